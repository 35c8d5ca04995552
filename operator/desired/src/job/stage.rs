//! Where a job is: exactly one [`Stage`], from what is observed and the time.
//!
//! Both the actions and the status are made from it, so they cannot disagree.

use cadre_crds::TrainingJob;
use cadre_crds::contract::{LABEL_QUEUE, MANAGED_BY};
use cadre_crds::validate::{self, Refusal};
use k8s_openapi::jiff::Timestamp;

use super::Observed;
use super::attempt::{Attempt, Restarts, attempt, attempts, newest, told};
use super::failure::{Cause, RESTARTS_USED_UP, Verdict, is_lost, judge, stands};
use super::seen::{all_ours, is_quiet, trains_on};
use super::watched::Watched;
use crate::conditions::is_true;
use crate::names::{is_owned, label, trainers_service};

/// Where a job is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Stage {
    /// Being deleted; what was made for it goes with it.
    Deleted,
    /// Another controller is responsible for the job.
    Foreign,
    /// The status says that the job is over.
    Finished { at: Timestamp },
    /// A field is wrong.
    Invalid(Refusal),
    /// The job is suspended.
    Suspended,
    /// The job cannot start.
    Blocked(Obstacle),
    /// The job took longer than `activeDeadlineSeconds`.
    Late { seconds: u32 },
    /// An attempt has finished its work.
    Completed,
    /// An attempt has failed and there is no further one.
    Failed(Cause),
    /// An attempt has failed; why is known when its last pod has ended.
    Failing(Cause),
    /// The next attempt waits until the others make no pods any more and their pods are quiet.
    Waiting { number: u32, restarts: Restarts, after: Option<Cause> },
    /// The next attempt waits until `until`, seconds since 1970.
    Pausing { number: u32, restarts: Restarts, after: Option<Cause>, until: i64 },
    /// The next attempt starts.
    Start { number: u32, restarts: Restarts, after: Option<Cause> },
    /// An attempt is there.
    Active { number: u32 },
}

/// What a job cannot start for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Obstacle {
    /// There is no such pool.
    PoolNotFound,
    /// The pool does not serve the job's namespace.
    PoolRefuses,
    /// A Service of somebody else has the name that ours needs.
    NameTaken,
}

/// Whether the job has failed because its restarts were used up, and is allowed more by now: it goes on.
pub(crate) fn is_reopened(job: &TrainingJob) -> bool {
    let Some(status) = &job.status else { return false };
    let failed = is_true(&status.conditions, "Failed");
    failed.is_some_and(|it| it.reason == RESTARTS_USED_UP)
        && is_true(&status.conditions, "Complete").is_none()
        && status.in_a_row() < job.spec.failure_policy.restarts()
}

/// Says where a job is.
pub(crate) fn of(observed: &Observed, now: Timestamp) -> Stage {
    let job = &observed.job;
    if job.metadata.deletion_timestamp.is_some() {
        return Stage::Deleted;
    }
    if job.spec.managed_by.as_deref().is_some_and(|it| it != MANAGED_BY) {
        return Stage::Foreign;
    }
    let conditions = job.status.as_ref().map(|it| it.conditions.as_slice()).unwrap_or_default();
    let over = is_true(conditions, "Complete").or_else(|| is_true(conditions, "Failed"));
    if let Some(over) = over.filter(|_| !is_reopened(job)) {
        return Stage::Finished { at: over.last_transition_time.0 };
    }
    if let Some(refusal) = observed.unreadable.clone().or_else(|| validate::job(job).err()) {
        return Stage::Invalid(refusal);
    }
    let newest = newest(observed);
    let newest = newest.as_ref();
    if newest.is_some_and(Attempt::is_complete) {
        return Stage::Completed;
    }
    if deadline(observed).is_some_and(|it| it <= now.as_second()) {
        return Stage::Late { seconds: job.spec.active_deadline_seconds.unwrap_or_default() };
    }
    if job.spec.suspend {
        return Stage::Suspended;
    }
    let (restarts, after) = match newest {
        None => (told(observed), None),
        // Pods that go with their place in the queue may let the Job fail, too.
        Some(newest) if was_taken_back(observed, newest) => {
            (newest.restarts(observed), Some(Cause::taken_back()))
        }
        Some(newest) if newest.has_failed() || is_lost(observed, newest, now) || stands(newest) => {
            match judge(observed, newest, now) {
                Verdict::End(cause) => return Stage::Failed(cause),
                Verdict::Open(cause) => return Stage::Failing(cause),
                Verdict::Again { counted, cause } => {
                    (newest.restarts(observed).and(counted), Some(cause))
                }
            }
        }
        Some(newest) => return Stage::Active { number: newest.number },
    };
    if let Some(obstacle) = obstacle(observed) {
        return Stage::Blocked(obstacle);
    }
    next(observed, restarts, after, now)
}

