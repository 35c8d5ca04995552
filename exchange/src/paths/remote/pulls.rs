//! The state machine of a pull by UCX: find its entry on the board, get keys, read the bytes in parts, read the entry again.
//!
//! In: claimed pulls, ends of reads. Out: ended pulls, or pulls that go over the link after all.
//!
//! ```text
//! claimed ──▶ Finding ──on the board──▶ Keys ──all there──▶ Rows ──all here──▶ Again ──the same──▶ done
//!    │           └───── not there ─────────▶ link ◀──────────┘ way failed        │
//!    └── no way ─────────────────────────────▶ ▲ ◀────────── another, or none ───┘
//! ```
//!
//! Queues of each way hold its pulls that can begin something, so a turn looks at no others.
//!
//! Invariant: a pull leaves this module when none of its reads is under way.

use std::collections::BTreeSet;
use std::time::Instant;

use super::way::{Onward, Stage};
use super::{For, Remote};
use crate::paths::Paths;
use crate::paths::copies::{Better, TURN_BYTES};
use crate::peer::PeerId;
use crate::provider::PullId;
use crate::shared::Found;
use crate::tcp::Pull;
use crate::ucx::{Done, Flying};

/// Maximum reads that are finished or begun before links and the caller are served; also at most
/// [`TURN_BYTES`].
const TURN_READS: usize = 256;

/// A pull whose rows are read.
pub(super) struct Reading {
    pub(super) flying: Flying,
    pub(super) step: Step,
    /// Whether a read of its entry is in progress.
    pub(super) is_looking: bool,
    /// Position of the pull in the order of deadlines: it is not late before this time.
    pub(super) look_at: Instant,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// Reads the bucket of its key.
    Finding,
    /// Waits for the UCX keys of the stretches that its region lies in.
    Keys(Found),
    /// Reads its bytes.
    Rows(Found),
    /// Reads its entry again.
    Again(Found),
}

/// Reads and bytes since links and the caller were last served.
#[derive(Default)]
pub(super) struct Turn {
    reads: usize,
    bytes: u64,
}

impl Turn {
    pub(super) fn count(&mut self, bytes: u64) {
        (self.reads, self.bytes) = (self.reads + 1, self.bytes + bytes);
    }

    pub(super) fn is_over(&self) -> bool {
        self.reads >= TURN_READS || self.bytes >= TURN_BYTES
    }
}

impl Reading {
    pub(super) fn peer(&self) -> PeerId {
        self.flying.pull().peer()
    }

    /// Whether a read of the pull is in flight.
    pub(super) fn is_under_way(&self) -> bool {
        self.flying.is_flying() || self.is_looking
    }
}

impl Remote {
    /// Counts ended reads at once: one that arrives for a pull postpones the deadlines of all pulls from its peer.
    pub(super) fn count_done(&mut self, now: Instant) {
        while let Some(done) = self.net.done() {
            let Some(what) = self.gets.remove(&done.get) else { continue };
            if let For::Left(id) = what {
                self.left_ended(id);
            }
            if let For::Entry(id) | For::Rows(id, _) = what
                && let Some(reading) = self.reading.get_mut(&id)
            {
                let way = self.ways.get_mut(&reading.peer());
                match what {
                    For::Rows(_, bytes) => {
                        reading.flying.ended();
                        self.flying_bytes -= bytes;
                    }
                    For::Look(..) | For::Entry(_) | For::Left(_) => reading.is_looking = false,
                }
                if let Some(way) = way {
                    match what {
                        For::Rows(_, bytes) => way.flying_bytes -= bytes,
                        For::Look(..) | For::Entry(_) | For::Left(_) => way.looks -= 1,
                    }
                    if done.result.is_ok() {
                        way.heard = Some(now);
                    }
                }
            }
            self.done.push_back((what, done));
        }
    }

    fn add(&mut self, pull: Pull) {
        let (id, peer, look_at) = (pull.id(), pull.peer(), pull.late_at());
        let (flying, step) = (Flying::new(pull), Step::Finding);
        self.reading.insert(id, Reading { flying, step, is_looking: false, look_at });
        self.deadlines.insert((look_at, id));
        if let Some(way) = self.ways.get_mut(&peer) {
            way.to_look.push_back(id);
        }
    }

    /// Removes a pull that has no read in flight.
    pub(super) fn remove(&mut self, id: PullId) -> Option<Pull> {
        self.take_out(id).map(Flying::into_pull)
    }

    /// Removes a pull from the queues; reads of it may be in flight.
    pub(super) fn take_out(&mut self, id: PullId) -> Option<Flying> {
        let it = self.reading.remove(&id)?;
        self.deadlines.remove(&(it.look_at, id));
        Some(it.flying)
    }

    /// Begins to read a pull's bytes if the keys of all its stretches are here.
    pub(super) fn read_if_keys_are_here(&mut self, id: PullId) {
        let Some(reading) = self.reading.get_mut(&id) else { return };
        let Some(way) = self.ways.get_mut(&reading.peer()) else { return };
        if let Step::Keys(found) = reading.step
            && way.has_keys(found.spot, reading.flying.pull().reach())
        {
            reading.step = Step::Rows(found);
            way.to_read.insert(id);
        }
    }

