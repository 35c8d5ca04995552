//! How busy a server is, as its load reports say.
//!
//! In: works that ran. Out: once a second a report: share of the time busy, queue, tasks a second, and
//! observed over expected time, where the first second of work says what is expected. It sends nothing.
//!
//! Invariant: a work that ran is counted in one report at most.

use std::time::{Duration, Instant};

use cadre_control::proto;

use crate::launch::Done;

/// Between two load reports of a server.
const REPORT_EVERY: Duration = Duration::from_secs(1);

/// What the next load report says.
#[derive(Debug)]
pub(super) struct Load {
    since: Instant,
    pub(super) step: u64,
    pub(super) queue: u32,
    tasks: u32,
    busy: Duration,
    cost: u64,
    /// Cost units a second of the first second of work: what later ones are held against.
    speed: Option<f64>,
}

impl Load {
    pub(super) fn new() -> Self {
        Self {
            since: Instant::now(),
            step: 0,
            queue: 0,
            tasks: 0,
            busy: Duration::ZERO,
            cost: 0,
            speed: None,
        }
    }

    /// Counts a work that ran.
    pub(super) fn ran(&mut self, done: &Done) {
        self.queue = self.queue.saturating_sub(1);
        self.tasks += 1;
        self.busy += done.busy;
        self.cost += done.work.cost();
    }

    /// The report that is due, if one is.
    pub(super) fn report(&mut self) -> Option<proto::ServerReport> {
        let elapsed = self.since.elapsed();
        if elapsed < REPORT_EVERY {
            return None;
        }
        let (busy, cost) = (self.busy.as_secs_f64(), self.cost as f64);
        let speed = if busy > 0.0 { Some(cost / busy) } else { None };
        let expected = *self.speed.get_or_insert(speed.unwrap_or(0.0));
        if expected == 0.0 {
            self.speed = None;
        }
        let report = proto::ServerReport {
            step: self.step,
            queue: self.queue,
            busy_ppm: (busy / elapsed.as_secs_f64() * 1e6).min(1e6) as u32,
            tasks_per_second: f64::from(self.tasks) / elapsed.as_secs_f64(),
            observed_over_expected: speed.map_or(0.0, |it| expected / it),
            memory_bytes: 0,
            cost: self.cost,
            busy_nanoseconds: self.busy.as_nanos() as u64,
        };
        (self.since, self.tasks, self.busy, self.cost) = (Instant::now(), 0, Duration::ZERO, 0);
        Some(report)
    }
}
