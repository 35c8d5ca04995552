//! The conductor's machine: publishes headers, moves the watermark, declares servers lost.
//!
//! In: [`Event`]s of the shell in trainer 0. Out: [`Command`]s. It plans nothing: the shell tells whether
//! a table can be placed.
//!
//! ```text
//! a step:    ready ──room──▶ live ──watermark of its last phase──▶ done
//! a server:  well ──link breaks──▶ broken ──answers──▶ well
//!            well ──silent──▶ lost      broken ──fresh links refused, or silent──▶ lost
//! a round:   proposed ──Placed──▶ sent to all
//!            no live slot, or Unplaceable, and no step before it is live ──▶ what `on_pool_loss` says
//! ```
//!
//! Invariants: at most two steps are live; the rounds of a step are numbered without gaps and each is
//! sent with all tables before it; a server declared lost never fills a slot again under the same
//! incarnation; the watermark never passes a phase that some trainer lacks results of.

mod complaints;
mod doubts;
mod events;
mod lives;
mod rounds;

use std::collections::{BTreeMap, BTreeSet};

use self::complaints::Complaints;
use self::doubts::Doubts;
pub use self::events::{Command, Event};
use self::lives::Life;
use self::rounds::{Live, enable_standby};
use crate::{
    At, End, Fillers, Heartbeat, Message, Nanos, OnPoolLoss, Peer, ServerId, Settings, TrainerId,
    Why, alive,
};

/// Steps whose headers are out and which are not done, at most: one that runs, and the next one.
pub const LIVE_STEPS: usize = 2;

/// The proposal that a header is.
pub const HEADER: u64 = 0;

/// The machine.
#[derive(Debug)]
pub struct Conductor {
    settings: Settings,
    /// By trainer.
    trainers: Vec<(Life, Option<At>)>,
    /// How many trainers have no more than every phase up to the watermark.
    behind: usize,
    servers: BTreeMap<ServerId, Life>,
    /// Newest incarnation lost, by index of the server.
    lost: BTreeMap<u16, u32>,
    /// Servers that are to leave, and when they last said so.
    leaving: BTreeMap<ServerId, Nanos>,
    complaints: Complaints,
    doubts: Doubts,
    /// The newest view, and who of it fills slots: servers that are lost or are to leave do not.
    offered: Fillers,
    view: Fillers,
    ready: BTreeMap<u64, u32>,
    /// A step, and the fillers with which it could not be published.
    refused: (u64, Vec<Fillers>),
    live: BTreeMap<u64, Live>,
    /// Since when a step that could be published has found no live slot, until a header of it is known to have found its slots.
    held: Option<Nanos>,
    /// Whether it was said that its pool is lost, since a header of it was last tried.
    held_said: bool,
    local: Locality,
    proposals: u64,
    watermark: Option<At>,
    /// Trainers that have left: nobody misses them.
    left: BTreeSet<TrainerId>,
    /// Trainers that are dead; the job ends when all of them are known, at the latest then.
    dead: BTreeSet<TrainerId>,
    dead_until: Option<Nanos>,
    beat_at: Nanos,
    /// No life is due before this.
    quiet_until: Nanos,
    last: Nanos,
    ended: bool,
}

/// Whether headers put the work on the trainers when no server is there.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Locality {
    Pool,
    Local,
}

impl Conductor {
    /// The conductor of a job of `trainers` trainers.
    pub fn new(trainers: u16, settings: Settings, now: Nanos) -> Self {
        let first = now.after(settings.assemble_within);
        Self {
            settings,
            trainers: (0..trainers).map(|_| (Life::new(first), None)).collect(),
            behind: trainers.into(),
            servers: BTreeMap::new(),
            lost: BTreeMap::new(),
            leaving: BTreeMap::new(),
            complaints: Complaints::default(),
            doubts: Doubts::default(),
            offered: Vec::new(),
            view: Vec::new(),
            ready: BTreeMap::new(),
            refused: (0, Vec::new()),
            live: BTreeMap::new(),
            held: None,
            held_said: false,
            local: Locality::Pool,
            proposals: 0,
            watermark: None,
            dead: BTreeSet::new(),
            left: BTreeSet::new(),
            dead_until: None,
            beat_at: now,
            quiet_until: now,
            last: now,
            ended: false,
        }
    }

    /// The last phase of which every trainer has its whole result.
    pub fn watermark(&self) -> Option<At> {
        self.watermark
    }

