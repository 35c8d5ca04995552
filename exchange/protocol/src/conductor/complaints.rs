//! Trainers and servers that the conductor hears and that cannot reach each other.
//!
//! In: what trainers say of their links, and servers of their pulls. Out: whether the server is lost, or
//! the trainer is cut off. The conductor measures for itself how long a trainer complains. The trainer's own
//! count has to be as long. Neither counts its own pauses. Complaints of servers about a trainer that the
//! conductor does not hear are ignored: it is stopped, not cut off.
//!
//! After a complaint of [`BELIEVED_AFTER`] suspicions the server is declared lost, since the step cannot go on
//! otherwise. If that trainer cannot reach a second server either, while the others reach both, the job ends: the
//! trainer would lose every server in turn.
//!
//! Where trainers compute in place, one may be out of reach for another. Nobody can be lost for it, so the job ends when one of
//! them has complained for `trainer_after` while the conductor has heard both.

use std::collections::BTreeMap;

use super::{Command, Conductor};
use crate::{End, Nanos, Peer, ServerId, TrainerId};

/// How long one trainer has to complain until a server is lost for it, in suspicions.
const BELIEVED_AFTER: u64 = 5;

/// Fewest complaints in a row until they are believed: two breaks may have nothing to do with each other.
const BELIEVED_COMPLAINTS: u32 = 3;

/// How long a server that was lost on one trainer's word is remembered, in suspicions.
const REMEMBERED_FOR: u64 = 600;

/// Open complaints, and servers lost by them.
#[derive(Debug, Default)]
pub(super) struct Complaints {
    open: BTreeMap<(TrainerId, ServerId), Complaint>,
    /// Complaints of a trainer, or the server in its process, about another trainer.
    apart: BTreeMap<(TrainerId, TrainerId), Complaint>,
    /// The newest server lost on the word of a trainer alone, and when.
    believed: BTreeMap<TrainerId, (ServerId, Nanos)>,
}

#[derive(Clone, Copy, Debug)]
struct Complaint {
    first: Nanos,
    last: Nanos,
    count: u32,
}

impl Complaint {
    /// One of `about` complains about the other. Out: for how long and how often in a row they have done so without longer gaps
    /// than `gap`.
    fn hear<A: Ord>(all: &mut BTreeMap<A, Self>, about: A, now: Nanos, gap: Nanos) -> (Nanos, u32) {
        let new = Self { first: now, last: now, count: 0 };
        let complaint = all.entry(about).or_insert(new);
        if now.since(complaint.last) > gap {
            *complaint = new;
        }
        complaint.last = now;
        complaint.count += 1;
        (now.since(complaint.first), complaint.count)
    }
}

impl Complaints {
    /// Drops complaints about servers that are gone.
    pub(super) fn settle(&mut self, is_here: impl Fn(ServerId) -> bool) {
        self.open.retain(|it, _| is_here(it.1));
    }

    /// After a pause of this process: it counts neither for a complaint nor as a gap in it.
    pub(super) fn paused(&mut self, pause: Nanos) {
        for complaint in self.open.values_mut().chain(self.apart.values_mut()) {
            complaint.first = complaint.first.after(pause);
            complaint.last = complaint.last.after(pause);
        }
    }
}

impl Conductor {
    /// A trainer, or the server in its process, says which other trainers it cannot reach, and for how long that has been so.
    pub(super) fn apart(
        &mut self,
        now: Nanos,
        by: TrainerId,
        trainers: &[(TrainerId, Nanos)],
        out: &mut Vec<Command>,
    ) {
        let silent = Nanos(2 * self.settings.heartbeat_every.0);
        let gap = self.settings.between_breaks();
        for &(other, lasting) in trainers {
            let heard = self.life(Peer::Trainer(other)).map(|it| now.since(it.heard()));
            let is_heard =
                Peer::Trainer(other) == Peer::CONDUCTOR || heard.is_some_and(|it| it <= silent);
            if other == by || !is_heard {
                continue;
            }
            let apart = &mut self.complaints.apart;
            let (span, count) = Complaint::hear(apart, (by, other), now, gap);
            if span.min(lasting) >= self.settings.trainer_after && count >= BELIEVED_COMPLAINTS {
                let pair = [by.min(other), by.max(other)];
                return out.push(Command::End(End::TrainersApart(pair)));
            }
        }
    }

    /// A server says that it cannot pull the rows of trainers, and for how long that has been so.
    pub(super) fn cannot_pull(
        &mut self,
        now: Nanos,
        by: Peer,
        trainers: &[(TrainerId, Nanos)],
        out: &mut Vec<Command>,
    ) {
        let Peer::Server(server) = by else { return };
        let silent = Nanos(2 * self.settings.heartbeat_every.0);
        for &(trainer, lasting) in trainers {
            let heard = self.life(Peer::Trainer(trainer)).map(|it| now.since(it.heard()));
            if heard.is_some_and(|it| it <= silent) && !self.is_lost(server) {
                self.unreachable(now, trainer, server, lasting, out);
            }
        }
    }

    /// The path between `from` and a server that is not lost is bad, one of them says, and for how long that
    /// has been so.
    pub(super) fn unreachable(
        &mut self,
        now: Nanos,
        from: TrainerId,
        server: ServerId,
        lasting: Nanos,
        out: &mut Vec<Command>,
    ) {
        self.try_link(now, server);
        let (suspicion, gap) = (self.settings.suspect_after, self.settings.between_breaks());
        let open = &mut self.complaints.open;
        let (span, count) = Complaint::hear(open, (from, server), now, gap);
        let span = span.min(lasting);
        if span < Nanos(BELIEVED_AFTER * suspicion.0) || count < BELIEVED_COMPLAINTS {
            return;
        }
        let open = &self.complaints.open;
        let lasting =
            |it: &Complaint| now.since(it.last) <= gap && it.last.since(it.first) >= suspicion;
        let others_reach = |server: ServerId| {
            !open.iter().any(|(key, it)| key.1 == server && key.0 != from && lasting(it))
        };
        let alone = others_reach(server);
        let cut_off = |key: &(TrainerId, ServerId)| {
            key.0 == from && key.1 != server && lasting(&open[key]) && others_reach(key.1)
        };
        let remembered = |it: &&(ServerId, Nanos)| {
            it.0 != server && now.since(it.1) <= Nanos(REMEMBERED_FOR * suspicion.0)
        };
        let second = open.keys().copied().find(cut_off).map(|it| it.1);
        let second = second
            .or_else(|| self.complaints.believed.get(&from).filter(remembered).map(|it| it.0));
        if let Some(second) = second.filter(|_| alone) {
            let servers = [second.min(server), second.max(server)];
            out.push(Command::End(End::TrainerCutOff { trainer: from, servers }));
            return;
        }
        if alone {
            self.complaints.believed.insert(from, (server, now));
        }
        self.declare_lost(now, server, out);
    }
}
