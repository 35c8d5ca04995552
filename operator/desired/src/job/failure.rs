//! Why an attempt failed, and whether there is another.
//!
//! In: the Job of an attempt, its pods and the job's policy. Out: a [`Verdict`] with its [`Cause`].
//!
//! | the first trainer that ended | then |
//! |---|---|
//! | was drained, preempted, deleted, or lost its node | again, not counted: the program did nothing wrong |
//! | says that its input is wrong (exit code 2) | the job fails: it would fail again |
//! | has an exit code of a rule | what the rule says |
//! | anything else | again while `maxRestarts` allows it: so often in a row without a newer checkpoint |
//!
//! Who ended first is the cause; who ends because a peer is gone is not, nor who ends because the Job has failed.
//!
//! A pod that was taken away is soon gone, so the verdict rests on what stays, nearest first:
//!
//! 1. the note on the Job: what an operator that watched has seen, written before anything follows from it;
//! 2. the Job's condition: [`rules`] let the Job controller name the pod there, and that it was disrupted or its
//!    exit code, also while no operator runs;
//! 3. the pods that are left.

use std::fmt;

use cadre_crds::contract::{ANNOTATION_ENDED, TRAINER_CONTAINER};
use cadre_crds::{FailureAction, FailurePolicy};
use k8s_openapi::api::batch::v1::{
    PodFailurePolicy, PodFailurePolicyOnExitCodesRequirement,
    PodFailurePolicyOnPodConditionsPattern, PodFailurePolicyRule,
};
use k8s_openapi::jiff::Timestamp;

use super::Observed;
use super::attempt::Attempt;
use super::ended::{COULD_NOT_GO_ON, Ended, How, WORDS, told};
use super::seen::{all_quiet, never_ends, pods, seen};
use crate::names::{annotation, name};
use crate::pod::{DISRUPTED, NODE_PRESSURE, NODE_SHUTDOWN};

/// Exit code of a worker whose input is wrong, as the local supervisor knows it.
const BAD_INPUT: i32 = 2;

/// Reason of the only failure that is not final: the job goes on when the user raises
/// `maxRestarts`.
pub(crate) const RESTARTS_USED_UP: &str = "RestartsUsedUp";

/// What comes after a failed attempt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Verdict {
    /// A further attempt starts.
    Again { counted: bool, cause: Cause },
    /// The job has failed.
    End(Cause),
    /// The trainers that have ended blame a peer; one that still ends may show the cause.
    Open(Cause),
}

/// Why an attempt failed.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Cause {
    /// Reason, as a condition writes it.
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

/// The conductor's last message about an attempt that has failed. If no farewell follows it, the
/// conductor's main thread stands still.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct LastWords {
    /// Number of the attempt.
    pub attempt: u32,
    /// When it was heard.
    pub since: Timestamp,
    /// The exit code that the conductor should end with.
    pub exit_code: i32,
    /// Why the attempt has failed.
    pub text: String,
}

/// Rules that make the Job controller record which pod ended an attempt, and how: one for pods that
/// the platform takes away, one for all exit codes of a trainer but 0, one for those of containers
/// beside it. Without them the Job's condition says only that the attempt failed.
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
    let by_condition = PodFailurePolicyRule { on_pod_conditions: Some(vec![disrupted]), ..rule() };
    let by_code = |container: Option<&str>| {
        let failed = PodFailurePolicyOnExitCodesRequirement {
            container_name: container.map(str::to_owned),
            operator: "NotIn".into(),
            values: vec![0],
        };
        PodFailurePolicyRule { on_exit_codes: Some(failed), ..rule() }
    };
    PodFailurePolicy { rules: vec![by_condition, by_code(Some(TRAINER_CONTAINER)), by_code(None)] }
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
    let overdue = || overdue(observed, attempt).filter(|it| it.0 <= now.as_second());
    let seen = seen(observed, attempt, now).or_else(|| overdue().map(|it| it.1))?;
    let is_open = seen.how == How::Exit(COULD_NOT_GO_ON) && !all_quiet(observed, attempt, now);
    (!is_open).then(|| serde_json::to_string(&seen).expect("plain data"))
}

/// Seconds that the trainers of an attempt that has failed have left to end by themselves.
pub(crate) fn patience(observed: &Observed, attempt: &Attempt<'_>, now: Timestamp) -> Option<i64> {
    let (until, _) = overdue(observed, attempt).filter(|_| !attempt.is_suspended())?;
    Some((until - now.as_second()).max(1))
}

/// The time until which an attempt may end by itself after its conductor has given it up, and the
/// end that is recorded after that.
fn overdue(observed: &Observed, attempt: &Attempt<'_>) -> Option<(i64, Ended)> {
    let said = observed.last_words.as_ref().filter(|it| it.attempt == attempt.number)?;
    let patience = observed.job.spec.failure_policy.suspect_after_seconds;
    let ended = Ended {
        pod: format!("{}-0", name(&attempt.job.metadata)),
        how: How::Stands(said.exit_code),
        words: said.text.chars().take(WORDS).collect(),
    };
    Some((said.since.as_second() + i64::from(patience), ended))
}

