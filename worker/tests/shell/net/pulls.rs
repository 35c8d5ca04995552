//! Pulls: what they are asked for, what they bring, and when they end.
//!
//! In: calls of processes, signals that arrive. Out: rows in landings, events.

use std::sync::Arc;

use cadre_exchange::{Buffer, Event, LandingId, Piece, PullError, PullId, PullRequest, RegionKey};
use cadre_step::lowering::Tensor;

use super::{Happening, Kept, Landing, Life, LinkId, Net, Out, PROBE, Pull, Signal};

/// Whether a region is a work's results.
pub(super) fn is_result(key: RegionKey) -> bool {
    let [first, last] = [Tensor::O, Tensor::DV].map(|it| it as u32);
    // Words that are published have numbers there, too.
    key.0[..2] != WORDS && (first..=last).contains(&key.0[2])
}

/// Parts that a pull travels in, at most.
const PARTS: u64 = 8;

/// Bytes of a word that are pulled at a time.
const PART_OF_WORD: usize = 4 << 20;

/// How names of words begin that are published: no step has this number.
pub(super) const WORDS: [u32; 2] = [u32::MAX, u32::MAX - 1];

impl Landing {
    pub(super) fn memory(&mut self) -> &mut Buffer {
        self.memory.get_or_insert_with(|| {
            let mut memory = Buffer::zeroed(self.bytes);
            // Not a number: whoever reads what did not land gets wrong bits.
            memory.bytes_mut().fill(0xff);
            memory
        })
    }
}

impl Net {
    pub(crate) fn land(&mut self, me: Life, bytes: usize) -> LandingId {
        let end = &mut self.endpoints[me];
        end.last_id += 1;
        let id = LandingId(end.last_id);
        end.landings.insert(id, Landing { bytes, ..Landing::default() });
        id
    }

    pub(crate) fn is_busy(&self, me: Life, landing: LandingId) -> bool {
        self.endpoints[me].landings.get(&landing).is_some_and(|it| !it.busy.is_empty())
    }

    pub(crate) fn take(
        &mut self,
        me: Life,
        landing: LandingId,
    ) -> Result<Buffer, cadre_exchange::Error> {
        let end = &mut self.endpoints[me];
        match end.landings.get(&landing).filter(|it| !it.discarded) {
            None => Err(cadre_exchange::Error::UnknownLanding { landing }),
            Some(it) if !it.busy.is_empty() => {
                Err(cadre_exchange::Error::Busy { landing, outstanding: it.busy.len() })
            }
            Some(_) => {
                let mut it = end.landings.remove(&landing).expect("just seen");
                self.words += u64::from(it.key.is_some_and(|it| it.0[..2] == WORDS));
                if let Some(RegionKey([step, phase, tensor, _])) = it.key
                    && tensor >= Tensor::DK as u32
                {
                    self.parts +=
                        u64::from(end.results.get(&[step, phase]).is_some_and(|it| *it > 0));
                }
                it.memory();
                Ok(it.memory.expect("just made"))
            }
        }
    }

    pub(crate) fn copy_landed(
        &mut self,
        me: Life,
        landing: LandingId,
        pieces: &[Piece],
        to: &mut Buffer,
    ) -> Result<(), cadre_exchange::Error> {
        self.copied += 1;
        let it = self.endpoints[me].landings.get_mut(&landing).filter(|it| !it.discarded);
        let memory = it.ok_or(cadre_exchange::Error::UnknownLanding { landing })?.memory();
        for piece in pieces {
            let from = &memory.bytes()[piece.remote as usize..][..piece.bytes as usize];
            to.bytes_mut()[piece.local as usize..][..piece.bytes as usize].copy_from_slice(from);
        }
        Ok(())
    }

    pub(crate) fn discard(&mut self, me: Life, landing: LandingId) {
        if let Some(it) = self.endpoints[me].landings.get_mut(&landing) {
            it.discarded = true;
        }
        self.free(me, landing);
    }

    pub(super) fn free(&mut self, me: Life, landing: LandingId) {
        let end = &mut self.endpoints[me];
        if end.landings.get(&landing).is_some_and(|it| it.discarded && it.busy.is_empty()) {
            end.landings.remove(&landing);
        }
    }

