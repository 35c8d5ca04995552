//! Decides about membership: hellos, addresses, views, and the reports of workers.
//!
//! In: messages of workers. Out: welcomes, rosters, views and [`RunEvent`]s. The first view waits
//! until every trainer and every server that can still come is there, so that a run starts with all
//! its slots; after that each change of a slot makes a view with a higher number.

use std::time::Duration;

use cadre_control::Moment;
use cadre_control::proto::{
    self, Conductor, Drain, FaultsFired, Hello, Kind, Listening, Trainer, Trainers, View,
    ViewNumber, notice, worker_message::Message,
};
use cadre_control::server::LinkId;
use cadre_views::load::{reference, speed};

use super::action::Action;
use super::event::{
    Level, LoadRecord, Role, RunError, RunEvent, ServerKind, ServerRecord, StepRecord, WorkerName,
};
use super::mode::Mode;
use super::state::State;

impl State {
    /// Handles a hello. Welcomes the processes that this run has started.
    pub(crate) fn attached(
        &mut self,
        now: Duration,
        link: LinkId,
        hello: &Hello,
        out: &mut Vec<Action>,
    ) {
        let role = match hello.role() {
            proto::Role::Trainer => Some(Role::Trainer),
            proto::Role::Server => Some(Role::Server),
            proto::Role::Unspecified => None,
        };
        let name = role.zip(u16::try_from(hello.index).ok()).map(|(role, index)| WorkerName {
            role,
            index,
            incarnation: hello.incarnation,
        });
        let conductor = self.conductor_address();
        let Some((name, worker)) =
            name.and_then(|name| self.workers.get_mut(&name).map(|worker| (name, worker)))
        else {
            let reason = format!("{} was not started by this run", hello.name());
            out.push(Action::Refuse { link, reason });
            return;
        };
        // The process that had a broken stream opens it again.
        if worker.link.is_some() && worker.pid != hello.pid {
            let here = worker.pid;
            let reason = format!("{name} is here already, as process {here}; start each rank once");
            let second = hello.pid;
            out.push(Action::Refuse { link, reason: reason.clone() });
            match (&self.mode, name.role) {
                // Nobody knows which of the two processes the user means.
                (Mode::Running | Mode::Interrupted { .. }, Role::Trainer) => {
                    let message =
                        format!("process {second} joins as a rank of the job, but {reason}");
                    self.kill_all_then(Err(RunError::BadInput { message }), out);
                }
                (_, Role::Trainer | Role::Server) => {
                    let text = format!("process {second} was refused: {reason}");
                    self.notice(Level::Warning, text, out);
                }
            }
            return;
        }
        worker.link = Some(link);
        worker.pid = hello.pid;
        worker.silent_since = Some(now);
        worker.server = proto::Server {
            index: hello.index,
            incarnation: hello.incarnation,
            exchange_address: hello.exchange_address.clone(),
            memory_bytes: hello.memory_bytes,
            numerics_id: hello.numerics_id.clone(),
        };
        let leaves = worker.leaves;
        out.push(Action::Welcome { link, conductor });
        if leaves {
            // The stream may have broken before the worker read the request to drain.
            out.push(Action::Send { link, message: Drain::default().into() });
        }
        if !hello.exchange_address.is_empty() {
            let listening = Listening {
                exchange_address: hello.exchange_address.clone(),
                ring_address: hello.ring_address.clone(),
            };
            self.listens(name, listening, out);
        }
    }

    /// Handles the registration of a worker.
    fn listens(&mut self, name: WorkerName, listening: Listening, out: &mut Vec<Action>) {
        let Some(worker) = self.workers.get_mut(&name) else { return };
        let Listening { exchange_address, ring_address } = listening;
        out.push(Action::Address { worker: name, address: exchange_address.clone() });
        worker.server.exchange_address = exchange_address;
        worker.ring_address = ring_address;
        worker.listening = true;
        worker.silent_since = None;
        let (server, link) = (worker.server.clone(), worker.link);
        match name.role {
            Role::Server if worker.leaves => {}
            Role::Server => self.slots.fill(Kind::Dedicated, server),
            Role::Trainer => self.slots.fill(Kind::InPlace, server),
        }
        if let Some(conductor) = self.conductor_address() {
            let others = self.workers.iter().filter(|(other, _)| match name {
                WorkerName { role: Role::Trainer, index: 0, .. } => **other != name,
                WorkerName { .. } => **other == name,
            });
            let links = others.filter_map(|(_, worker)| worker.link);
            out.extend(links.map(|link| Action::Send { link, message: conductor.clone().into() }));
        }
        if name.role == Role::Trainer {
            self.offer_roster(out);
        }
        if name.role == Role::Trainer
            && name.index == 0
            && let (Some(view), Some(link)) = (&self.view, link)
        {
            out.push(Action::Send { link, message: view.clone().into() });
        }
    }

