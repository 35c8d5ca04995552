//! What a reconcile says of itself: when to look again, and what went wrong.
//!
//! In and out: nothing is done here; [`crate::controllers`] does what it says.

use std::time::Duration;

use crate::error::Error;
use crate::recent::LOOK_AGAIN;

/// Result of a reconcile.
#[derive(Debug, Default)]
pub(crate) struct Looked {
    /// Time until the next reconcile if nothing changes.
    pub(crate) again: Option<Duration>,
    /// The error that was met; the next reconcile tries again.
    pub(crate) failed: Option<Error>,
}

impl Looked {
    /// Runs again after `seconds`, or at the next change. The watch may miss a write of ours, so
    /// while one `waits` for its cache the next reconcile comes by itself; likewise when one of
    /// the `turns` has come: that of the status, or of what is done beside the decision.
    pub(crate) fn new(
        seconds: Option<i64>,
        waits: bool,
        turns: [Option<Duration>; 2],
        failed: Option<Error>,
    ) -> Self {
        let wanted = seconds.and_then(|it| u64::try_from(it).ok()).map(Duration::from_secs);
        let missing = waits.then_some(LOOK_AGAIN);
        Self {
            again: wanted.into_iter().chain(missing).chain(turns.into_iter().flatten()).min(),
            failed,
        }
    }
}
