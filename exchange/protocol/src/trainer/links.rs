//! A trainer's links: acknowledgements, what is said again after a break, heartbeats, deadlines.
//!
//! A message is lost only with its link or its receiver. After a break the trainer says again
//! everything that the peer may have missed: the doorbells of every phase that the watermark has not
//! passed, with all acknowledgements.

use std::collections::BTreeSet;

use super::link::Link;
use super::results::State;
use super::{Command, Trainer};
use crate::{Acks, At, End, Heartbeat, Message, Nanos, Peer, ServerId, Why, Work};

impl Trainer {
    pub(super) fn acknowledge(&mut self, now: Nanos, to: Peer, at: At, work: Work) {
        let due = now.after(self.settings.ack_within);
        self.links.change(to, |link| {
            link.acks.push((at, work));
            link.ack_due.get_or_insert(due);
        });
    }

    pub(super) fn take_acks(&mut self, to: Peer) -> Acks {
        let through = self.done;
        let taken = self.links.change_known(to, |link| {
            link.ack_due = None;
            std::mem::take(&mut link.acks)
        });
        let mut works = taken.unwrap_or_default();
        works.retain(|it| Some(it.0) > through);
        Acks { through, works }
    }

    pub(super) fn closed(&mut self, now: Nanos, peer: Peer, out: &mut Vec<Command>) {
        let (retry, gap) = (self.settings.retry_after, self.settings.between_breaks());
        // One that is silent for long is gone: it is called no more often than it is told.
        if peer == Peer::CONDUCTOR && now.since(self.heard) < self.settings.suspect_after {
            self.beat_at = self.beat_at.min(now.after(retry));
        }
        let open = self.phases.values().any(|it| it.rung.contains(&peer));
        let owed = self.links.get(peer).is_some_and(|it| !it.acks.is_empty());
        let pulling = self.pulls.any_from(peer);
        if !self.links.fills(peer) || !(open || owed || pulling) {
            return;
        }
        let known = self.links.change(peer, |link| {
            let known = link.resend.is_some();
            link.say_again_later(now, retry);
            let first = match link.broken {
                Some((first, last)) if now.since(last) <= gap => first,
                Some(_) | None => now,
            };
            link.broken = Some((first, now));
            known
        });
        if !known {
            self.suspect(now, peer, out);
        }
    }

    /// What was dropped for a peer is said again, now. Its link is as good as before: nobody is suspect.
    pub(super) fn unsaid(&mut self, now: Nanos, peer: Peer) {
        if peer == Peer::CONDUCTOR {
            self.beat_at = now;
        }
        if self.links.fills(peer) {
            self.links.change(peer, |it| it.resend = Some(now));
        }
    }

    /// The conductor cannot reach these servers: rings them again, also those that fill no slot or do not need
    /// these rows. A server that is rung twice for a phase answers.
    pub(super) fn ask(&mut self, servers: &[ServerId], out: &mut Vec<Command>) {
        self.asked.retain(|it, _| servers.contains(it));
        for &server in servers {
            let peer = Peer::Server(server);
            if !self.asked.contains_key(&server) {
                let rung = self.phases.iter().find(|it| it.1.rung.contains(&peer));
                let Some((&at, _)) = rung.or(self.phases.iter().next()) else { continue };
                let live = &self.steps[&at.step];
                let (round, digest) = (live.table.round, live.step.digest());
                // Always the same one: what such a server hears of later steps adds up.
                let doorbell = Message::Doorbell { at, round, acks: Acks::default(), digest };
                self.asked.insert(server, (doorbell, false));
            }
            if let Some((doorbell, waiting)) = self.asked.get_mut(&server) {
                *waiting = true;
                out.push(Command::Send { to: peer, message: doorbell.clone() });
            }
        }
    }

    /// A server has answered.
    pub(super) fn answered(&mut self, now: Nanos, peer: Peer) {
        self.links.change_known(peer, Link::mended);
        if let Peer::Server(server) = peer
            && let Some((_, waiting)) = self.asked.get_mut(&server)
            && std::mem::take(waiting)
        {
            self.reached.insert(server);
            self.beat_at = now;
        }
    }

    /// Tells the conductor that the link to a server, or to a trainer that computes in place, breaks, or that results do not come over
    /// it.
    pub(super) fn suspect(&mut self, now: Nanos, peer: Peer, out: &mut Vec<Command>) {
        let broken = self.links.get(peer).and_then(|it| it.broken);
        let lasting = broken.map_or(Nanos(0), |(first, _)| now.since(first));
        let lasting = lasting.max(self.reach.failing(now, peer).unwrap_or_default());
        let message = match peer {
            Peer::Server(server) => Message::Suspect { server, why: Why::Broken, lasting },
            Peer::Trainer(other) => Message::Unreached { trainers: vec![(other, lasting)] },
        };
        out.push(Command::Send { to: Peer::CONDUCTOR, message });
    }

