//! The conductor's side of the IO thread, in trainer 0: makes headers, publishes them, reports steps.
//!
//! In: lengths from trainers, views from the controller, what everybody rings. Out: headers and rounds to
//! all, and to the controller progress, notices and the places where faults are to be fired.
//!
//! The machine of `cadre-protocol` decides who is lost and where the watermark is; here the steps are put
//! together. Invariant: a header is published once, when every phase of the step before it is whole
//! everywhere, so that it names who fills the slots now.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use cadre_control::proto::{self, notice};
use cadre_exchange::PeerId;
use cadre_protocol::conductor::{Command, Conductor, Event, HEADER};
use cadre_protocol::{At, End, Fillers, Nanos, Peer, ServerId, TrainerId, alive};

use super::envelope::{Ending, Envelope, Lengths, ServerStep, StepDone};
use super::shared::Shared;
use crate::conduct::{Draft, Roster, View};
use crate::phases::Direction;
use crate::planned::{PlannedStep, filler};
use crate::supervisor::Moment;

/// A step that is out.
#[derive(Debug)]
struct Published {
    planned: Arc<PlannedStep>,
    done: BTreeMap<u16, StepDone>,
    servers: Vec<proto::ServerStep>,
}

/// See the module.
pub struct Conducting {
    machine: Conductor,
    draft: Draft,
    roster: Roster,
    view: Option<View>,
    steps: u64,
    /// Step whose header comes next.
    next: u64,
    /// Whether every phase of the step before `next` is whole.
    clear: bool,
    /// Whether `next` was offered to the machine.
    offered: bool,
    lengths: BTreeMap<u64, BTreeMap<u16, Lengths>>,
    published: BTreeMap<u64, Published>,
    failovers: u32,
    /// Faults that are still to come, and those whose firing is awaited.
    faults: BTreeSet<Moment>,
    firing: BTreeSet<Moment>,
    stop: Option<Ending>,
    /// No server is there for some work of the step in progress.
    pool_lost: bool,
    /// The first header waits for all servers until here.
    patience: Nanos,
    /// For the controller.
    pub reports: VecDeque<proto::WorkerMessage>,
    /// Steps to begin in this process.
    pub begin: Vec<Arc<PlannedStep>>,
    /// The job is over; tell every trainer.
    pub ending: Option<Ending>,
    /// Why the job cannot go on.
    pub end: Option<End>,
}

/// Longest wait of the first header for servers that are still starting.
const PATIENCE: Nanos = Nanos::from_millis(20_000);

impl Conducting {
    /// The conductor of the job of `draft`, from step `first` to before `steps`.
    pub fn new(
        draft: Draft,
        settings: cadre_protocol::Settings,
        (first, steps): (u64, u64),
        faults: &[Moment],
        now: Nanos,
    ) -> Self {
        let trainers = draft.trainers;
        Self {
            machine: Conductor::new(trainers, settings, now),
            roster: Roster::new(trainers),
            draft,
            view: None,
            steps,
            next: first,
            clear: true,
            offered: false,
            lengths: BTreeMap::new(),
            published: BTreeMap::new(),
            failovers: 0,
            faults: faults.iter().copied().filter(|it| it.step >= first).collect(),
            firing: BTreeSet::new(),
            stop: None,
            pool_lost: false,
            patience: now.after(PATIENCE),
            reports: VecDeque::new(),
            begin: Vec::new(),
            ending: None,
            end: None,
        }
    }

    /// When something is due.
    pub fn next_deadline(&self) -> Option<Nanos> {
        let waiting = (!self.offered && self.next < self.steps).then_some(self.patience);
        self.machine.next_deadline().into_iter().chain(waiting).min()
    }

    /// Who the trainers are and where they listen.
    pub fn trainers(&mut self, shared: &mut Shared, trainers: Vec<(PeerId, String)>) {
        self.roster.trainers(trainers);
        self.proceed(shared);
    }

    /// The controller offers servers.
    pub fn view(&mut self, shared: &mut Shared, mut view: View) {
        if self.view.as_ref().is_some_and(|it| it.number >= view.number) {
            tracing::warn!("a view that is not newer than the last was refused");
            return;
        }
        if self.draft.reproducible {
            for text in view.refuse_foreign(&self.draft.numerics) {
                self.notice(notice::Level::Warning, text, None);
            }
        }
        let servers: Vec<_> = view.addresses().collect();
        for (id, address) in &servers {
            shared.know(*id, address);
        }
        // A round may name a server that no header did; its address has to be there first.
        for trainer in shared.trainers() {
            shared.ring(trainer, &Envelope::Addresses(servers.clone()));
        }
        self.view = Some(view);
        let running = self.published.keys().next_back().copied();
        if let Some(fillers) = running.and_then(|it| self.fillers_of(it)) {
            self.handle(shared, Event::View(fillers));
        }
        self.proceed(shared);
    }

