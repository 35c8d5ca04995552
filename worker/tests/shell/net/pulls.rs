//! Pulls: what they are asked for, what they bring, and when they end.
//!
//! In: calls of processes, signals that arrive. Out: rows in landings, events.

use std::time::Duration;

use cadre_exchange::{Buffer, Event, LandingId, PeerId, Piece, PullError, PullId, RegionKey};
use cadre_step::lowering::Tensor;

use super::{Happening, Landing, Life, Net, Out, PROBE, Pull, Signal};

/// How names of words begin that are published: no step has this number.
const WORDS: [u32; 2] = [u32::MAX, u32::MAX - 1];

impl Landing {
    fn memory(&mut self) -> &mut Buffer {
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
        self.endpoints[me].landings.get(&landing).is_some_and(|it| it.busy > 0)
    }

    pub(crate) fn take(
        &mut self,
        me: Life,
        landing: LandingId,
    ) -> Result<Buffer, cadre_exchange::Error> {
        let end = &mut self.endpoints[me];
        match end.landings.get(&landing).filter(|it| !it.discarded) {
            None => Err(cadre_exchange::Error::UnknownLanding { landing }),
            Some(it) if it.busy > 0 => {
                Err(cadre_exchange::Error::Busy { landing, outstanding: it.busy })
            }
            Some(_) => {
                let mut it = end.landings.remove(&landing).expect("just seen");
                self.words += u64::from(it.key.is_some_and(|it| it.0[..2] == WORDS));
                if let Some(RegionKey([step, phase, tensor, _])) = it.key
                    && tensor >= Tensor::DK as u32
                {
                    let [first, last] = [Tensor::O, Tensor::DV].map(|it| it as u32);
                    let same = |it: &Pull| {
                        it.key.0[..2] == [step, phase] && (first..=last).contains(&it.key.0[2])
                    };
                    self.parts += u64::from(end.pulls.values().any(same));
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
        if end.landings.get(&landing).is_some_and(|it| it.discarded && it.busy == 0) {
            end.landings.remove(&landing);
        }
    }

    pub(crate) fn pull(
        &mut self,
        me: Life,
        peer: PeerId,
        (key, pieces): (RegionKey, Vec<Piece>),
        landing: LandingId,
        patience: Duration,
    ) -> PullId {
        let when = self.now + patience.as_nanos() as u64;
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
        let others = end.pulls.values().filter(|it| it.landing == landing);
        let taken: Vec<(Piece, bool)> =
            others.flat_map(|it| it.pieces.iter().map(move |piece| (*piece, it.cut_off))).collect();
        let room = end.landings.get_mut(&landing).filter(|it| !it.discarded);
        let Some(room) = room else {
            self.wrong = Some(format!("{} pulls into a landing that is gone", end.me));
            return id;
        };
        let fits = pieces.iter().all(|it| inside(it, room));
        let clash = |cut_off: bool| {
            let mut taken = taken.iter().filter(|it| it.1 == cut_off).map(|it| &it.0);
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
        room.busy += 1;
        room.key = Some(key);
        let pull = Pull {
            link,
            key,
            pieces,
            landing,
            ended: false,
            cut_off: false,
            asked: false,
            data: None,
        };
        end.pulls.insert(id, pull);
        self.at(when, Happening::Signal(Signal::Late(me, id)));
        let it = self.links.get_mut(&link).expect("ends know links that are there");
        if it.open {
            self.ask(link, me, id);
        } else {
            it.waiting.push_back(Out::Pull(id));
        }
        id
    }

    pub(super) fn ask(&mut self, link: u64, me: Life, id: PullId) {
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
        let Some(pull) = self.endpoints[me].pulls.remove(&id) else { return };
        if let Some(landing) = self.endpoints[me].landings.get_mut(&pull.landing) {
            landing.busy -= 1;
        }
        self.free(me, pull.landing);
        if !pull.ended {
            self.say(me, Event::Pulled { pull: id, result });
        }
    }

    pub(super) fn asked(&mut self, link: u64, life: Life, id: PullId) {
        let listener = if self.rdma {
            self.links.get(&link).and_then(|it| it.acceptor)
        } else {
            self.listener(link)
        };
        let Some(owner) = listener else { return };
        if self.endpoints[owner].paused && !self.rdma {
            self.endpoints[owner].held.push(Signal::Ask(link, life, id));
            return;
        }
        let Some(pull) = self.endpoints[life].pulls.get(&id) else { return };
        let (key, bytes) = (pull.key, pull.pieces.iter().map(|it| it.bytes).sum::<u64>());
        let data = self.endpoints[owner].regions.get(&key).cloned();
        let there = data.is_some();
        self.endpoints[life].pulls.get_mut(&id).expect("just seen").data = data;
        let when = self.arrival(link, true, if there { bytes } else { 0 });
        self.at(when, Happening::Signal(Signal::Copied(link, life, id)));
    }

    /// The last byte of a pull is there.
    pub(super) fn copied(&mut self, link: u64, life: Life, id: PullId) {
        let Some(pull) = self.endpoints[life].pulls.get(&id).filter(|it| !it.cut_off) else {
            return;
        };
        let owner = self.links.get(&link).and_then(|it| it.acceptor);
        let Some(began) = pull.data.clone() else {
            return self.finish(life, id, Err(PullError::Gone));
        };
        let Some(owner) = owner.filter(|it| self.endpoints[*it].alive) else {
            // Half of a reply is none. Of a machine without power nobody hears.
            if owner.is_some_and(|it| self.endpoints[it].answers) {
                self.farewell(life, link);
            }
            return;
        };
        let read = if self.rdma {
            // What is there now: of somebody else, if it was withdrawn.
            self.endpoints[owner].regions.get(&pull.key).cloned()
        } else {
            Some(began)
        };
        let (pieces, landing, probe) = (pull.pieces.clone(), pull.landing, pull.key == PROBE);
        let Some(room) = self.endpoints[life].landings.get_mut(&landing) else { return };
        let bytes = pieces.iter().map(|it| it.bytes).sum();
        // Nobody looks at what was measured with.
        for piece in pieces.iter().filter(|_| !probe) {
            let to = &mut room.memory().bytes_mut()[piece.local as usize..][..piece.bytes as usize];
            let from = piece.remote as usize..(piece.remote + piece.bytes) as usize;
            match read.as_ref().map(|it| it.bytes().get(from)) {
                Some(Some(from)) => to.copy_from_slice(from),
                Some(None) => {
                    self.wrong = Some(format!("life {life} pulls outside of a region"));
                    return;
                }
                None => to.fill(0x42),
            }
        }
        self.finish(life, id, Ok(bytes));
    }

    pub(super) fn late(&mut self, life: Life, id: PullId) {
        let Some(pull) = self.endpoints[life].pulls.get_mut(&id) else { return };
        if pull.asked {
            if !std::mem::replace(&mut pull.ended, true) {
                self.say(life, Event::Pulled { pull: id, result: Err(PullError::Deadline) });
            }
        } else {
            self.finish(life, id, Err(PullError::Deadline));
        }
    }
}