/// Whether it was noted of an attempt that it has failed and does not end.
pub(crate) fn stands(attempt: &Attempt<'_>) -> bool {
    let noted = noted(attempt).is_some_and(|it| matches!(it.how, How::Stands(_)));
    noted && !attempt.is_suspended()
}

/// Whether an attempt will never end by itself: one of its pods is on a node that is lost, and the Job controller waits
/// for the pod's end.
pub(crate) fn is_lost(observed: &Observed, attempt: &Attempt<'_>, now: Timestamp) -> bool {
    !attempt.is_suspended() && pods(observed, attempt).any(|it| never_ends(observed, it, now))
}

pub(crate) fn judge(observed: &Observed, attempt: &Attempt<'_>, now: Timestamp) -> Verdict {
    let told = noted(attempt).or_else(|| seen(observed, attempt, now)).or_else(|| told(attempt));
    let policy = (&observed.job.spec.failure_policy, attempt.restarts(observed).in_a_row);
    let Some(ended) = told else {
        let what = "an attempt failed and none of its pods says why".to_owned();
        return budget(policy, Cause { reason: "TrainerFailed", what });
    };
    if ended.how == How::Exit(COULD_NOT_GO_ON) && !all_quiet(observed, attempt, now) {
        return Verdict::Open(ended.cause());
    }
    ended.verdict(policy)
}

/// A further attempt if the policy allows more than `used` restarts in a row, otherwise the end of
/// the job.
fn budget((policy, used): (&FailurePolicy, u32), cause: Cause) -> Verdict {
    let allowed = policy.restarts();
    if used < allowed {
        return Verdict::Again { counted: true, cause };
    }
    let what = format!(
        "{cause}; {used} of {allowed} restarts used without a newer checkpoint; raise \
         spec.failurePolicy.maxRestarts, and the job goes on"
    );
    Verdict::End(Cause { reason: RESTARTS_USED_UP, what })
}

impl Ended {
    fn cause(&self) -> Cause {
        let (reason, how) = match &self.how {
            How::Disrupted(reason) => (disruption(reason), String::new()),
            How::Deleted => ("Deleted", "it was deleted".to_owned()),
            How::NotBegun(why) => {
                ("TrainerFailed", format!("it failed before its trainer began: {why}"))
            }
            How::Beside(why) => ("TrainerFailed", format!("its trainer did not fail, but {why}")),
            How::Stands(code) => {
                let reason = if *code == BAD_INPUT { "BadInput" } else { "TrainerStalled" };
                (reason, "the attempt has failed and did not end".to_owned())
            }
            How::OutOfMemory(_) => {
                ("OutOfMemory", "out of memory, raise its memory limit".to_owned())
            }
            How::Exit(BAD_INPUT) => ("BadInput", format!("exit code {BAD_INPUT}")),
            How::Exit(code) => ("TrainerFailed", format!("exit code {code}")),
        };
        let colon = if how.is_empty() || self.words.is_empty() { "" } else { ": " };
        Cause { reason, what: format!("pod {}: {how}{colon}{}", self.pod, self.words) }
    }

    fn verdict(&self, policy: (&FailurePolicy, u32)) -> Verdict {
        let mut cause = self.cause();
        let code = match &self.how {
            // A pod that needs more than its node has is put out again wherever it goes.
            How::Disrupted(reason) if reason == NODE_PRESSURE => return budget(policy, cause),
            How::Disrupted(_) | How::Deleted => return Verdict::Again { counted: false, cause },
            How::NotBegun(_) | How::Beside(_) => return budget(policy, cause),
            How::Exit(BAD_INPUT) | How::Stands(BAD_INPUT) => return Verdict::End(cause),
            How::OutOfMemory(code) | How::Exit(code) | How::Stands(code) => {
                u32::try_from(*code).unwrap_or_default()
            }
        };
        let rule = policy.0.rules.iter().find(|it| it.exit_codes.contains(&code));
        match rule.map(|it| it.action) {
            Some(FailureAction::FailJob) => {
                cause.reason = "FailureRule";
                Verdict::End(cause)
            }
            Some(FailureAction::RestartUncounted) => {
                cause.reason = "FailureRule";
                Verdict::Again { counted: false, cause }
            }
            Some(FailureAction::Restart) | None => budget(policy, cause),
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
        NODE_PRESSURE => "NodePressure",
        NODE_SHUTDOWN => "NodeShutdown",
        _ => "Disrupted",
    }
}

/// The end that the annotation of the Job records.
fn noted(attempt: &Attempt<'_>) -> Option<Ended> {
    serde_json::from_str(annotation(&attempt.job.metadata, ANNOTATION_ENDED)?).ok()
}
