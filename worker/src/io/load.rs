//! How busy a server is, as its load reports say.
//!
//! In: works that ran. Out: once a second a report: share of the time busy, queue, tasks a second, cost and the time it took.
//! Whether that is slow is for the controller to say, who knows the other servers. It sends nothing.
//!
//! Invariant: a work that ran is counted in one report at most.

use std::time::Duration;

use cadre_control::proto;
use cadre_protocol::Nanos;

use crate::launch::Done;

/// Between two load reports of a server.
const REPORT_EVERY: Nanos = Nanos::from_millis(1_000);

/// What the next load report says.
#[derive(Debug)]
pub(super) struct Load {
    since: Nanos,
    pub(super) step: u64,
    pub(super) queue: u32,
    tasks: u32,
    busy: Duration,
    cost: u64,
}

impl Load {
    /// Counts from `now`.
    pub(super) fn new(now: Nanos) -> Self {
        Self { since: now, step: 0, queue: 0, tasks: 0, busy: Duration::ZERO, cost: 0 }
    }

    /// Counts a work that ran.
    pub(super) fn ran<M>(&mut self, done: &Done<M>) {
        self.queue = self.queue.saturating_sub(1);
        self.tasks += 1;
        self.busy += done.busy;
        self.cost += done.work.cost();
    }

    /// The report that is due now, if one is; but for the memory in use, which the caller knows.
    pub(super) fn report(&mut self, now: Nanos) -> Option<proto::ServerReport> {
        let elapsed = now.since(self.since);
        if elapsed < REPORT_EVERY {
            return None;
        }
        let elapsed = Duration::from_nanos(elapsed.0).as_secs_f64();
        let busy = self.busy.as_secs_f64();
        let report = proto::ServerReport {
            step: self.step,
            queue: self.queue,
            busy_ppm: (busy / elapsed * 1e6).min(1e6) as u32,
            tasks_per_second: f64::from(self.tasks) / elapsed,
            memory_bytes: 0,
            cost: self.cost,
            busy_nanoseconds: self.busy.as_nanos() as u64,
            spare: false,
        };
        (self.since, self.tasks, self.busy, self.cost) = (now, 0, Duration::ZERO, 0);
        Some(report)
    }
}
