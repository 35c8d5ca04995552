//! What a server measures when it joins, and when a path changes: how fast rows of each trainer come, and over what.
//!
//! In: the trainers. Out: a [`Probed`](proto::Probed) of all of them, each time. A few pulls a trainer, one after
//! the other: the first opens the link, the next one the path, and neither is counted; then one row tells the delay, and
//! the others tell the bandwidth. Nothing is measured while it is being found out which paths there are, for a while.
//!
//! Trainers are measured one after the other, so that a server does not compete with itself. A region that
//! every trainer publishes is read. Replies come in order, so rows of a step wait behind what is measured:
//! each pull is longer than the one before only where that one came fast.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use cadre_control::proto;
use cadre_exchange::{LandingId, PeerId, Piece, PullError, PullId, PullRequest, RegionKey};

use super::exchange::Exchange;
use super::shared::Shared;
use crate::memory::{self, Place as _};

/// Name of the region: no step has this number.
pub(super) const KEY: RegionKey = RegionKey([u32::MAX; 4]);
/// Bytes of the region, and of the pull that tells the bandwidth while there are few trainers.
const MAX_PULL_BYTES: u64 = 4 << 20;
/// Bytes that a server pulls from all trainers together, about.
const ALL_PULLS_BYTES: u64 = 256 << 20;
/// Least bytes that tell a bandwidth, where there are many trainers.
const MIN_PULL_BYTES: u64 = 256 << 10;
/// Bytes of the first pull that tells a bandwidth; how many times as long the next one is, and beyond the delay within what time
/// the one before has to come for that, at the second try at the latest.
const FIRST_PULL_BYTES: u64 = 16 << 10;
const PULL_GROWTH: u64 = 32;
const GROWS_WITHIN: Duration = Duration::from_millis(30);
/// Bytes of one row.
const ROW_BYTES: u64 = 512;
/// Longest wait for a pull; a trainer that is slower is not reached.
const PULL_DEADLINE: Duration = Duration::from_secs(10);
/// Longest wait for a path that is being found out.
const PATH_FOUND_WITHIN: Duration = Duration::from_secs(5);
/// How often it is looked whether it is found, and whether paths have changed since they were measured.
const PATH_LOOK_EVERY: Duration = Duration::from_millis(50);
const PATHS_CHECKED_EVERY: Duration = Duration::from_secs(1);

