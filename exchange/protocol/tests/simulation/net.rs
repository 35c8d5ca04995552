//! The simulated wire: delays, order within a link, cuts, and pulls that end exactly once.

use std::collections::BTreeMap;

use cadre_protocol::{
    At, Message, Nanos, Parcel, Peer, PullFailure, PullId, ServerId, TrainerId, Work,
};

use crate::faults::{BadPath, PathFault};
use crate::random::Random;

/// What arrives at a process.
#[derive(Clone, Debug)]
pub(crate) enum Input {
    Message {
        from: Peer,
        message: Message,
    },
    /// The header of a step.
    Header(u64),
    /// A pull of one of the machines ended; if well, with the incarnation and the bits found.
    Pulled {
        machine: Machine,
        pull: PullId,
        result: Result<(u32, u64), PullFailure>,
    },
    Closed(Peer),
    /// A launch ended.
    Ran {
        at: At,
        works: Vec<Work>,
    },
    /// The trainer's own work before the next phase may be over.
    Go,
    /// The controller's view has changed.
    View,
    /// The loaders have sent the lengths of a step.
    Lengths(u64),
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Machine {
    Trainer,
    Server,
}

/// Something that happens at some time.
#[derive(Clone, Debug)]
pub(crate) enum Happening {
    /// Over a link of that generation; an older one has lost it.
    Arrive {
        link: Option<((Peer, Peer), u64)>,
        to: Peer,
        input: Input,
    },
    /// A process asked to be woken.
    Wake(Peer),
    /// The request of a pull is at the far side.
    Read(u64),
    /// What the far side has sent is here.
    Land(u64, (u32, u64)),
    /// A pull is late.
    Late(u64),
    Fault(usize),
    Resume(Peer),
    /// A trainer's path to servers is bad from now on; where it refuses, links break.
    PathBreaks,
    /// The supervisor starts servers in these slots.
    Spawn(Vec<u16>),
}

/// A pull on its way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flight {
    pub(crate) by: Peer,
    pub(crate) machine: Machine,
    pub(crate) pull: PullId,
    pub(crate) from: Peer,
    pub(crate) what: What,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum What {
    Rows(At, Parcel),
    Result(At, Work),
}

/// Links, by (from, to), and what is under way.
#[derive(Debug, Default)]
pub(crate) struct Net {
    queue: BTreeMap<(Nanos, u64), Happening>,
    count: u64,
    links: BTreeMap<(Peer, Peer), Link>,
    pub(crate) flights: BTreeMap<u64, Flight>,
    /// Longest usual delay.
    slowest: Nanos,
    bad: Option<BadPath>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Link {
    generation: u64,
    clock: Nanos,
    cut_until: Nanos,
    open: bool,
    /// Until when an attempt to open it goes on that will fail.
    opening_until: Nanos,
}

/// How long a greeting may take.
const GREETING: Nanos = Nanos::from_millis(40);

impl Net {
    pub(crate) fn new(slowest: Nanos, bad: Option<BadPath>) -> Self {
        Self { slowest, bad, ..Self::default() }
    }

    pub(crate) fn pop(&mut self) -> Option<(Nanos, Happening)> {
        self.queue.pop_first().map(|((at, _), it)| (at, it))
    }

    pub(crate) fn at(&mut self, when: Nanos, happening: Happening) {
        self.count += 1;
        self.queue.insert((when, self.count), happening);
    }

    pub(crate) fn local(&mut self, when: Nanos, to: Peer, input: Input) {
        self.at(when, Happening::Arrive { link: None, to, input });
    }

    pub(crate) fn delay(&self, random: &mut Random) -> Nanos {
        let usual = random.within(5_000, self.slowest.0);
        Nanos(if random.chance(1) { 20 * usual } else { usual })
    }

    fn link(&mut self, from: Peer, to: Peer) -> &mut Link {
        self.links.entry((from, to)).or_default()
    }

    pub(crate) fn is_cut(&mut self, now: Nanos, a: Peer, b: Peer) -> bool {
        let refuses = self.is_bad(now, a, b) == Some(PathFault::Refuses);
        refuses || self.link(a, b).cut_until > now
    }

    /// Whether a path is bad for good, and then how.
    fn is_bad(&self, now: Nanos, a: Peer, b: Peer) -> Option<PathFault> {
        let bad = self.bad.filter(|it| it.from <= now)?;
        let trainer = Peer::Trainer(TrainerId(bad.trainer));
        let server = |it| match it {
            Peer::Server(id) => {
                bad.server.is_none_or(|index| id == ServerId { index, incarnation: 0 })
            }
            Peer::Trainer(_) => false,
        };
        let between = (a == trainer && server(b)) || (b == trainer && server(a));
        between.then_some(bad.fault)
    }

    pub(crate) fn swallows(&self, now: Nanos, a: Peer, b: Peer) -> bool {
        self.is_bad(now, a, b) == Some(PathFault::Swallows)
    }

