//! Why an attempt failed, and whether there is another.
//!
//! In: the Job of an attempt, its pods and the job's policy. Out: a [`Verdict`] with its [`Cause`].
//!
//! | the first trainer that ended | then |
//! |---|---|
//! | was evicted, preempted, deleted, or lost its node | again, not counted: the program did nothing wrong |
//! | says that its input is wrong (exit code 2) | the job fails: it would fail again |
//! | has an exit code of a rule | what the rule says |
//! | anything else | again while `maxRestarts` allows it |
//!
//! Who ended first is the cause; who ends because a peer is gone is not.
//!
//! A pod that was taken away is soon gone, so the verdict rests on what stays, nearest first:
//!
//! 1. the note on the Job: what an operator that watched has seen, written before anything follows from it;
//! 2. the Job's condition: [`rules`] let the Job controller name the pod there, and that it was disrupted or its
//!    exit code, also while no operator runs;
//! 3. the pods that are left.

use std::fmt;

use cadre_crds::contract::{ANNOTATION_ENDED, LABEL_ATTEMPT, TRAINER_CONTAINER};
use cadre_crds::{FailureAction, FailurePolicy};
use k8s_openapi::api::batch::v1::{
    PodFailurePolicy, PodFailurePolicyOnExitCodesRequirement,
    PodFailurePolicyOnPodConditionsPattern, PodFailurePolicyRule,
};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::Observed;
use super::stage::Attempt;
use crate::names::{annotation, label, name};
use crate::pod::{State, condition, end, is_overdue, is_quiet, state};

/// Exit code of a worker whose input is wrong, as the local supervisor knows it.
const BAD_INPUT: i32 = 2;
/// Exit code of a worker that could not go on without a peer, so that the peer is the cause.
const COULD_NOT_GO_ON: i32 = 3;
/// Characters of a trainer's last words that a status holds.
const WORDS: usize = 512;
/// Condition of a pod that the platform takes away.
const DISRUPTED: &str = "DisruptionTarget";

/// What comes after a failed attempt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Verdict {
    /// Another attempt.
    Again { counted: bool, cause: Cause },
    /// The end of the job.
    End(Cause),
    /// Trainers that could not go on do not say why; a peer that still ends may.
    Open(Cause),
}

/// Why an attempt failed.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Cause {
    /// As a condition's reason is written.
    pub reason: &'static str,
    /// What ended and how.
    pub what: String,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl Cause {
    /// The queue wants the place back.
    pub(crate) fn taken_back() -> Self {
        Self { reason: "Preempted", what: "the queue has taken the attempt's place back".into() }
    }
}

/// The end of the trainer that ended first, as it is noted on the attempt's Job.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Ended {
    pod: String,
    how: How,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    words: String,
}

/// How a trainer ended.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum How {
    /// The platform took the pod away, for this reason of its own.
    Disrupted(String),
    /// Somebody deleted the pod.
    Deleted,
    /// Out of memory; the exit code.
    OutOfMemory(i32),
    /// By itself; the exit code.
    Exit(i32),
}

/// Lets the Job controller write down which pod ended an attempt, and how: one rule for pods that the platform takes
/// away, one for every exit code that is not 0. Without them its condition says only that the attempt failed.
pub(crate) fn rules() -> PodFailurePolicy {
    let rule = || PodFailurePolicyRule {
        action: "FailJob".into(),
        on_exit_codes: None,
        on_pod_conditions: None,
    };
    let disrupted = PodFailurePolicyOnPodConditionsPattern {
        status: Some("True".into()),
        type_: DISRUPTED.into(),
    };
    let failed = PodFailurePolicyOnExitCodesRequirement {
        container_name: Some(TRAINER_CONTAINER.into()),
        operator: "NotIn".into(),
        values: vec![0],
    };
    let by_condition = PodFailurePolicyRule { on_pod_conditions: Some(vec![disrupted]), ..rule() };
    let by_code = PodFailurePolicyRule { on_exit_codes: Some(failed), ..rule() };
    PodFailurePolicy { rules: vec![by_condition, by_code] }
}

