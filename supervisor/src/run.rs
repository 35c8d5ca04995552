//! Carries out the actions of the decisions, and passes events to them.
//!
//! In: a [`RunConfig`]. Out: events, and the end of the run. The caller's thread owns everything here. It has to outlive all
//! workers, since they die with it. Other threads only append to its queue: the control service, one waiting thread per process,
//! and [`Interrupt`].

use std::collections::{BTreeMap, VecDeque};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use cadre_control::manifest::BesideManifest;
use cadre_control::proto::{self, Welcome};
use cadre_control::server::{self, Event, Link, LinkId};
use cadre_control::{CONTROL_VERSION, DATA_VERSION, Settings, job_secret};
use cadre_crds::Encryption;
use rustix::process::Signal;

use super::action::{Action, Input};
use super::config::RunConfig;
use super::event::{Attempt, Outcome, ProcessRecord, RunError, RunEvent, WorkerName};
use super::outgoing::{Gate, Outgoing};
use super::room::Room;
use super::spawn::Processes;
use super::state::State;

/// Maximum events that wait for the supervisor. A thread that sends a further one blocks.
const MAX_EVENTS: usize = 4096;
/// Longest sleep when nothing is due.
const LONGEST_WAIT: Duration = Duration::from_hours(1);
/// Interval at which events are offered again while their reader is stopped.
const EVENTS_AGAIN_EVERY: Duration = Duration::from_millis(50);

/// Runs a job to its end. Blocks. When it returns, no process that it started is left, and all events are in the queue. While the
/// queue is full, load reports are dropped and messages of workers are not read. The job trains on, and an interrupt still ends
/// it.
///
/// # Errors
///
/// [`RunError::BadInput`] for what cannot be run, [`RunError::JobFailed`] for what did not finish,
/// [`RunError::Interrupted`] when the user ended it.
pub fn run(
    config: RunConfig,
    events: SyncSender<RunEvent>,
    interrupt: &Interrupt,
) -> Result<Outcome, RunError> {
    let checkpoints = config.out.join("checkpoints");
    let newest = if config.resume { newest_checkpoint(&checkpoints) } else { None };
    if config.resume && newest.is_none() {
        return Err(bad_input(format!(
            "nothing to resume: {} has no checkpoint; leave --resume out",
            checkpoints.display()
        )));
    }
    config.check(newest.as_ref().map_or(0, |(step, _)| *step))?;
    let room = Room::new().map_err(bad_input)?;
    let socket = room.socket();
    let listener = UnixListener::bind(&socket).map_err(|source| {
        bad_input(format!("control socket {}: {source}; set TMPDIR", socket.display()))
    })?;
    let (wake, queue) = sync_channel(MAX_EVENTS);
    let (control_events, mut from_control) = tokio::sync::mpsc::channel(MAX_EVENTS);
    let control = server::spawn(listener, DATA_VERSION, control_events)
        .map_err(|error| bad_input(error.to_string()))?;
    let (forward, gate) = (wake.clone(), Gate::default());
    let passed = gate.clone();
    std::thread::Builder::new()
        .name("control-events".into())
        .spawn(move || {
            while let Some(event) = from_control.blocking_recv() {
                passed.pass();
                if forward.send(Wake::Control(Box::new(event))).is_err() {
                    return;
                }
            }
        })
        .map_err(|source| bad_input(format!("no thread: {source}; raise the limit")))?;
    interrupt.listen(wake.clone());
    let processes = Processes::new(&config, &socket).map_err(|it| bad_input(it.to_string()))?;
    let mut shell = Shell {
        secret: job_secret()
            .map_err(|source| bad_input(format!("no randomness for the job's secret: {source}")))?
            .to_vec(),
        settings: settings(&config, checkpoints)?,
        state: State::new(config),
        started: Instant::now(),
        stood: Duration::ZERO,
        processes,
        records: BTreeMap::new(),
        links: BTreeMap::new(),
        events: Outgoing::new(events, gate),
        wake,
    };
    let result = shell.run(&queue);
    shell.events.finish();
    // The order matters: links first, so that the service has no peers left; then the service, then
    // the room.
    drop(shell);
    drop(control);
    drop(room);
    result
}

/// Asks a run to end; clones are the same. The first request asks for a checkpoint, the second kills.
#[derive(Clone, Debug, Default)]
pub struct Interrupt {
    inner: Arc<Mutex<Raised>>,
}

#[derive(Debug, Default)]
struct Raised {
    /// Interrupts before the run began to listen.
    early: usize,
    run: Option<SyncSender<Wake>>,
}

