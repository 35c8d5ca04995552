//! Ctrl-C and its kin end a run.
//!
//! In: SIGINT, SIGTERM, SIGHUP to this process. Out: each raises the run's [`Interrupt`]: the first
//! ends it with a checkpoint, the second at once. Workers are in process groups of their own, so that
//! a terminal's Ctrl-C reaches this process alone.

use cadre_supervisor::Interrupt;
use tokio::signal::unix::{SignalKind, signal};

/// Listens on a thread of its own until the process ends.
pub(super) fn listen(interrupt: Interrupt) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let mut signals = {
        let _inside = runtime.enter();
        [
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
            signal(SignalKind::hangup())?,
        ]
    };
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        runtime.block_on(async {
            let [ctrl_c, terminate, hangup] = &mut signals;
            loop {
                tokio::select! {
                    Some(()) = ctrl_c.recv() => {}
                    Some(()) = terminate.recv() => {}
                    Some(()) = hangup.recv() => {}
                    else => return,
                }
                interrupt.raise();
            }
        });
    })?;
    Ok(())
}