    /// Address of the conductor, once it listens.
    fn conductor_address(&self) -> Option<Conductor> {
        let (name, worker) = self.conductor().filter(|(_, worker)| worker.listening)?;
        Some(Conductor {
            exchange_address: worker.server.exchange_address.clone(),
            ring_address: worker.ring_address.clone(),
            incarnation: name.incarnation,
        })
    }

    fn trainers_listening(&self) -> bool {
        let trainers = self.workers.iter().filter(|(name, _)| name.role == Role::Trainer);
        let listening = trainers.filter(|(_, worker)| worker.listening).count();
        listening == usize::from(self.config.trainers())
    }

    /// Tells all trainers about each other, once all are there.
    fn offer_roster(&self, out: &mut Vec<Action>) {
        if !self.trainers_listening() {
            return;
        }
        let trainers = || self.workers.iter().filter(|(name, _)| name.role == Role::Trainer);
        let roster = Trainers {
            trainers: trainers()
                .map(|(name, worker)| Trainer {
                    incarnation: name.incarnation,
                    exchange_address: worker.server.exchange_address.clone(),
                    ring_address: worker.ring_address.clone(),
                })
                .collect(),
        };
        let links = trainers().filter_map(|(_, worker)| worker.link);
        out.extend(links.map(|link| Action::Send { link, message: roster.clone().into() }));
    }

    /// Sends the conductor a view when the slots differ from the last one.
    pub(crate) fn offer_view(&mut self, out: &mut Vec<Action>) {
        if !matches!(self.mode, Mode::Running | Mode::Interrupted { .. }) {
            return;
        }
        let awaited =
            self.workers.iter().any(|(name, it)| name.role == Role::Server && !it.listening);
        if self.view.is_none() && (awaited || !self.trainers_listening()) {
            return;
        }
        let slots = self.slots.view();
        if self.view.as_ref().is_some_and(|view| view.slots == slots) {
            return;
        }
        self.view_counter += 1;
        let number = ViewNumber { term: u64::from(self.attempt), counter: self.view_counter };
        let view = View { number: Some(number), slots };
        self.view = Some(view.clone());
        if let Some(link) = self.conductor().and_then(|(_, worker)| worker.link) {
            out.push(Action::Send { link, message: view.into() });
        }
    }

