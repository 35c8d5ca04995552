//! How a process ended, and the line that reports it.
//!
//! In: the system's exit status of the process, and the last lines of its log. Out: one line about the end. [`super::ending`]
//! decides what follows from it.

use std::fmt;

use cadre_control::proto::Finished;
use cadre_crds::contract::ASKED_TO_END;
use rustix::process::Signal;

use super::event::WorkerName;

/// Exit code of a worker that refuses its input.
pub(crate) const BAD_INPUT: i32 = 2;

/// How a process ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct Exit {
    /// Exit code, if the process exited.
    pub(crate) code: Option<i32>,
    /// Otherwise the signal that ended it.
    pub(crate) signal: Option<i32>,
    /// Last lines of its log.
    pub(crate) log: Vec<String>,
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.code, self.signal) {
            (Some(code), _) => write!(f, "exit code {code}"),
            (None, Some(9)) => write!(f, "killed by SIGKILL"),
            (None, Some(signal)) => write!(f, "killed by signal {signal}"),
            (None, None) => write!(f, "ended in an unknown way"),
        }
    }
}

impl Exit {
    /// Whether SIGTERM ended it, or it exited after one.
    pub(crate) fn was_asked(&self) -> bool {
        self.code == Some(ASKED_TO_END.into()) || self.signal == Some(Signal::TERM.as_raw())
    }

    /// One line about the end: the worker's own report, else the last error line of its log, else
    /// how its process ended.
    pub(crate) fn last_words(&self, name: WorkerName, account: Option<&Finished>) -> String {
        let said = account.map(|it| it.message.clone()).filter(|it| !it.is_empty());
        let error = self.log.iter().rev().find_map(|line| line.strip_prefix("error: "));
        said.or_else(|| error.map(str::to_owned)).unwrap_or_else(|| format!("{name}: {self}"))
    }
}