    /// Takes an event, appends what has to be done. `now` never goes back.
    pub fn handle(&mut self, now: Nanos, event: Event, out: &mut Vec<Command>) {
        if self.ended {
            return;
        }
        self.forgive(now);
        match event {
            Event::View(view) => {
                self.offered = view;
                self.view(now, out);
            }
            Event::HeaderReady { step, phases } => {
                assert!(phases > 0, "a step has phases");
                self.ready.insert(step, phases);
            }
            Event::Published { step } => {
                if self.live.contains_key(&step) {
                    self.held = None;
                }
            }
            Event::Placed { step, proposal } => self.placed(step, proposal, out),
            Event::Unplaceable { step, proposal } => self.unplaceable(now, step, proposal, out),
            Event::Message { from, message } => self.message(now, from, message, out),
            Event::Unnamed(server) => self.doubts.heard(server),
            Event::Closed(peer) => self.closed(now, peer, out),
            Event::Left(trainer) => {
                self.left.insert(trainer);
                self.is_not_dead(trainer);
            }
            Event::Tick => {}
        }
        self.come_first(now, out);
        self.publish(now, out);
        self.deadlines(now, out);
        if let Some(end) = out.iter().position(|it| matches!(it, Command::End(_))) {
            out.truncate(end + 1);
            self.ended = true;
        }
    }

