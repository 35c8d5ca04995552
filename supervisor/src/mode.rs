//! The mode of the run: it trains, or it ends in one of several ways.
//!
//! In and out: nothing; [`super::ending`] says which mode follows which, and has the picture.

use std::time::Duration;

use super::action::Worker;
use super::event::{Outcome, RunError, WorkerName};
use super::exit::Exit;

/// The mode of the run.
#[derive(Debug)]
pub(crate) enum Mode {
    /// Training.
    Running,
    /// A trainer has failed; the others write their checkpoint and leave. The user may have interrupted meanwhile.
    Survivors { until: Duration, interrupted: bool },
    /// The user has interrupted; trainers write a checkpoint and leave.
    Interrupted { until: Duration },
    /// The job is done; everybody leaves.
    Farewell { until: Duration },
    /// Everything has been killed.
    Killing(Next),
}

impl Mode {
    /// Deadline at which a worker that still lives is killed. It is later while the worker writes its checkpoint.
    pub(crate) fn until_of(&self, worker: &Worker) -> Option<Duration> {
        match *self {
            Self::Survivors { until, .. } | Self::Interrupted { until } => {
                Some(worker.busy_until.map_or(until, |it| it.max(until)))
            }
            Self::Farewell { until } => Some(until),
            Self::Running | Self::Killing(_) => None,
        }
    }
}

/// What the run does when no process is left.
#[derive(Debug)]
pub(crate) enum Next {
    /// A further attempt.
    Restart,
    /// The end of the run.
    Done(Result<Outcome, RunError>),
}

/// Why an attempt failed.
#[derive(Clone, Debug)]
pub(crate) struct Cause {
    pub(crate) worker: WorkerName,
    pub(crate) exit: Exit,
    pub(crate) words: String,
}
