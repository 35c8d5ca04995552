//! The attention server's machine, dedicated or in place: pulls rows, says what is ready, keeps results
//! until their readers have them.
//!
//! In: [`Event`]s of the shell. Out: [`Command`]s. It computes nothing and holds no bytes, but every
//! byte that the shell holds is one that it granted.
//!
//! ```text
//! a bundle:  assigned ──room──▶ active ──inputs freed, results freed, pulls ended──▶ over
//! a parcel:  absent ──rung──▶ pulling ──Pulled──▶ here ──last work ran──▶ freed
//! a work:    waiting ──all parcels of its bundle here──▶ ready ──Ran──▶ done ──all readers acked──▶ freed
//!               └──its own here, nothing else is ready──▶ ready, on a copy of its rows
//! ```
//! The watermark takes every arrow at once, but a running pull and a queued work end first.
//!
//! Invariant: bytes pulled or being pulled, copies of them, and results of work made ready never exceed
//! [`Server::budget`]; and no room is held by a bundle that waits for a room held by a later one.

mod active;
mod ahead;
mod beats;
mod early;
mod events;
mod listed;
mod owed;
mod reach;
mod room;
mod share;
mod work;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use self::active::{Active, Key};
use self::beats::Leaves;
use self::early::Early;
pub use self::events::{Command, Event, Host};
use self::owed::Owed;
use self::room::Rooms;
use crate::step::Live;
use crate::{
    Acks, At, Bundle, End, Message, Nanos, Parcel, Peer, PullId, RoundTable, Settings, Step,
    TrainerId,
};

/// Maximum pulls that begin, and maximum bundles that become active, until the next [`Event::Tick`], which is due
/// at once where some are left. A phase may have hundreds of thousands, and so many events may come between two looks at links:
/// between slices this process is heard, and hears others.
const SLICE: usize = 256;

/// The machine.
#[derive(Debug)]
pub struct Server {
    host: Host,
    settings: Settings,
    steps: BTreeMap<u64, Live>,
    rooms: Rooms,
    /// Bundles that have room.
    active: BTreeMap<Key, Active>,
    /// Of them, those with works that may run ahead.
    ahead: BTreeSet<Key>,
    /// Where an event that looked for such works has stopped.
    ahead_from: Option<Key>,
    /// Works that are ready and did not run.
    ready: usize,
    pulls: BTreeMap<PullId, (At, Bundle, Parcel)>,
    /// Pulls that failed wait for their time, and those that are more than a slice for the next tick.
    retries: BTreeSet<(Nanos, At, Bundle, Parcel)>,
    /// How many pulls may begin, and bundles become active, until then.
    slices: [usize; 2],
    /// Trainers whose rows could not be pulled when it was last tried, since when.
    unreached: BTreeMap<TrainerId, Nanos>,
    next_pull: u64,
    /// Phases whose rows are readable, by trainer; none is passed.
    rung: BTreeSet<(At, TrainerId)>,
    early: Early,
    owed: Owed,
    /// Everything up to here is whole at the trainer.
    through: BTreeMap<TrainerId, At>,
    /// When to say again what a trainer may have missed.
    announce: BTreeMap<TrainerId, Nanos>,
    watermark: Option<At>,
    owing: Option<(At, Nanos)>,
    beat_at: Nanos,
    heard: Nanos,
    last: Nanos,
    leaves: Leaves,
    ended: bool,
}

impl Server {
    /// A server with `memory` bytes for inputs and results.
    pub fn new(host: Host, memory: u64, settings: Settings, now: Nanos) -> Self {
        Self {
            host,
            settings,
            steps: BTreeMap::new(),
            rooms: Rooms::new(memory),
            active: BTreeMap::new(),
            ahead: BTreeSet::new(),
            ahead_from: None,
            ready: 0,
            pulls: BTreeMap::new(),
            retries: BTreeSet::new(),
            slices: [SLICE; 2],
            unreached: BTreeMap::new(),
            next_pull: 0,
            rung: BTreeSet::new(),
            early: Early::default(),
            owed: Owed::default(),
            through: BTreeMap::new(),
            announce: BTreeMap::new(),
            watermark: None,
            owing: None,
            beat_at: now,
            heard: now.after(settings.assemble_within),
            last: now,
            leaves: Leaves::default(),
            ended: false,
        }
    }

    /// Bytes that the steps begun here may hold: two phases and a reserve, at most its memory.
    pub fn budget(&self) -> u64 {
        self.rooms.budget()
    }

    /// The last phase of which every trainer is known to have its whole result.
    pub fn watermark(&self) -> Option<At> {
        self.watermark
    }

    /// Whether a step has begun here that is not over.
    pub fn has_steps(&self) -> bool {
        !self.steps.is_empty()
    }

