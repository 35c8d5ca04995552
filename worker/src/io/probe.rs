//! What a server measures when it joins: how fast rows of each trainer come, and over what.
//!
//! In: the trainers. Out: one [`Probed`](proto::Probed) for all of them. Three pulls a trainer, one after
//! the other: the first opens the link and is not counted, the second is one row long and tells the delay,
//! the third tells the bandwidth.
//!
//! Trainers are measured one after the other, so that a server does not compete with itself. A region that
//! every trainer publishes is read; nothing here touches a step.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use cadre_control::proto;
use cadre_exchange::{LandingId, PeerId, Piece, PullError, PullId, RegionKey};

use super::exchange::Exchange;
use super::shared::Shared;
use crate::memory;

/// Name of the region: no step has this number.
pub(super) const KEY: RegionKey = RegionKey([u32::MAX; 4]);
/// Bytes of the region, and of the pull that tells the bandwidth while there are few trainers.
const MOST: u64 = 4 << 20;
/// Bytes that a server pulls from all trainers together, about.
const ALTOGETHER: u64 = 256 << 20;
/// Least bytes that tell a bandwidth.
const LEAST: u64 = 256 << 10;
/// Bytes of one row.
const ROW: u64 = 512;
/// Longest wait for a pull; a trainer that is slower is not reached.
const DEADLINE: Duration = Duration::from_secs(10);

/// Publishes what servers read of a trainer.
pub(super) fn publish(shared: &mut Shared<impl Exchange>) {
    match shared.provider.place().hold(memory::rows(MOST as usize)) {
        Ok(rows) => shared.provider.publish(KEY, &rows),
        Err(why) => shared.broke(&why),
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Stage {
    Link,
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
    bytes: u64,
    microseconds: u32,
    done: Vec<proto::Probe>,
}

impl Probing {
    /// Starts anew with these trainers, whose addresses are known.
    pub(super) fn begin(&mut self, shared: &mut Shared<impl Exchange>, trainers: Vec<PeerId>) {
        if self.current.is_some() || !self.done.is_empty() {
            return;
        }
        self.bytes = (ALTOGETHER / trainers.len().max(1) as u64).clamp(LEAST, MOST);
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
            (Stage::Link, Ok(_)) => self.pull(shared, peer, Stage::Delay),
            (Stage::Delay, Ok(_)) => {
                self.microseconds = micros;
                self.pull(shared, peer, Stage::Bandwidth);
            }
            (Stage::Bandwidth, Ok(_)) => self.tell(shared, peer, mbps(bytes, took)),
            (_, Err(error)) => {
                tracing::warn!("{peer} cannot be measured: {error}");
                self.microseconds = 0;
                self.tell(shared, peer, 0);
            }
        }
        if self.current.is_none() {
            self.next(shared);
        }
        self.current.is_none().then(|| proto::Probed { probes: self.done.clone() })
    }

    fn next(&mut self, shared: &mut Shared<impl Exchange>) {
        if let Some(peer) = self.waiting.pop_front() {
            self.pull(shared, peer, Stage::Link);
        }
    }

    fn pull(&mut self, shared: &mut Shared<impl Exchange>, peer: PeerId, stage: Stage) {
        let bytes = if stage == Stage::Bandwidth { self.bytes } else { ROW };
        let landing = match shared.provider.land(bytes as usize) {
            Ok(landing) => landing,
            Err(why) => return shared.broke(&why),
        };
        let began = shared.clock.moment();
        let pieces = vec![Piece { remote: 0, local: 0, bytes }];
        let id = shared.pull_region(peer, KEY, pieces, landing, DEADLINE);
        self.current = Some(Pull { id, stage, peer, landing, bytes, began });
    }

    fn tell(&mut self, shared: &Shared<impl Exchange>, peer: PeerId, mbps: u32) {
        let (trainer, microseconds) = (u32::from(peer.index), self.microseconds);
        let path = shared.provider.path(peer).to_owned();
        self.done.push(proto::Probe { trainer, mbps, microseconds, path });
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