    /// The controller wants the job to end after the step in progress.
    pub fn stop(&mut self, shared: &mut Shared, checkpoint: bool) {
        self.stop = Some(Ending::Stopped { checkpoint });
        if self.pool_lost {
            // The step in progress may never end; the one before it is worth a checkpoint.
            self.ending.clone_from(&self.stop);
        }
        self.proceed(shared);
    }

    /// The controller has fired the faults of a moment.
    pub fn fired(&mut self, shared: &mut Shared, moment: Moment) {
        self.firing.remove(&moment);
        self.proceed(shared);
    }

    /// A worker tells something.
    pub fn told(&mut self, shared: &mut Shared, from: Peer, envelope: Envelope) {
        match (envelope, from) {
            (Envelope::Lengths(lengths), Peer::Trainer(from)) => {
                self.lengths.entry(lengths.step).or_default().insert(from.0, lengths);
                self.proceed(shared);
            }
            (Envelope::StepDone(done), Peer::Trainer(from)) => self.step_done(shared, from, done),
            (Envelope::ServerStep(done), _) => self.server_step(from, &done),
            (envelope, _) => tracing::warn!("{from} told the conductor {envelope:?}"),
        }
    }

    /// Runs the machine on an event and does what it commands.
    pub fn handle(&mut self, shared: &mut Shared, event: Event) {
        let mut commands = Vec::new();
        self.machine.handle(shared.now(), event, &mut commands);
        let mut answers = Vec::new();
        for command in commands {
            self.obey(shared, command, &mut answers);
        }
        self.fire();
        for answer in answers {
            self.handle(shared, answer);
        }
        if shared.now() >= self.patience {
            self.proceed(shared);
        }
    }

    fn obey(&mut self, shared: &mut Shared, command: Command, answers: &mut Vec<Event>) {
        match command {
            Command::Publish { step, fillers } => {
                answers.extend(self.publish(shared, step, &fillers));
            }
            Command::Header { step, to } => self.header(shared, step, to),
            Command::Send { to, message } => shared.send(to, message),
            Command::Propose { step, proposal, tables } => {
                answers.push(match shared.table(step, &tables) {
                    Ok(_) => Event::Placed { step, proposal },
                    Err(error) => {
                        self.notice(notice::Level::Warning, error.to_string(), None);
                        Event::Unplaceable { step, proposal }
                    }
                });
            }
            Command::DeclareLost(server) => {
                self.failovers += 1;
                let text = format!("{} is lost; its work moves", Peer::Server(server));
                self.notice(
                    notice::Level::Warning,
                    text,
                    Some((notice::Event::ServerLost, server)),
                );
                shared.close(Peer::Server(server));
            }
            Command::PoolLost { step } => {
                self.pool_lost = true;
                let text = format!("step {step} has no attention server left");
                self.report_notice(notice::Level::Warning, text, notice::Event::PoolLost, None);
            }
            Command::Filled { step, round } => {
                if std::mem::take(&mut self.pool_lost) {
                    let text = format!("step {step} goes on");
                    let level = notice::Level::Information;
                    self.report_notice(level, text, notice::Event::PoolBack, None);
                }
                tracing::info!("round {} of step {step} is out", round.0);
            }
            Command::StepDone(step) => {
                tracing::debug!("every phase of step {step} is whole");
                self.clear = true;
                self.pool_lost = false;
                self.proceed(shared);
            }
            Command::End(end) => self.end = Some(end),
        }
    }

    /// Offers the next header, or ends the job, as soon as nothing is missing for it.
    fn proceed(&mut self, shared: &mut Shared) {
        if !self.clear || self.offered || self.ending.is_some() || !self.firing.is_empty() {
            return;
        }
        if self.stop.is_some() || self.next >= self.steps {
            // Only when every trainer has told the end of its last step.
            if self.published.is_empty() {
                self.ending = Some(self.stop.clone().unwrap_or(Ending::Completed));
            }
            return;
        }
        let trainers = usize::from(self.draft.trainers);
        let complete = self.lengths.get(&self.next).is_some_and(|it| it.len() == trainers);
        if !complete || !self.roster.is_complete() {
            return;
        }
        let Some(view) = &self.view else { return };
        if self.published.is_empty() && view.has_vacancy() && shared.now() < self.patience {
            return;
        }
        let lengths = self.lengths.remove(&self.next).expect("it was complete a moment ago");
        match self.draft.prepare(self.next, &lengths, view) {
            Ok(phases) => {
                let fillers = self.draft.fillers(view);
                self.offered = true;
                self.clear = false;
                let step = self.next;
                self.handle(
                    shared,
                    Event::View(fillers.iter().map(|it| it.as_ref().map(filler)).collect()),
                );
                self.handle(shared, Event::HeaderReady { step, phases });
            }
            Err(error) => {
                self.ending = Some(Ending::Failed { reason: error.to_string(), bad_input: true });
            }
        }
    }

