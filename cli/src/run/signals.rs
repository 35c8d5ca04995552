//! Ctrl-C and its kin end a run.
//!
//! In: SIGINT, SIGTERM, SIGHUP to this process. Out: each raises the run's [`Interrupt`]: the first
//! ends it with a checkpoint, the second at once. Workers are in process groups of their own, so that
//! a terminal's Ctrl-C reaches this process alone. A signal that was ignored when this process began stays
//! ignored: `nohup` starts programs so that they outlive their terminal.

use cadre_supervisor::Interrupt;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Listens on a thread of its own until the process ends.
pub(super) fn listen(interrupt: Interrupt) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let ignored = ignored();
    let heard = |kind: SignalKind| {
        let is_heard = ignored & 1 << (kind.as_raw_value() - 1) == 0;
        is_heard.then(|| signal(kind)).transpose()
    };
    let mut signals = {
        let _inside = runtime.enter();
        [
            heard(SignalKind::interrupt())?,
            heard(SignalKind::terminate())?,
            heard(SignalKind::hangup())?,
        ]
    };
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        runtime.block_on(async {
            let [ctrl_c, terminate, hangup] = &mut signals;
            loop {
                tokio::select! {
                    Some(()) = next(ctrl_c) => {}
                    Some(()) = next(terminate) => {}
                    Some(()) = next(hangup) => {}
                    else => return,
                }
                interrupt.raise();
            }
        });
    })?;
    Ok(())
}

/// The next of a signal that is heard; none of one that is not.
async fn next(signal: &mut Option<Signal>) -> Option<()> {
    signal.as_mut()?.recv().await
}

/// Signals that this process ignores, a bit each, as the kernel tells them.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|it| it.strip_prefix("SigIgn:"));
    mask.and_then(|it| u64::from_str_radix(it.trim(), 16).ok()).unwrap_or(0)
}
