//! The conductor's side of the IO thread, in trainer 0: makes headers, publishes them, reports steps.
//!
//! In: lengths from trainers, views from the controller, what everybody rings. Out: headers and rounds to
//! all, and to the controller progress, notices and the places where faults are to be fired.
//!
//! The machine of `cadre-protocol` decides who is lost and where the watermark is; here the steps are put
//! together. What costs as much as a step has documents is done by the planning thread. Invariant: a header is published once. It goes out while the step before it runs if it has the slots of that one, so
//! that a place in a view means the same slot of every step that is out; else when every phase of that step is whole everywhere.

mod agree;
mod headers;
mod progress;
pub(crate) mod reports;
mod stopping;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cadre_control::proto::{self, notice};
use cadre_control::{Moment, Settings};
use cadre_crds::Wire;
use cadre_exchange::PeerId;
use cadre_protocol::conductor::{Command, Conductor, Event};
use cadre_protocol::{End, Fillers, Nanos, Peer};
use cadre_step::conduct::{Draft, Roster, View};
use cadre_step::envelope::{Ending, Lengths, Said, Stands, StepDone};
use cadre_step::planned::PlannedStep;
use cadre_step::words::Body;

use self::agree::{Counts, STANDING_TOGETHER};
use super::encoded::Encoded;
use super::exchange::Exchange;
use super::output::Output;
use super::planning::{Asker, Figures, Ready};
use super::shared::{Shared, peer_of};