    /// Makes the header with these fillers; comes back with an event if some bundle has no place then.
    fn publish(&mut self, shared: &mut Shared, step: u64, fillers: &Fillers) -> Option<Event> {
        let view = self.view.as_ref()?;
        let members = view.members(fillers);
        let header = Arc::new(self.draft.finish(view.number, members));
        let planned = match PlannedStep::new(header) {
            Ok(planned) => Arc::new(planned),
            Err(error) => {
                self.ending = Some(Ending::Failed { reason: error.to_string(), bad_input: true });
                return None;
            }
        };
        if let Err(error) = planned.assign(None, &alive(fillers)) {
            self.notice(notice::Level::Warning, error.to_string(), None);
            // Without a header here, the commands that follow send none.
            self.published.remove(&step);
            return Some(Event::Unplaceable { step, proposal: HEADER });
        }
        tracing::debug!("step {step} is published at {} ms", shared.now().millis());
        let (done, servers) = (BTreeMap::new(), Vec::new());
        self.published.insert(step, Published { planned, done, servers });
        self.next = step + 1;
        self.offered = false;
        None
    }

    fn header(&mut self, shared: &mut Shared, step: u64, to: Peer) {
        let Some(published) = self.published.get(&step) else { return };
        if to == shared.me {
            self.begin.push(Arc::clone(&published.planned));
            return;
        }
        let header = Box::new(published.planned.header.as_ref().clone());
        let trainers = self.roster.list();
        shared.ring(to, &Envelope::Header { header, trainers });
    }

    /// Fillers of a published step's slots by the newest view.
    fn fillers_of(&self, step: u64) -> Option<Fillers> {
        let (view, published) = (self.view.as_ref()?, self.published.get(&step)?);
        let members = view.fill(&published.planned.header.slots);
        Some(members.iter().map(|it| it.as_ref().map(filler)).collect())
    }

    /// Tells the controller that a step has got to where a fault is to be fired.
    fn fire(&mut self) {
        let Some(watermark) = self.machine.watermark() else { return };
        while let Some(&moment) = self.faults.first() {
            let Moment { step, direction } = moment;
            let Some(published) = self.published.get(&step) else { return };
            let first = match direction {
                Direction::Forward => 0,
                Direction::Backward => published.planned.order.forward() as u32,
            };
            if watermark < At::new(step, first) {
                return;
            }
            self.faults.pop_first();
            self.firing.insert(moment);
            let direction = match direction {
                Direction::Forward => proto::Direction::Forward,
                Direction::Backward => proto::Direction::Backward,
            };
            let direction = direction.into();
            self.reports.push_back(proto::PhaseReached { step, direction }.into());
        }
    }

    fn step_done(&mut self, shared: &mut Shared, from: TrainerId, done: StepDone) {
        let step = done.step;
        let Some(published) = self.published.get_mut(&step) else { return };
        published.done.insert(from.0, done);
        if published.done.len() == usize::from(self.draft.trainers) {
            let published = self.published.remove(&step).expect("it was there a moment ago");
            let failovers = std::mem::take(&mut self.failovers);
            let Published { planned, done, servers } = published;
            let done: Vec<_> = done.into_values().collect();
            self.reports
                .push_back(crate::conduct::progress(&planned, &done, servers, failovers).into());
            self.proceed(shared);
        }
    }

    fn server_step(&mut self, from: Peer, done: &ServerStep) {
        let Some(published) = self.published.get_mut(&done.step) else { return };
        // Every trainer has an in-place server; here are those that the step's slots name, and those
        // that took work of lost ones.
        let mut members = published.planned.header.fillers.iter().flatten();
        let named = members.any(|it| filler(it).executor() == Some(from));
        if !named && done.tasks == 0 {
            return;
        }
        published.servers.push(crate::conduct::server_step(&published.planned, from, done));
    }

    fn notice(
        &mut self,
        level: notice::Level,
        text: String,
        event: Option<(notice::Event, ServerId)>,
    ) {
        let (event, server) =
            event.map_or((notice::Event::Unspecified, None), |(event, id)| (event, Some(id)));
        self.report_notice(level, text, event, server);
    }

    fn report_notice(
        &mut self,
        level: notice::Level,
        text: String,
        event: notice::Event,
        server: Option<ServerId>,
    ) {
        let server = server.map(|it| proto::ServerName {
            kind: proto::Kind::Dedicated.into(),
            index: it.index.into(),
            incarnation: it.incarnation,
        });
        let notice = proto::Notice { level: level.into(), text, event: event.into(), server };
        self.reports.push_back(notice.into());
    }
}