    /// Takes an event, appends what has to be done. `now` never goes back.
    pub fn handle(&mut self, now: Nanos, event: Event, out: &mut Vec<Command>) {
        if self.ended {
            return;
        }
        if let Some(pause) = self.settings.pause(self.last, now) {
            self.heard = self.heard.after(pause);
            for since in self.unreached.values_mut() {
                *since = since.after(pause);
            }
        }
        self.last = now;
        match event {
            Event::Begin(step) => self.begin(now, step, out),
            Event::Message { from, message } => self.message(now, from, message, out),
            Event::Pulled { pull, result } => self.pulled(now, (pull, result), out),
            Event::Ran { at, works } => self.ran(at, &works, out),
            Event::Round(table) => self.round(now, &table, out),
            Event::Closed(peer) => self.closed(now, peer),
            Event::Unsaid(peer) => self.unsaid(now, peer),
            Event::Leave => self.leave(now),
            Event::Tick => self.slices = [SLICE; 2],
        }
        if !self.ended {
            self.admit(now, out);
            self.run_ahead(out);
            self.deadlines(now, out);
        }
    }

    /// When the shell has to send [`Event::Tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Nanos> {
        if self.ended {
            return None;
        }
        let silent = self.heard.after(self.settings.conductor_after);
        let alone = match self.host {
            Host::Dedicated(_) => Some(self.beat_at.min(silent)),
            Host::InPlace(_) => (!self.unreached.is_empty()).then_some(self.beat_at),
        };
        let retry = self.retries.first().map(|it| it.0);
        let admitting = self.rooms.is_admitting().then_some(self.last);
        self.announce.values().copied().chain(alone).chain(retry).chain(admitting).min()
    }

    fn end(&mut self, end: End, out: &mut Vec<Command>) {
        self.ended = true;
        out.push(Command::End(end));
    }

    /// Whether every trainer has all results up to a phase.
    pub fn passed(&self, at: At) -> bool {
        self.watermark >= Some(at)
    }

    fn begin(&mut self, now: Nanos, step: Arc<Step>, out: &mut Vec<Command>) {
        let number = step.number();
        if self.passed(step.last()) || self.steps.contains_key(&number) {
            return;
        }
        let host = self.host;
        if let Err(end) = self.rooms.begin(&step, |it| host.fills(it)) {
            return self.end(end, out);
        }
        let table = Arc::clone(step.table());
        if let Err(end) = self.take(&step, None, &table) {
            return self.end(end, out);
        }
        for (at, from, theirs) in self.early.take(number) {
            if !step.has(at.phase) || from.0 >= step.trainers() {
                continue;
            }
            if theirs != step.digest() {
                let ours = step.digest();
                return self.end(End::Digest { from, ours, theirs }, out);
            }
            self.rung.insert((at, from));
        }
        self.steps.insert(number, Live { step, table });
        self.beat_at = now;
    }

    fn message(&mut self, now: Nanos, from: Peer, message: Message, out: &mut Vec<Command>) {
        if from == Peer::CONDUCTOR {
            self.heard = now;
        }
        let conductor = from == Peer::CONDUCTOR;
        match (message, from) {
            (Message::Doorbell { at, acks, digest, round: _ }, Peer::Trainer(from)) => {
                self.acked(from, acks, out);
                self.rung(now, from, at, digest, out);
            }
            (Message::Ack { acks }, Peer::Trainer(from)) => self.acked(from, acks, out),
            (Message::Watermark { at } | Message::Pulse { watermark: Some(at), .. }, _)
                if conductor =>
            {
                self.advance(at, out);
            }
            (Message::Round { step, round, tables }, _) if conductor => {
                let news = |it: &Live| it.table.round < round && it.step.takes(round, &tables);
                if self.steps.get(&step).is_some_and(news) {
                    out.push(Command::Reassign { step, round, tables });
                }
            }
            (Message::Leave { server }, _) if conductor && self.host == Host::Dedicated(server) => {
                self.end(End::DeclaredLost(server), out);
            }
            (Message::Spare { watermark }, _) if conductor => self.spare(watermark, out),
            (
                Message::Doorbell { .. }
                | Message::Ack { .. }
                | Message::Watermark { .. }
                | Message::Round { .. }
                | Message::Leave { .. }
                | Message::Spare { .. }
                | Message::Pulse { .. }
                | Message::Finished { .. }
                | Message::PhaseDone { .. }
                | Message::Heartbeat(_)
                | Message::Suspect { .. }
                | Message::Unreached { .. },
                _,
            ) => {}
        }
    }

    fn rung(&mut self, now: Nanos, from: TrainerId, at: At, theirs: u64, out: &mut Vec<Command>) {
        if self.passed(at) {
            return self.answer(from, at, out);
        }
        let Some(live) = self.steps.get(&at.step) else {
            let (known, count) = self.early.insert(from, at, theirs);
            if count > 4 * self.settings.window {
                self.end(End::Flooded { from, count }, out);
            } else if known {
                self.answer(from, at, out);
            }
            return;
        };
        if !live.step.has(at.phase) || from.0 >= live.step.trainers() {
            return;
        }
        let ours = live.step.digest();
        if ours != theirs {
            return self.end(End::Digest { from, ours, theirs }, out);
        }
        if self.rung.insert((at, from)) {
            self.rooms.look_again();
            self.pull_rows(now, at, from, out);
        } else {
            // Rung again: the trainer may have missed what it was told.
            self.answer(from, at, out);
        }
    }

    /// Says what there is for a trainer that rang again, if only to show that it is heard.
    fn answer(&self, to: TrainerId, at: At, out: &mut Vec<Command>) {
        let said = out.len();
        self.announce_to(to, at..=at, out);
        if out.len() == said {
            let message = Message::Finished { at, works: Vec::new() };
            out.push(Command::Send { to: Peer::Trainer(to), message });
        }
    }

    fn acked(&mut self, from: TrainerId, acks: Acks, out: &mut Vec<Command>) {
        let through = acks.through.filter(|it| self.through.get(&from).is_none_or(|old| old < it));
        if let Some(last) = through {
            self.through.insert(from, last);
            let all: Vec<_> = self.owed.to(from, At::new(0, 0)..=last).collect();
            for (at, work) in all {
                self.acked_work(from, at, work, out);
            }
        }
        for (at, work) in acks.works {
            self.acked_work(from, at, work, out);
        }
    }

    fn round(&mut self, now: Nanos, table: &Arc<RoundTable>, out: &mut Vec<Command>) {
        let Some(live) = self.steps.get_mut(&table.step) else { return };
        if live.table.round >= table.round {
            return;
        }
        assert!(live.step.check(table).is_ok(), "the shell assigns all bundles of the step");
        let before = std::mem::replace(&mut live.table, Arc::clone(table));
        let step = Arc::clone(&live.step);
        let host = self.host;
        let fills = |it: &RoundTable| it.fillers.iter().flatten().any(|&it| host.fills(it));
        if let (Host::Dedicated(id), true, false) = (host, fills(&before), fills(table)) {
            return self.end(End::DeclaredLost(id), out);
        }
        if let Err(end) = self.take(&step, Some(&before), table) {
            return self.end(end, out);
        }
        self.beat_at = now;
    }

    fn closed(&mut self, now: Nanos, peer: Peer) {
        let again = now.after(self.settings.retry_after);
        // One that is silent for long is gone, or turns this one away: it is called no more often than it is told.
        if peer == Peer::CONDUCTOR && now.since(self.heard) < self.settings.suspect_after {
            self.beat_at = self.beat_at.min(again);
        }
        let all = At::new(0, 0)..=At::new(u64::MAX, u32::MAX);
        if let Peer::Trainer(trainer) = peer
            && self.owed.to(trainer, all).next().is_some()
        {
            self.announce.entry(trainer).or_insert(again);
        }
    }

    /// What was dropped for a peer is said again, now.
    fn unsaid(&mut self, now: Nanos, peer: Peer) {
        if peer == Peer::CONDUCTOR {
            self.beat_at = now;
        }
        if let Peer::Trainer(trainer) = peer {
            self.announce.insert(trainer, now);
        }
    }

    fn deadlines(&mut self, now: Nanos, out: &mut Vec<Command>) {
        while let Some(&(due, at, bundle, parcel)) = self.retries.first()
            && due <= now
            && self.slices[0] > 0
        {
            self.retries.pop_first();
            self.pull_parcel(now, (at, bundle), parcel, out);
        }
        let due = self.announce.iter().filter(|it| *it.1 <= now).map(|it| *it.0);
        for trainer in due.collect::<Vec<_>>() {
            self.announce.remove(&trainer);
            let all = At::new(0, 0)..=At::new(u64::MAX, u32::MAX);
            self.announce_to(trainer, all, out);
        }
        if matches!(self.host, Host::InPlace(_)) {
            return self.complain(now, out);
        }
        if now >= self.heard.after(self.settings.conductor_after) {
            return self.end(End::ConductorSilent(self.settings.conductor_after), out);
        }
        if now >= self.beat_at {
            self.beat(now, out);
        }
    }
}

#[cfg(test)]
#[allow(clippy::wildcard_enum_match_arm, reason = "tests pick one out of many")]
mod tests;