    /// When the shell has to send [`Event::Tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Nanos> {
        if self.ended {
            return None;
        }
        let soonest = self.beat_at.min(self.quiet_until);
        let soonest = self.dead_until.map_or(soonest, |it| it.min(soonest));
        Some(self.waits().fold(soonest, |soonest, it| it.0.min(soonest)))
    }

    fn message(&mut self, now: Nanos, from: Peer, message: Message, out: &mut Vec<Command>) {
        if let Peer::Server(server) = from {
            self.doubts.heard(server);
            if let Message::Heartbeat(beat) = &message {
                self.leaves(now, server, beat.leaves, out);
            }
        }
        let Some(life) = self.life(from) else {
            if let Peer::Server(server) = from {
                let watermark = self.watermark;
                // One that no view names any more hears that it is not forgotten, until its controller lets it go.
                let message = if self.is_lost(server) || self.is_replaced(server) {
                    Message::Leave { server }
                } else if self.leaving.contains_key(&server) {
                    Message::Spare { watermark }
                } else {
                    Message::Pulse { watermark, ask: Vec::new() }
                };
                out.push(Command::Send { to: from, message });
            }
            return;
        };
        if life.hear(now) {
            self.quiet_until = now;
        }
        if let Peer::Trainer(trainer) = from {
            self.is_not_dead(trainer);
        }
        match message {
            Message::PhaseDone { at } => self.phase_done(from, at, out),
            Message::Heartbeat(beat) => self.heartbeat(now, from, &beat, out),
            Message::Suspect { server, why, lasting } => {
                if let Peer::Trainer(from) = from {
                    self.suspect(now, from, (server, why, lasting), out);
                }
            }
            Message::Unreached { trainers } => {
                if let Peer::Trainer(by) = from {
                    self.apart(now, by, &trainers, out);
                }
            }
            Message::Doorbell { .. }
            | Message::Finished { .. }
            | Message::Ack { .. }
            | Message::Watermark { .. }
            | Message::Round { .. }
            | Message::Pulse { .. }
            | Message::Leave { .. }
            | Message::Spare { .. } => {}
        }
    }

    fn phase_done(&mut self, from: Peer, at: At, out: &mut Vec<Command>) {
        let Peer::Trainer(trainer) = from else { return };
        let done = &mut self.trainers[usize::from(trainer.0)].1;
        if *done >= Some(at) {
            return;
        }
        let before = done.replace(at);
        if self.live.contains_key(&at.step) {
            self.held = None;
        }
        if before > self.watermark {
            return;
        }
        self.behind -= 1;
        if self.behind > 0 {
            return;
        }
        // All are told, too, so to look at each of them costs little beside that.
        let done = self.trainers.iter().map(|it| it.1);
        self.watermark = done.clone().min().flatten();
        self.behind = done.filter(|it| *it == self.watermark).count();
        if let Some(at) = self.watermark {
            let to = self.everybody();
            out.push(Command::SendAll { to, message: Message::Watermark { at } });
            let live = self.live.len();
            while let Some((&step, live)) = self.live.first_key_value()
                && live.last(step) <= at
            {
                self.live.remove(&step);
                out.push(Command::StepDone(step));
            }
            if self.live.len() < live {
                self.forget_servers();
            }
        }
    }

    fn heartbeat(&mut self, now: Nanos, from: Peer, beat: &Heartbeat, out: &mut Vec<Command>) {
        let Heartbeat { watermark, done, rounds, owes, unreached, reached, leaves: _ } = beat;
        if let Some(life) = self.life(from) {
            life.owes = *owes;
        }
        if let Some(at) = *done {
            self.phase_done(from, at, out);
        }
        if let Some(at) = self.watermark.filter(|_| *watermark < self.watermark) {
            out.push(Command::Send { to: from, message: Message::Watermark { at } });
        }
        let mut lacks = Vec::new();
        for (&step, live) in &self.live {
            match rounds.iter().find(|it| it.0 == step) {
                Some(it) if it.1 < live.round() => {
                    out.push(Command::Send { to: from, message: live.message(step) });
                }
                Some(_) => {}
                // The peer's first heartbeat after the header may have crossed it.
                None if now.since(live.published) < self.settings.heartbeat_every => {}
                None => {
                    lacks.push(step);
                    out.push(Command::Header { step, to: from });
                }
            }
        }
        if let Some(life) = self.life(from) {
            life.lack(now, &lacks);
        }
        self.cannot_pull(now, from, unreached, out);
        if matches!(from, Peer::Trainer(_)) && from != Peer::CONDUCTOR {
            self.doubts.reached(now, reached);
        }
    }

    fn suspect(
        &mut self,
        now: Nanos,
        from: TrainerId,
        (server, why, lasting): (ServerId, Why, Nanos),
        out: &mut Vec<Command>,
    ) {
        let Some(life) = self.servers.get(&server) else { return };
        match why {
            Why::Broken => self.unreachable(now, from, server, lasting, out),
            Why::Late { step, phase } => {
                if life.is_behind(now, At { step, phase }, self.settings.phase_within) {
                    self.declare_lost(now, server, out);
                } else {
                    self.try_link(now, server);
                }
            }
        }
    }

    /// Publishes what is ready, while there is room and a live slot. What finds no place beside a step that runs waits until that one
    /// is whole: somebody may come, and no earlier is the pool lost for it.
    fn publish(&mut self, now: Nanos, out: &mut Vec<Command>) {
        while self.live.len() < LIVE_STEPS
            && let Some((&step, &phases)) = self.ready.first_key_value()
        {
            let mut fillers = self.view.clone();
            if !alive(&fillers).contains(&true) && self.local == Locality::Local {
                enable_standby(&mut fillers);
            }
            if !alive(&fillers).contains(&true) || self.is_refused(step, &fillers) {
                if !self.live.is_empty() {
                    return;
                }
                // A header that finds no slots does not begin the wait anew.
                self.held.get_or_insert(now);
                if !std::mem::replace(&mut self.held_said, true) {
                    out.push(Command::PoolLost { step });
                }
                match self.settings.on_pool_loss {
                    OnPoolLoss::Local
                        if enable_standby(&mut fillers) && !self.is_refused(step, &fillers) =>
                    {
                        self.local = Locality::Local;
                    }
                    OnPoolLoss::Wait(_) => return,
                    OnPoolLoss::Local | OnPoolLoss::Fail if self.in_doubt() => return,
                    OnPoolLoss::Local | OnPoolLoss::Fail => {
                        return out.push(Command::End(End::PoolLost { step }));
                    }
                }
            }
            self.held_said = false;
            self.ready.remove(&step);
            out.push(Command::Publish { step, fillers: fillers.clone() });
            self.live.insert(step, Live::new(now, phases, fillers));
            for to in self.everybody() {
                out.push(Command::Header { step, to });
            }
        }
    }

    /// A header cannot be placed: its step is ready again.
    fn withdraw(&mut self, step: u64) {
        if let Some(live) = self.live.remove(&step) {
            self.ready.insert(step, live.phases());
            if self.refused.0 != step {
                self.refused = (step, Vec::new());
            }
            self.refused.1.push(live.fillers().clone());
        }
    }

    /// Whether this step's bundles fit nowhere with these fillers.
    fn is_refused(&self, step: u64, fillers: &Fillers) -> bool {
        self.refused.0 == step && self.refused.1.contains(fillers)
    }

    fn next_proposal(&mut self) -> u64 {
        self.proposals += 1;
        self.proposals
    }

    fn everybody(&self) -> Vec<Peer> {
        let trainers = (0..self.trainers.len() as u16).map(TrainerId).map(Peer::Trainer);
        trainers.chain(self.servers.keys().copied().map(Peer::Server)).collect()
    }

    fn broadcast(&self, message: &Message, out: &mut Vec<Command>) {
        let everybody = self.everybody();
        out.reserve(everybody.len());
        for to in everybody {
            out.push(Command::Send { to, message: message.clone() });
        }
    }
}
