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
//! A way that is left is closed by force first: nothing is written for its pulls when they end or go over the link.
//!
//! Invariant: a pull leaves this module when none of its reads is under way.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::card::{self, CARD, CARD_BYTES, Card, KEY_BYTES, PackedKey, STRETCH_BYTES};
use super::way::{Key, Stage, Way};
use super::{Asked, For, PATIENCE, Remote};
use crate::buffer::Buffer;
use crate::paths::Path;
use crate::paths::Paths;
use crate::peer::{PeerId, Piece, RegionKey};
use crate::provider::{Event, LandingId, Provider as _, PullError, PullId};
use crate::shared::{BUCKET_BYTES, ENTRY_BYTES, Found};
use crate::tcp::Pull;
use crate::ucx::{Done, Flying, Transports, is_rdma};

/// Bytes that a peer of which nothing is under way may always be asked for.
const IDLE_PART_BYTES: u64 = 64 << 10;

/// A pull whose rows are read.
pub(super) struct Reading {
    flying: Flying,
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
    fn peer(&self) -> PeerId {
        self.flying.pull().peer()
    }

    /// Whether UCX may bring something for it.
    fn is_under_way(&self) -> bool {
        self.flying.is_flying() || matches!(self.step, Step::Finding | Step::Again(_))
    }
}

/// How pulls go on whose way is left.
enum Onward {
    /// Over the link, from their first byte; those of the set are late.
    Link(BTreeSet<PullId>),
    /// Not at all.
    End(PullError),
}

impl Remote {
    /// How rows of a peer come now.
    pub(in crate::paths) fn path(&self, peer: PeerId) -> Option<Path> {
        self.ways.get(&peer).map(Way::path)
    }

    /// Whether a way that is shut has rested long enough.
    pub(in crate::paths) fn is_to_be_tried(&self, peer: PeerId, now: Instant) -> bool {
        let again = |it: &Way| matches!(it.stage, Stage::Shut { again } if again <= now);
        self.ways.get(&peer).is_some_and(again)
    }

    /// When something is late next.
    pub(in crate::paths) fn next_late(&self) -> Option<Instant> {
        let waiting = self.waiting.iter().map(Pull::late_at);
        let reading = self.reading.values().map(|it| self.late_at(it));
        let looks = self.ways.values().filter_map(|it| match it.stage {
            Stage::Looking { until, .. } => Some(until),
            Stage::Asked | Stage::Open { .. } | Stage::Shut { .. } => None,
        });
        waiting.chain(reading).chain(looks).min()
    }

    fn late_at(&self, reading: &Reading) -> Instant {
        let heard = self.ways.get(&reading.peer()).and_then(|it| it.heard);
        reading.flying.pull().late_after(heard)
    }

    /// The end of a read that nobody has looked at.
    fn next_done(&mut self) -> Option<Done> {
        self.done.pop_front().or_else(|| self.net.done())
    }