/// Whether the queue has taken an attempt back that it had let run. That it had is known from the status,
/// which therefore goes on saying so until the attempt is gone.
pub(crate) fn was_taken_back(observed: &Observed, newest: &Attempt<'_>) -> bool {
    let Some(status) = &observed.job.status else { return false };
    label(&observed.job.metadata, LABEL_QUEUE).is_some()
        && newest.is_suspended()
        && status.attempt == newest.number
        && is_true(&status.conditions, "Admitted").is_some()
}

fn next(observed: &Observed, restarts: Restarts, after: Option<Cause>, now: Timestamp) -> Stage {
    let seen = observed.jobs.iter().filter_map(attempt).map(|it| it.number).max().unwrap_or(0);
    let told = observed.job.status.as_ref().map_or(0, |it| it.attempt);
    let number = seen.max(told).saturating_add(1);
    let is_over = attempts(observed).iter().all(Attempt::is_over);
    let is_quiet = all_ours(observed).all(|it| is_quiet(observed, it, now));
    // A new leader hears of the trainers of an earlier attempt when they come back to it.
    let may_train = observed.attached.is_none() && number > 1;
    if !is_over || !is_quiet || may_train || trains_on(observed).is_some() {
        return Stage::Waiting { number, restarts, after };
    }
    // What was lost in a hiccup of the cluster is not tried again and again while it lasts.
    let seen = observed.watched.as_ref().and_then(Watched::failed);
    let failed = seen.or_else(|| newest(observed)?.failed_at()).filter(|_| after.is_some());
    match failed.map(|it| it.as_second() + restarts.pause()) {
        Some(until) if until > now.as_second() => Stage::Pausing { number, restarts, after, until },
        Some(_) | None => Stage::Start { number, restarts, after },
    }
}

/// What keeps a job from starting.
pub(crate) fn obstacle(observed: &Observed) -> Option<Obstacle> {
    let job = &observed.job;
    let Some(pool) = &observed.pool else { return Some(Obstacle::PoolNotFound) };
    let home = pool.metadata.namespace == job.metadata.namespace;
    let listed = |it: &String| Some(it) == job.metadata.namespace.as_ref();
    if !home && !pool.spec.access.namespaces.iter().any(listed) {
        return Some(Obstacle::PoolRefuses);
    }
    let service = observed.service.as_ref()?;
    debug_assert_eq!(
        service.metadata.name,
        job.metadata.name.as_deref().map(trainers_service),
        "the Service is looked up by its name"
    );
    (!is_owned(&service.metadata, &job.metadata)).then_some(Obstacle::NameTaken)
}

/// When the job has been active for as long as it may, seconds since 1970. It was not while it had failed.
pub(crate) fn deadline(observed: &Observed) -> Option<i64> {
    if is_reopened(&observed.job) {
        return None;
    }
    let since = observed.job.status.as_ref()?.start_time.as_ref()?;
    let seconds = observed.job.spec.active_deadline_seconds?;
    Some(since.0.as_second() + i64::from(seconds))
}