/// Publishes what servers read of a trainer.
pub(super) fn publish(shared: &mut Shared<impl Exchange>) {
    match shared.provider.place().hold(memory::rows(MAX_PULL_BYTES as usize)) {
        Ok(rows) => shared.provider.publish(KEY, &rows),
        Err(why) => shared.broke(&why),
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Stage {
    Link,
    Path,
    Delay,
    Bandwidth,
}

/// The pull on its way.
#[derive(Debug)]
struct Pull {
    id: PullId,
    stage: Stage,
    peer: PeerId,
    landing: LandingId,
    bytes: u64,
    began: Instant,
}

/// A server's measures.
#[derive(Debug, Default)]
pub(super) struct Probing {
    waiting: VecDeque<PeerId>,
    current: Option<Pull>,
    /// A trainer whose path is being found out, and until when that is waited for.
    finding: Option<(PeerId, Instant)>,
    /// When paths are looked at again.
    look_at: Option<Instant>,
    /// Of the last pull.
    bytes: u64,
    /// The pull on its way is a second try: the process may have been busy elsewhere at the first.
    again: bool,
    microseconds: u32,
    done: BTreeMap<PeerId, proto::Probe>,
}

impl Probing {
    /// Starts anew with these trainers, whose addresses are known.
    pub(super) fn begin(&mut self, shared: &mut Shared<impl Exchange>, trainers: Vec<PeerId>) {
        if self.current.is_some() || self.finding.is_some() || !self.done.is_empty() {
            return;
        }
        self.bytes =
            (ALL_PULLS_BYTES / trainers.len().max(1) as u64).clamp(MIN_PULL_BYTES, MAX_PULL_BYTES);
        self.waiting = trainers.into();
        self.next(shared);
    }

    /// Whether a pull of the exchange is one of these.
    pub(super) fn is_mine(&self, pull: PullId) -> bool {
        self.current.as_ref().is_some_and(|it| it.id == pull)
    }

    /// The current pull ended. Out: the measures, with the last one.
    pub(super) fn pulled(
        &mut self,
        shared: &mut Shared<impl Exchange>,
        result: &Result<u64, PullError>,
    ) -> Option<proto::Probed> {
        let Pull { stage, peer, landing, bytes, began, .. } = self.current.take()?;
        let took = shared.clock.moment().saturating_duration_since(began);
        shared.provider.discard(landing);
        let micros = u32::try_from(took.as_micros()).unwrap_or(u32::MAX);
        match (stage, result) {
            (Stage::Link, Ok(_)) => {
                self.finding = Some((peer, shared.clock.moment() + PATH_FOUND_WITHIN));
                self.look(shared);
            }
            (Stage::Path, Ok(_)) => self.pull(shared, peer, Stage::Delay, ROW_BYTES),
            (Stage::Delay, Ok(_)) => {
                (self.microseconds, self.again) = (micros, false);
                self.pull(shared, peer, Stage::Bandwidth, FIRST_PULL_BYTES.min(self.bytes));
            }
            (Stage::Bandwidth, Ok(_)) => {
                let delay = Duration::from_micros(self.microseconds.into());
                let fast = took.saturating_sub(delay) < GROWS_WITHIN;
                if bytes < self.bytes && (fast || !self.again) {
                    let next = if fast { self.bytes.min(bytes * PULL_GROWTH) } else { bytes };
                    self.again = !fast;
                    self.pull(shared, peer, Stage::Bandwidth, next);
                } else {
                    self.tell(shared, peer, mbps(bytes, took));
                }
            }
            (_, Err(error)) => {
                tracing::warn!("{peer} cannot be measured: {error}");
                self.microseconds = 0;
                self.tell(shared, peer, 0);
            }
        }
        if self.is_idle() {
            self.next(shared);
        }
        self.is_idle().then(|| proto::Probed { probes: self.done.values().cloned().collect() })
    }

    /// Goes on where a path is found, or was not found for too long; measures anew what has changed.
    pub(super) fn look(&mut self, shared: &mut Shared<impl Exchange>) {
        if self.finding.is_none() && self.done.is_empty() {
            return;
        }
        let now = shared.clock.moment();
        if let Some((peer, until)) = self.finding {
            if shared.provider.path(peer).is_some() || until <= now {
                self.finding = None;
                self.pull(shared, peer, Stage::Path, ROW_BYTES);
            }
            return;
        }
        if self.current.is_some() || self.look_at.is_some_and(|it| now < it) {
            return;
        }
        self.look_at = Some(now + PATHS_CHECKED_EVERY);
        let is_other =
            |peer, said: &str| shared.provider.path(peer).is_some_and(|path| path != said);
        let changed = self.done.iter().filter(|it| is_other(*it.0, &it.1.path)).map(|it| *it.0);
        self.waiting.extend(changed);
        self.next(shared);
    }

    /// For how long there is nothing to look at.
    pub(super) fn rest(&self) -> Duration {
        if self.finding.is_some() { PATH_LOOK_EVERY } else { PATHS_CHECKED_EVERY }
    }

    fn is_idle(&self) -> bool {
        self.current.is_none() && self.finding.is_none()
    }

    fn next(&mut self, shared: &mut Shared<impl Exchange>) {
        if let Some(peer) = self.waiting.pop_front() {
            self.pull(shared, peer, Stage::Link, ROW_BYTES);
        }
    }

    fn pull(&mut self, shared: &mut Shared<impl Exchange>, peer: PeerId, stage: Stage, bytes: u64) {
        let landing = match shared.provider.land(bytes as usize) {
            Ok(landing) => landing,
            Err(why) => return shared.broke(&why),
        };
        let began = shared.clock.moment();
        let pieces = vec![Piece { remote: 0, local: 0, bytes }];
        let request = PullRequest { peer, key: KEY, pieces, landing, patience: PULL_DEADLINE };
        let id = shared.pull_region(request);
        self.current = Some(Pull { id, stage, peer, landing, bytes, began });
    }

    fn tell(&mut self, shared: &Shared<impl Exchange>, peer: PeerId, mbps: u32) {
        let (trainer, microseconds) = (u32::from(peer.index), self.microseconds);
        let (path, why) = match shared.provider.path(peer) {
            Some(path) => (path, shared.provider.why_tcp(peer)),
            None => ("tcp", "the trainer has not said in time whether there is a better path"),
        };
        let (path, why) = (path.to_owned(), why.to_owned());
        self.done.insert(peer, proto::Probe { trainer, mbps, microseconds, path, why });
    }
}

/// Megabits a second, at least 1.
fn mbps(bytes: u64, took: Duration) -> u32 {
    let nanos = took.as_nanos().max(1);
    let mbps = u128::from(bytes) * 8 * 1000 / nanos;
    u32::try_from(mbps).unwrap_or(u32::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidth_is_in_megabits_and_never_nothing() {
        assert_eq!(mbps(1 << 20, Duration::from_millis(1)), 8388);
        assert_eq!(mbps(1, Duration::from_secs(9)), 1);
        assert_eq!(mbps(u64::MAX, Duration::from_nanos(1)), u32::MAX);
    }
}
