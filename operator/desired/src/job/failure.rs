//! Why an attempt failed, and whether there is another.
//!
//! In: the pods of a failed attempt and the job's policy. Out: a [`Verdict`] with its [`Cause`].
//!
//! | the first trainer that ended | then |
//! |---|---|
//! | was evicted, preempted, or lost its node | again, not counted: the program did nothing wrong |
//! | says that its input is wrong (exit code 2) | the job fails: it would fail again |
//! | has an exit code of a rule | what the rule says |
//! | anything else | again while `maxRestarts` allows it |
//!
//! Who ended first is the cause; who ends because a peer is gone is not.

use std::fmt;

use cadre_crds::FailureAction;
use cadre_crds::contract::{LABEL_ATTEMPT, TRAINER_CONTAINER};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;

use super::Observed;
use super::stage::Attempt;
use crate::names::{label, name};
use crate::pod::{State, condition, end, state};

/// Exit code of a worker whose input is wrong, as the local supervisor knows it.
const BAD_INPUT: i32 = 2;
/// Characters of a trainer's last words that a status holds.
const WORDS: usize = 512;

/// What comes after a failed attempt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Verdict {
    /// Another attempt.
    Again { counted: bool, cause: Cause },
    /// The end of the job.
    End(Cause),
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

pub(crate) fn judge(observed: &Observed, attempt: &Attempt<'_>) -> Verdict {
    let number = attempt.number.to_string();
    let pods = || {
        let of_attempt = |it: &&Pod| label(&it.metadata, LABEL_ATTEMPT) == Some(&number);
        observed.pods.iter().filter(of_attempt)
    };
    let policy = &observed.job.spec.failure_policy;
    let budget = |cause: Cause| {
        if attempt.restarts < policy.max_restarts {
            return Verdict::Again { counted: true, cause };
        }
        let used = format!(
            "{}; {} of {} restarts used, raise spec.failurePolicy.maxRestarts to allow more",
            cause.what, attempt.restarts, policy.max_restarts
        );
        Verdict::End(Cause { reason: "RestartsUsedUp", what: used })
    };
    if let Some(pod) = pods().filter(|it| is_disrupted(it)).min_by_key(|it| name(&it.metadata)) {
        let said = condition(pod, "DisruptionTarget");
        let said = said.and_then(|it| it.message.as_deref()).unwrap_or("it was taken away");
        let what = format!("pod {}: {said}", name(&pod.metadata));
        return Verdict::Again { counted: false, cause: Cause { reason: "Disrupted", what } };
    }
    let failed = pods().filter(|it| state(it) == State::Ended).filter_map(|pod| {
        let end = end(pod, TRAINER_CONTAINER)?;
        let at = end.finished_at.as_ref().map_or(Timestamp::MIN, |it| it.0);
        (end.exit_code != 0).then_some(((at, name(&pod.metadata)), pod, end))
    });
    let Some((_, pod, end)) = failed.min_by_key(|it| it.0) else {
        let what = "an attempt failed and none of its pods says why".to_owned();
        return budget(Cause { reason: "TrainerFailed", what });
    };
    let words: String = end.message.as_deref().unwrap_or_default().trim().chars().collect();
    let tail = words.chars().count().saturating_sub(WORDS);
    let words: String = words.chars().skip(tail).collect();
    let how = match (end.reason.as_deref(), end.signal) {
        (Some("OOMKilled"), _) => "out of memory, raise its memory limit".to_owned(),
        (_, Some(signal)) if signal > 0 => format!("killed by signal {signal}"),
        _ => format!("exit code {}", end.exit_code),
    };
    let colon = if words.is_empty() { "" } else { ": " };
    let what = format!("pod {}: {how}{colon}{words}", name(&pod.metadata));
    if end.exit_code == BAD_INPUT {
        return Verdict::End(Cause { reason: "BadInput", what });
    }
    let code = u32::try_from(end.exit_code).unwrap_or_default();
    match policy.rules.iter().find(|it| it.exit_codes.contains(&code)).map(|it| it.action) {
        Some(FailureAction::FailJob) => Verdict::End(Cause { reason: "FailureRule", what }),
        Some(FailureAction::RestartUncounted) => {
            Verdict::Again { counted: false, cause: Cause { reason: "FailureRule", what } }
        }
        Some(FailureAction::Restart) | None => budget(Cause { reason: "TrainerFailed", what }),
    }
}

fn is_disrupted(pod: &Pod) -> bool {
    condition(pod, "DisruptionTarget").is_some_and(|it| it.status == "True")
}
