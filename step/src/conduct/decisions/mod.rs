//! What the conductor of a job decides: when a header goes out and to whom, what trainers have to agree on, when a fault is fired,
//! when a step is over, how the job ends.
//!
//! In: an [`Event`], and what time it is. Out: [`Command`]s, which the shell in trainer 0 carries out in their order. The machine of
//! `cadre-protocol` is within: it decides who is lost and where the watermark is; here the steps are put together around it.
//!
//! Invariant: a header is published once. It goes out while the step before it runs if it has the slots of that one, so that a place
//! in a view means the same slot of every step that is out; else when every phase of that step is whole everywhere. No work here
//! grows with the documents of a step: what does is asked for by a command.

mod agree;
mod events;
mod headers;
mod progress;
mod stopping;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cadre_protocol::conductor::{self, Conductor};
use cadre_protocol::{Fillers, Nanos, Peer, PeerId, ServerId, Settings, TrainerId};

use self::agree::{Counts, Leavers, STANDING_TOGETHER};
use super::{Draft, Roster, View};
use crate::envelope::{Ending, Lengths, Said, Stands, StepDone};
use crate::planned::PlannedStep;

pub use self::events::{About, Command, Event, FaultAt, Level, Over, Refused, Served};
use self::progress::Telling;

/// A step that is out.
#[derive(Debug)]
struct Out {
    planned: Arc<PlannedStep>,
    begins: Begins,
    /// Who was told its header.
    told: BTreeSet<Peer>,
    done: BTreeMap<u16, StepDone>,
    served: BTreeMap<Peer, Served>,
    /// Who fills its slots in its rounds, if any were proposed.
    tables: Vec<Fillers>,
    /// The newest that was proposed before the step has begun here.
    proposal: Option<(u64, Vec<Fillers>)>,
}

/// How far this process is with the beginning of a step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Begins {
    No,
    /// It was asked to.
    Asked,
    Begun,
}

/// A step whose header is being planned.
#[derive(Debug)]
struct Publishing {
    step: u64,
    /// Who is to be told.
    to: BTreeSet<Peer>,
    /// The newest that was proposed meanwhile.
    proposal: Option<(u64, Vec<Fillers>)>,
}

/// What a job begins with.
#[derive(Clone, Debug, Default)]
pub struct Start {
    /// Its first step.
    pub first: u64,
    /// Where faults are fired.
    pub faults: BTreeSet<FaultAt>,
    /// Servers that were lost before this process.
    pub failovers: u32,
}

/// What is to be carried out, and what time it is.
struct Acts<'a> {
    now: Nanos,
    commands: &'a mut Vec<Command>,
}

impl Acts<'_> {
    fn put(&mut self, command: Command) {
        self.commands.push(command);
    }

    fn say(&mut self, about: About, text: String) {
        self.put(Command::Say(about, text));
    }

    fn warn(&mut self, text: impl Into<String>) {
        self.put(Command::Log(Level::Warning, text.into()));
    }
}

/// See the module.
#[derive(Debug)]
pub struct Decisions {
    machine: Conductor,
    /// Room for what it commands.
    commanded: Vec<conductor::Command>,
    draft: Draft,
    roster: Roster,
    view: Option<View>,
    counts: Counts,
    /// Trainers whose main threads stand still, and what they have not done; the job ends then.
    standing: BTreeMap<u16, String>,
    standing_until: Option<Nanos>,
    /// Trainers that have left while a step was out that was not over there.
    left: Leavers,
    /// Step whose header comes next.
    next: u64,
    /// Steps before this one are whole: every trainer has every result of them.
    whole: u64,
    /// Whether the header of `next` is being made.
    making: bool,
    /// Whether `next` was offered to the machine.
    offered: bool,
    lengths: BTreeMap<u64, BTreeMap<u16, Lengths>>,
    publishing: Option<Publishing>,
    published: BTreeMap<u64, Out>,
    /// Steps that are over and not told yet: what some server did may still come.
    telling: BTreeMap<u64, Telling>,
    /// The end that is told behind them.
    closing: Option<Ending>,
    /// Newest incarnation that was declared lost, by index of the server.
    lost: BTreeMap<u16, u32>,
    /// Since the last step that was over.
    failovers: u32,
    /// Of the job, those before this process among them. A report that is read twice counts them once.
    failovers_so_far: u32,
    /// Faults that are still to come, and those whose firing is awaited.
    faults: BTreeSet<FaultAt>,
    firing: BTreeSet<FaultAt>,
    stop: Option<Ending>,
    /// Steps for some work of which no server is there.
    pool_lost: BTreeSet<u64>,
    /// The first header waits for all servers until here; nothing once that is over.
    patience: Option<Nanos>,
    /// Why no step follows, once that is so.
    ending: Option<Ending>,
}

/// Longest wait of the first header for servers that are still starting.
const SERVERS_START_WITHIN: Nanos = Nanos::from_millis(20_000);

