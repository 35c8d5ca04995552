//! Decides what the supervisor does: which process to start, replace or kill, and what to tell to whom.
//!
//! In: [`Input`]s with the time since the run began. Out: [`Action`]s, to be carried out in order.
//! Who registers and what workers say is in [`super::registration`], how trainers end and what
//! follows in [`super::ending`], slots in [`super::slots`].
//!
//! Invariant: `workers` holds exactly the processes that were started and whose end has not been
//! reported; `Done` is the last action and comes only when it is empty. Pure: no clock, no IO.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use cadre_control::Moment;
use cadre_control::proto::{self, Kind, View};
use cadre_control::server::LinkId;

use super::action::{Action, Hit, Input, Overdue, Worker};
use super::config::{Limits, RunConfig};
use super::event::{Level, Role, RunError, RunEvent, WorkerName};
use super::exit::{BAD_INPUT, Exit};
use super::fault::Fault;
use super::mode::{Cause, Mode};
use super::slots::Slots;

/// Early ends of a server within [`Limits::crash_loop`] after which it is not started again: deaths, and exits before it joined.
const MAX_CRASHES: usize = 3;

/// The state of the decisions.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) config: RunConfig,
    pub(crate) attempt: u32,
    /// Restarts since a newer checkpoint was reported.
    pub(crate) restarts: u32,
    /// Steps in the newest reported checkpoint.
    pub(crate) saved: u64,
    /// Value of `saved` when the count of restarts began.
    pub(crate) counted_from: u64,
    pub(crate) mode: Mode,
    pub(crate) workers: BTreeMap<WorkerName, Worker>,
    pub(crate) completed: u16,
    pub(crate) cause: Option<Cause>,
    /// A trainer's refusal of its input after steps were done, while the others save them.
    pub(crate) refused: Option<String>,
    pub(crate) sample: Option<String>,
    /// The last step of this attempt that was reported.
    pub(crate) reported: Option<u64>,
    /// Duration of the last reported step, in any attempt.
    pub(crate) step_took: Duration,
    pub(crate) slots: Slots,
    pub(crate) servers: u16,
    next_incarnation: BTreeMap<u16, u32>,
    crashes: BTreeMap<u16, VecDeque<Duration>>,
    pending_faults: Vec<Fault>,
    pub(crate) view: Option<View>,
    pub(crate) view_counter: u64,
}

impl State {
    /// The state before the first attempt; [`Self::begin`] starts that.
    pub(crate) fn new(config: RunConfig) -> Self {
        let in_place = if config.in_place() { config.trainers() } else { 0 };
        Self {
            attempt: 0,
            restarts: 0,
            saved: 0,
            counted_from: 0,
            mode: Mode::Running,
            workers: BTreeMap::new(),
            completed: 0,
            cause: None,
            refused: None,
            sample: None,
            reported: None,
            step_took: Duration::ZERO,
            slots: Slots::new(config.servers(), in_place, Duration::ZERO),
            servers: config.servers(),
            next_incarnation: BTreeMap::new(),
            crashes: BTreeMap::new(),
            pending_faults: config.faults.clone(),
            view: None,
            view_counter: 0,
            config,
        }
    }

    /// Starts trainers and servers of the next attempt.
    pub(crate) fn begin(&mut self, now: Duration, out: &mut Vec<Action>) {
        self.attempt += 1;
        self.mode = Mode::Running;
        self.completed = 0;
        self.cause = None;
        self.refused = None;
        self.view = None;
        self.view_counter = 0;
        self.reported = None;
        self.crashes.clear();
        self.slots.vacate_all(now);
        out.push(Action::BeginAttempt { number: self.attempt });
        for index in 0..self.config.trainers() {
            let incarnation = self.attempt - 1;
            self.spawn(WorkerName { role: Role::Trainer, index, incarnation }, now, out);
        }
        for index in 0..self.servers {
            self.spawn_server(index, now, out);
        }
    }