    /// Whether what is pulled never comes.
    pub(crate) fn loses(&self, now: Nanos, flight: &Flight) -> bool {
        match (self.is_bad(now, flight.by, flight.from), flight.what) {
            (Some(PathFault::Swallows), _)
            | (Some(PathFault::LosesResults), What::Result(..))
            | (Some(PathFault::LosesRows), What::Rows(..)) => true,
            (Some(_) | None, _) => false,
        }
    }

    /// Something goes from `from` to `to` on a path that swallows: an open link keeps still, any other
    /// fails when its greeting is late.
    fn swallow(&mut self, now: Nanos, from: Peer, to: Peer) {
        let until = now.after(GREETING);
        let link = self.link(from, to);
        if !link.open && link.opening_until <= now {
            link.opening_until = until;
            self.local(until, from, Input::Closed(to));
            self.fail(until, |it| (it.by, it.from) == (from, to), PullFailure::PeerFailed);
        }
    }

    /// Sends in order; a cut link refuses at once.
    pub(crate) fn send(
        &mut self,
        now: Nanos,
        random: &mut Random,
        from: Peer,
        to: Peer,
        input: Input,
    ) {
        let when = now.after(self.delay(random));
        if self.is_cut(now, from, to) {
            return self.local(when, from, Input::Closed(to));
        }
        if self.swallows(now, from, to) {
            return self.swallow(now, from, to);
        }
        let link = self.link(from, to);
        link.open = true;
        let when = when.max(link.clock.after(Nanos(1)));
        link.clock = when;
        let link = Some(((from, to), link.generation));
        self.at(when, Happening::Arrive { link, to, input });
    }

    /// Whether what was sent over a link of that generation arrives.
    pub(crate) fn arrives(&mut self, link: Option<((Peer, Peer), u64)>) -> bool {
        link.is_none_or(|((from, to), generation)| self.link(from, to).generation == generation)
    }

    /// Loses what is under way between two processes and tells both.
    pub(crate) fn cut(&mut self, now: Nanos, random: &mut Random, a: Peer, b: Peer, until: Nanos) {
        for (from, to) in [(a, b), (b, a)] {
            let link = self.link(from, to);
            link.generation += 1;
            link.open = false;
            link.cut_until = link.cut_until.max(until);
            let when = now.after(self.delay(random));
            self.local(when, from, Input::Closed(to));
        }
        let between = |it: &Flight| (it.by, it.from) == (a, b) || (it.by, it.from) == (b, a);
        self.fail(now, between, PullFailure::PeerFailed);
    }

    /// `by` closes its links with `peer` by force.
    pub(crate) fn close(&mut self, now: Nanos, random: &mut Random, by: Peer, peer: Peer) {
        let when = now.after(self.delay(random));
        self.fail(now, |it| (it.by, it.from) == (by, peer), PullFailure::Cancelled);
        self.link(by, peer).generation += 1;
        self.link(by, peer).open = false;
        if self.swallows(now, by, peer) {
            return;
        }
        self.link(peer, by).generation += 1;
        self.link(peer, by).open = false;
        self.local(when, peer, Input::Closed(by));
        self.fail(now, |it| (it.by, it.from) == (peer, by), PullFailure::PeerFailed);
    }

    /// Everybody who has talked with a process that died hears of it.
    pub(crate) fn died(&mut self, now: Nanos, random: &mut Random, peer: Peer) {
        let others = self.links.keys().filter(|it| it.0 == peer).map(|it| it.1);
        for other in others.collect::<Vec<_>>() {
            let when = now.after(Nanos(random.within(100_000, 15_000_000)));
            self.local(when, other, Input::Closed(peer));
        }
        self.flights.retain(|_, it| it.by != peer);
    }

    /// Ends pulls that have not been read.
    pub(crate) fn fail(
        &mut self,
        now: Nanos,
        which: impl Fn(&Flight) -> bool,
        failure: PullFailure,
    ) {
        let ended: Vec<_> = self.flights.iter().filter(|it| which(it.1)).map(|it| *it.0).collect();
        for id in ended {
            self.end(now, id, Err(failure));
        }
    }

    /// Ends a pull, if it has not ended.
    pub(crate) fn end(&mut self, when: Nanos, id: u64, result: Result<(u32, u64), PullFailure>) {
        if let Some(Flight { by, machine, pull, .. }) = self.flights.remove(&id) {
            self.local(when, by, Input::Pulled { machine, pull, result });
        }
    }

    pub(crate) fn pull(
        &mut self,
        now: Nanos,
        random: &mut Random,
        flight: Flight,
        deadline: Nanos,
    ) {
        self.count += 1;
        let id = self.count;
        let when = now.after(self.delay(random));
        let refused = self.is_cut(now, flight.by, flight.from);
        self.flights.insert(id, flight);
        if refused {
            return self.end(when, id, Err(PullFailure::PeerFailed));
        }
        self.at(deadline, Happening::Late(id));
        if self.swallows(now, flight.by, flight.from) {
            return self.swallow(now, flight.by, flight.from);
        }
        self.link(flight.by, flight.from).open = true;
        self.link(flight.from, flight.by);
        self.at(when, Happening::Read(id));
    }
}