/// A step that is out.
#[derive(Debug)]
struct Published {
    planned: Arc<PlannedStep>,
    /// Until it begins here.
    ready: Option<Ready>,
    /// What the controller is told of its plans.
    figures: Figures,
    /// The header as it is told, until it is; then as a word, and who was told.
    encoded: Option<Encoded>,
    word: Option<(Arc<Body>, BTreeSet<Peer>)>,
    done: BTreeMap<u16, StepDone>,
    servers: BTreeMap<Peer, proto::ServerStep>,
    /// Who fills its slots in its rounds, if any were proposed.
    tables: Vec<Fillers>,
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

/// See the module.
pub struct Conducting {
    machine: Conductor,
    draft: Draft,
    roster: Roster,
    view: Option<View>,
    counts: Counts,
    /// Trainers whose main threads stand still, and what they have not done; the job ends then.
    standing: BTreeMap<u16, String>,
    standing_until: Option<Nanos>,
    /// Trainers that have left while a step was out that was not over there.
    left: BTreeSet<u16>,
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
    published: BTreeMap<u64, Published>,
    /// What was proposed before its step began here: step, proposal, tables.
    proposal: Option<(u64, u64, Vec<Fillers>)>,
    /// Newest incarnation that was declared lost, by index of the server.
    lost: BTreeMap<u16, u32>,
    /// Since the last step that was over.
    failovers: u32,
    /// Of the job, those before this process among them. A report that is read twice counts them once.
    failovers_so_far: u32,
    /// Faults that are still to come, and those whose firing is awaited.
    faults: BTreeSet<Moment>,
    firing: BTreeSet<Moment>,
    stop: Option<Ending>,
    /// Steps for some work of which no server is there.
    pool_lost: BTreeSet<u64>,
    /// The first header waits for all servers until here; nothing once that is over.
    patience: Option<Nanos>,
    /// The step that this process is about to begin.
    begins: Option<u64>,
    /// Why no step follows, once that is so.
    ending: Option<Ending>,
}

/// Longest wait of the first header for servers that are still starting.
const SERVERS_START_WITHIN: Nanos = Nanos::from_millis(20_000);

impl Conducting {
    /// The conductor of the job of `draft`, from step `first` on. Of what the controller says of the `job` it takes the faults, and
    /// how many failovers there were.
    pub fn new(
        draft: Draft,
        settings: cadre_protocol::Settings,
        first: u64,
        job: &Settings,
        now: Nanos,
    ) -> Self {
        let trainers = draft.trainers;
        Self {
            machine: Conductor::new(trainers, settings, now),
            roster: Roster::new(trainers),
            draft,
            view: None,
            counts: Counts::default(),
            standing: BTreeMap::new(),
            standing_until: None,
            left: BTreeSet::new(),
            next: first,
            whole: first,
            making: false,
            offered: false,
            lengths: BTreeMap::new(),
            publishing: None,
            published: BTreeMap::new(),
            proposal: None,
            lost: BTreeMap::new(),
            failovers: 0,
            failovers_so_far: job.failovers,
            faults: job.faults.iter().copied().filter(|it| it.step >= first).collect(),
            firing: BTreeSet::new(),
            stop: None,
            pool_lost: BTreeSet::new(),
            patience: Some(now.after(SERVERS_START_WITHIN)),
            begins: None,
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
        let own = self.patience.into_iter().chain(self.standing_until);
        self.machine.next_deadline().into_iter().chain(own).min()
    }

    /// Who the trainers are and where they listen.
    pub fn trainers(
        &mut self,
        shared: &mut Shared<impl Exchange>,
        trainers: Vec<(PeerId, String)>,
    ) {
        self.roster.trainers(trainers);
        self.tell_addresses(shared);
        self.proceed(shared);
    }

    /// The controller offers servers.
    pub fn view(&mut self, shared: &mut Shared<impl Exchange>, mut view: View) {
        if self.view.as_ref().is_some_and(|it| it.number >= view.number) {
            tracing::warn!("a view that is not newer than the last was refused");
            return;
        }
        if self.draft.wire == Wire::F32 {
            // Their GPUs have no part in such rows.
            for id in view.slots.iter_mut().filter_map(|it| it.numerics.as_mut()) {
                *id = cadre_kernels::numerics_of_cpu(id).to_owned();
            }
        }
        if self.draft.reproducible {
            for text in view.refuse_foreign(&self.draft.numerics) {
                Self::notice(shared, notice::Level::Warning, text, None);
            }
        }
        let servers: Vec<_> = view.addresses().collect();
        let before: BTreeSet<_> = self.servers().into_iter().collect();
        let mut stay = BTreeSet::new();
        for (id, address) in &servers {
            let peer = peer_of(*id);
            if before.contains(&peer) && shared.address_of(peer).is_some_and(|it| it == address) {
                stay.insert(peer);
            }
            shared.know(*id, address);
        }
        // Another job may have had whoever comes back under its name, or have whom no view names: what it was told is gone.
        for (_, told) in self.published.values_mut().filter_map(|it| it.word.as_mut()) {
            told.retain(|it| matches!(it, Peer::Trainer(_)) || stay.contains(it));
        }
        self.view = Some(view);
        self.tell_addresses(shared);
        let newest = self.published.keys().next_back().copied();
        let fillers = if self.offered {
            // Whom the header in the making counts on may be gone.
            Some(self.next_fillers())
        } else {
            newest.and_then(|it| self.fillers_of(it))
        };
        if let Some(fillers) = fillers {
            self.handle(shared, Event::View(fillers));
        }
        self.forget_servers(shared);
        self.proceed(shared);
    }

    /// A peer beats in another life than the one that heard the headers of live steps: this one has to hear them, too.
    pub fn came_back(&mut self, peer: Peer) {
        tracing::info!("{peer} has come back: it is told the steps that are out again");
        for (_, told) in self.published.values_mut().filter_map(|it| it.word.as_mut()) {
            told.remove(&peer);
        }
    }

    /// Whether a peer is told anything: not a server that is lost, nor one that no view and no live step names any more.
    fn hears(&self, peer: Peer) -> bool {
        match peer {
            Peer::Trainer(_) => true,
            Peer::Server(id) => self.machine.watches(id) || self.servers().contains(&peer),
        }
    }

    /// Servers that have left are owed nothing.
    fn forget_servers(&mut self, shared: &mut Shared<impl Exchange>) {
        for peer in shared.telling.owed_to() {
            if !self.hears(peer) {
                shared.forget(peer);
                let words = self.published.values_mut().filter_map(|it| it.word.as_mut());
                words.for_each(|(_, told)| {
                    told.remove(&peer);
                });
            }
        }
    }

    /// A round may name a server that no header did; its address has to be there first.
    fn tell_addresses(&self, shared: &mut Shared<impl Exchange>) {
        let Some(view) = &self.view else { return };
        let body = shared.compose(&Said::Addresses(view.addresses().collect()));
        for trainer in shared.trainers() {
            shared.tell(trainer, &body);
        }
    }

    /// Whether a server was declared lost: what it says of the job does not count any more.
    pub fn has_lost(&self, peer: Peer) -> bool {
        match peer {
            Peer::Trainer(_) => false,
            Peer::Server(id) => self.lost.get(&id.index).is_some_and(|it| *it >= id.incarnation),
        }
    }

    /// The controller has fired the faults of a moment.
    pub fn fired(&mut self, shared: &mut Shared<impl Exchange>, moment: Moment) {
        self.firing.remove(&moment);
        self.proceed(shared);
    }

    /// A worker tells something of itself. Ends of steps that are not out change nothing, nor does what is told twice.
    pub fn told(&mut self, shared: &mut Shared<impl Exchange>, from: Peer, said: Said) {
        match (said, from) {
            (Said::ServerStep(done), _) => self.server_step(from, &done),
            (_, Peer::Trainer(from)) if from.0 >= self.draft.trainers => {
                tracing::warn!("the job has no trainer {}: it is not believed", from.0);
            }
            (Said::Lengths(lengths), Peer::Trainer(from)) => self.lengths(shared, from, lengths),
            (Said::Steps(steps), Peer::Trainer(from)) => self.counted(shared, from.0, steps),
            (Said::Standing(Stands::Still(what)), Peer::Trainer(from)) => {
                self.standing.insert(from.0, what);
                self.standing_until.get_or_insert(shared.now().after(STANDING_TOGETHER));
            }
            (Said::Standing(Stands::Left(what)), Peer::Trainer(from)) => {
                self.left(shared, from.0, what);
            }
            (Said::Standing(Stands::No), Peer::Trainer(from)) => {
                self.standing.remove(&from.0);
            }
            (Said::StepDone(done), Peer::Trainer(from)) => self.step_done(shared, from, done),
            (said, _) => tracing::warn!("{from} told the conductor {}", said.name()),
        }
    }

    /// Runs the machine on an event and does what it commands.
    pub fn handle(&mut self, shared: &mut Shared<impl Exchange>, event: Event) {
        let mut commands = Vec::new();
        self.machine.handle(shared.now(), event, &mut commands);
        for command in commands {
            self.obey(shared, command);
        }
        self.fire(shared);
        if self.patience.is_some_and(|it| it <= shared.now()) {
            self.patience = None;
            self.proceed(shared);
        }
        if self.standing_until.is_some_and(|it| it <= shared.now()) {
            self.stalled(shared);
        }
    }

    fn obey(&mut self, shared: &mut Shared<impl Exchange>, command: Command) {
        match command {
            Command::Publish { step, fillers } => self.publish(shared, step, &fillers),
            Command::Header { step, to } => self.header(shared, step, to),
            Command::Send { to, message } => shared.send(to, message),
            Command::SendAll { to, message } => shared.send_all(&to, message),
            Command::Propose { step, proposal, tables } => {
                if let Some(it) = self.published.get_mut(&step) {
                    it.tables.clone_from(&tables);
                }
                // A server may be lost before this process begins the step.
                let begins = self.begins == Some(step);
                match self.publishing.as_mut().filter(|it| it.step == step) {
                    Some(it) => it.proposal = Some((proposal, tables)),
                    None if begins => self.proposal = Some((step, proposal, tables)),
                    None => shared.reassign(step, tables, Asker::Conductor(proposal)),
                }
            }
            Command::DeclareLost(server) => {
                self.failovers += 1;
                self.failovers_so_far += 1;
                let text = format!("{} is lost; its work moves", Peer::Server(server));
                Self::notice(
                    shared,
                    notice::Level::Warning,
                    text,
                    Some((notice::Event::ServerLost, server)),
                );
                self.lost.insert(server.index, server.incarnation);
                shared.forget(Peer::Server(server));
                shared.close(Peer::Server(server));
            }
            Command::PoolLost { step } => {
                self.pool_lost.insert(step);
                let text = format!("step {step} has no attention server left");
                let level = notice::Level::Warning;
                Self::report_notice(shared, level, text, notice::Event::PoolLost, None);
                self.stop_lost(shared);
            }
            Command::Filled { step, round } => {
                self.pool_is_back(shared, step);
                tracing::info!("round {} of step {step} is out", round.0);
            }
            Command::StepDone(step) => {
                tracing::debug!("every phase of step {step} is whole");
                self.whole = step + 1;
                self.pool_lost.remove(&step);
                self.stop_lost(shared);
                self.forget_servers(shared);
                self.proceed(shared);
            }
            // Silent since they left.
            Command::End(End::TrainersDead(dead))
                if dead.iter().any(|it| self.left.contains(&it.0)) =>
            {
                self.stalled(shared);
            }
            Command::End(end) => shared.outputs.put(Output::JobEnd(end)),
        }
    }
}

#[cfg(test)]
mod tests;
