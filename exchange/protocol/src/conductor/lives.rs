//! Who is alive: heartbeats, broken links, and the declaration that a server is lost.
//!
//! A server whose link broke gets a ping over a fresh link a moment later (both directions of a link may
//! report the same break); if that link breaks too, it is lost at once. A silent one is lost at its
//! deadline. A trainer that cannot be reached for longer than that ends the job.

use super::{Command, Conductor};
use crate::{At, End, Filler, Fillers, Message, Nanos, Peer, ServerId, TrainerId};

/// What is known of a peer's health.
#[derive(Debug)]
pub(super) struct Life {
    heard: Nanos,
    link: Link,
    /// What it said last that it owes, and for how long.
    pub(super) owes: Option<(At, Nanos)>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Link {
    Well,
    /// Broke; a ping goes out then.
    Broken {
        since: Nanos,
        ping_at: Nanos,
    },
    /// A ping is on its way.
    Pinged {
        since: Nanos,
    },
}

impl Life {
    pub(super) fn new(now: Nanos) -> Self {
        Self { heard: now, link: Link::Well, owes: None }
    }

    pub(super) fn hear(&mut self, now: Nanos) {
        self.heard = now;
        self.link = Link::Well;
    }

    fn ping_at(&self) -> Option<Nanos> {
        match self.link {
            Link::Broken { ping_at, .. } => Some(ping_at),
            Link::Well | Link::Pinged { .. } => None,
        }
    }
}

impl Conductor {
    pub(super) fn life(&mut self, peer: Peer) -> Option<&mut Life> {
        match peer {
            Peer::Trainer(id) => self.trainers.get_mut(usize::from(id.0)).map(|it| &mut it.0),
            Peer::Server(id) => self.servers.get_mut(&id),
        }
    }

    pub(super) fn is_lost(&self, server: ServerId) -> bool {
        self.lost.get(&server.index).is_some_and(|it| *it >= server.incarnation)
    }

    pub(super) fn is_replaced(&self, server: ServerId) -> bool {
        self.servers.keys().any(|it| it.index == server.index && *it > server)
    }

    /// After a pause of this process, silence says nothing about the others.
    pub(super) fn forgive(&mut self, now: Nanos) {
        if now.since(self.last) > Nanos(2 * self.settings.heartbeat_every.0) {
            let trainers = self.trainers.iter_mut().map(|it| &mut it.0);
            for life in trainers.chain(self.servers.values_mut()) {
                life.heard = life.heard.max(now);
            }
        }
        self.last = now;
    }

    pub(super) fn view(&mut self, now: Nanos, mut view: Fillers, out: &mut Vec<Command>) {
        // A first heartbeat may take a while: the server has to be told where the conductor is.
        let first = now.after(self.settings.suspect_after);
        for filler in &mut view {
            if let Some(Filler::Server(id)) = *filler {
                if self.is_lost(id) {
                    *filler = None;
                } else {
                    self.servers.entry(id).or_insert_with(|| Life::new(first));
                }
            }
        }
        self.view = view;
        // A server that came back under a new incarnation is no longer there under the old one.
        let old = self.servers.keys().copied().filter(|&it| self.is_replaced(it));
        let old: Vec<_> = old.collect();
        for server in old {
            self.declare_lost(now, server, out);
        }
        self.forget_servers();
        self.fill(out);
    }

    /// Stops watching servers that no view and no live step names.
    pub(super) fn forget_servers(&mut self) {
        let (view, live) = (&self.view, &self.live);
        self.servers.retain(|&id, _| {
            let filler = Some(Filler::Server(id));
            view.contains(&filler) || live.values().any(|it| it.fillers().contains(&filler))
        });
    }

    pub(super) fn closed(&mut self, now: Nanos, peer: Peer, out: &mut Vec<Command>) {
        let ping_at = now.after(self.settings.retry_after);
        // To lose a trainer is to lose the job: try for longer.
        let patience = match peer {
            Peer::Trainer(_) => self.settings.suspect_after,
            Peer::Server(_) => Nanos(0),
        };
        let Some(life) = self.life(peer).filter(|_| peer != Peer::CONDUCTOR) else { return };
        match life.link {
            Link::Well => life.link = Link::Broken { since: now, ping_at },
            Link::Pinged { since } if now.since(since) < patience => {
                life.link = Link::Broken { since, ping_at };
            }
            Link::Broken { .. } => {}
            Link::Pinged { .. } => self.dead(now, peer, out),
        }
    }

    fn dead(&mut self, now: Nanos, peer: Peer, out: &mut Vec<Command>) {
        match peer {
            Peer::Trainer(id) => out.push(Command::End(End::TrainerDead(id))),
            Peer::Server(id) => self.declare_lost(now, id, out),
        }
    }

    pub(super) fn declare_lost(&mut self, now: Nanos, server: ServerId, out: &mut Vec<Command>) {
        if self.is_lost(server) {
            return;
        }
        self.lost.insert(server.index, server.incarnation);
        self.servers.remove(&server);
        out.push(Command::DeclareLost(server));
        let lost = Some(Filler::Server(server));
        for filler in self.view.iter_mut().filter(|it| **it == lost) {
            *filler = None;
        }
        let steps = self.live.iter().filter(|it| it.1.newest().contains(&lost)).map(|it| *it.0);
        for step in steps.collect::<Vec<_>>() {
            self.vacate(now, step, server, out);
        }
    }

    fn limit(&self, peer: Peer) -> Nanos {
        match peer {
            Peer::Trainer(_) => self.settings.trainer_after,
            Peer::Server(_) => self.settings.suspect_after,
        }
    }

    fn lives(&self) -> impl Iterator<Item = (Peer, &Life)> {
        let trainers = (0..).map(TrainerId).map(Peer::Trainer).zip(&self.trainers);
        let servers = self.servers.iter().map(|(&id, life)| (Peer::Server(id), life));
        trainers.map(|(peer, it)| (peer, &it.0)).skip(1).chain(servers)
    }

    pub(super) fn life_deadlines(&self) -> impl Iterator<Item = Nanos> {
        self.lives().map(|(peer, life)| {
            let silent = life.heard.after(self.limit(peer));
            life.ping_at().map_or(silent, |it| it.min(silent))
        })
    }

    /// Does what is due at `now`.
    pub(super) fn deadlines(&mut self, now: Nanos, out: &mut Vec<Command>) {
        let silent = |it: &(Peer, &Life)| it.1.heard.after(self.limit(it.0)) <= now;
        let silent: Vec<_> = self.lives().filter(silent).map(|it| it.0).collect();
        for peer in silent {
            self.dead(now, peer, out);
        }
        let ping = |it: &(Peer, &Life)| it.1.ping_at().is_some_and(|it| it <= now);
        let ping: Vec<_> = self.lives().filter(ping).map(|it| it.0).collect();
        let message = Message::Pulse { watermark: self.watermark };
        for to in ping {
            if let Some(life) = self.life(to)
                && let Link::Broken { since, .. } = life.link
            {
                life.link = Link::Pinged { since };
            }
            out.push(Command::Send { to, message: message.clone() });
        }
        if now >= self.beat_at {
            self.beat_at = now.after(self.settings.heartbeat_every);
            self.broadcast(&message, out);
        }
        let over = self.waits().find(|it| it.0 <= now);
        if let Some((_, step)) = over {
            out.push(Command::End(End::PoolLost { step }));
        }
    }
}
