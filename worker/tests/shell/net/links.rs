//! Links: how they are opened, what they carry, how they break.
//!
//! In: calls of processes, signals that arrive. Out: events at both ends, and more signals.

use std::collections::VecDeque;

use cadre_exchange::{Event, PeerId, PullError, RingError};
use cadre_step::envelope::Envelope;

use super::{GREETING, Happening, Life, LinkId, Net, Out, Pull, Signal};

#[derive(Debug)]
pub(super) struct Link {
    pub(super) opener: Life,
    pub(super) acceptor: Option<Life>,
    /// Whom the opener wants.
    pub(super) peer: PeerId,
    pub(super) open: bool,
    /// Whether each end believes in it.
    pub(super) opener_holds: bool,
    pub(super) acceptor_holds: bool,
    pub(super) waiting: VecDeque<Out>,
    /// Bytes that a process which does not look has not read.
    pub(super) unread: usize,
    /// Messages that found no room since it was last said that there is some.
    pub(super) refused: u32,
    pub(super) last: [u64; 2],
    /// From when to when bytes come from the acceptor without a gap, the newest last.
    pub(super) coming: VecDeque<(u64, u64)>,
}

impl Link {
    /// Bytes will come from `start` to `end`; nobody asks any more what came before `now`.
    pub(super) fn come(&mut self, start: u64, end: u64, now: u64) {
        match self.coming.back_mut() {
            Some(last) if start <= last.1 => *last = (last.0.min(start), last.1.max(end)),
            Some(_) | None => self.coming.push_back((start, end)),
        }
        while self.coming.get(1).is_some_and(|it| it.0 <= now) {
            self.coming.pop_front();
        }
    }

    /// Until when bytes come without a gap, or came last; nothing before any has.
    pub(super) fn came(&self, now: u64) -> Option<u64> {
        self.coming.iter().take_while(|it| it.0 <= now).last().map(|it| it.1)
    }
}

impl Net {
    pub(crate) fn connect(&mut self, me: Life, peer: PeerId, address: &str) {
        let end = &self.endpoints[me];
        if end.links.get(&peer).is_some_and(|it| it[1].is_some()) {
            return;
        }
        if end.newest.get(&(peer.role, peer.index)).is_some_and(|it| *it > peer.incarnation) {
            return self.fail(me, peer, "an older incarnation");
        }
        self.retire_older(me, peer);
        let acceptor = address.strip_prefix("life:").and_then(|it| it.parse().ok());
        let acceptor = acceptor.and_then(|it: Life| self.places.get(it).copied());
        let Some(acceptor) = acceptor else { return self.fail(me, peer, "no address") };
        let link = self.links.len();
        self.links.push(Link {
            opener: me,
            acceptor: Some(acceptor),
            peer,
            open: false,
            opener_holds: true,
            acceptor_holds: false,
            waiting: VecDeque::new(),
            unread: 0,
            refused: 0,
            last: [0; 2],
            coming: VecDeque::new(),
        });
        self.endpoints[me].links.entry(peer).or_default()[1] = Some(link);
        let refused = self.cut(me, acceptor).is_some_and(|it| !it.silent);
        let when = self.arrival(link, false, 0);
        if refused {
            let when = self.now + self.delay();
            self.at(when, Happening::Signal(Signal::Farewell(me, link)));
        } else {
            self.at(when, Happening::Signal(Signal::Dial(link)));
        }
        self.at(self.now + GREETING, Happening::Signal(Signal::GreetingLate(link)));
    }

    pub(super) fn retire_older(&mut self, me: Life, peer: PeerId) {
        self.endpoints[me].newest.insert((peer.role, peer.index), peer.incarnation);
        let first = PeerId { incarnation: 0, ..peer };
        let older: Vec<_> = self.endpoints[me].links.range(first..peer).map(|it| *it.0).collect();
        for older in older {
            self.fail(me, older, "a newer incarnation has come");
        }
    }

