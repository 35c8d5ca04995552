//! Inputs and actions of the supervisor's decisions.
//!
//! In: [`Input`]s, one at a time. Out: [`Action`]s, to be carried out in order. [`Worker`] is the state of a process between the
//! two. No decision is made here: [`super::state`] makes them.

use std::time::Duration;

use cadre_control::proto::{
    self, Conductor, ControllerMessage, Finished, Hello, finished, worker_message::Message,
};
use cadre_control::server::LinkId;

use super::event::{Outcome, RunError, RunEvent, WorkerName};
use super::exit::Exit;

/// What happened.
#[derive(Debug)]
pub(crate) enum Input {
    /// A worker's stream is open.
    Attached { link: LinkId, hello: Hello },
    /// A worker said something.
    Said { link: LinkId, message: Message },
    /// A worker's stream has ended.
    Detached { link: LinkId },
    /// A process could not be started.
    SpawnFailed { worker: WorkerName, message: String },
    /// A process has ended.
    Exited { worker: WorkerName, exit: Exit },
    /// The user wants the run to end.
    Interrupt,
    /// Time has passed.
    Tick,
}

/// What to do.
#[derive(Debug)]
pub(crate) enum Action {
    /// Find the newest checkpoint; settings of later welcomes are those of this attempt.
    BeginAttempt { number: u32 },
    /// Start a process.
    Spawn(WorkerName),
    /// SIGKILL to a process and its children.
    Kill(WorkerName),
    /// SIGSTOP to a process and its children.
    Pause(WorkerName),
    /// Accept a hello.
    Welcome { link: LinkId, conductor: Option<Conductor> },
    /// Refuse a hello with a reason.
    Refuse { link: LinkId, reason: String },
    /// Send a message to a worker.
    Send { link: LinkId, message: ControllerMessage },
    /// Record a worker's address.
    Address { worker: WorkerName, address: String },
    /// Report something.
    Emit(RunEvent),
    /// The run is over.
    Done(Result<Outcome, RunError>),
}

/// What a fault does to a process.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Hit {
    /// Killed; its end is on its way.
    Killed,
    /// Stopped for good.
    Paused,
}

/// When the silence began for which a process was ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Overdue {
    /// It never registered, so a new process would not register either.
    AtStart,
    /// After it had registered.
    Since,
    /// After its last report: it did not exit.
    Leaving,
}

/// A process that was started and has not ended.
#[derive(Debug, Default)]
pub(crate) struct Worker {
    pub(crate) link: Option<LinkId>,
    /// Process id in its hello.
    pub(crate) pid: u32,
    /// Since when it has been silent; none while it is attached and registered.
    pub(crate) silent_since: Option<Duration>,
    /// Its entry as a server, from its hello.
    pub(crate) server: proto::Server,
    /// Whether it is registered, so that its addresses are known.
    pub(crate) listening: bool,
    pub(crate) ring_address: String,
    /// Cost a second of its server, from the last report with work.
    pub(crate) speed: Option<u64>,
    /// Its own report of its end.
    pub(crate) account: Option<Finished>,
    /// Deadline of its exit after that report.
    pub(crate) leaves_by: Option<Duration>,
    /// Deadline of its checkpoint: until then it may be at work, as it reported after it was asked to end.
    pub(crate) busy_until: Option<Duration>,
    /// Whether it is a server that was asked to end, and leaves when its work is done. Its end is no crash.
    pub(crate) leaves: bool,
    /// The fault that the user ordered for it. Its end is no crash of its own.
    pub(crate) hit: Option<Hit>,
    /// Whether the supervisor has killed it.
    pub(crate) killed: bool,
    /// Set if it was ended for its silence.
    pub(crate) overdue: Option<Overdue>,
    /// How its process ended, and the latest time at which that end counts: its stream may still hold messages.
    pub(crate) gone: Option<(Exit, Duration)>,
}

impl Worker {
    /// Whether it may be ended for its silence: it lives, and nothing else ends it.
    pub(crate) fn is_awaited(&self) -> bool {
        !self.killed && self.hit.is_none() && self.gone.is_none()
    }

    /// Whether its report says that it ended well; none without a report.
    pub(crate) fn has_completed(&self) -> Option<bool> {
        let account = self.account.as_ref();
        account.map(|it| it.outcome() == finished::Outcome::Completed)
    }
}
