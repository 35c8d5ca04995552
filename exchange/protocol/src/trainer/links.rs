//! A trainer's links: acknowledgements, what is said again after a break, heartbeats, deadlines.
//!
//! A message is lost only with its link or its receiver. After a break the trainer says again
//! everything that the peer may have missed: the doorbells of every phase that the watermark has not
//! passed, with all acknowledgements.

use std::collections::BTreeSet;

use super::results::State;
use super::{Command, Trainer};
use crate::settings::MAX_DOUBLINGS;
use crate::{Acks, At, End, Heartbeat, Message, Nanos, Peer, ServerId, Why, Work};

/// What is to be said to a peer.
#[derive(Debug, Default)]
pub(super) struct Link {
    acks: Vec<(At, Work)>,
    ack_due: Option<Nanos>,
    resend: Option<Nanos>,
    /// Times it was said again since something was heard.
    tries: u32,
    /// First and last break since something was heard.
    broken: Option<(Nanos, Nanos)>,
    /// Since when it has not answered what was said again.
    asked: Option<Nanos>,
}

impl Link {
    pub(super) fn deadline(&self) -> Option<Nanos> {
        [self.ack_due, self.resend].into_iter().flatten().min()
    }

    pub(super) fn mended(&mut self) {
        self.asked = None;
        self.broken = None;
        self.tries = 0;
    }

    /// This process was paused: what broke before says nothing of now.
    pub(super) fn forgive(&mut self) {
        self.asked = None;
        self.broken = None;
    }

    /// Plans to say everything again, after a wait that doubles with every try.
    pub(super) fn say_again_later(&mut self, now: Nanos, first: Nanos) {
        if self.resend.is_none() {
            self.resend = Some(now.after(Nanos(first.0 << self.tries.min(MAX_DOUBLINGS))));
            self.tries += 1;
        }
    }
}

impl Trainer {
    pub(super) fn link(&mut self, peer: Peer) -> &mut Link {
        self.links.entry(peer).or_default()
    }

    pub(super) fn acknowledge(&mut self, now: Nanos, to: Peer, at: At, work: Work) {
        let due = now.after(self.settings.ack_within);
        let link = self.link(to);
        link.acks.push((at, work));
        link.ack_due.get_or_insert(due);
    }

    pub(super) fn take_acks(&mut self, to: Peer) -> Acks {
        let through = self.done;
        let mut works = match self.links.get_mut(&to) {
            Some(link) => {
                link.ack_due = None;
                std::mem::take(&mut link.acks)
            }
            None => Vec::new(),
        };
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
        let owed = self.links.get(&peer).is_some_and(|it| !it.acks.is_empty());
        let pulling = self.pulls.values().any(|it| it.peer == peer);
        if !self.fills(peer) || !(open || owed || pulling) {
            return;
        }
        let link = self.link(peer);
        let known = link.resend.is_some();
        link.say_again_later(now, retry);
        let first = match link.broken {
            Some((first, last)) if now.since(last) <= gap => first,
            Some(_) | None => now,
        };
        link.broken = Some((first, now));
        if !known {
            self.suspect(now, peer, out);
        }
    }

    /// What was dropped for a peer is said again, now. Its link is as good as before: nobody is suspect.
    pub(super) fn unsaid(&mut self, now: Nanos, peer: Peer) {
        if peer == Peer::CONDUCTOR {
            self.beat_at = now;
        }
        if self.fills(peer) {
            self.link(peer).resend = Some(now);
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
        if let Some(link) = self.links.get_mut(&peer) {
            link.mended();
        }
        if let Peer::Server(server) = peer
            && let Some((_, waiting)) = self.asked.get_mut(&server)
            && std::mem::take(waiting)
        {
            self.reached.insert(server);
            self.beat_at = now;
        }
    }

    /// Tells the conductor that the link to a server breaks.
    pub(super) fn suspect(&mut self, now: Nanos, peer: Peer, out: &mut Vec<Command>) {
        let Peer::Server(server) = peer else { return };
        let broken = self.links.get(&peer).and_then(|it| it.broken);
        let lasting = broken.map_or(Nanos(0), |(first, _)| now.since(first));
        let message = Message::Suspect { server, why: Why::Broken, lasting };
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
            let message = Message::Heartbeat(heartbeat);
            out.push(Command::Send { to: Peer::CONDUCTOR, message });
        }
        let due = |it: &Option<Nanos>| it.is_some_and(|it| it <= now);
        let resend: Vec<_> =
            self.links.iter().filter(|it| due(&it.1.resend)).map(|it| *it.0).collect();
        for peer in resend {
            self.say_again(now, peer, out);
        }
        let acks: Vec<_> =
            self.links.iter().filter(|it| due(&it.1.ack_due)).map(|it| *it.0).collect();
        for to in acks {
            let acks = self.take_acks(to);
            out.push(Command::Send { to, message: Message::Ack { acks } });
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
            let have = |state| matches!(state, State::Have(_));
            works.extend(open.wants.iter().filter(|it| have(it.1.state)).map(|it| (at, *it.0)));
        }
        let link = self.link(peer);
        link.resend = None;
        link.acks = works;
        if rung.is_empty() {
            let acks = self.take_acks(peer);
            out.push(Command::Send { to: peer, message: Message::Ack { acks } });
        }
        if !rung.is_empty() {
            self.link(peer).asked.get_or_insert(now);
        }
        for at in rung {
            self.doorbell(peer, at, out);
        }
    }

    /// A server that was rung again has not answered: what is said may be lost on a link that nobody sees
    /// broken. Closes it, so that it is opened anew or seen to be broken, and tells the conductor.
    fn reopen(&mut self, now: Nanos, peer: Peer, out: &mut Vec<Command>) {
        let patience = self.settings.suspect_after;
        let link = self.link(peer);
        let Some(asked) = link.asked.filter(|it| now.since(*it) >= patience) else { return };
        if link.broken.is_none() {
            out.push(Command::Close(peer));
        }
        let first = link.broken.map_or(asked, |it| it.0);
        link.broken = Some((first, now));
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
            let rung = open.rung.iter().copied().filter(|&it| self.fills(it));
            for peer in rung.chain(owing.iter().copied()).collect::<BTreeSet<_>>() {
                if let Peer::Server(server) = peer {
                    if owing.contains(&peer) {
                        let why = Why::Late { step: at.step, phase: at.phase };
                        let message = Message::Suspect { server, why, lasting };
                        out.push(Command::Send { to: Peer::CONDUCTOR, message });
                    }
                    self.reopen(now, peer, out);
                }
                self.link(peer).resend = Some(now);
            }
            let again = now.after(self.settings.suspect_after);
            self.phases.get_mut(&at).expect("it was just found").late_at = again;
        }
    }
}