    pub(crate) fn pull(&mut self, me: Life, request: PullRequest) -> PullId {
        let PullRequest { peer, key, pieces, landing, patience } = request;
        let patience = patience.as_nanos() as u64;
        let when = self.now + patience;
        let end = &mut self.endpoints[me];
        end.last_id += 1;
        let id = PullId(end.last_id);
        let inside = |it: &Piece, room: &Landing| {
            it.local.checked_add(it.bytes).is_some_and(|it| it <= room.bytes as u64)
        };
        let apart = |a: &Piece, b: &Piece| {
            a.bytes == 0
                || b.bytes == 0
                || a.local + a.bytes <= b.local
                || b.local + b.bytes <= a.local
        };
        let room = end.landings.get_mut(&landing).filter(|it| !it.discarded);
        let Some(room) = room else {
            self.wrong = Some(format!("{} pulls into a landing that is gone", end.me));
            return id;
        };
        let fits = pieces.iter().all(|it| inside(it, room));
        let clash = |cut_off: bool| {
            let others = room.busy.iter().filter_map(|it| end.pulls.get(it));
            let mut taken = others.filter(|it| it.cut_off == cut_off).flat_map(|it| &it.pieces);
            taken.any(|other| pieces.iter().any(|it| !apart(it, other)))
        };
        if !fits || clash(false) || clash(true) {
            let reason = format!("{} pulls where another pull writes, or outside", end.me);
            // Nobody knows how long a device copies for a pull that has ended.
            if !fits || clash(false) {
                self.wrong = Some(reason.clone());
            }
            self.say(me, Event::Pulled { pull: id, result: Err(PullError::Refused { reason }) });
            return id;
        }
        let Some(link) = end.links.get(&peer).and_then(|it| it[1]) else {
            self.say(me, Event::Pulled { pull: id, result: Err(PullError::PeerFailed) });
            return id;
        };
        let of_peer = |it: &&Pull| it.key.0[..2] == WORDS && it.peer == peer && !it.ended;
        let words = key.0[..2] == WORDS;
        if words && (room.bytes > PART_OF_WORD || end.pulls.values().any(|it| of_peer(&it))) {
            self.wrong = Some(format!("{} pulls more of {peer} than one part of one word", end.me));
            return id;
        }
        room.busy.push(id);
        room.key = Some(key);
        let bytes = pieces.iter().map(|it| it.bytes).sum();
        let kept = pieces.first().and_then(|it| room.kept.remove(&it.local));
        let goes_on = kept.filter(|it| {
            let same = (it.peer, it.key, &it.pieces) == (peer, key, &pieces);
            // A whole one over the same link is wanted anew.
            same && (it.landed < bytes || it.link != link)
        });
        self.resumed[0] += u64::from(goes_on.is_some());
        let (landed, publication) =
            goes_on.map_or((0, None), |it| (it.landed, Some(it.publication)));
        if is_result(key) {
            *end.results.entry([key.0[0], key.0[1]]).or_default() += 1;
        }
        let deadline = self.happenings.deadline(when, me, id);
        let pull = Pull {
            link,
            peer,
            key,
            pieces,
            bytes,
            landed,
            publication,
            part: 0,
            landing,
            ended: false,
            cut_off: false,
            asked: false,
            data: None,
            deadline,
            patience,
        };
        end.pulls.insert(id, pull);
        let it = &mut self.links[link];
        if it.open {
            self.ask(link, me, id);
        } else {
            it.waiting.push_back(Out::Pull(id));
        }
        id
    }

    pub(super) fn ask(&mut self, link: LinkId, me: Life, id: PullId) {
        if let Some(pull) = self.endpoints[me].pulls.get_mut(&id) {
            pull.asked = true;
            let when = self.arrival(link, false, 0);
            self.at(when, Happening::Signal(Signal::Ask(link, me, id)));
        }
    }

