//! How pulls are read: found on their owner's board, read in parts, and looked at again when all is here.
//!
//! In: claimed pulls, ends of reads. Out: ended pulls, or pulls that go over the link after all.
//!
//! ```text
//! claimed ──▶ Finding ──on the board──▶ Keys ──all there──▶ Rows ──all here──▶ Again ──the same──▶ done
//!    │           └───── not there ─────────▶ link ◀──────────┘ way failed        │
//!    └── no way ─────────────────────────────▶ ▲ ◀────────── another, or none ───┘
//! ```
//!
//! Invariant: a pull leaves this module when none of its reads is under way.

use std::collections::BTreeSet;
use std::time::Instant;

use super::card::STRETCH_BYTES;
use super::leaving::Onward;
use super::way::{Stage, Way};
use super::{For, Remote};
use crate::paths::Paths;
use crate::peer::PeerId;
use crate::provider::PullId;
use crate::shared::{BUCKET_BYTES, ENTRY_BYTES, Found};
use crate::tcp::Pull;
use crate::ucx::{Done, Flying, Read};

/// Bytes that a peer of which nothing is under way may always be asked for.
const IDLE_PART_BYTES: u64 = 64 << 10;

/// A pull whose rows are read.
pub(super) struct Reading {
    pub(super) flying: Flying,
    step: Step,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// The entries of its key.
    Finding,
    /// Of the stretches that its region lies in.
    Keys(Found),
    /// Its bytes.
    Rows(Found),
    /// Its entry again.
    Again(Found),
}

impl Reading {
    pub(super) fn peer(&self) -> PeerId {
        self.flying.pull().peer()
    }

    /// Whether UCX may bring something for it.
    pub(super) fn is_under_way(&self) -> bool {
        self.flying.is_flying() || matches!(self.step, Step::Finding | Step::Again(_))
    }
}

impl Remote {
    /// The end of a read that nobody has looked at.
    fn next_done(&mut self) -> Option<Done> {
        self.done.pop_front().or_else(|| self.net.done())
    }

    /// Counts a read that has ended: what it was for.
    pub(super) fn count(&mut self, done: &Done, now: Instant) -> Option<For> {
        let (what, bytes) = self.gets.remove(&done.get)?;
        if let For::Pull(id) = what
            && let Some(reading) = self.reading.get_mut(&id)
        {
            if bytes > 0 {
                reading.flying.ended();
            }
            self.flying_bytes -= bytes;
            if let Some(way) = self.ways.get_mut(&reading.peer()) {
                way.flying_bytes -= bytes;
                if done.result.is_ok() {
                    way.heard = Some(now);
                }
            }
        }
        Some(what)
    }

    /// Where a byte of a region is to be read, and how many from there on.
    fn place(way: &Way, found: &Found, at: u64) -> Option<(Read, u64)> {
        let Stage::Open { end, .. } = way.stage else { return None };
        let byte = found.spot.at.checked_add(at)?;
        let index = u32::try_from(byte / STRETCH_BYTES).ok()?;
        let key = (*way.keys.get(&(found.spot.arena, index))?)?;
        let within = byte % STRETCH_BYTES;
        Some((key.at(end, within), STRETCH_BYTES - within))
    }

    /// Begins a look at the board: `bytes` bytes from `at` on.
    pub(super) fn look(
        &mut self,
        peer: PeerId,
        at: u64,
        bytes: usize,
        what: For,
    ) -> Result<(), String> {
        let closed = || "its way is closed".to_owned();
        let way = self.ways.get(&peer).ok_or_else(closed)?;
        let (Stage::Looking { end, board, .. } | Stage::Open { end, board }) = way.stage else {
            return Err(closed());
        };
        let get = self.net.peek(board.at(end, at), bytes)?;
        self.gets.insert(get, (what, 0));
        Ok(())
    }
}

impl Paths {
    /// Begins a claimed pull by UCX where that is open, else over the link.
    pub(in crate::paths) fn begin_remote(&mut self, pull: Pull) {
        let peer = pull.peer();
        let Some(remote) = &mut self.remote else { return self.tcp.send_pull(pull) };
        match remote.ways.get(&peer).map(|it| &it.stage) {
            Some(Stage::Open { .. }) => {}
            Some(Stage::Asked | Stage::Looking { .. }) if remote.required => {
                return remote.waiting.push(pull);
            }
            None if remote.required && self.tcp.is_opening(peer) => {
                return remote.waiting.push(pull);
            }
            Some(Stage::Asked | Stage::Looking { .. }) => {
                self.traffic.sent_anew += 1;
                return self.tcp.send_pull(pull);
            }
            Some(Stage::Shut { .. }) | None => return self.tcp.send_pull(pull),
        }
        let (id, key) = (pull.id(), pull.key());
        let reading = Reading { flying: Flying::new(pull), step: Step::Finding };
        remote.reading.insert(id, reading);
        if let Err(why) = remote.look(peer, Found::bucket(key), BUCKET_BYTES, For::Pull(id)) {
            self.leave(peer, &why, true, Onward::Link(BTreeSet::new()));
        }
    }

