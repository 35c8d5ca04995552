//! Who is alive: heartbeats, broken links, and the declaration that a server is lost.
//!
//! A peer whose link broke gets a ping over a fresh link a moment later (both directions of a link may
//! report the same break). A server whose fresh links are refused three times in a row, with nothing
//! heard between, is lost. Fewer breaks say nothing, since a living peer closes links too, when a pull
//! is late. A silent server is lost at its deadline. The job ends if a trainer refuses links for as long.
//! A refusal takes at most a heartbeat: a link that breaks later had been opened, and that is a new break.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use super::rounds::Live;
use super::{Command, Conductor};
use crate::{At, End, Filler, Message, Nanos, Peer, ServerId, TrainerId};

/// After so many fresh links that were refused in a row a server is lost.
const REFUSALS: u32 = 3;

/// What is known of a peer's health.
#[derive(Debug)]
pub(super) struct Life {
    heard: Nanos,
    link: Link,
    /// The work that its last heartbeat says it owes, and for how long it has.
    pub(super) owes: Option<(At, Nanos)>,
    /// Live steps that its heartbeats say it has not begun, and since when.
    lacks: BTreeMap<u64, Nanos>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Link {
    Well,
    /// Broke at `since`, and `refused` fresh links were refused; the next ping goes out at `ping_at`.
    Broken {
        since: Nanos,
        refused: u32,
        ping_at: Nanos,
    },
    /// A ping is on its way.
    Pinged {
        since: Nanos,
        refused: u32,
        at: Nanos,
    },
}

impl Life {
    pub(super) fn new(now: Nanos) -> Self {
        Self { heard: now, link: Link::Well, owes: None, lacks: BTreeMap::new() }
    }

    pub(super) fn heard(&self) -> Nanos {
        self.heard
    }

    /// The peer is heard. Out: whether its deadline moved nearer, as after a first word, which may take longer than later ones.
    pub(super) fn hear(&mut self, now: Nanos) -> bool {
        self.link = Link::Well;
        std::mem::replace(&mut self.heard, now) > now
    }

    /// A heartbeat names all live steps but these.
    pub(super) fn lack(&mut self, now: Nanos, steps: &[u64]) {
        self.lacks.retain(|it, _| steps.contains(it));
        for &step in steps {
            self.lacks.entry(step).or_insert(now);
        }
    }