/// What the pods tell of an attempt's end and nothing on its Job does yet: to be noted there, as an annotation, before
/// anything follows from it.
pub(crate) fn unwritten(
    observed: &Observed,
    attempt: &Attempt<'_>,
    now: Timestamp,
) -> Option<String> {
    if noted(attempt).is_some() || attempt.is_complete() || attempt.is_suspended() {
        return None;
    }
    let seen = seen(observed, attempt, now)?;
    let is_open = seen.how == How::Exit(COULD_NOT_GO_ON) && !all_quiet(observed, attempt, now);
    (!is_open).then(|| serde_json::to_string(&seen).expect("plain data"))
}

/// Whether an attempt will never end by itself: one of its pods is on a node that is lost, and the Job controller waits
/// for the pod's end.
pub(crate) fn is_lost(observed: &Observed, attempt: &Attempt<'_>, now: Timestamp) -> bool {
    !attempt.is_suspended() && pods(observed, attempt).any(|it| never_ends(it, now))
}

pub(crate) fn judge(observed: &Observed, attempt: &Attempt<'_>, now: Timestamp) -> Verdict {
    let told = noted(attempt).or_else(|| seen(observed, attempt, now)).or_else(|| told(attempt));
    let policy = &observed.job.spec.failure_policy;
    let Some(ended) = told else {
        let what = "an attempt failed and none of its pods says why".to_owned();
        return budget(policy, attempt, Cause { reason: "TrainerFailed", what });
    };
    if ended.how == How::Exit(COULD_NOT_GO_ON) && !all_quiet(observed, attempt, now) {
        return Verdict::Open(ended.cause());
    }
    ended.verdict(policy, attempt)
}

fn budget(policy: &FailurePolicy, attempt: &Attempt<'_>, cause: Cause) -> Verdict {
    if attempt.restarts < policy.max_restarts {
        return Verdict::Again { counted: true, cause };
    }
    let used = format!(
        "{}; {} of {} restarts used, raise spec.failurePolicy.maxRestarts to allow more",
        cause.what, attempt.restarts, policy.max_restarts
    );
    Verdict::End(Cause { reason: "RestartsUsedUp", what: used })
}

impl Ended {
    fn cause(&self) -> Cause {
        let (reason, how) = match &self.how {
            How::Disrupted(reason) => (disruption(reason), String::new()),
            How::Deleted => ("Deleted", "it was deleted".to_owned()),
            How::OutOfMemory(_) => {
                ("OutOfMemory", "out of memory, raise its memory limit".to_owned())
            }
            How::Exit(BAD_INPUT) => ("BadInput", format!("exit code {BAD_INPUT}")),
            How::Exit(code) => ("TrainerFailed", format!("exit code {code}")),
        };
        let colon = if how.is_empty() || self.words.is_empty() { "" } else { ": " };
        Cause { reason, what: format!("pod {}: {how}{colon}{}", self.pod, self.words) }
    }

    fn verdict(&self, policy: &FailurePolicy, attempt: &Attempt<'_>) -> Verdict {
        let mut cause = self.cause();
        let code = match self.how {
            How::Disrupted(_) | How::Deleted => return Verdict::Again { counted: false, cause },
            How::Exit(BAD_INPUT) => return Verdict::End(cause),
            How::OutOfMemory(code) | How::Exit(code) => u32::try_from(code).unwrap_or_default(),
        };
        let rule = policy.rules.iter().find(|it| it.exit_codes.contains(&code));
        match rule.map(|it| it.action) {
            Some(FailureAction::FailJob) => {
                cause.reason = "FailureRule";
                Verdict::End(cause)
            }
            Some(FailureAction::RestartUncounted) => {
                cause.reason = "FailureRule";
                Verdict::Again { counted: false, cause }
            }
            Some(FailureAction::Restart) | None => budget(policy, attempt, cause),
        }
    }
}

/// The platform's reason in the words of a status.
fn disruption(reason: &str) -> &'static str {
    match reason {
        "EvictionByEvictionAPI" => "Evicted",
        "PreemptionByScheduler" => "Preempted",
        "DeletionByTaintManager" => "Tainted",
        "DeletionByPodGC" => "NodeLost",
        "TerminationByKubelet" => "NodePressure",
        _ => "Disrupted",
    }
}

/// What was noted on the Job.
fn noted(attempt: &Attempt<'_>) -> Option<Ended> {
    serde_json::from_str(annotation(&attempt.job.metadata, ANNOTATION_ENDED)?).ok()
}

