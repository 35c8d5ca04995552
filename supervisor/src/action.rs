//! What goes into the supervisor's decisions and what comes out.
//!
//! In: [`Input`]s, one at a time. Out: [`Action`]s, to be carried out in order. [`Worker`] is what is
//! remembered about a process between the two. No decision here; those are in [`super::state`].

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
    /// Answer a hello.
    Welcome { link: LinkId, conductor: Option<Conductor> },
    /// Answer a hello with no.
    Refuse { link: LinkId, reason: String },
    /// Tell a worker something.
    Send { link: LinkId, message: ControllerMessage },
    /// A worker's address is known.
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

/// When a process that was ended had said nothing for too long.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Overdue {
    /// It never registered, so another one would not register either.
    AtStart,
    /// Later.
    Since,
    /// It said its last words and did not end.
    Leaving,
}

/// A process that was started and has not ended.
#[derive(Debug, Default)]
pub(crate) struct Worker {
    pub(crate) link: Option<LinkId>,
    /// Process id in its hello.
    pub(crate) pid: u32,
    /// Since when it should have said something; none while it is attached and listens.
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
    /// Until when it has to be gone after that.
    pub(crate) leaves_by: Option<Duration>,
    /// Until when it may be at work on its checkpoint, as it said when it was to end.
    pub(crate) busy_until: Option<Duration>,
    /// A server that was asked to end, and goes when its work is done: its end is no crash.
    pub(crate) leaves: bool,
    /// What a fault of the user did to it: its end is no crash of its own.
    pub(crate) hit: Option<Hit>,
    /// The supervisor has killed it.
    pub(crate) killed: bool,
    /// Set if it was ended because nothing was heard from it.
    pub(crate) overdue: Option<Overdue>,
    /// How its process ended, and the time at which its end counts at the latest: its stream may
    /// still hold messages.
    pub(crate) gone: Option<(Exit, Duration)>,
}

impl Worker {
    /// Whether it may be ended for what it has not done: it lives, and nothing else ends it.
    pub(crate) fn is_awaited(&self) -> bool {
        !self.killed && self.hit.is_none() && self.gone.is_none()
    }

    /// Whether it ended well, if it has said anything of its end.
    pub(crate) fn has_completed(&self) -> Option<bool> {
        let account = self.account.as_ref();
        account.map(|it| it.outcome() == finished::Outcome::Completed)
    }
}