    pub(crate) fn ring(&mut self, me: Life, peer: PeerId, message: &[u8]) -> Result<(), RingError> {
        if message.len() > cadre_exchange::MAX_MESSAGE_BYTES {
            return Err(RingError::TooLong { bytes: message.len() });
        }
        let link = self.endpoints[me].links.get(&peer).and_then(|it| it[1]);
        let Some(link) = link else { return Err(RingError::NotConnected { peer }) };
        if self.spies
            && let Ok(Envelope::Word { stream, number, .. }) = postcard::from_bytes(message)
        {
            self.spied.insert((me, peer), (stream, number));
        }
        let queue = self.queue;
        let it = &mut self.links[link];
        if it.unread + message.len() > queue {
            self.full[0] += 1;
            it.refused += 1;
            return Err(RingError::Full { peer, queued: it.unread });
        }
        it.unread += message.len();
        if it.open {
            let when = self.arrival(link, false, 0);
            self.at(when, Happening::Signal(Signal::Message(link, message.to_vec())));
        } else {
            it.waiting.push_back(Out::Message(message.to_vec()));
        }
        Ok(())
    }

    pub(crate) fn close(&mut self, me: Life, peer: PeerId) {
        self.drop_links(me, peer, &PullError::Cancelled);
    }

    pub(super) fn fail(&mut self, me: Life, peer: PeerId, why: &str) {
        self.drop_links(me, peer, &PullError::PeerFailed);
        self.say(me, Event::Closed { peer, error: why.to_owned() });
    }

    pub(super) fn drop_links(&mut self, me: Life, peer: PeerId, result: &PullError) {
        let Some(links) = self.endpoints[me].links.remove(&peer) else { return };
        for link in links.into_iter().flatten() {
            let it = &mut self.links[link];
            let other = if it.opener == me { it.acceptor } else { Some(it.opener) };
            if it.opener == me {
                it.opener_holds = false;
                it.waiting.clear();
            } else {
                it.acceptor_holds = false;
            }
            // What is behind the end of a link is read, or lost with it.
            let behind = self.random.chance(50);
            let back = self.links[link].opener != me;
            if let Some(other) = other {
                let when =
                    if behind { self.arrival(link, back, 0) } else { self.now + self.delay() };
                self.at(when, Happening::Signal(Signal::Farewell(other, link)));
            }
            let ended = |it: &Pull| it.link == link;
            let pulls = self.endpoints[me].pulls.iter().filter(|it| ended(it.1));
            let mut pulls: Vec<_> = pulls.map(|it| *it.0).collect();
            pulls.sort_unstable();
            for id in pulls {
                self.cut_off(me, id, Err(result.clone()));
            }
        }
    }

    /// An end learns that a link is closed.
    pub(super) fn farewell(&mut self, life: Life, link: LinkId) {
        let it = &self.links[link];
        if it.opener == life && it.opener_holds {
            let peer = it.peer;
            self.fail(life, peer, "the link broke");
        } else if it.acceptor == Some(life) && it.acceptor_holds {
            let peer = self.endpoints[it.opener].me;
            self.fail(life, peer, "the link broke");
        }
    }

    pub(super) fn dialed(&mut self, link: LinkId) {
        let it = &self.links[link];
        let (opener, peer, Some(acceptor)) = (it.opener, it.peer, it.acceptor) else { return };
        let end = &self.endpoints[acceptor];
        if !it.opener_holds {
            return;
        }
        if !end.alive || end.me != peer {
            if end.answers {
                let when = self.now + self.delay();
                self.at(when, Happening::Signal(Signal::Farewell(opener, link)));
            }
            return;
        }
        if end.paused {
            self.endpoints[acceptor].held.push(Signal::Dial(link));
            return;
        }
        let who = self.endpoints[opener].me;
        let newest = self.endpoints[acceptor].newest.get(&(who.role, who.index));
        if newest.is_some_and(|it| *it > who.incarnation) {
            let when = self.now + self.delay();
            self.at(when, Happening::Signal(Signal::Farewell(opener, link)));
            let (from, reason) = (who.to_string(), "an older incarnation".to_owned());
            return self.say(acceptor, Event::Refused { from, reason });
        }
        self.retire_older(acceptor, who);
        if self.endpoints[acceptor].links.get(&who).is_some_and(|it| it[0].is_some()) {
            self.fail(acceptor, who, "the peer opened a new link in place of its old one");
        }
        self.endpoints[acceptor].links.entry(who).or_default()[0] = Some(link);
        self.links[link].acceptor_holds = true;
        let when = self.arrival(link, true, 0);
        self.at(when, Happening::Signal(Signal::Opened(link)));
    }