    /// Handles one input.
    pub(crate) fn handle(&mut self, now: Duration, input: Input, out: &mut Vec<Action>) {
        match input {
            Input::Attached { link, hello } => self.attached(now, link, &hello, out),
            Input::Said { link, message } => {
                if let Some(worker) = self.by_link(link) {
                    self.said(now, worker, message, out);
                }
            }
            Input::Detached { link } => {
                if let Some(name) = self.by_link(link)
                    && let Some(worker) = self.workers.get_mut(&name)
                {
                    worker.link = None;
                    worker.silent_since = Some(now);
                    if worker.gone.is_some() {
                        self.ended(now, name, out);
                    }
                }
            }
            Input::SpawnFailed { worker, message } => {
                self.workers.remove(&worker);
                self.kill_all_then(Err(RunError::BadInput { message }), out);
            }
            Input::Exited { worker: name, exit } => {
                let Some(worker) = self.workers.get_mut(&name) else { return };
                // What a trainer reported last decides whether the job is done.
                let speaks = name.role == Role::Trainer && worker.link.is_some();
                worker.gone = Some((exit, now + self.config.limits.farewell));
                if !speaks {
                    self.ended(now, name, out);
                }
            }
            Input::Interrupt => self.interrupt(now, out),
            Input::Tick => {}
        }
        self.deadlines(now, out);
        self.offer_view(out);
    }