impl Interrupt {
    /// Requests the end; may be called from any thread, before, during and after the run.
    pub fn raise(&self) {
        let mut raised = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        match &raised.run {
            // A queue that is full or gone has no use for it.
            Some(run) => drop(run.try_send(Wake::Interrupt)),
            None => raised.early += 1,
        }
    }

    fn listen(&self, run: SyncSender<Wake>) {
        let mut raised = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..std::mem::take(&mut raised.early) {
            let _ = run.try_send(Wake::Interrupt);
        }
        raised.run = Some(run);
    }
}

/// What wakes the supervisor.
#[derive(Debug)]
enum Wake {
    Control(Box<Event>),
    Ended(WorkerName),
    Interrupt,
}

struct Shell {
    state: State,
    settings: Settings,
    secret: Vec<u8>,
    started: Instant,
    /// Time in which workers' messages were not read, and which does not count as their silence.
    stood: Duration,
    processes: Processes,
    records: BTreeMap<WorkerName, ProcessRecord>,
    links: BTreeMap<LinkId, Link>,
    events: Outgoing,
    wake: SyncSender<Wake>,
}

impl Shell {
    fn run(&mut self, queue: &std::sync::mpsc::Receiver<Wake>) -> Result<Outcome, RunError> {
        let mut actions = Vec::new();
        self.state.begin(self.now(), &mut actions);
        loop {
            if let Some(result) = self.act_all(actions) {
                return result;
            }
            self.events.go_on();
            let held_up = self.events.is_held_up();
            let due = self.state.next_deadline().unwrap_or(Duration::MAX);
            let patience = due.saturating_sub(self.now());
            let longest = if held_up { EVENTS_AGAIN_EVERY } else { LONGEST_WAIT };
            let since = Instant::now();
            let woken = queue.recv_timeout(patience.min(longest));
            // The deadlines of a job that is ending count all the same.
            if held_up && self.state.trains() {
                self.stood += since.elapsed();
            }
            let input = match woken {
                Ok(wake) => self.input(wake),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Input::Tick,
            };
            actions = Vec::new();
            self.state.handle(self.now(), input, &mut actions);
        }
    }

    /// Time since the run began, without the time in which workers' messages were not read.
    fn now(&self) -> Duration {
        self.started.elapsed().saturating_sub(self.stood)
    }

    fn input(&mut self, wake: Wake) -> Input {
        match wake {
            Wake::Control(event) => match *event {
                Event::Attached { link, hello, caller: _ } => {
                    let id = link.id();
                    self.links.insert(id, link);
                    Input::Attached { link: id, hello: *hello }
                }
                Event::Message { link, message } => Input::Said { link, message },
                Event::Detached { link } => {
                    // All earlier messages of the link have been handled, so a worker that has said
                    // goodbye may exit.
                    if let Some(link) = self.links.remove(&link) {
                        link.farewell();
                    }
                    Input::Detached { link }
                }
            },
            Wake::Ended(worker) => {
                self.records.remove(&worker);
                Input::Exited { worker, exit: self.processes.bury(worker) }
            }
            Wake::Interrupt => Input::Interrupt,
        }
    }

    /// Carries out actions, and the actions that follow from them, until the list is empty or the run is over.
    fn act_all(&mut self, actions: Vec<Action>) -> Option<Result<Outcome, RunError>> {
        let mut actions = VecDeque::from(actions);
        while let Some(action) = actions.pop_front() {
            match action {
                Action::Done(result) => return Some(result),
                Action::BeginAttempt { number } => self.begin(number),
                Action::Spawn(worker) => {
                    if let Err(message) = self.spawn(worker) {
                        let mut more = Vec::new();
                        let failed = Input::SpawnFailed { worker, message };
                        self.state.handle(self.now(), failed, &mut more);
                        actions.extend(more);
                    }
                }
                Action::Kill(worker) => self.processes.signal(worker, Signal::KILL),
                Action::Pause(worker) => self.processes.signal(worker, Signal::STOP),
                Action::Welcome { link, conductor } => self.welcome(link, conductor),
                Action::Refuse { link, reason } => {
                    if let Some(link) = self.links.remove(&link) {
                        link.refuse(&reason);
                    }
                }
                Action::Send { link, message } => self.send(link, message),
                Action::Address { worker, address } => {
                    if let Some(record) = self.records.get_mut(&worker) {
                        record.address = address;
                        let record = record.clone();
                        self.emit(RunEvent::Process(record));
                    }
                }
                Action::Emit(event) => self.emit(event),
            }
        }
        None
    }

