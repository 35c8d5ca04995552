//! How a rank's job ends, for the rank or by it; and for how long it is at work elsewhere.
//!
//! In: calls of any thread of the rank. Out: requests to the IO thread, the end of the job. It waits for nothing but that end.

use std::time::Duration;

use cadre_protocol::Nanos;
use cadre_step::envelope::{Ending, Stands};

use super::Rank;
use crate::io::Request;
use crate::session::lock;

/// Longest time that [`Rank::busy`] grants: the most that a job may give its trainers.
const LONGEST_LEASE: Duration = Duration::from_hours(24);

impl Rank {
    /// Tells that this rank is at work elsewhere, as when it saves or evaluates a model: it is not taken for one that stands
    /// still for `lease` from now on, a day at most, and never for less than the job's `stalledAfterSeconds`. The next call of
    /// [`Self::announce`], [`Self::announce_end`], [`Self::submit`] or [`Self::done`] ends that. Work that goes on in small parts
    /// says so after each, with a lease of zero; then it is noticed when a part hangs. Any thread may call it.
    pub fn busy(&self, lease: Duration) {
        let nanos = u64::try_from(lease.min(LONGEST_LEASE).as_nanos()).unwrap_or(u64::MAX);
        // Calls that were made before may come to the IO thread later: behind the copy of their rows.
        let calls = lock(&self.turn).calls();
        self.line.send(Request::Busy(Nanos(nanos), calls));
    }

    /// Ends the job everywhere, for a reason of the caller's.
    pub fn fail(&self, reason: String) {
        self.line.send(Request::Fail(reason));
    }

    /// As [`Self::fail`], for a mistake of the caller's: the job ends as one whose input is bad.
    pub fn fail_for_good(&self, reason: String) {
        self.line.send(Request::Refuse(reason));
    }

    /// Asks the IO thread to end, and the conductor to be told which call is due that this rank will not make.
    /// `as_done`: the rank says that the job is complete. [`Session::leave`](crate::session::Session::leave) does it.
    pub fn leave(&self, as_done: bool) {
        let left = lock(&self.turn).leaves(as_done);
        let is_behind = !matches!(left, Some(Stands::Left { in_mid_step: true, .. }));
        let leave = Request::Leave(left);
        // Behind what was said of the steps before; but in mid-step not behind lent rows, which may never come.
        if is_behind {
            self.side.leave(leave);
        } else {
            self.line.send(leave);
        }
    }

    /// The step behind the last one, if all steps are done here: who asks for it waits for the end of the job.
    pub(in crate::session) fn behind_the_last(&self) -> Option<u64> {
        lock(&self.turn).behind_the_last()
    }

    /// What ends the job in peace when it is called, from any thread: this process was asked to end.
    pub fn ender(&self) -> impl Fn() + Send + use<> + 'static {
        let line = self.line.clone();
        move || line.send(Request::Terminate)
    }

    /// What waits for the end of the job as [`Self::ending`] does, for a thread that outlives this session.
    pub fn watcher(&self) -> impl Fn(Duration) -> Option<Ending> + Send + use<> + 'static {
        let end = self.end.clone();
        move |deadline| end.wait(deadline)
    }

    /// Waits for the reason why the job ends, at most for `deadline`. Any thread may, whatever others wait for meanwhile.
    pub fn ending(&self, deadline: Duration) -> Option<Ending> {
        self.end.wait(deadline)
    }
}
