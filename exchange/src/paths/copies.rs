//! Copies rows from shared memory: finds the region on the board, copies it a turn at a time, then checks that it is still
//! published.
//!
//! In: claimed pulls. Out: ended ones, or pulls that go over the link after all.
//!
//! ```text
//! claimed ──on the board, mapped──▶ copying ──all here, same publication──▶ done
//!    └───────── else ──────────▶ link ◀──────── another one, or none ────┘
//! ```
//!
//! Invariant: a copy counts only if its region was published until the copy's end.

use std::sync::Arc;
use std::time::Instant;

use super::Paths;
use super::ways::Source;
use crate::peer::PeerId;
use crate::provider::PullError;
use crate::shared::{Foreign, Found};
use crate::tcp::Pull;

/// Maximum bytes that one turn copies before links and the caller are served.
pub(super) const TURN_BYTES: u64 = 4 << 20;

/// Whether a better path than UCX can bring a pull.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Better {
    No,
    /// Its memory is not mapped yet.
    Coming,
}

/// A pull that is being copied.
pub(super) struct Copying {
    pull: Pull,
    found: Found,
    arena: Arc<Foreign>,
}

impl Paths {
    /// Begins a claimed pull on the best available path.
    pub(super) fn begin(&mut self, mut pull: Pull) {
        let Some(shared) = &mut self.sharing else { return self.begin_remote(pull, Better::No) };
        let peer = pull.peer();
        if shared.required && !shared.ways.knows(peer) && self.tcp.is_opening(peer) {
            return shared.waiting.push(pull);
        }
        match shared.ways.find(peer, pull.key(), pull.reach()) {
            Ok(Source::Shared(found, arena)) => {
                pull.is_to_be_of(found.number);
                shared.copying.push_back(Copying { pull, found, arena });
            }
            Ok(Source::Coming) if shared.required => shared.waiting.push(pull),
            Ok(Source::Coming) => self.begin_remote(pull, Better::Coming),
            Ok(Source::Link) => self.begin_remote(pull, Better::No),
            Err(why) => {
                let answer = shared.ways.shut(peer, why, true, self.tcp.now());
                self.tcp.send_pull(pull);
                self.take_answer(answer);
            }
        }
    }

    /// Begins the pulls that waited for memory of a peer.
    pub(super) fn begin_waiting(&mut self, peer: PeerId) {
        let waiting = self.sharing.as_mut().map(|it| it.waiting.take_from(peer));
        for mut pull in waiting.into_iter().flatten() {
            self.tcp.watch_anew(&mut pull);
            self.begin(pull);
        }
    }

    /// Ends pulls that have waited for memory longer than their patience.
    pub(super) fn end_late(&mut self, now: Instant) {
        let Some(shared) = &mut self.sharing else { return };
        while let Some(pull) = shared.waiting.take_late(now) {
            self.tcp.end_copied(pull, Err(PullError::Deadline));
        }
    }

    /// Copies for a turn.
    pub(super) fn copy(&mut self) {
        let mut left = self.sharing.as_ref().map_or(0, |it| it.turn_bytes);
        while left > 0
            && let Some(shared) = &mut self.sharing
            && let Some(Copying { pull, found, arena }) = shared.copying.front_mut()
        {
            let at = found.spot.at;
            left -= self.tcp.copy_on(pull, left, |from, to| arena.copy(at + from, to));
            if !pull.is_whole() {
                continue;
            }
            let Some(Copying { pull, found, .. }) = shared.copying.pop_front() else { return };
            if shared.ways.still(pull.peer(), &found) {
                self.copied.insert(pull.id());
                self.demanded.came(pull.peer());
                self.traffic.shared_bytes += pull.landed();
                self.tcp.end_copied(pull, Ok(found.number));
            } else {
                self.traffic.sent_anew += 1;
                self.tcp.send_anew(pull);
            }
        }
    }

    /// Ends all pulls from a peer that do not use the link, and forgets the peer's memory.
    pub(super) fn end_all(&mut self, peer: PeerId, why: &PullError) {
        self.end_all_remote(peer, why);
        self.end_all_shared(peer, why);
        // The events of these pulls come before the event with the reason.
        for event in self.tcp.take_events() {
            self.take_in(event);
        }
    }

    fn end_all_shared(&mut self, peer: PeerId, why: &PullError) {
        let Some(shared) = &mut self.sharing else { return };
        shared.ways.forget(peer);
        let copying = std::mem::take(&mut shared.copying);
        let mut ended = Vec::new();
        for it in copying {
            if it.pull.peer() == peer {
                ended.push(it.pull);
            } else {
                shared.copying.push_back(it);
            }
        }
        ended.extend(shared.waiting.take_from(peer));
        for pull in ended {
            self.tcp.end_copied(pull, Err(why.clone()));
        }
    }
}
