//! Conditions of a status.
//!
//! In: what is true now. Out: the list with each condition once, in the order in which it was first
//! set, but without those that are only there while they are true. The time of a condition is when its status last changed; a new reason or message alone leaves it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

/// Nothing goes on until somebody changes an object; only there while that is so.
pub(crate) const STALLED: &str = "Stalled";
/// Type of the condition that the object is still changing towards its spec; present only while
/// that is so and nothing stalls it.
pub(crate) const RECONCILING: &str = "Reconciling";
/// Longest message of a condition, in characters; the definitions refuse a status with a longer one.
const LONGEST: usize = 32_768;
/// Reasons that do not go away by themselves.
const STALLS: [&str; 6] =
    ["Invalid", "NameTaken", "NoCertificate", "PoolNotFound", "PoolRefuses", "Refused"];

/// Content of a condition.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Said {
    pub(crate) status: Truth,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

/// Status of a condition.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Truth {
    Yes,
    No,
    Unknown,
}

impl From<bool> for Truth {
    fn from(yes: bool) -> Self {
        if yes { Self::Yes } else { Self::No }
    }
}

pub(crate) fn said(
    status: impl Into<Truth>,
    reason: &'static str,
    message: impl Into<String>,
) -> Said {
    Said { status: status.into(), reason, message: message.into() }
}

impl Said {
    /// Whether somebody has to act before this condition goes away.
    pub(crate) fn stalls(&self) -> bool {
        STALLS.contains(&self.reason)
    }
}

/// Conditions of one status, being written.
#[derive(Debug)]
pub(crate) struct Conditions<'a> {
    pub(crate) list: &'a mut Vec<Condition>,
    pub(crate) generation: Option<i64>,
    pub(crate) now: Timestamp,
}

impl Conditions<'_> {
    pub(crate) fn set(&mut self, name: &str, said: Said) {
        let Said { status, reason, message } = said;
        let status = match status {
            Truth::Yes => "True",
            Truth::No => "False",
            Truth::Unknown => "Unknown",
        };
        let message = message.chars().take(LONGEST).collect();
        let old = self.list.iter().position(|it| it.type_ == name);
        let since = match old {
            Some(at) if self.list[at].status == status => {
                self.list[at].last_transition_time.clone()
            }
            Some(_) | None => Time(self.now),
        };
        let condition = Condition {
            type_: name.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message,
            last_transition_time: since,
            observed_generation: self.generation,
        };
        match old {
            Some(at) => self.list[at] = condition,
            None => self.list.push(condition),
        }
    }

    /// Sets the two conditions that tools read on objects of any kind: what stalls the object, or
    /// otherwise what it still waits for.
    pub(crate) fn waits(&mut self, stalled: Option<Said>, reconciling: Option<Said>) {
        let reconciling = reconciling.filter(|_| stalled.is_none());
        for (name, now) in [(STALLED, stalled), (RECONCILING, reconciling)] {
            match now {
                Some(it) => self.set(name, said(true, it.reason, it.message)),
                None => self.list.retain(|it| it.type_ != name),
            }
        }
    }
}

/// The condition of this name, if it is true.
pub(crate) fn is_true<'a>(list: &'a [Condition], name: &str) -> Option<&'a Condition> {
    list.iter().find(|it| it.type_ == name && it.status == "True")
}