    pub(super) fn opened(&mut self, link: LinkId) {
        let it = &mut self.links[link];
        if !it.opener_holds {
            return;
        }
        it.open = true;
        let (opener, peer, waiting) = (it.opener, it.peer, std::mem::take(&mut it.waiting));
        self.say(opener, Event::Connected(peer));
        for out in waiting {
            match out {
                Out::Message(bytes) => {
                    let when = self.arrival(link, false, 0);
                    self.at(when, Happening::Signal(Signal::Message(link, bytes)));
                }
                Out::Pull(id) => self.ask(link, opener, id),
            }
        }
    }

    /// The end that something came for, if it still believes in the link; else whoever sent it hears so.
    pub(super) fn listener(&mut self, link: LinkId) -> Option<Life> {
        let it = &self.links[link];
        let (opener, acceptor) = (it.opener, it.acceptor?);
        let holds = it.acceptor_holds;
        let end = &self.endpoints[acceptor];
        if end.alive && holds {
            return Some(acceptor);
        }
        if end.alive || end.answers {
            let when = self.now + self.delay();
            self.at(when, Happening::Signal(Signal::Farewell(opener, link)));
        }
        None
    }

    pub(super) fn message(&mut self, link: LinkId, bytes: Vec<u8>) {
        let Some(acceptor) = self.listener(link) else { return };
        let it = &mut self.links[link];
        if !self.endpoints[acceptor].paused {
            it.unread -= bytes.len().min(it.unread);
            self.has_room(link);
        }
        let it = &self.links[link];
        let from = self.endpoints[it.opener].me;
        if self.repeats > 0 && self.random.chance(self.repeats) {
            self.soon(200_000_000, Happening::Signal(Signal::Again(link, bytes.clone())));
        }
        self.say(acceptor, Event::Message { from, bytes });
    }

    /// Whoever was refused hears that half of the queue is free again.
    pub(super) fn has_room(&mut self, link: LinkId) {
        let queue = self.queue;
        let it = &mut self.links[link];
        if it.unread <= queue / 2 && std::mem::take(&mut it.refused) > 0 && it.opener_holds {
            let (opener, peer) = (it.opener, it.peer);
            self.full[1] += 1;
            self.say(opener, Event::Room { peer });
        }
    }

    /// A message comes once more, as long as its link stands: its sender may have said it again.
    pub(super) fn again(&mut self, link: LinkId, bytes: Vec<u8>) {
        let it = &self.links[link];
        let Some(acceptor) = it.acceptor.filter(|_| it.acceptor_holds) else { return };
        let from = self.endpoints[it.opener].me;
        self.say(acceptor, Event::Message { from, bytes });
    }

    /// The links between two processes break; each end hears of it or not.
    pub(crate) fn break_links(&mut self, a: Life, b: Life, heard: [bool; 2]) {
        let between = |it: &Link| {
            let ends = (Some(it.opener), it.acceptor);
            ends == (Some(a), Some(b)) || ends == (Some(b), Some(a))
        };
        let links = self.links.iter().enumerate().filter(|it| between(it.1));
        let links: Vec<_> = links.map(|it| it.0).collect();
        for link in links {
            for (end, heard) in [a, b].into_iter().zip(heard) {
                if heard {
                    let when = self.now + self.delay();
                    self.at(when, Happening::Signal(Signal::Farewell(end, link)));
                }
            }
        }
    }
}
