//! The conductor's side of the IO thread, in trainer 0: makes headers, publishes them, reports steps.
//!
//! In: lengths from trainers, views from the controller, what everybody rings. Out: headers and rounds to
//! all, and to the controller progress, notices and the places where faults are to be fired.
//!
//! The machine of `cadre-protocol` decides who is lost and where the watermark is; here the steps are put
//! together. Invariant: a header is published once, when every phase of the step before it is whole
//! everywhere, so that it names who fills the slots now.

mod headers;
mod progress;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use cadre_control::proto::{self, notice};
use cadre_exchange::PeerId;
use cadre_protocol::conductor::{Command, Conductor, Event};
use cadre_protocol::{End, Nanos, Peer};

use super::envelope::{Ending, Envelope, Lengths, StepDone};
use super::shared::{Shared, peer_of};
use crate::conduct::{Draft, Roster, View};
use crate::planned::{PlannedStep, filler};
use crate::supervisor::{Moment, Settings};

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
    /// Of the step in progress.
    failovers: u32,
    /// Of the job, those before this process among them. A report that is read twice counts them once.
    failovers_so_far: u32,
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
    /// The conductor of the job of `draft`, from step `first` to before `steps`. Of what the controller says of the `job` it
    /// takes the faults, and how many failovers there were.
    pub fn new(
        draft: Draft,
        settings: cadre_protocol::Settings,
        (first, steps): (u64, u64),
        job: &Settings,
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
            failovers_so_far: job.failovers,
            faults: job.faults.iter().copied().filter(|it| it.step >= first).collect(),
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

    /// The dedicated servers of the newest view.
    pub fn servers(&self) -> Vec<Peer> {
        let addresses = self.view.iter().flat_map(View::addresses);
        addresses.map(|(id, _)| peer_of(id)).collect()
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
        } else if self.offered {
            // Whom the header in the making counts on may be gone.
            let fillers = self.view.as_ref().map_or_else(Vec::new, |it| self.draft.fillers(it));
            self.handle(
                shared,
                Event::View(fillers.iter().map(|it| it.as_ref().map(filler)).collect()),
            );
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
                self.failovers_so_far += 1;
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
}