    /// Whether it owes a phase, as it says, or has not begun the step of the phase, for so long.
    pub(super) fn is_behind(&self, now: Nanos, phase: At, span: Nanos) -> bool {
        let lacks = self.lacks.get(&phase.step).is_some_and(|it| now.since(*it) >= span);
        lacks || self.owes.is_some_and(|(at, owed)| at <= phase && owed >= span)
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

    /// Whether a server is not lost, and some view or live step names it.
    pub fn watches(&self, server: ServerId) -> bool {
        self.servers.contains_key(&server)
    }

    pub(super) fn is_replaced(&self, server: ServerId) -> bool {
        // Servers of one index are side by side, the newest last.
        let last = ServerId { incarnation: u32::MAX, ..server };
        self.servers.range((Bound::Excluded(server), Bound::Included(last))).next().is_some()
    }

    /// After a pause of this process, neither silence in the pause nor earlier breaks count against others. Silence and complaints from
    /// before the pause count on: else a process that stands still now and then would never miss anybody.
    pub(super) fn forgive(&mut self, now: Nanos) {
        if let Some(pause) = self.settings.pause(self.last, now) {
            let trainers = self.trainers.iter_mut().map(|it| &mut it.0);
            let ping_at = now.after(self.settings.retry_after);
            for life in trainers.chain(self.servers.values_mut()) {
                life.heard = life.heard.after(pause);
                for since in life.lacks.values_mut() {
                    *since = since.after(pause);
                }
                if life.link != Link::Well {
                    life.link = Link::Broken { since: now, refused: 0, ping_at };
                    self.quiet_until = self.quiet_until.min(ping_at);
                }
            }
            self.complaints.paused(pause);
            self.doubts.forget();
            self.dead.clear();
            self.dead_until = None;
        }
        self.last = now;
    }

    /// A server says whether it is to leave. As soon as it does, nothing more is planned for it, whatever views say; what runs there
    /// is watched until it is over. Under the same name it may come back from another job, and says so for longer than a message
    /// of before takes.
    pub(super) fn leaves(
        &mut self,
        now: Nanos,
        server: ServerId,
        leaves: bool,
        out: &mut Vec<Command>,
    ) {
        if leaves {
            if self.leaving.insert(server, now).is_none() {
                self.view(now, out);
            }
            self.forget_servers();
        } else if let Some(last) = self.leaving.get(&server)
            && now.since(*last) >= self.settings.suspect_after
        {
            self.leaving.remove(&server);
            self.view(now, out);
        }
    }

    pub(super) fn view(&mut self, now: Nanos, out: &mut Vec<Command>) {
        let mut view = self.offered.clone();
        // A first heartbeat may take a while: the server has to be told where the conductor is.
        let first = now.after(self.settings.suspect_after);
        for filler in &mut view {
            if let Some(Filler::Server(id)) = *filler {
                if self.is_lost(id) || self.leaving.contains_key(&id) {
                    *filler = None;
                } else {
                    self.servers.entry(id).or_insert_with(|| Life::new(first));
                    self.quiet_until = now;
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

    /// Stops watching servers that no view and no live step names, nor a round that is only proposed yet.
    pub(super) fn forget_servers(&mut self) {
        let live = self.live.values().flat_map(Live::newest);
        let named: BTreeSet<_> = self.view.iter().chain(live).flatten().copied().collect();
        self.servers.retain(|&id, _| named.contains(&Filler::Server(id)));
        self.complaints.settle(|id| self.servers.contains_key(&id));
        // One that left is remembered for as long as a view of before may come, and its last words be repeated.
        let (now, long) = (self.last, self.settings.conductor_after);
        let is_known = |id: Filler| named.contains(&id) || self.offered.contains(&Some(id));
        self.leaving.retain(|&id, said| is_known(Filler::Server(id)) || now.since(*said) < long);
    }

    pub(super) fn closed(&mut self, now: Nanos, peer: Peer, out: &mut Vec<Command>) {
        let ping_at = now.after(self.settings.retry_after);
        let refusal = self.settings.heartbeat_every;
        // To lose a trainer is to lose the job: try for longer.
        let patience = match peer {
            Peer::Trainer(_) => self.settings.suspect_after,
            Peer::Server(_) => Nanos(0),
        };
        let is_missed = match peer {
            Peer::Trainer(id) => peer != Peer::CONDUCTOR && !self.left.contains(&id),
            Peer::Server(_) => true,
        };
        let Some(life) = self.life(peer).filter(|_| is_missed) else { return };
        match life.link {
            Link::Pinged { since, refused, at } if now.since(at) <= refusal => {
                let refused = refused + 1;
                if refused >= REFUSALS && now.since(since) >= patience {
                    return self.dead(now, peer, out);
                }
                life.link = Link::Broken { since, refused, ping_at };
            }
            Link::Well | Link::Pinged { .. } => {
                life.link = Link::Broken { since: now, refused: 0, ping_at };
            }
            Link::Broken { .. } => return,
        }
        self.quiet_until = self.quiet_until.min(ping_at);
    }

    /// Sends a ping now, unless one is due or on its way: somebody else cannot reach the server.
    pub(super) fn try_link(&mut self, now: Nanos, server: ServerId) {
        if let Some(life) = self.servers.get_mut(&server)
            && life.link == Link::Well
        {
            life.link = Link::Broken { since: now, refused: 0, ping_at: now };
            self.quiet_until = now;
        }
    }

    fn dead(&mut self, now: Nanos, peer: Peer, out: &mut Vec<Command>) {
        match peer {
            Peer::Trainer(id) => {
                self.dead.insert(id);
                self.dead_until.get_or_insert(now.after(self.settings.suspect_after));
            }
            Peer::Server(id) => {
                self.doubts.lost(now, id);
                self.declare_lost(now, id, out);
            }
        }
    }

    /// A trainer that was taken for dead is heard, or has left.
    pub(super) fn is_not_dead(&mut self, trainer: TrainerId) {
        if self.dead.remove(&trainer) && self.dead.is_empty() {
            self.dead_until = None;
        }
    }

    /// Ends the job for dead trainers. While another one may be dead, too, it waits for as long as a suspicion, to name all of them.
    fn end_for_dead(&mut self, now: Nanos, out: &mut Vec<Command>) {
        let Some(until) = self.dead_until else { return };
        let silent = Nanos(2 * self.settings.heartbeat_every.0);
        let is_well = |it: &Life| it.link == Link::Well && now.since(it.heard) <= silent;
        let others = self.lives().filter(|it| matches!(it.0, Peer::Trainer(_)));
        if now >= until || others.map(|it| it.1).all(is_well) {
            out.push(Command::End(End::TrainersDead(self.dead.iter().copied().collect())));
        }
    }

    pub(super) fn declare_lost(&mut self, now: Nanos, server: ServerId, out: &mut Vec<Command>) {
        if self.is_lost(server) {
            return;
        }
        self.lost.insert(server.index, server.incarnation);
        self.servers.remove(&server);
        self.leaving.remove(&server);
        self.complaints.settle(|id| id != server);
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
        let is_gone = |it: &(Peer, &Life)| match it.0 {
            Peer::Trainer(id) => self.dead.contains(&id) || self.left.contains(&id),
            Peer::Server(_) => false,
        };
        let trainers = trainers.map(|(peer, it)| (peer, &it.0)).skip(1);
        trainers.filter(move |it| !is_gone(it)).chain(servers)
    }

    fn life_deadlines(&self) -> impl Iterator<Item = Nanos> {
        self.lives().map(|(peer, life)| {
            let silent = life.heard.after(self.limit(peer));
            life.ping_at().map_or(silent, |it| it.min(silent))
        })
    }

    /// Does what is due at `now`. Hearing a peer only moves its deadline away, but for a first word. So nobody is looked at before
    /// `quiet_until`, the nearest deadline at the last look.
    pub(super) fn deadlines(&mut self, now: Nanos, out: &mut Vec<Command>) {
        let mut ping = Vec::new();
        if now >= self.quiet_until {
            let silent = |it: &(Peer, &Life)| it.1.heard.after(self.limit(it.0)) <= now;
            let silent: Vec<_> = self.lives().filter(silent).map(|it| it.0).collect();
            for peer in silent {
                self.dead(now, peer, out);
            }
            let due = |it: &(Peer, &Life)| it.1.ping_at().is_some_and(|it| it <= now);
            ping.extend(self.lives().filter(due).map(|it| it.0));
        }
        self.end_for_dead(now, out);
        self.doubt(now, out);
        let message = Message::Pulse { watermark: self.watermark, ask: self.asked(now) };
        for to in ping {
            if let Some(life) = self.life(to)
                && let Link::Broken { since, refused, .. } = life.link
            {
                life.link = Link::Pinged { since, refused, at: now };
            }
            out.push(Command::Send { to, message: message.clone() });
        }
        if now >= self.quiet_until {
            let next = self.life_deadlines().min();
            self.quiet_until = next.unwrap_or_else(|| now.after(self.settings.suspect_after));
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