impl Decisions {
    /// The conductor of the job of `draft`.
    pub fn new(draft: Draft, settings: Settings, start: Start, now: Nanos) -> Self {
        let trainers = draft.trainers;
        let Start { first, faults, failovers } = start;
        Self {
            machine: Conductor::new(trainers, settings, now),
            commanded: Vec::new(),
            roster: Roster::new(trainers),
            draft,
            view: None,
            counts: Counts::default(),
            standing: BTreeMap::new(),
            standing_until: None,
            left: Leavers::default(),
            next: first,
            whole: first,
            making: false,
            offered: false,
            lengths: BTreeMap::new(),
            publishing: None,
            published: BTreeMap::new(),
            telling: BTreeMap::new(),
            closing: None,
            lost: BTreeMap::new(),
            failovers: 0,
            failovers_so_far: failovers,
            faults: faults.into_iter().filter(|it| it.step >= first).collect(),
            firing: BTreeSet::new(),
            stop: None,
            pool_lost: BTreeSet::new(),
            patience: Some(now.after(SERVERS_START_WITHIN)),
            ending: None,
        }
    }

    /// The dedicated servers of the newest view, but for those that are lost.
    pub fn servers(&self) -> Vec<Peer> {
        let addresses = self.view.iter().flat_map(View::addresses);
        addresses.map(|(id, _)| peer_of(id)).filter(|it| !self.has_lost(*it)).collect()
    }

    /// When something is due.
    pub fn next_deadline(&self) -> Option<Nanos> {
        let telling = self.telling.first_key_value().map(|it| it.1.until);
        let own = [self.patience, self.standing_until, telling];
        own.into_iter().fold(self.machine.next_deadline(), Nanos::first_of)
    }

    /// Whether a peer is told anything: not a server that is lost, nor one that no view and no live step names any more.
    pub fn hears(&self, peer: Peer) -> bool {
        match peer {
            Peer::Trainer(_) => true,
            Peer::Server(id) => self.machine.watches(id) || self.servers().contains(&peer),
        }
    }

    /// Whether a server was declared lost: what it says of the job does not count any more.
    pub fn has_lost(&self, peer: Peer) -> bool {
        match peer {
            Peer::Trainer(_) => false,
            Peer::Server(id) => self.lost.get(&id.index).is_some_and(|it| *it >= id.incarnation),
        }
    }

    /// Decides what follows from an event.
    pub fn handle(&mut self, now: Nanos, event: Event, commands: &mut Vec<Command>) {
        let acts = &mut Acts { now, commands };
        match event {
            Event::Trainers(list) => {
                self.roster.trainers(list);
                self.tell_addresses(acts);
                self.proceed(acts);
            }
            Event::View(view) => self.view(acts, view),
            Event::Stop { checkpoint } => self.stop(acts, checkpoint),
            Event::Fired(at) => {
                self.firing.remove(&at);
                self.proceed(acts);
            }
            Event::Asked(trainer) => self.asked(acts, trainer),
            Event::Told(from, said) => self.told(acts, from, said),
            Event::CameBack(peer) => {
                let text = format!("{peer} has come back: it is told the steps that are out again");
                acts.put(Command::Log(Level::Information, text));
                for out in self.published.values_mut() {
                    out.told.remove(&peer);
                }
            }
            Event::Failed => self.report_rest(acts),
            Event::Protocol(event) => self.run(acts, event),
            Event::Made(made) => self.made(acts, made),
            Event::Planned(planned) => self.planned(acts, planned),
            Event::Begun(step) => self.begun(acts, step),
            Event::Proposed { step, proposal, placed } => {
                self.proposed(acts, (step, proposal), placed);
            }
        }
    }

    fn view(&mut self, acts: &mut Acts<'_>, mut view: View) {
        if self.view.as_ref().is_some_and(|it| it.number >= view.number) {
            return acts.warn("a view that is not newer than the last was refused");
        }
        if self.draft.reproducible {
            for text in view.refuse_foreign(&self.draft.numerics) {
                acts.say(About::Warning, text);
            }
        }
        let listened: BTreeMap<_, _> = self.view.iter().flat_map(View::addresses).collect();
        let mut stay = BTreeSet::new();
        for (id, address) in view.addresses() {
            let stays = !address.is_empty() && listened.get(&id) == Some(&address);
            if stays && !self.has_lost(peer_of(id)) {
                stay.insert(peer_of(id));
            }
            acts.put(Command::Know(id, address));
        }
        // Another job may have had whoever comes back under its name, or have whom no view names: what it was told is gone.
        for out in self.published.values_mut() {
            out.told.retain(|it| matches!(it, Peer::Trainer(_)) || stay.contains(it));
        }
        self.view = Some(view);
        self.tell_addresses(acts);
        let newest = self.published.keys().next_back().copied();
        // Whom the header in the making counts on may be gone. Where no step is out, whoever the view leaves out is not
        // watched any more.
        let fillers = newest.filter(|_| !self.offered).and_then(|it| self.fillers_of(it));
        let fillers = fillers.unwrap_or_else(|| self.next_fillers());
        self.run(acts, conductor::Event::View(fillers));
        self.forget_gone(acts);
        self.proceed(acts);
    }

