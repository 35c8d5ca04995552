//! A main thread that stands still when the job has ended: the process ends itself, since a pod's processor is held else.
//!
//! In: how the job ends, when the main thread has taken notice of it, and what it does meanwhile. Out: an exit with code 3 of a
//! process that has not taken notice and does nothing.
//!
//! Invariant: a main thread that makes a call within the patience of the job is never cut short, however long it then closes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Whether the main thread knows that the job has ended, and how often it has said that it is busy.
#[derive(Clone, Debug, Default)]
pub(super) struct Noticed(Arc<AtomicU64>);

/// Value once the main thread knows that the job has ended.
const NOTICED: u64 = u64::MAX;

impl Noticed {
    pub(super) fn set(&self) {
        self.0.store(NOTICED, Ordering::Release);
    }

    /// The main thread is at work, for example on a checkpoint, before it has noticed the end.
    pub(super) fn busy(&self) {
        let more = |it: u64| (it != NOTICED).then_some(it + 1);
        // A main thread that has noticed the end needs no more time.
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
    }
}

/// Starts a thread that calls `exit` if, for `patience` after `ended` returns, the main thread
/// neither notices the end nor says that it is busy.
///
/// # Errors
///
/// The system has no thread left.
pub(super) fn watch(
    ended: impl FnOnce() + Send + 'static,
    patience: Duration,
    noticed: &Noticed,
    exit: impl FnOnce() + Send + 'static,
) -> std::io::Result<()> {
    let noticed = noticed.clone();
    let watch = move || {
        ended();
        loop {
            let before = noticed.0.load(Ordering::Acquire);
            if before == NOTICED {
                return;
            }
            let until = Instant::now() + patience;
            while let Some(left) =
                until.checked_duration_since(Instant::now()).filter(|it| !it.is_zero())
            {
                thread::park_timeout(left);
            }
            if noticed.0.load(Ordering::Acquire) == before {
                return exit();
            }
        }
    };
    thread::Builder::new().name("stuck".into()).spawn(watch).map(drop)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn who_is_busy_has_its_patience_again() {
        let noticed = Noticed::default();
        noticed.busy();
        noticed.busy();
        assert_eq!(noticed.0.load(Ordering::Acquire), 2);
        noticed.set();
        noticed.busy();
        assert_eq!(noticed.0.load(Ordering::Acquire), NOTICED);
    }

    #[test]
    fn a_process_ends_itself_only_if_nobody_takes_notice_of_the_end() {
        let exits = |is_noticed: bool| {
            let (noticed, (said, heard)) = (Noticed::default(), channel());
            let (end, ended) = channel();
            let wait = move || ended.recv().expect("it ends");
            let patience = Duration::from_millis(1);
            watch(wait, patience, &noticed, move || said.send(()).expect("it is heard"))
                .expect("a thread");
            if is_noticed {
                noticed.set();
            }
            end.send(()).expect("it waits");
            // The sender goes with the thread.
            heard.recv().is_ok()
        };
        assert!(exits(false));
        assert!(!exits(true));
    }
}