    /// Latest time at which [`Input::Tick`] is due.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        let Limits { register, .. } = self.config.limits;
        let awaited = || self.workers.values().filter(|it| it.is_awaited());
        let silent = awaited().filter_map(|it| it.silent_since).min().map(|since| since + register);
        let leaving = awaited().filter_map(|it| it.leaves_by).min();
        let reshape = match (&self.mode, &self.view) {
            (Mode::Running, Some(_)) => self.slots.next_reshape(self.reshape_after()),
            _ => None,
        };
        let alive = self.workers.values().filter(|it| !it.killed);
        let until = alive.filter_map(|it| self.mode.until_of(it)).min();
        let gone = self.workers.values().filter_map(|it| it.gone.as_ref().map(|it| it.1)).min();
        [silent, leaving, reshape, until, gone].into_iter().flatten().min()
    }

    /// Handles the end of a process, after all its messages.
    fn ended(&mut self, now: Duration, name: WorkerName, out: &mut Vec<Action>) {
        let Some(mut worker) = self.workers.remove(&name) else { return };
        let (exit, _) = worker.gone.take().unwrap_or_default();
        let how = exit.to_string();
        out.push(Action::Emit(RunEvent::ProcessEnded { worker: name, how }));
        match name.role {
            Role::Trainer => self.trainer_ended(now, name, &worker, exit, out),
            Role::Server => self.server_ended(now, name, &worker, &exit, out),
        }
        self.settle(now, out);
    }

    fn reshape_after(&self) -> Duration {
        Duration::from_secs(u64::from(self.config.pool.spec.health.reshape_after_seconds))
    }

    fn by_link(&self, link: LinkId) -> Option<WorkerName> {
        self.workers.iter().find(|(_, it)| it.link == Some(link)).map(|(name, _)| *name)
    }

    /// Trainer 0, while it lives.
    pub(crate) fn conductor(&self) -> Option<(WorkerName, &Worker)> {
        let first = self.workers.first_key_value().map(|(name, worker)| (*name, worker));
        first.filter(|(name, _)| name.role == Role::Trainer && name.index == 0)
    }

    fn spawn(&mut self, name: WorkerName, now: Duration, out: &mut Vec<Action>) {
        self.workers.insert(name, Worker { silent_since: Some(now), ..Worker::default() });
        out.push(Action::Spawn(name));
    }

    fn spawn_server(&mut self, index: u16, now: Duration, out: &mut Vec<Action>) {
        let next = self.next_incarnation.entry(index).or_default();
        let name = WorkerName { role: Role::Server, index, incarnation: *next };
        *next += 1;
        self.spawn(name, now, out);
    }

    /// Kills workers that are overdue, and removes slots that were vacant for too long.
    fn deadlines(&mut self, now: Duration, out: &mut Vec<Action>) {
        let due = |it: &Worker| it.gone.as_ref().is_some_and(|it| it.1 <= now);
        let gone = self.workers.iter().filter(|(_, it)| due(it)).map(|(name, _)| *name);
        for name in gone.collect::<Vec<_>>() {
            self.ended(now, name, out);
        }
        for (name, worker) in self.workers.iter_mut().filter(|(_, it)| !it.killed) {
            if self.mode.until_of(worker).is_some_and(|until| until <= now) {
                worker.killed = true;
                out.push(Action::Kill(*name));
            }
        }
        let Limits { register, .. } = self.config.limits;
        let overdue = |it: &Worker| {
            let stays = it.leaves_by.is_some_and(|until| until <= now);
            stays || it.silent_since.is_some_and(|since| since + register <= now)
        };
        let late: Vec<WorkerName> = self
            .workers
            .iter()
            .filter(|(_, it)| it.is_awaited() && overdue(it))
            .map(|(name, _)| *name)
            .collect();
        for name in late {
            let Some(worker) = self.workers.get_mut(&name) else { continue };
            let late = match (worker.leaves_by, worker.listening) {
                (Some(_), _) => Overdue::Leaving,
                (None, true) => Overdue::Since,
                (None, false) => Overdue::AtStart,
            };
            worker.overdue = Some(late);
            worker.killed = true;
            let text = match late {
                Overdue::Leaving => format!("{name} has said its last words and stays; ending it"),
                Overdue::AtStart | Overdue::Since => {
                    format!("{name} has not registered within {register:?}; ending it")
                }
            };
            self.notice(Level::Warning, text, out);
            out.push(Action::Kill(name));
        }
        if let (Mode::Running, Some(_)) = (&self.mode, &self.view) {
            let after = self.reshape_after();
            for slot in self.slots.reshape(now, after) {
                let text = format!(
                    "slot {slot} has been vacant for {after:?} and leaves the view; \
                     later steps may have other bits"
                );
                self.notice(Level::Warning, text, out);
            }
        }
    }

    #[allow(clippy::unused_self, reason = "reads as what the supervisor says")]
    pub(crate) fn notice(&self, level: Level, text: String, out: &mut Vec<Action>) {
        out.push(Action::Emit(RunEvent::Notice { level, text }));
    }

    /// SIGKILL to everything that runs.
    pub(crate) fn kill_all(&mut self, out: &mut Vec<Action>) {
        for (name, worker) in self.workers.iter_mut().filter(|(_, it)| !it.killed) {
            worker.killed = true;
            out.push(Action::Kill(*name));
        }
    }

    /// A server has ended: its slot becomes vacant. A new server is started if that may help.
    fn server_ended(
        &mut self,
        now: Duration,
        name: WorkerName,
        worker: &Worker,
        exit: &Exit,
        out: &mut Vec<Action>,
    ) {
        self.slots.vacate(Kind::Dedicated, name.index, name.incarnation, now);
        if !matches!(self.mode, Mode::Running | Mode::Interrupted { .. }) {
            return;
        }
        if exit.code == Some(BAD_INPUT) && !worker.listening {
            let message = exit.last_words(name, worker.account.as_ref());
            self.kill_all_then(Err(RunError::BadInput { message }), out);
            return;
        }
        let crashes = self.crashes.entry(name.index).or_default();
        // A server that has not joined cannot announce its leaving. Something may end each replacement too, so these ends count.
        let is_early = !worker.listening && exit.was_asked();
        let has_left = worker.leaves && exit.code == Some(0);
        if worker.hit.is_none() && !has_left {
            crashes.push_back(now);
        }
        let within = self.config.limits.crash_loop;
        while crashes.front().is_some_and(|&first| first + within < now) {
            crashes.pop_front();
        }
        let loops = crashes.len() >= MAX_CRASHES;
        let then = if !self.config.replace {
            "its slot stays vacant".to_owned()
        } else if worker.overdue == Some(Overdue::AtStart) {
            "it never registered and is not started again".to_owned()
        } else if loops && is_early {
            format!(
                "it ended {MAX_CRASHES} times within {within:?}, now by SIGTERM before it joined, and is not started again"
            )
        } else if loops {
            format!("it died {MAX_CRASHES} times within {within:?} and is not started again")
        } else {
            "starting a replacement".to_owned()
        };
        if has_left || is_early && !loops {
            self.notice(Level::Information, format!("{name} has left; {then}"), out);
        } else {
            self.notice(Level::Warning, format!("{name}: {exit}; {then}"), out);
        }
        if self.config.replace && worker.overdue != Some(Overdue::AtStart) && !loops {
            self.spawn_server(name.index, now, out);
        }
    }

    /// Fires the faults that the user ordered for this moment, then lets the conductor continue.
    pub(crate) fn fire(&mut self, now: Duration, at: Moment, out: &mut Vec<Action>) {
        let (due, rest) = self.pending_faults.iter().partition(|it| it.at() == at);
        self.pending_faults = rest;
        let due: Vec<Fault> = due;
        for fault in due {
            let victim = match fault {
                Fault::AddServer { .. } => {
                    let index = self.servers;
                    self.servers += 1;
                    self.slots.append(index, now);
                    self.spawn_server(index, now, out);
                    self.notice(Level::Information, format!("{fault}: server {index} starts"), out);
                    continue;
                }
                Fault::KillServer { index, .. } | Fault::StopServer { index, .. } => {
                    self.victim(Role::Server, index)
                }
                Fault::KillTrainer { index, .. } => {
                    let last = self.config.trainers() - 1;
                    self.victim(Role::Trainer, index.or(Some(last)))
                }
            };
            let Some(name) = victim else {
                let text = format!("{fault} hits nobody: no such worker runs now");
                self.notice(Level::Warning, text, out);
                continue;
            };
            self.notice(Level::Information, format!("{fault} hits {name}"), out);
            let worker = self.workers.get_mut(&name).expect("the victim was found among them");
            if let Fault::StopServer { .. } = fault {
                worker.hit = Some(Hit::Paused);
                out.push(Action::Pause(name));
            } else {
                worker.hit = Some(Hit::Killed);
                out.push(Action::Kill(name));
            }
        }
    }

    /// The worker that a fault hits. It is registered, alive and was not hit before.
    fn victim(&self, role: Role, index: Option<u16>) -> Option<WorkerName> {
        let alive = |it: &Worker| it.listening && it.hit.is_none() && !it.killed;
        let mut names = self.workers.iter().filter(|(_, it)| alive(it)).map(|(name, _)| *name);
        names.find(|it| it.role == role && index.is_none_or(|index| index == it.index))
    }

    /// Moments of faults that have not fired.
    pub(crate) fn pending_moments(&self) -> Vec<Moment> {
        let mut moments: Vec<Moment> = self.pending_faults.iter().map(Fault::at).collect();
        moments.sort_unstable();
        moments.dedup();
        moments
    }

    /// Handles the conductor's report of a lost server: its slot becomes vacant, and it is replaced as a dead one.
    pub(crate) fn lost(
        &mut self,
        now: Duration,
        server: &proto::ServerName,
        out: &mut Vec<Action>,
    ) {
        let index = u16::try_from(server.index).unwrap_or(u16::MAX);
        let name = WorkerName { role: Role::Server, index, incarnation: server.incarnation };
        if server.kind() != Kind::Dedicated {
            return;
        }
        self.slots.vacate(Kind::Dedicated, index, server.incarnation, now);
        if let Some(worker) = self.workers.get_mut(&name)
            && self.config.replace
            && !worker.killed
        {
            worker.killed = true;
            out.push(Action::Kill(name));
        }
    }
}