    /// The link of a pull is gone, and so is the pull; a device goes on to write what it had begun to copy.
    pub(super) fn cut_off(&mut self, me: Life, id: PullId, result: Result<u64, PullError>) {
        let begun = |it: &&mut Pull| it.asked && !it.ended;
        let pull = self.endpoints[me].pulls.get_mut(&id).filter(begun);
        let Some(pull) = pull.filter(|_| self.lasting) else {
            return self.finish(me, id, result);
        };
        (pull.ended, pull.cut_off) = (true, true);
        self.say(me, Event::Pulled { pull: id, result });
        self.soon(200_000_000, Happening::Signal(Signal::Freed(me, id)));
    }

    /// The device has written the last of a pull that had ended.
    pub(super) fn freed(&mut self, me: Life, id: PullId) {
        let Some(pull) = self.endpoints[me].pulls.get(&id) else { return };
        let (pieces, landing) = (pull.pieces.clone(), pull.landing);
        if let Some(it) = self.endpoints[me].landings.get_mut(&landing) {
            let memory = it.memory();
            for piece in pieces {
                memory.bytes_mut()[piece.local as usize..][..piece.bytes as usize].fill(0x43);
            }
        }
        self.finish(me, id, Err(PullError::Cancelled));
    }

    /// A pull is over, its bytes of the landing are free.
    pub(super) fn finish(&mut self, me: Life, id: PullId, result: Result<u64, PullError>) {
        let end = &mut self.endpoints[me];
        let Some(pull) = end.pulls.remove(&id) else { return };
        self.happenings.take_back(pull.deadline);
        let resumes = !self.rdma && !self.lasting;
        if let Some(landing) = end.landings.get_mut(&pull.landing) {
            landing.busy.retain(|it| *it != id);
            let Pull { peer, key, landed, link, .. } = pull;
            let keeps = resumes && landed > 0 && !matches!(result, Err(PullError::Gone));
            if let (true, Some(publication), Some(first)) =
                (keeps, pull.publication, pull.pieces.first())
            {
                let first = first.local;
                let pieces = pull.pieces;
                landing.kept.insert(first, Kept { peer, key, pieces, landed, publication, link });
            }
        }
        if is_result(pull.key)
            && let Some(left) = end.results.get_mut(&[pull.key.0[0], pull.key.0[1]])
        {
            *left -= 1;
        }
        self.free(me, pull.landing);
        if !pull.ended {
            self.say(me, Event::Pulled { pull: id, result });
        }
    }

    /// Whether a machine has lost its power, and nobody has its memory yet: a card tries to read there until its pull is late.
    fn is_dark(&self, life: Life) -> bool {
        let end = &self.endpoints[life];
        !end.alive && !end.answers && self.heir(life).is_none()
    }

    fn later(&mut self, ended: bool, signal: Signal) {
        if !ended {
            self.at(self.now + 20_000_000, Happening::Signal(signal));
        }
    }

    pub(super) fn asked(&mut self, link: LinkId, life: Life, id: PullId) {
        let listener = if self.rdma { self.links[link].acceptor } else { self.listener(link) };
        let Some(owner) = listener else { return };
        if self.endpoints[owner].paused && !self.rdma {
            self.endpoints[owner].held.push(Signal::Ask(link, life, id));
            return;
        }
        let resumes = self.resumes();
        let Some(pull) = self.endpoints[life].pulls.get(&id) else { return };
        if self.rdma && self.is_dark(owner) {
            let ended = pull.ended;
            return self.later(ended, Signal::Ask(link, life, id));
        }
        let (key, left) = (pull.key, pull.bytes - pull.landed);
        if self.is_dry(owner, life, key) {
            return;
        }
        // Nobody looks at what is measured with.
        let whole = !resumes || key == PROBE;
        let part = if whole { left } else { left.min(self.part.max(pull.bytes.div_ceil(PARTS))) };
        let data = match self.heir(owner) {
            // Something is there: nobody looks at what.
            Some(_) => Some((0, Arc::new(Buffer::zeroed(0)))),
            None => self.endpoints[owner].regions.get(&key).cloned(),
        };
        let (there, bytes) = (data.is_some(), part);
        let pull = self.endpoints[life].pulls.get_mut(&id).expect("just seen");
        (pull.data, pull.part) = (data, part);
        let when = self.arrival(link, true, if there { bytes } else { 0 });
        self.at(when, Happening::Signal(Signal::Copied(link, life, id)));
    }

