//! The attempts of a job: Jobs of the core API that are ours, with the restarts before them.
//!
//! In: what is observed. Out: attempts by number, restarts and checkpoints so far. What follows from them is said in
//! [`super::stage`], why one failed in [`super::failure`].

use cadre_crds::contract::{
    ANNOTATION_CHECKPOINT, ANNOTATION_GENERATION, ANNOTATION_IN_A_ROW, ANNOTATION_RESTARTS,
    ANNOTATION_VAIN, LABEL_ATTEMPT,
};
use k8s_openapi::api::batch::v1::{Job, JobCondition};
use k8s_openapi::jiff::Timestamp;

use super::Observed;
use crate::names::{annotation, is_owned, label};

/// Seconds between the end of an attempt and the next one; each further one in a row doubles them.
const PAUSE_SECONDS: i64 = 10;
/// Longest pause.
const LONGEST_PAUSE_SECONDS: i64 = 300;

/// Restarts before an attempt.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Restarts {
    /// Those of the whole job that counted.
    pub(crate) all: u32,
    /// Those that counted since a newer checkpoint was heard of.
    pub(crate) in_a_row: u32,
    /// All since then.
    pub(crate) vain: u32,
}

impl Restarts {
    /// One more, which may have counted.
    pub(super) fn and(self, counted: bool) -> Self {
        let more = u32::from(counted);
        let Self { all, in_a_row, vain } = self;
        Self {
            all: all.saturating_add(more),
            in_a_row: in_a_row.saturating_add(more),
            vain: vain.saturating_add(1),
        }
    }

    /// As they are after a newer checkpoint.
    fn after_progress(self) -> Self {
        Self { in_a_row: 0, vain: 0, ..self }
    }

    /// Seconds that the last one waits.
    pub(super) fn pause(self) -> i64 {
        let doubled = PAUSE_SECONDS << self.vain.saturating_sub(1).min(16);
        if self.vain == 0 { 0 } else { doubled.min(LONGEST_PAUSE_SECONDS) }
    }
}

/// A Job of the core API that is an attempt of ours.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attempt<'a> {
    pub(crate) number: u32,
    /// Before it.
    pub(crate) restarts: Restarts,
    /// Steps in the newest checkpoint that was heard of before it.
    checkpoint: u64,
    /// Of the spec that it was made from; 0 where another build made it.
    pub(crate) generation: i64,
    pub(crate) job: &'a Job,
}

impl Attempt<'_> {
    pub(crate) fn has(&self, condition: &str) -> bool {
        let conditions = self.job.status.as_ref().and_then(|it| it.conditions.as_ref());
        conditions
            .is_some_and(|it| it.iter().any(|it| it.type_ == condition && it.status == "True"))
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.has("Failed") || self.has("FailureTarget")
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.has("Complete") || self.has("SuccessCriteriaMet")
    }

    /// Restarts as they count at its end: those before a newer checkpoint are no more in a row.
    pub(crate) fn restarts(&self, observed: &Observed) -> Restarts {
        let newer = checkpoint(observed) > self.checkpoint;
        if newer { self.restarts.after_progress() } else { self.restarts }
    }

    /// When the Job began to fail, if it has failed.
    pub(super) fn failed_at(&self) -> Option<Timestamp> {
        let conditions = self.job.status.as_ref()?.conditions.as_ref()?;
        let failed = |it: &&JobCondition| {
            it.status == "True" && (it.type_ == "Failed" || it.type_ == "FailureTarget")
        };
        conditions
            .iter()
            .filter(failed)
            .filter_map(|it| Some(it.last_transition_time.as_ref()?.0))
            .min()
    }

    /// Whether the attempt makes no pods any more. An attempt that the queue has taken back must
    /// not come back under the same number.
    pub(crate) fn is_over(&self) -> bool {
        self.is_complete() || self.has_failed() && !self.is_suspended()
    }

    pub(crate) fn is_suspended(&self) -> bool {
        self.job.spec.as_ref().is_some_and(|it| it.suspend == Some(true))
    }
}

/// The attempts of a job that are not being deleted, by number.
pub(crate) fn attempts(observed: &Observed) -> Vec<Attempt<'_>> {
    let ours = observed.jobs.iter().filter(|it| is_owned(&it.metadata, &observed.job.metadata));
    let alive = ours.filter(|it| it.metadata.deletion_timestamp.is_none());
    let mut attempts: Vec<_> = alive.filter_map(attempt).collect();
    attempts.sort_by_key(|it| it.number);
    attempts
}

/// The attempt that counts. One before it that is kept for its logs says nothing of the job any more, also where the newest
/// is gone.
pub(crate) fn newest(observed: &Observed) -> Option<Attempt<'_>> {
    let told = observed.job.status.as_ref().map_or(0, |it| it.attempt);
    attempts(observed).pop().filter(|it| it.number >= told)
}

/// An attempt of ours, if the Job is one.
pub(super) fn attempt(job: &Job) -> Option<Attempt<'_>> {
    let number = label(&job.metadata, LABEL_ATTEMPT)?.parse().ok()?;
    let noted = |it| annotation(&job.metadata, it);
    let count = |it| noted(it).and_then(|it| it.parse().ok());
    let all = count(ANNOTATION_RESTARTS).unwrap_or(0);
    // An operator that did not tell them apart wrote one number.
    let in_a_row = count(ANNOTATION_IN_A_ROW).unwrap_or(all);
    let vain = count(ANNOTATION_VAIN).unwrap_or(in_a_row);
    let restarts = Restarts { all, in_a_row, vain };
    let checkpoint = noted(ANNOTATION_CHECKPOINT).and_then(|it| it.parse().ok()).unwrap_or(0);
    let generation = noted(ANNOTATION_GENERATION).and_then(|it| it.parse().ok()).unwrap_or(0);
    Some(Attempt { number, restarts, checkpoint, generation, job })
}

/// Restarts by the status, where no attempt is left to say them: those before a checkpoint that was heard of since are no
/// more in a row. Trainers that are ended write one on their way out.
pub(crate) fn told(observed: &Observed) -> Restarts {
    let Some(status) = &observed.job.status else { return Restarts::default() };
    let newer = checkpoint(observed) > status.checkpoint_step;
    let in_a_row = status.in_a_row();
    let restarts = Restarts { all: status.restarts, in_a_row, vain: in_a_row };
    if newer { restarts.after_progress() } else { restarts }
}

/// Steps in the newest checkpoint of the job that was ever heard of.
pub(crate) fn checkpoint(observed: &Observed) -> u64 {
    let known = observed.job.status.as_ref().map_or(0, |it| it.checkpoint_step);
    known.max(observed.checkpoint)
}