    /// Handles a message that a worker sends after its hello.
    pub(crate) fn said(
        &mut self,
        now: Duration,
        name: WorkerName,
        message: Message,
        out: &mut Vec<Action>,
    ) {
        match message {
            Message::Listening(listening) => self.listens(name, listening, out),
            Message::ServerReport(report) => {
                let own = speed(report.cost, report.busy_nanoseconds);
                if let Some(worker) = self.workers.get_mut(&name) {
                    worker.speed = own.or(worker.speed);
                }
                // The expected speed is the median of the run's servers, including this one.
                let expected = reference(self.workers.values().filter_map(|it| it.speed));
                let slowness = |(expected, own)| expected as f64 / own as f64;
                out.push(Action::Emit(RunEvent::Load(LoadRecord {
                    worker: name,
                    step: report.step,
                    queue: report.queue,
                    busy: f64::from(report.busy_ppm) / 1e6,
                    tasks_per_second: report.tasks_per_second,
                    observed_over_expected: expected.zip(own).map_or(0.0, slowness),
                    memory_bytes: report.memory_bytes,
                })));
            }
            // A worker that has lost its stream repeats its last step.
            Message::Progress(progress) if self.reported >= Some(progress.step) => {}
            Message::Progress(progress) => {
                self.reported = Some(progress.step);
                self.step_took = Duration::try_from_secs_f64(progress.seconds).unwrap_or_default();
                self.wait_on(now);
                report(progress, out);
            }
            Message::PhaseReached(reached) => {
                let at = match Moment::of(reached.step, reached.direction()) {
                    Ok(at) => at,
                    Err(why) => {
                        let message = format!("{name}: {why}");
                        return self.kill_all_then(
                            Err(RunError::JobFailed { message, log: Vec::new() }),
                            out,
                        );
                    }
                };
                self.fire(now, at, out);
                // An added slot is sent to the conductor before the next step begins.
                self.offer_view(out);
                if let Some(link) = self.workers.get(&name).and_then(|worker| worker.link) {
                    let (step, direction) = (reached.step, reached.direction);
                    let message = FaultsFired { step, direction }.into();
                    out.push(Action::Send { link, message });
                }
            }
            Message::Notice(notice) => {
                let level = match notice.level() {
                    notice::Level::Error => Level::Error,
                    notice::Level::Warning => Level::Warning,
                    notice::Level::Information | notice::Level::Unspecified => Level::Information,
                };
                let lost = notice.event() == notice::Event::ServerLost;
                self.notice(level, notice.text, out);
                if let (true, Some(server)) = (lost, notice.server) {
                    self.lost(now, &server, out);
                }
            }
            Message::Finished(account) => {
                if !account.sample.is_empty() {
                    self.sample = Some(account.sample.clone());
                }
                if let Some(worker) = self.workers.get_mut(&name) {
                    worker.account = Some(account);
                    worker.leaves_by.get_or_insert(now + self.config.limits.last_words);
                }
                self.settle(now, out);
            }
            Message::Saved(saved) if name.role == Role::Trainer => {
                self.saved = self.saved.max(saved.steps);
            }
            Message::Busy(_) if name.role == Role::Trainer => self.busy(now, name),
            Message::Leaving(_) if name.role == Role::Server => self.leaves(now, name, out),
            // A worker that has drained or sent Bye ends by itself. Only its exit counts.
            Message::Saved(_)
            | Message::Drained(_)
            | Message::Bye(_)
            | Message::Hello(_)
            | Message::Leaving(_)
            | Message::Busy(_)
            | Message::Probed(_) => {}
        }
    }

    /// Handles the notice that a server was asked to end. It leaves when its planned work is over, and is replaced then.
    fn leaves(&mut self, now: Duration, name: WorkerName, out: &mut Vec<Action>) {
        let Some(worker) = self.workers.get_mut(&name) else { return };
        let Some(link) = worker.link.filter(|_| !std::mem::replace(&mut worker.leaves, true))
        else {
            return;
        };
        let text = format!("{name} was asked to end: it leaves when its work is done");
        self.notice(Level::Information, text, out);
        out.push(Action::Send { link, message: Drain::default().into() });
        self.slots.vacate(Kind::Dedicated, name.index, name.incarnation, now);
    }
}

/// Turns a step's progress into events: header, servers, then the step.
fn report(progress: proto::Progress, out: &mut Vec<Action>) {
    let proto::Progress {
        step,
        loss_bits,
        tokens,
        seconds,
        exposed_wait_seconds,
        header_wait_seconds,
        failovers,
        view,
        imbalance,
        imbalance_unplanned,
        header,
        servers,
        steps: _,
        failovers_so_far: _,
        gradient_norm,
        learning_rate,
        plans,
        gap_compute,
        gap_link,
        gap_bytes,
        validation_loss,
    } = progress;
    if !header.is_empty() {
        out.push(Action::Emit(RunEvent::Header { step, line: header }));
    }
    for server in servers {
        let (kind, lives_in) = match server.kind() {
            Kind::InPlace => (ServerKind::InPlace, Role::Trainer),
            Kind::Dedicated | Kind::Unspecified => (ServerKind::Dedicated, Role::Server),
        };
        out.push(Action::Emit(RunEvent::Server(ServerRecord {
            step,
            server: format!("{lives_in}-{}", server.index),
            kind,
            slot: server.slot,
            incarnation: server.incarnation,
            tasks: server.tasks,
            busy_seconds: server.busy_seconds,
            bytes_pulled: server.bytes_pulled,
        })));
    }
    out.push(Action::Emit(RunEvent::Step(StepRecord {
        step,
        loss: f32::from_bits(loss_bits),
        loss_bits: format!("{loss_bits:08x}"),
        lr: learning_rate,
        gradient_norm,
        validation_loss,
        tokens,
        seconds,
        exposed_wait_seconds,
        header_wait_seconds,
        failovers,
        imbalance,
        imbalance_unplanned,
        gap_compute,
        gap_link,
        gap_bytes,
        plans: format!("{plans:016x}"),
        view: view.unwrap_or_default().to_string(),
    })));
}