    /// The last byte of a part of a pull is there.
    pub(super) fn copied(&mut self, link: LinkId, life: Life, id: PullId) {
        let Some(pull) = self.endpoints[life].pulls.get(&id).filter(|it| !it.cut_off) else {
            return;
        };
        let owner = self.links[link].acceptor;
        let Some((number, began)) = pull.data.clone() else {
            return self.finish(life, id, Err(PullError::Gone));
        };
        let heir = owner.and_then(|it| self.heir(it));
        let owner = owner.filter(|it| self.endpoints[*it].alive);
        let Some(owner) = heir.or(owner) else {
            let owner = self.links[link].acceptor;
            if self.rdma && owner.is_some_and(|it| self.is_dark(it)) {
                let ended = pull.ended;
                return self.later(ended, Signal::Copied(link, life, id));
            }
            // Half of a reply is none. Of a machine without power nobody hears.
            if owner.is_some_and(|it| self.endpoints[it].answers) {
                self.farewell(life, link);
            }
            return;
        };
        let read = if self.rdma {
            // What is there now: of somebody else, if it was withdrawn.
            self.endpoints[owner].regions.get(&pull.key).map(|it| Arc::clone(&it.1))
        } else {
            Some(began)
        };
        let (landing, probe) = (pull.landing, pull.key == PROBE);
        let found = heir.map(|it| self.endpoints[it].me.incarnation);
        let end = &mut self.endpoints[life];
        end.found.extend(found.map(|it| (id, it)));
        let Some(room) = end.landings.get_mut(&landing) else { return };
        let pull = end.pulls.get_mut(&id).expect("just seen");
        if *pull.publication.get_or_insert(number) != number {
            // What has landed is of another one.
            (pull.landed, pull.publication) = (0, None);
            self.resumed[1] += 1;
            return self.ask(link, life, id);
        }
        // Bytes of the stream that come before this part, and that come in it.
        let (mut before, mut left) = (pull.landed, pull.part);
        // Nobody looks at what was measured with.
        for piece in pull.pieces.iter().filter(|_| !probe) {
            let skipped = before.min(piece.bytes);
            let taken = left.min(piece.bytes - skipped);
            (before, left) = (before - skipped, left - taken);
            if taken == 0 {
                continue;
            }
            let local = (piece.local + skipped) as usize;
            let to = &mut room.memory().bytes_mut()[local..][..taken as usize];
            let from = (piece.remote + skipped) as usize;
            match read.as_ref().map(|it| it.bytes().get(from..from + taken as usize)) {
                Some(Some(from)) => to.copy_from_slice(from),
                // A word may say that it is longer than it is.
                Some(None) if pull.key.0[..2] == WORDS => {
                    let reason = "the spans lie outside of the region".to_owned();
                    return self.finish(life, id, Err(PullError::Refused { reason }));
                }
                Some(None) => {
                    self.wrong = Some(format!("life {life} pulls outside of a region"));
                    return;
                }
                None => to.fill(0x42),
            }
        }
        if self.spoilt.is_some_and(|it| it.0 == owner) && pull.key.0[..2] == WORDS {
            pull.spoil(self.spoilt, room);
        }
        pull.landed += pull.part;
        let bytes = pull.bytes;
        if pull.landed < bytes {
            return self.ask(link, life, id);
        }
        self.finish(life, id, Ok(bytes));
    }

    /// A pull is late when nothing has come over its link for so long, however long it takes.
    pub(super) fn late(&mut self, life: Life, id: PullId) {
        let Some(pull) = self.endpoints[life].pulls.get_mut(&id) else { return };
        if !pull.asked {
            return self.finish(life, id, Err(PullError::Deadline));
        }
        let came = self.links[pull.link].came(self.now);
        let when = came.map_or(0, |it| it + pull.patience);
        if when > self.now {
            pull.deadline = self.happenings.deadline(when, life, id);
        } else if !self.rdma && !self.lasting {
            // Its landing is free at once; what still comes lands nowhere.
            self.finish(life, id, Err(PullError::Deadline));
        } else if !std::mem::replace(&mut pull.ended, true) {
            self.say(life, Event::Pulled { pull: id, result: Err(PullError::Deadline) });
        }
    }
}
