//! How a trainer ended, from what the Job controller reports or a pod shows.
//!
//! In: an attempt's Job. Out: [`Ended`]. What it means for the job is said in [`super::failure`].

use cadre_crds::contract::TRAINER_CONTAINER;
use serde::{Deserialize, Serialize};

use super::attempt::Attempt;
use crate::pod::DISRUPTED;

/// Exit code of a worker that could not go on without a peer, so that the peer is the cause.
pub(super) const COULD_NOT_GO_ON: i32 = 3;
/// Characters of a trainer's last words that a status holds.
pub(super) const WORDS: usize = 512;

/// The end of the trainer that ended first, as it is noted on the attempt's Job.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Ended {
    pub(super) pod: String,
    pub(super) how: How,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) words: String,
}

/// How a trainer ended.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum How {
    /// The platform took the pod away, for this reason of its own.
    Disrupted(String),
    /// Somebody deleted the pod.
    Deleted,
    /// The pod failed before its trainer began, for this reason.
    NotBegun(String),
    /// The trainer did not fail, another container of its pod did.
    Beside(String),
    /// The trainer did not end, although its conductor says that the attempt has failed. The exit
    /// code is the one that the conductor names.
    Stands(i32),
    /// Out of memory, with the exit code.
    OutOfMemory(i32),
    /// The trainer exited by itself, with this code.
    Exit(i32),
}

/// The end that the Job controller reports: `Pod NAMESPACE/NAME has condition DisruptionTarget …` or
/// `Container NAME for pod NAMESPACE/NAME failed with exit code CODE …`.
pub(super) fn told(attempt: &Attempt<'_>) -> Option<Ended> {
    let conditions = attempt.job.status.as_ref()?.conditions.as_ref()?;
    let said = conditions.iter().find(|it| {
        let by_rule = it.reason.as_deref() == Some("PodFailurePolicy");
        by_rule && (it.type_ == "FailureTarget" || it.type_ == "Failed")
    })?;
    let message = said.message.as_deref()?;
    let word = |start: &str| message.split_once(start)?.1.split(' ').next();
    let pod = word("Pod ").or_else(|| word(" for pod "))?;
    let pod = pod.split_once('/').map_or(pod, |it| it.1).to_owned();
    if let Some(code) = word(" failed with exit code ") {
        if let Some(other) = word("Container ").filter(|it| *it != TRAINER_CONTAINER) {
            let how = How::Beside(format!("container {other}: exit code {code}"));
            return Some(Ended { pod, how, words: String::new() });
        }
        return Some(Ended { pod, how: How::Exit(code.parse().ok()?), words: String::new() });
    }
    let how = How::Disrupted(String::new());
    message.contains(DISRUPTED).then(|| Ended { pod, how, words: "it was taken away".into() })
}