    /// Sends a worker its job. A worker whose control version lacks a field that the job needs is
    /// refused.
    fn welcome(&mut self, link: LinkId, conductor: Option<proto::Conductor>) {
        self.settings.faults = self.state.pending_moments();
        let Some(to) = self.links.get(&link) else { return };
        match self.settings.to_text(to.control_version()) {
            Ok(settings) => {
                let welcome = Welcome {
                    job_secret: self.secret.clone(),
                    conductor,
                    settings,
                    control_version: CONTROL_VERSION,
                    session: String::new(),
                };
                self.send(link, welcome);
            }
            Err(error) => {
                if let Some(link) = self.links.remove(&link) {
                    link.refuse(&error.to_string());
                }
            }
        }
    }

    fn emit(&mut self, event: RunEvent) {
        // If the receiver is gone, the run goes on and its result is still returned.
        self.events.put(event);
    }

    fn send(&mut self, link: LinkId, message: impl Into<cadre_control::proto::ControllerMessage>) {
        if let Some(to) = self.links.get(&link)
            && let Err(error) = to.send(message)
        {
            tracing::warn!(%error, "link dropped");
            self.links.remove(&link);
        }
    }

    /// Prepares an attempt. All but the first of a new run resume from the newest checkpoint.
    fn begin(&mut self, number: u32) {
        let goes_on = number > 1 || self.state.config.resume;
        let newest = if goes_on { newest_checkpoint(&self.settings.checkpoints) } else { None };
        let (first_step, checkpoint) = match newest {
            Some((step, path)) => (step, Some(path)),
            None => (0, None),
        };
        self.settings.attempt = number;
        self.settings.resume.clone_from(&checkpoint);
        self.emit(RunEvent::Attempt(Attempt { number, first_step, checkpoint }));
    }

    fn spawn(&mut self, worker: WorkerName) -> Result<(), String> {
        let wake = self.wake.clone();
        // If the receiver is gone, the run is over.
        let ended = move || drop(wake.send(Wake::Ended(worker)));
        let pid = self
            .processes
            .spawn(worker, self.settings.attempt, ended)
            .map_err(|error| error.to_string())?;
        let started = SystemTime::now();
        let record = ProcessRecord { worker, pid, address: String::new(), started };
        self.records.insert(worker, record.clone());
        self.emit(RunEvent::Process(record));
        Ok(())
    }
}

fn bad_input(message: String) -> RunError {
    RunError::BadInput { message }
}

/// The settings of every worker, but for what an attempt changes.
fn settings(config: &RunConfig, checkpoints: PathBuf) -> Result<Settings, RunError> {
    let spec = &config.job.spec;
    let own = BesideManifest {
        job: config.job.metadata.name.clone().unwrap_or_default(),
        attempt: 1,
        trainers: config.trainers(),
        attention: config.attention,
        encryption: spec.attention.encryption.unwrap_or(Encryption::Off),
        checkpoints,
        // Each step reports its own failovers.
        failovers: 0,
        resume: None,
        headers: config.headers.clone(),
        faults: Vec::new(),
    };
    Settings::of(Some(spec), &config.pool.spec.health, own)
        .map_err(|error| bad_input(error.to_string()))
}

/// The newest `step-N` of a folder; N steps are done in it.
fn newest_checkpoint(folder: &Path) -> Option<(u64, PathBuf)> {
    let entries = std::fs::read_dir(folder).ok()?;
    let step = |path: &Path| path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok();
    let paths = entries.filter_map(|entry| entry.ok().map(|it| it.path()));
    paths.filter_map(|path| Some((step(&path)?, path))).max_by_key(|(step, _)| *step)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn workers_are_told_of_a_manifest_what_the_operator_tells_them() {
        let text = include_str!("../../testing/manifest.json");
        let all: BTreeMap<String, Value> = serde_json::from_str(text).expect("JSON");
        let job = serde_json::from_value(all["job"].clone()).expect("a job");
        let pool = serde_json::from_value(all["pool"].clone()).expect("a pool");
        let config = RunConfig::new(pool, job, PathBuf::new(), PathBuf::new());
        let settings = settings(&config, PathBuf::new()).expect("settings");
        let told = serde_json::to_value(settings).expect("plain data");
        let (told, expected) = (told.as_object(), all["settings"].as_object());
        let (told, expected) = told.zip(expected).expect("all fields");
        assert!(told.keys().eq(expected.keys()), "{told:?}");
        for (field, value) in expected {
            assert_eq!(told[field], *value, "{field}");
        }
    }
}