    /// Does what is due at `now`.
    pub(super) fn deadlines(&mut self, now: Nanos, out: &mut Vec<Command>) {
        if now >= self.heard.after(self.settings.conductor_after) {
            out.push(Command::End(End::ConductorSilent(self.settings.conductor_after)));
            self.ended = true;
            return;
        }
        if now >= self.beat_at {
            self.beat_at = now.after(self.settings.heartbeat_every);
            let heartbeat = Heartbeat {
                watermark: self.watermark,
                done: self.done,
                rounds: self.steps.iter().map(|(&step, it)| (step, it.table.round)).collect(),
                reached: std::mem::take(&mut self.reached).into_iter().collect(),
                ..Heartbeat::default()
            };
            let message = Message::Heartbeat(Box::new(heartbeat));
            out.push(Command::Send { to: Peer::CONDUCTOR, message });
            self.say_unreached(now, out);
        }
        let is_due = |it: Option<Nanos>| it.is_some_and(|it| it <= now);
        for peer in self.links.due(now) {
            if self.links.get(peer).is_some_and(|it| is_due(it.resend)) {
                self.say_again(now, peer, out);
            }
        }
        for to in self.links.due(now) {
            if self.links.get(to).is_some_and(|it| is_due(it.ack_due)) {
                let acks = self.take_acks(to);
                out.push(Command::Send { to, message: Message::Ack { acks } });
            }
        }
        self.complain(now, out);
    }

    fn say_again(&mut self, now: Nanos, peer: Peer, out: &mut Vec<Command>) {
        let mut works = Vec::new();
        let mut rung = Vec::new();
        for (&at, open) in &self.phases {
            if open.rung.contains(&peer) {
                rung.push(at);
            }
            // Whoever made a copy that was not wanted announces it again, and hears so.
            let came = open.wants.iter().filter(|it| it.1.state == State::Have(peer));
            works.extend(came.map(|it| (at, *it.0)));
        }
        self.links.change(peer, |link| {
            link.resend = None;
            link.acks = works;
        });
        if rung.is_empty() {
            let acks = self.take_acks(peer);
            out.push(Command::Send { to: peer, message: Message::Ack { acks } });
        }
        if !rung.is_empty() {
            self.links.change(peer, |it| it.asked.get_or_insert(now).0);
        }
        for at in rung {
            self.doorbell(peer, at, out);
        }
    }

    /// A server, dedicated or in place, that was rung again has not answered: what is said may be lost on a link that nobody sees
    /// broken. Closes it, so that it is opened anew or seen to be broken, and tells the conductor.
    fn reopen(&mut self, now: Nanos, peer: Peer, out: &mut Vec<Command>) {
        let patience = self.settings.suspect_after;
        let Some(link) = self.links.get(peer) else { return };
        let Some(asked) = link.asked.filter(|it| now.since(*it) >= patience) else { return };
        // A link of two trainers carries what the conductor says, too: it is closed by its pulls alone, which wait longer.
        if link.broken.is_none() && matches!(peer, Peer::Server(_)) {
            out.push(Command::Close(peer));
        }
        let first = link.broken.map_or(asked, |it| it.0);
        self.links.change(peer, |it| it.broken = Some((first, now)));
        self.suspect(now, peer, out);
    }

    /// Makes the executors of late work suspect, and rings again whoever was rung, until the phase is passed:
    /// a doorbell may be lost on a link that nobody sees broken, also one for results of others.
    fn complain(&mut self, now: Nanos, out: &mut Vec<Command>) {
        let late = |it: &(&At, &super::Open)| it.1.late_at <= now;
        let phases: Vec<_> = self.phases.iter().filter(late).map(|it| *it.0).collect();
        for at in phases {
            let open = &self.phases[&at];
            let lasting = now.since(open.since);
            let missing = open.wants.iter().filter(|it| !matches!(it.1.state, State::Have(_)));
            let owing: BTreeSet<_> = missing.filter_map(|it| self.executor(at, *it.0)).collect();
            let rung = open.rung.iter().copied().filter(|&it| self.links.fills(it));
            for peer in rung.chain(owing.iter().copied()).collect::<BTreeSet<_>>() {
                if let Peer::Server(server) = peer
                    && owing.contains(&peer)
                {
                    let why = Why::Late { step: at.step, phase: at.phase };
                    let message = Message::Suspect { server, why, lasting };
                    out.push(Command::Send { to: Peer::CONDUCTOR, message });
                }
                if peer != Peer::Trainer(self.me) {
                    self.reopen(now, peer, out);
                }
                self.links.change(peer, |it| it.resend = Some(now));
            }
            let again = now.after(self.settings.suspect_after);
            self.phases.get_mut(&at).expect("it was just found").late_at = again;
        }
    }
}