    /// Servers that have left are owed nothing.
    fn forget_gone(&mut self, acts: &mut Acts<'_>) {
        let mut gone: BTreeSet<Peer> =
            self.published.values().flat_map(|it| &it.told).copied().collect();
        gone.retain(|it| !self.hears(*it));
        for out in self.published.values_mut() {
            out.told.retain(|it| !gone.contains(it));
        }
        acts.put(Command::ForgetGone);
    }

    /// A round may name a server that no header did; its address has to be there first.
    fn tell_addresses(&self, acts: &mut Acts<'_>) {
        if let Some(view) = &self.view {
            acts.put(Command::Addresses(view.addresses().collect()));
        }
    }

    /// Ends of steps that are not out change nothing, nor does what is told twice.
    fn told(&mut self, acts: &mut Acts<'_>, from: Peer, said: Said) {
        match (said, from) {
            (Said::ServerStep(done), _) => self.server_step(acts, from, done),
            (_, Peer::Trainer(from)) if from.0 >= self.draft.trainers => {
                acts.warn(format!("the job has no trainer {}: it is not believed", from.0));
            }
            (Said::Lengths(lengths), Peer::Trainer(from)) => self.lengths(acts, from, lengths),
            (Said::Steps(steps), Peer::Trainer(from)) => self.counted(acts, from.0, steps),
            (Said::Standing(Stands::Still(what)), Peer::Trainer(from)) => {
                self.standing.insert(from.0, what);
                self.standing_until.get_or_insert(acts.now.after(STANDING_TOGETHER));
            }
            (Said::Standing(Stands::Left { what, in_mid_step, as_done }), Peer::Trainer(from)) => {
                self.left(acts, (from.0, what), (in_mid_step, as_done));
            }
            // Who has left does not come back.
            (Said::Standing(Stands::No), Peer::Trainer(from)) if self.left.has(from.0) => {}
            (Said::Standing(Stands::No), Peer::Trainer(from)) => {
                self.standing.remove(&from.0);
            }
            (Said::StepDone(done), Peer::Trainer(from)) => self.step_done(acts, from, done),
            (said, _) => acts.warn(format!("{from} told the conductor {}", said.name())),
        }
    }

    /// Runs the machine on an event and does what it commands.
    fn run(&mut self, acts: &mut Acts<'_>, event: conductor::Event) {
        let mut commands = std::mem::take(&mut self.commanded);
        self.machine.handle(acts.now, event, &mut commands);
        for command in commands.drain(..) {
            self.obey(acts, command);
        }
        self.commanded = commands;
        self.fire(acts);
        self.tell_over(acts);
        if self.patience.is_some_and(|it| it <= acts.now) {
            self.patience = None;
            self.proceed(acts);
        }
        if self.standing_until.is_some_and(|it| it <= acts.now) {
            self.stalled(acts);
        }
    }

    fn obey(&mut self, acts: &mut Acts<'_>, command: conductor::Command) {
        use conductor::Command as Commanded;
        match command {
            Commanded::Publish { step, fillers } => self.publish(acts, step, &fillers),
            Commanded::Header { step, to } => self.header(acts, step, to),
            Commanded::Send { to, message } => acts.put(Command::Send { to, message }),
            Commanded::SendAll { to, message } => acts.put(Command::SendAll { to, message }),
            Commanded::Propose { step, proposal, tables } => {
                self.propose(acts, step, proposal, tables);
            }
            Commanded::DeclareLost(server) => self.declare_lost(acts, server),
            Commanded::PoolLost { step } => {
                self.pool_lost.insert(step);
                acts.say(About::PoolLost, format!("step {step} has no attention server left"));
                self.stop_lost(acts);
            }
            Commanded::Filled { step, round } => {
                self.pool_is_back(acts, step);
                let text = format!("round {} of step {step} is out", round.0);
                acts.put(Command::Log(Level::Information, text));
            }
            Commanded::StepDone(step) => {
                let text = format!("every phase of step {step} is whole");
                acts.put(Command::Log(Level::Detail, text));
                self.whole = step + 1;
                self.pool_lost.remove(&step);
                self.stop_lost(acts);
                self.forget_gone(acts);
                self.proceed(acts);
            }
            Commanded::End(end) => acts.put(Command::End(end)),
        }
    }

    fn declare_lost(&mut self, acts: &mut Acts<'_>, server: ServerId) {
        self.failovers += 1;
        self.failovers_so_far += 1;
        let text = format!("{} is lost; its work moves", Peer::Server(server));
        acts.say(About::ServerLost(server), text);
        self.lost.insert(server.index, server.incarnation);
        acts.put(Command::Lost(server));
    }
}

/// The protocol's name of a process.
fn peer_of(id: PeerId) -> Peer {
    match id.role {
        cadre_protocol::Role::Trainer => Peer::Trainer(TrainerId(id.index)),
        cadre_protocol::Role::Server => {
            Peer::Server(ServerId { index: id.index, incarnation: id.incarnation })
        }
    }
}

#[cfg(test)]
mod tests;