    /// Counts a read that has ended: what it was for.
    fn count(&mut self, done: &Done, now: Instant) -> Option<For> {
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

    /// Closes the end of a peer and gives back its pulls: nothing is written for them any more.
    fn close_way(&mut self, peer: PeerId, now: Instant) -> Vec<Pull> {
        if let Some(end) = self.ways.get(&peer).and_then(Way::end) {
            self.net.close(end);
        }
        while let Some(done) = self.net.done() {
            self.done.push_back(done);
        }
        for done in std::mem::take(&mut self.done) {
            let is_theirs = match self.gets.get(&done.get) {
                Some((For::Pull(id), _)) => self.reading.get(id).is_some_and(|it| it.peer() == peer),
                Some((For::Look(..), _)) | None => false,
            };
            if is_theirs {
                self.count(&done, now);
            } else {
                self.done.push_back(done);
            }
        }
        let theirs = self.reading.extract_if(.., |_, it| it.peer() == peer);
        theirs.map(|it| it.1.flying.into_pull()).collect()
    }

    /// Where a byte of a region is to be read, and how many from there on.
    fn place(way: &Way, found: &Found, at: u64) -> Option<(crate::ucx::Read, u64)> {
        let Stage::Open { end, .. } = way.stage else { return None };
        let byte = found.spot.at.checked_add(at)?;
        let index = u32::try_from(byte / STRETCH_BYTES).ok()?;
        let key = (*way.keys.get(&(found.spot.arena, index))?)?;
        let within = byte % STRETCH_BYTES;
        Some((key.at(end, within), STRETCH_BYTES - within))
    }

    /// Begins a look at the board: `bytes` bytes from `at` on.
    fn look(&mut self, peer: PeerId, at: u64, bytes: usize, what: For) -> Result<(), String> {
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
    /// Asks a peer for its card.
    pub(in crate::paths) fn ask_card(&mut self, peer: PeerId) {
        let now = self.tcp.now();
        let Some(remote) = &mut self.remote else { return };
        remote.rounds += 1;
        let round = remote.rounds;
        let waiting = remote.close_way(peer, now);
        debug_assert!(waiting.is_empty(), "a way that is asked for has no pulls");
        let before = remote.ways.remove(&peer);
        remote.ways.insert(peer, Way::asked(round, before));
        self.ask_owner(peer, round, CARD, CARD_BYTES, None);
    }

    fn ask_owner(
        &mut self,
        peer: PeerId,
        round: u64,
        key: RegionKey,
        bytes: usize,
        stretch: Option<(u64, u32)>,
    ) {
        let landing = self.tcp.land(Buffer::zeroed(bytes));
        let whole = vec![Piece { remote: 0, local: 0, bytes: bytes as u64 }];
        let pull = self.tcp.pull(peer, key, whole, landing, PATIENCE);
        if let Some(remote) = &mut self.remote {
            remote.asked.insert(pull, Asked { peer, round, landing, stretch });
        }
    }

    /// Takes what a peer says of itself, if this pull asked for it.
    pub(in crate::paths) fn take_said(
        &mut self,
        pull: PullId,
        result: &Result<u64, PullError>,
    ) -> bool {
        let asked = self.remote.as_mut().and_then(|it| it.asked.remove(&pull));
        let Some(Asked { peer, round, landing, stretch }) = asked else { return false };
        let said = self.said(landing, result);
        let is_there = |it: &Remote| it.ways.get(&peer).is_some_and(|it| it.round == round);
        if self.remote.as_ref().is_some_and(is_there) {
            let is_odd = stretch.is_some() || !matches!(result, Err(PullError::Gone));
            let taken = match stretch {
                None => said.and_then(|it| self.take_card(peer, round, &it)),
                Some(place) => said.and_then(|it| self.take_key(peer, place, &it)),
            };
            if let Err(why) = taken {
                self.leave(peer, why, is_odd, Onward::Link(BTreeSet::new()));
            }
        }
        true
    }

    fn said(&mut self, landing: LandingId, result: &Result<u64, PullError>) -> Result<Buffer, String> {
        let landed = self.tcp.take(landing).map_err(|it| it.to_string());
        match result {
            Ok(_) => landed,
            Err(PullError::Gone) => Err("it offers no UCX".to_owned()),
            Err(why) => Err(format!("it does not say how its rows are read: {why}")),
        }
    }

    /// Opens the way to the owner of a card, and looks at its board for the first time.
    fn take_card(&mut self, peer: PeerId, round: u64, said: &Buffer) -> Result<(), String> {
        let card = Card::decode(said.bytes()).ok_or("its card is none of this build")?;
        let until = self.tcp.now() + PATIENCE;
        let Some(remote) = &mut self.remote else { return Ok(()) };
        let was_reading = remote.net.descriptors().is_ok_and(|it| it.1.is_some());
        let end = remote.net.connect(&card.address).map_err(|it| it.to_string())?;
        if !was_reading {
            let (_, reading) = remote.net.descriptors().map_err(|it| it.to_string())?;
            if let Some(it) = reading {
                self.tcp.watch_device(it).map_err(|it| it.to_string())?;
            }
        }
        let key = remote.net.unpack(end, &card.board.key);
        let id = match key {
            Ok(id) => id,
            Err(why) => {
                remote.net.close(end);
                return Err(why.to_string());
            }
        };
        let board = Key { id, start: card.board.start };
        if let Some(way) = remote.ways.get_mut(&peer) {
            way.stage = Stage::Looking { end, board, until };
        }
        remote.look(peer, 0, ENTRY_BYTES, For::Look(peer, round))
    }

    fn take_key(&mut self, peer: PeerId, place: (u64, u32), said: &Buffer) -> Result<(), String> {
        let PackedKey { start, key } =
            PackedKey::decode(said.bytes()).ok_or("its key is none of this build")?;
        let Some(remote) = &mut self.remote else { return Ok(()) };
        let Some(way) = remote.ways.get_mut(&peer) else { return Ok(()) };
        let Some(end) = way.end() else { return Ok(()) };
        let id = remote.net.unpack(end, &key).map_err(|it| it.to_string())?;
        way.keys.insert(place, Some(Key { id, start }));
        Ok(())
    }

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
            self.leave(peer, why, true, Onward::Link(BTreeSet::new()));
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
                let of = |it: &Remote| {
                    it.ways.iter().find(|it| it.1.end() == Some(end)).map(|it| *it.0)
                };
                if let Some(peer) = self.remote.as_ref().and_then(of) {
                    self.leave(peer, why, true, Onward::Link(BTreeSet::new()));
                }
            }
            self.end_late_remote(now);
            self.read_on();
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
            return self.leave(peer, why, true, Onward::Link(BTreeSet::new()));
        }
        match what {
            For::Look(peer, _) => self.seen(peer),
            For::Pull(id) => self.step(id, &done.words),
        }
    }

    /// The first look at a board has come.
    fn seen(&mut self, peer: PeerId) {
        let Some(remote) = &mut self.remote else { return };
        let over = remote.transports.names();
        let Some(way) = remote.ways.get_mut(&peer) else { return };
        let emulates = |lanes: &str| remote.transports == Transports::Rdma && !is_rdma(lanes);
        if let Some(end) = way.end()
            && emulates(&remote.net.lanes(end))
        {
            let why = "UCX would emulate reads with the owner's processor".to_owned();
            return self.leave(peer, why, true, Onward::Link(BTreeSet::new()));
        }
        way.open(peer, over);
        if remote.required {
            // Held back until there is a way.
            self.events.push(Event::Connected(peer));
            self.begin_waiting_remote();
        }
    }

    /// Begins again what has waited for a way.
    fn begin_waiting_remote(&mut self) {
        let waiting = self.remote.as_mut().map(|it| std::mem::take(&mut it.waiting));
        for mut pull in waiting.unwrap_or_default() {
            self.tcp.watch_anew(&mut pull);
            self.begin_remote(pull);
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

    /// Asks for the keys of a region that are not here.
    fn ask_keys(&mut self, id: PullId, found: &Found) {
        let Some(remote) = &mut self.remote else { return };
        let Some(reading) = remote.reading.get(&id) else { return };
        let (peer, reach) = (reading.peer(), reading.flying.pull().reach());
        let Some(way) = remote.ways.get_mut(&peer) else { return };
        let (round, spot) = (way.round, found.spot);
        let end = spot.at.checked_add(reach).and_then(|it| it.checked_next_multiple_of(STRETCH_BYTES));
        let stretches = end.map(|end| spot.at / STRETCH_BYTES..end / STRETCH_BYTES);
        // More than any machine has memory.
        let sound = stretches.filter(|it| it.end < 1 << 24 && it.end.saturating_sub(it.start) < 1 << 16);
        let Some(stretches) = sound else {
            let why = "its region ends behind every arena".to_owned();
            return self.leave(peer, why, true, Onward::Link(BTreeSet::new()));
        };
        let mut wanted = Vec::new();
        for index in stretches {
            let place = (spot.arena, index as u32);
            if !way.keys.contains_key(&place) {
                way.keys.insert(place, None);
                wanted.push(place);
            }
        }
        for place in wanted {
            self.ask_owner(peer, round, card::key_region(place), KEY_BYTES, Some(place));
        }
    }

    /// Begins as many reads as there is room for.
    fn read_on(&mut self) {
        let Some(remote) = &mut self.remote else { return };
        let ids: Vec<_> = remote.reading.keys().copied().collect();
        for id in ids {
            if let Err((peer, why)) = self.read_more(id) {
                self.leave(peer, why, true, Onward::Link(BTreeSet::new()));
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
                let is_there = |it: u64| {
                    matches!(way.keys.get(&(found.spot.arena, it as u32)), Some(Some(_)))
                };
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

    /// Ends what nothing has come for in too long.
    fn end_late_remote(&mut self, now: Instant) {
        let Some(remote) = &mut self.remote else { return };
        let late = |it: &mut Pull| it.is_late(now);
        for pull in remote.waiting.extract_if(.., late).collect::<Vec<_>>() {
            self.tcp.end_copied(pull, Err(PullError::Deadline));
        }
        let looks = remote.ways.iter().filter(
            |it| matches!(it.1.stage, Stage::Looking { until, .. } if until <= now),
        );
        for peer in looks.map(|it| *it.0).collect::<Vec<_>>() {
            let why = "it does not answer by UCX".to_owned();
            self.leave(peer, why, true, Onward::Link(BTreeSet::new()));
        }
        let Some(remote) = &mut self.remote else { return };
        let late = remote.reading.iter().filter(|it| remote.late_at(it.1) <= now);
        let late: Vec<_> = late.map(|(id, it)| (*id, it.peer(), it.is_under_way())).collect();
        let stuck: BTreeSet<_> = late.iter().filter(|it| it.2).map(|it| it.1).collect();
        for (id, _, _) in late.iter().filter(|it| !stuck.contains(&it.1)) {
            if let Some(it) = remote.reading.remove(id) {
                self.tcp.end_copied(it.flying.into_pull(), Err(PullError::Deadline));
            }
        }
        for peer in stuck {
            let theirs = late.iter().filter(|it| it.1 == peer).map(|it| it.0).collect();
            let why = "nothing came for too long".to_owned();
            self.leave(peer, why, true, Onward::Link(theirs));
        }
    }

    /// Leaves the way to a peer: closes it by force, then lets its pulls go on.
    fn leave(&mut self, peer: PeerId, why: String, is_odd: bool, onward: Onward) {
        let now = self.tcp.now();
        let Some(remote) = &mut self.remote else { return };
        let pulls = remote.close_way(peer, now);
        let required = remote.required;
        if let Some(way) = remote.ways.get_mut(&peer) {
            way.shut(peer, &why, is_odd, now);
        }
        let mut again = Vec::new();
        for pull in pulls {
            match &onward {
                Onward::Link(late) if late.contains(&pull.id()) => {
                    self.tcp.end_copied(pull, Err(PullError::Deadline));
                }
                Onward::Link(_) if required => again.push(pull),
                Onward::Link(_) => {
                    self.traffic.sent_anew += 1;
                    self.tcp.send_anew(pull);
                }
                Onward::End(error) => self.tcp.end_copied(pull, Err(error.clone())),
            }
        }
        match onward {
            Onward::Link(late) if required && late.is_empty() => {
                for pull in again {
                    self.tcp.end_copied(pull, Err(PullError::PeerFailed));
                }
                self.tcp.close(peer);
                self.end_all(peer, &PullError::PeerFailed);
                let error = format!(
                    "{why}; run where both reach each other by UCX, or without requiring it (--exchange auto)"
                );
                self.events.push(Event::Closed { peer, error });
            }
            // A deadline closes no link: the way is tried anew, and what was not late waits for it.
            Onward::Link(_) if required => {
                if let Some(remote) = &mut self.remote {
                    remote.waiting.extend(again.into_iter().map(|mut it| {
                        it.begin_anew();
                        it
                    }));
                }
                self.ask_card(peer);
            }
            Onward::Link(_) | Onward::End(_) => {}
        }
    }

    /// Ends all pulls from a peer that UCX brings, and forgets the way.
    pub(in crate::paths) fn end_all_remote(&mut self, peer: PeerId, why: &PullError) {
        if self.remote.as_ref().is_none_or(|it| !it.ways.contains_key(&peer) && it.waiting.is_empty())
        {
            return;
        }
        self.leave(peer, "its link is closed".to_owned(), false, Onward::End(why.clone()));
        let Some(remote) = &mut self.remote else { return };
        remote.ways.remove(&peer);
        let theirs = |it: &mut Pull| it.peer() == peer;
        for pull in remote.waiting.extract_if(.., theirs).collect::<Vec<_>>() {
            self.tcp.end_copied(pull, Err(why.clone()));
        }
    }

    /// How long nothing of UCX is late.
    pub(in crate::paths) fn rest_remote(&self, now: Instant) -> Duration {
        let late = self.remote.as_ref().and_then(Remote::next_late);
        late.map_or(Duration::MAX, |it| it.saturating_duration_since(now))
    }
}