/// What the Job controller says: `Pod NAMESPACE/NAME has condition DisruptionTarget …` or
/// `Container trainer for pod NAMESPACE/NAME failed with exit code CODE …`.
fn told(attempt: &Attempt<'_>) -> Option<Ended> {
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
        return Some(Ended { pod, how: How::Exit(code.parse().ok()?), words: String::new() });
    }
    let how = How::Disrupted(String::new());
    message.contains(DISRUPTED).then(|| Ended { pod, how, words: "it was taken away".into() })
}

/// What the pods that are left say; nothing, if the one that ended the attempt is no more among them.
fn seen(observed: &Observed, attempt: &Attempt<'_>, now: Timestamp) -> Option<Ended> {
    let own = |it: &Pod| name(&it.metadata).to_owned();
    let mut all: Vec<_> = pods(observed, attempt).collect();
    all.sort_by_key(|it| own(it));
    // The one that the Job controller names was first; what its peers do when they are deleted is no cause.
    let named = told(attempt);
    if named.as_ref().is_some_and(|it| all.iter().all(|pod| own(pod) != it.pod)) {
        return None;
    }
    if let Some(pod) = all.iter().find(|it| is_disrupted(it)) {
        let said = condition(pod, DISRUPTED);
        let words = said.and_then(|it| it.message.as_deref()).unwrap_or("it was taken away");
        let reason = said.and_then(|it| it.reason.clone()).unwrap_or_default();
        let how = How::Disrupted(reason);
        return Some(Ended { pod: own(pod), how, words: words.to_owned() });
    }
    let failed = all.iter().filter(|it| state(it) == State::Ended).filter_map(|pod| {
        let end = end(pod, TRAINER_CONTAINER).filter(|it| it.exit_code != 0)?;
        let at = end.finished_at.as_ref().map_or(Timestamp::MIN, |it| it.0);
        Some((at, *pod, end))
    });
    let Some((_, pod, end)) = failed.min_by_key(|it| it.0) else {
        // Nobody ended by itself. Once the Job fails its controller deletes pods, before it may be anybody.
        let leaves = all.iter().find(|it| state(it) == State::Leaving);
        let deleted = leaves.filter(|_| !attempt.has_failed());
        return deleted.map(|it| Ended { pod: own(it), how: How::Deleted, words: String::new() });
    };
    let lost = all.iter().find(|it| never_ends(it, now));
    if let Some(lost) = lost.filter(|_| end.exit_code == COULD_NOT_GO_ON) {
        let how = How::Disrupted("DeletionByPodGC".into());
        return Some(Ended { pod: own(lost), how, words: "its node is lost".into() });
    }
    let was_first = !attempt.has_failed() || named.is_some_and(|it| it.pod == own(pod));
    if pod.metadata.deletion_timestamp.is_some() && was_first {
        return Some(Ended { pod: own(pod), how: How::Deleted, words: String::new() });
    }
    let words = end.message.as_deref().unwrap_or_default().trim();
    let tail = words.chars().count().saturating_sub(WORDS);
    let words = words.chars().skip(tail).collect();
    let how = match end.reason.as_deref() {
        Some("OOMKilled") => How::OutOfMemory(end.exit_code),
        Some(_) | None => How::Exit(end.exit_code),
    };
    Some(Ended { pod: own(pod), how, words })
}

fn pods<'a>(observed: &'a Observed, attempt: &Attempt<'_>) -> impl Iterator<Item = &'a Pod> {
    let number = attempt.number.to_string();
    let of_attempt = move |it: &&Pod| label(&it.metadata, LABEL_ATTEMPT) == Some(&number);
    observed.pods.iter().filter(of_attempt)
}

fn all_quiet(observed: &Observed, attempt: &Attempt<'_>, now: Timestamp) -> bool {
    pods(observed, attempt).all(|it| is_quiet(it, now))
}

/// It should be gone for long and has not ended: its node is lost.
fn never_ends(pod: &Pod, now: Timestamp) -> bool {
    state(pod) != State::Ended && is_overdue(pod, now)
}

fn is_disrupted(pod: &Pod) -> bool {
    condition(pod, DISRUPTED).is_some_and(|it| it.status == "True")
}