    /// Reads the entry again once all bytes of the pull have landed.
    pub(super) fn look_again_if_whole(&mut self, id: PullId) {
        let Some(reading) = self.reading.get_mut(&id) else { return };
        let Some(way) = self.ways.get_mut(&reading.peer()) else { return };
        if let Step::Rows(found) = reading.step
            && reading.flying.is_begun()
            && !reading.flying.is_flying()
        {
            reading.step = Step::Again(found);
            way.to_look.push_back(id);
        }
    }
}

impl Paths {
    /// Begins a claimed pull by UCX where a way is open, else over the link.
    pub(in crate::paths) fn begin_remote(&mut self, pull: Pull, better: Better) {
        let peer = pull.peer();
        let Some(remote) = &mut self.remote else {
            self.traffic.sent_anew += u64::from(better == Better::Coming);
            return self.tcp.send_pull(pull);
        };
        match remote.ways.get(&peer).map(|it| &it.stage) {
            Some(Stage::Open { .. }) => {
                if remote.hold(&mut self.tcp, pull.landing()) || remote.required {
                    remote.add(pull);
                } else {
                    self.traffic.sent_anew += 1;
                    self.tcp.send_pull(pull);
                }
            }
            Some(Stage::Asked | Stage::Looking { .. }) if remote.required => {
                remote.waiting.push(pull);
            }
            None if remote.required && self.tcp.is_opening(peer) => remote.waiting.push(pull),
            Some(Stage::Asked | Stage::Looking { .. }) => {
                self.traffic.sent_anew += 1;
                self.tcp.send_pull(pull);
            }
            Some(Stage::Shut { .. }) | None => {
                self.traffic.sent_anew += u64::from(better == Better::Coming);
                self.tcp.send_pull(pull);
            }
        }
    }

    /// Does one turn of UCX. Returns whether more can be done at once.
    pub(in crate::paths) fn advance_remote(&mut self) -> bool {
        let now = self.tcp.now();
        let mut turn = Turn::default();
        loop {
            let Some(remote) = &mut self.remote else { return false };
            let mut is_more = remote.net.progress();
            remote.count_done(now);
            let mut is_still = true;
            while !turn.is_over()
                && let Some((what, done)) = self.remote.as_mut().and_then(|it| it.done.pop_front())
            {
                is_still = false;
                turn.count(what.bytes());
                self.got(what, &done);
            }
            while let Some((end, why)) = self.remote.as_mut().and_then(|it| it.net.failed()) {
                if let Some(peer) = self.remote.as_ref().and_then(|it| it.owner_at(end)) {
                    self.leave(peer, &why, true, &Onward::Link(BTreeSet::new()));
                }
            }
            self.end_late_remote(now);
            is_more |= self.read_on();
            while let Some(left) = self.remote.as_mut().and_then(|it| it.net.left()) {
                self.tcp.forget_device(left);
            }
            if is_still || turn.is_over() {
                return is_more || turn.is_over();
            }
        }
    }

    /// A read has ended.
    fn got(&mut self, what: For, done: &Done) {
        let Some(remote) = &mut self.remote else { return };
        let peer = match what {
            For::Look(peer, round) => {
                if remote.ways.get(&peer).is_none_or(|it| it.round != round) {
                    return;
                }
                peer
            }
            For::Entry(id) | For::Rows(id, _) => match remote.reading.get(&id) {
                Some(reading) => reading.peer(),
                None => return,
            },
            For::Left(id) => return self.got_left(id),
        };
        if let Err(why) = &done.result {
            let why = format!("a read ended with {why:?}");
            return self.leave(peer, &why, true, &Onward::Link(BTreeSet::new()));
        }
        match what {
            For::Look(peer, _) => self.seen(peer),
            For::Entry(id) => self.step(id, &done.words),
            For::Rows(id, _) => remote.look_again_if_whole(id),
            For::Left(_) => {}
        }
    }

    /// Handles the entry that a pull has read.
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
                        if let Some(remote) = &mut self.remote {
                            remote.read_if_keys_are_here(id);
                        }
                    }
                    // The owner answers over the link.
                    None => self.over_the_link(id),
                }
            }
            // A pull in these stages reads no entry.
            Step::Keys(_) | Step::Rows(_) => {}
            Step::Again(found) if found.is_still(key, words) => {
                let Some(pull) = remote.remove(id) else { return };
                self.copied.insert(id);
                self.traffic.ucx_bytes += pull.landed();
                self.demanded.came(pull.peer());
                self.tcp.end_copied(pull, Ok(found.number));
            }
            Step::Again(_) => self.over_the_link(id),
        }
    }

    /// Sends a pull without reads in flight over the link.
    fn over_the_link(&mut self, id: PullId) {
        if let Some(pull) = self.remote.as_mut().and_then(|it| it.remove(id)) {
            self.traffic.sent_anew += 1;
            self.tcp.send_anew(pull);
        }
    }

    /// Begins the reads of one turn, as far as the windows have room. Returns whether more can begin at once.
    fn read_on(&mut self) -> bool {
        let Some(remote) = &self.remote else { return false };
        let hungry = remote.ways.iter().filter(|it| it.1.is_hungry());
        // The peer whose pull began first comes first.
        let mut peers: Vec<_> = hungry.map(|it| (it.1.to_read.first().copied(), *it.0)).collect();
        peers.sort_unstable();
        let mut turn = Turn::default();
        for (_, peer) in peers {
            let begun = self.remote.as_mut().map(|it| it.read_from(peer, &mut self.tcp, &mut turn));
            if let Some(Err(why)) = begun {
                self.leave(peer, &why, true, &Onward::Link(BTreeSet::new()));
            }
        }
        turn.is_over()
    }
}