    /// Does what UCX can do without the links: whether there may be more at once.
    pub(in crate::paths) fn advance_remote(&mut self) -> bool {
        let mut is_more = false;
        let now = self.tcp.now();
        loop {
            let Some(remote) = &mut self.remote else { return false };
            is_more |= remote.net.progress();
            let mut is_still = true;
            while let Some(done) = self.remote.as_mut().and_then(Remote::next_done) {
                is_still = false;
                self.got(&done, now);
            }
            while let Some((end, why)) = self.remote.as_mut().and_then(|it| it.net.failed()) {
                if let Some(peer) = self.remote.as_ref().and_then(|it| it.owner_at(end)) {
                    self.leave(peer, &why, true, Onward::Link(BTreeSet::new()));
                }
            }
            self.end_late_remote(now);
            self.read_on();
            while let Some(left) = self.remote.as_mut().and_then(|it| it.net.left()) {
                self.tcp.forget_device(left);
            }
            if is_still {
                return is_more;
            }
        }
    }

    /// A read has ended.
    fn got(&mut self, done: &Done, now: Instant) {
        let Some(remote) = &mut self.remote else { return };
        let Some(what) = remote.count(done, now) else { return };
        let peer = match what {
            For::Look(peer, round) => {
                if remote.ways.get(&peer).is_none_or(|it| it.round != round) {
                    return;
                }
                peer
            }
            For::Pull(id) => match remote.reading.get(&id) {
                Some(reading) => reading.peer(),
                None => return,
            },
        };
        if let Err(why) = &done.result {
            let why = format!("a read ended with {why:?}");
            return self.leave(peer, &why, true, Onward::Link(BTreeSet::new()));
        }
        match what {
            For::Look(peer, _) => self.seen(peer),
            For::Pull(id) => self.step(id, &done.words),
        }
    }

    /// What a pull has waited for is here.
    fn step(&mut self, id: PullId, words: &[u64]) {
        let Some(remote) = &mut self.remote else { return };
        let Some(reading) = remote.reading.get_mut(&id) else { return };
        let pull = reading.flying.pull();
        let key = pull.key();
        match reading.step {
            Step::Finding => {
                let found = Found::among(key, words).filter(|it| pull.reach() <= it.spot.bytes);
                match found {
                    Some(found) => {
                        reading.flying.is_to_be_of(found.number);
                        reading.step = Step::Keys(found);
                        self.ask_keys(id, &found);
                    }
                    // The owner says what is wrong with it.
                    None => self.over_the_link(id),
                }
            }
            // Its next parts are begun when all others had their turn.
            Step::Keys(_) | Step::Rows(_) => {}
            Step::Again(found) if found.is_still(key, words) => {
                let Some(reading) = remote.reading.remove(&id) else { return };
                let pull = reading.flying.into_pull();
                self.copied.insert(id);
                self.traffic.ucx_bytes += pull.landed();
                self.tcp.end_copied(pull, Ok(found.number));
            }
            Step::Again(_) => self.over_the_link(id),
        }
    }

    /// Sends a pull of which nothing is under way over the link.
    fn over_the_link(&mut self, id: PullId) {
        let reading = self.remote.as_mut().and_then(|it| it.reading.remove(&id));
        if let Some(reading) = reading {
            self.traffic.sent_anew += 1;
            self.tcp.send_anew(reading.flying.into_pull());
        }
    }

    /// Begins as many reads as there is room for.
    fn read_on(&mut self) {
        let Some(remote) = &mut self.remote else { return };
        let ids: Vec<_> = remote.reading.keys().copied().collect();
        for id in ids {
            if let Err((peer, why)) = self.read_more(id) {
                self.leave(peer, &why, true, Onward::Link(BTreeSet::new()));
            }
        }
    }

    /// Begins reads of one pull.
    fn read_more(&mut self, id: PullId) -> Result<(), (PeerId, String)> {
        let Some(remote) = &mut self.remote else { return Ok(()) };
        let Some(reading) = remote.reading.get_mut(&id) else { return Ok(()) };
        let peer = reading.peer();
        let Some(way) = remote.ways.get_mut(&peer) else { return Ok(()) };
        let found = match reading.step {
            Step::Finding | Step::Again(_) => return Ok(()),
            Step::Rows(found) => found,
            Step::Keys(found) => {
                let (at, reach) = (found.spot.at, reading.flying.pull().reach());
                let stretches = at / STRETCH_BYTES..(at + reach).div_ceil(STRETCH_BYTES);
                let is_there =
                    |it: u64| matches!(way.keys.get(&(found.spot.arena, it as u32)), Some(Some(_)));
                if !stretches.into_iter().all(is_there) {
                    return Ok(());
                }
                reading.step = Step::Rows(found);
                found
            }
        };
        let limits = remote.limits;
        while !reading.flying.is_begun() {
            let room = limits.window_bytes.saturating_sub(remote.flying_bytes);
            let room = room.min(limits.peer_window_bytes.saturating_sub(way.flying_bytes));
            let part = limits.part_bytes.max(1);
            let most = if part <= room {
                part
            } else if way.flying_bytes == 0 {
                part.min(IDLE_PART_BYTES)
            } else {
                return Ok(());
            };
            let place = |at| Remote::place(way, &found, at);
            let (begun, result) = reading.flying.go_on(&mut self.tcp, &mut remote.net, most, place);
            for it in begun {
                remote.gets.insert(it.get, (For::Pull(id), it.bytes));
                remote.flying_bytes += it.bytes;
                way.flying_bytes += it.bytes;
            }
            result.map_err(|why| (peer, why))?;
        }
        if !reading.flying.is_flying() {
            reading.step = Step::Again(found);
            let looked = remote.look(peer, found.place(), ENTRY_BYTES, For::Pull(id));
            looked.map_err(|why| (peer, why))?;
        }
        Ok(())
    }
}
