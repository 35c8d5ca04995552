//! What a job's status says, with the one true reason of each condition.
//!
//! In: an observation made after the actions. Out: the status; equal to the old one when nothing that it
//! tells has changed, so that it need not be written; none for a job that is deleted, or another
//! controller's. `Running`'s reason is the word that `kubectl get cadjob` shows.

use cadre_crds::contract::TRAINER_CONTAINER;
use cadre_crds::{Encryption, TrainingJob, TrainingJobStatus};
use cadre_views::Unserved;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::attempt::{Attempt, checkpoint, newest, told};
use super::failure::RESTARTS_USED_UP;
use super::manifest::checkpoint_folder;
use super::seen::{self, all_ours, has_joined, is_quiet, pod_of, trains_on};
use super::stage::{Obstacle, Stage, is_reopened, obstacle, of, was_taken_back};
use super::watched::Watched;
use super::{Observed, encryption};
use crate::action::{Applied, Failure};
use crate::conditions::{Conditions, Said, Truth, said};
use crate::names::name;
use crate::pod::{JOINS, State, joins_by, node, state, stuck, unscheduled};

/// The status of a job, unless it is not ours to write.
#[allow(clippy::too_many_lines, reason = "a list of fields")]
pub fn status(applied: &Applied<Observed>, now: Timestamp) -> Option<TrainingJobStatus> {
    let observed: &Observed = applied;
    let mut status = observed.job.status.clone().unwrap_or_default();
    let stage = of(observed, now);
    let generation = observed.job.metadata.generation;
    if let Stage::Deleted | Stage::Foreign = stage {
        return None;
    }
    status.failovers = status.failovers.max(observed.failovers);
    if let Some(progress) = &observed.progress {
        status.progress = Some(progress.clone());
    }
    if let Stage::Finished { .. } = stage {
        // The conditions of the end stay. Only a failure to carry the end out is added.
        let mut conditions = Conditions { list: &mut status.conditions, generation, now };
        conditions.set("Degraded", refused(applied.failure()));
        return Some(status);
    }
    let newest = newest(observed);
    let reopened = is_reopened(&observed.job);
    status.observed_generation = observed.job.metadata.generation.unwrap_or_default();
    status.checkpoint_step = checkpoint(observed);
    let mut in_a_row = told(observed).in_a_row;
    if let Some(newest) = newest {
        status.attempt = status.attempt.max(newest.number);
        status.attempt_generation = newest.generation;
        status.restarts = status.restarts.max(newest.restarts.all);
        in_a_row = newest.restarts(observed).in_a_row;
        status.encryption = Some(encryption::of_attempt(&observed.job, &newest));
        // An attempt that is not kept for its logs is deleted soon, so its count goes into the
        // status now. So it does before a pause, in which somebody may delete it.
        let pauses =
            if let Stage::Pausing { restarts, .. } = &stage { Some(restarts) } else { None };
        let goes = if let (Stage::Waiting { restarts, .. } | Stage::Start { restarts, .. }, false) =
            (&stage, newest.is_over())
        {
            Some(restarts)
        } else {
            None
        };
        if let Some(restarts) = pauses.or(goes) {
            status.restarts = status.restarts.max(restarts.all);
            in_a_row = restarts.in_a_row;
        }
    }
    status.restarts_without_progress = Some(in_a_row);
    if stage == Stage::Suspended || reopened {
        status.start_time = None;
    }
    if matches!(stage, Stage::Active { .. }) && status.start_time.is_none() {
        let said = newest.and_then(|it| Some(it.job.status.as_ref()?.start_time.as_ref()?.0));
        let seen = observed.watched.as_ref().and_then(Watched::started);
        status.start_time = seen.or(said).map(Time);
    }
    // One that is still to come was written by a leader whose clock is ahead.
    if status.start_time.as_ref().is_some_and(|it| it.0 > now) {
        status.start_time = Some(Time(now));
    }
    let edited = edited(&observed.job, &stage, status.encryption);
    let mut conditions = Conditions { list: &mut status.conditions, generation, now };
    conditions.set("Admitted", admitted(observed, &stage, newest.as_ref()));
    let pods = pods(observed, newest.as_ref());
    let wanted = observed.job.spec.nodes as usize;
    conditions.set("Scheduled", scheduled(&pods, wanted, newest.as_ref()));
    let running = match (&stage, applied.failure()) {
        (Stage::Start { .. }, Some(Failure { reason, message })) => said(false, reason, message),
        (Stage::Waiting { .. }, _) => {
            waits(observed, running(observed, &stage, (&pods, wanted), None, now), now)
        }
        (stage, _) => running(observed, stage, (&pods, wanted), newest.as_ref(), now),
    };
    let running = Said { message: running.message + &edited, ..running };
    conditions.set("Running", running.clone());
    conditions.set("Degraded", degraded(observed, applied.failure()));
    let suspended = matches!(stage, Stage::Suspended);
    let (reason, message) =
        if suspended { ("Suspended", "spec.suspend is true") } else { ("NotSuspended", "") };
    conditions.set("Suspended", said(suspended, reason, message));
    let failed = match &stage {
        Stage::Failed(cause) => {
            // The message of this reason says itself how the job goes on.
            let goes_on = cause.reason == RESTARTS_USED_UP;
            let way = if goes_on { String::new() } else { way_on(observed) };
            Some(said(true, cause.reason, format!("{}{way}", cause.what)))
        }
        Stage::Late { seconds } => {
            let text =
                format!("the job was active for {seconds} s, as spec.activeDeadlineSeconds says");
            Some(said(true, "DeadlineExceeded", text + &way_on(observed)))
        }
        Stage::Deleted
        | Stage::Foreign
        | Stage::Finished { .. }
        | Stage::Invalid(_)
        | Stage::Suspended
        | Stage::Blocked(_)
        | Stage::Completed
        | Stage::Failing(_)
        | Stage::Waiting { .. }
        | Stage::Pausing { .. }
        | Stage::Start { .. }
        | Stage::Active { .. } => None,
    };
    if stage == Stage::Completed {
        conditions.set("Complete", said(true, "Completed", "every trainer has ended well"));
    }
    if reopened && failed.is_none() {
        conditions
            .set("Failed", said(false, "Reopened", "spec.failurePolicy allows more restarts"));
    }
    if let Some(failed) = &failed {
        conditions.set("Failed", failed.clone());
    }
    let comes = matches!(
        stage,
        Stage::Failing(_)
            | Stage::Waiting { .. }
            | Stage::Pausing { .. }
            | Stage::Start { .. }
            | Stage::Active { .. }
    );
    let comes = comes && running.status != Truth::Yes;
    let stalled = failed.or_else(|| Some(running.clone()).filter(Said::stalls));
    conditions.waits(stalled, Some(running).filter(|_| comes));
    Some(status)
}

/// What of the spec counts from the next attempt on.
fn edited(job: &TrainingJob, stage: &Stage, now: Option<Encryption>) -> String {
    let now = now.filter(|_| matches!(stage, Stage::Active { .. }));
    match (job.spec.attention.encryption, now) {
        (Some(asked), Some(now)) if asked != now => {
            format!(
                "; spec.attention.encryption {asked:?} counts from the next attempt on, this one has {now:?}"
            )
        }
        _ => String::new(),
    }
}

/// How what a job has trained can be gone on with after an end that is final.
fn way_on(observed: &Observed) -> String {
    let place = &observed.job.spec.checkpoint;
    if !place.is_shared() || checkpoint(observed) == 0 {
        return "; create a new job".into();
    }
    let folder = checkpoint_folder(&observed.job);
    format!("; create a new job, which goes on with spec.checkpoint.resumeFrom: {folder}")
}

/// Pods of the newest attempt that are not on their way out, by name.
fn pods<'a>(observed: &'a Observed, newest: Option<&Attempt<'_>>) -> Vec<&'a Pod> {
    let Some(newest) = newest else { return Vec::new() };
    let mut pods: Vec<_> = seen::pods(observed, newest).collect();
    pods.retain(|it| state(it) != State::Leaving);
    pods.sort_by_key(|it| name(&it.metadata).to_owned());
    pods
}

fn admitted(observed: &Observed, stage: &Stage, newest: Option<&Attempt<'_>>) -> Said {
    match (stage, newest) {
        (Stage::Suspended, _) => said(false, "Suspended", "spec.suspend is true"),
        (Stage::Invalid(_) | Stage::Blocked(_), _) | (_, None) => {
            said(false, "NotStarted", "no attempt has been made")
        }
        (_, Some(newest)) if was_taken_back(observed, newest) => said(
            true,
            "TakenBack",
            "the queue has taken the attempt back; it ends, and the next one waits",
        ),
        (_, Some(newest)) if newest.is_suspended() => {
            said(false, "Queued", "the queue has not admitted the attempt yet")
        }
        (_, Some(_)) => said(true, "Admitted", ""),
    }
}

fn scheduled(pods: &[&Pod], wanted: usize, newest: Option<&Attempt<'_>>) -> Said {
    let placed = pods.iter().filter(|it| node(it).is_some()).count();
    if newest.is_some() && placed >= wanted {
        return said(true, "Scheduled", format!("{wanted} of {wanted} pods have a node"));
    }
    let mut open = pods.iter().filter(|it| node(it).is_none());
    let found = open.find_map(|it| Some((name(&it.metadata), unscheduled(it)?)));
    match found {
        Some((pod, why)) => said(
            false,
            "Unschedulable",
            format!("{placed} of {wanted} pods have a node; pod {pod}: {why}"),
        ),
        None => said(false, "Waiting", format!("{placed} of {wanted} pods have a node")),
    }
}

fn running(
    observed: &Observed,
    stage: &Stage,
    (pods, wanted): (&[&Pod], usize),
    newest: Option<&Attempt<'_>>,
    now: Timestamp,
) -> Said {
    match stage {
        Stage::Invalid(refusal) => said(false, "Invalid", refusal.to_string()),
        Stage::Blocked(obstacle) => blocked(*obstacle),
        Stage::Suspended => said(false, "Suspended", "spec.suspend is true"),
        Stage::Completed => said(false, "Complete", "every trainer has ended well"),
        Stage::Failed(cause) => said(false, "Failed", &cause.what),
        Stage::Failing(cause) => {
            said(false, "Restarting", format!("{cause}; its peers end, one of them may say why"))
        }
        Stage::Late { seconds } => said(false, "Failed", format!("active for {seconds} s")),
        Stage::Waiting { number, after, .. } | Stage::Start { number, after, .. } => {
            let why = after.as_ref().map(|it| format!("; {it}")).unwrap_or_default();
            let text = format!("attempt {number} starts when the pods of others have ended{why}");
            said(false, if after.is_some() { "Restarting" } else { "Starting" }, text)
        }
        Stage::Pausing { number, restarts, after, .. } => {
            let why = after.as_ref().map(|it| format!("; {it}")).unwrap_or_default();
            let (pause, vain) = (restarts.pause(), restarts.vain);
            let text = format!(
                "attempt {number} starts {pause} s after the end of the one before; {vain} in a row have ended without a \
                 newer checkpoint{why}"
            );
            said(false, "Restarting", text)
        }
        Stage::Active { .. } => {
            if newest.is_some_and(Attempt::is_suspended) {
                return queued(newest.map_or(0, |it| it.number));
            }
            let ready = pods.iter().filter(|it| state(it) == State::Ready).count();
            let ended = pods.iter().filter(|it| state(it) == State::Ended).count();
            if ready + ended >= wanted {
                return trains(observed, (pods, wanted), newest.map_or(0, |it| it.number), now);
            }
            let text = format!("{ready} of {wanted} pods are ready");
            let made = pods.len();
            if let Some(Failure { reason, message }) = &observed.refused_pod
                && made < wanted
            {
                return said(false, reason, format!("{made} of {wanted} pods are made; {message}"));
            }
            let why = |it: &&Pod| {
                let why = stuck(it, TRAINER_CONTAINER, now)?;
                Some(format!("{text}; pod {}: {why}", name(&it.metadata)))
            };
            match pods.iter().find_map(why) {
                Some(why) => said(false, "NotStarting", why),
                None => said(false, "Starting", text),
            }
        }
        Stage::Deleted | Stage::Foreign | Stage::Finished { .. } => {
            said(Truth::Unknown, "Unknown", "")
        }
    }
}

/// From a trainer's pod being ready until it is late that it has not joined: a program joins once it has loaded its model.
pub(super) const TRAINER_JOINS_SECONDS: i64 = 600;

/// Whether the trainers of an attempt whose pods are all ready have joined, as far as that is known.
fn trains(
    observed: &Observed,
    (pods, wanted): (&[&Pod], usize),
    attempt: u32,
    now: Timestamp,
) -> Said {
    let mut missing: Vec<_> = pods.iter().collect();
    missing.retain(|it| has_joined(observed, attempt, it) == Some(false));
    let text = format!("{wanted} of {wanted} pods are ready");
    if missing.is_empty() {
        return said(true, "Running", text);
    }
    let text = format!("{text}, {} have joined", pods.len() - missing.len());
    let is_late =
        |it: &&&Pod| joins_by(it, TRAINER_JOINS_SECONDS).is_some_and(|it| it <= now.as_second());
    match missing.into_iter().find(is_late) {
        Some(pod) => {
            let pod = name(&pod.metadata);
            let text = format!(
                "{text}; pod {pod} is ready for {TRAINER_JOINS_SECONDS} s and has not; {JOINS}"
            );
            said(false, "NotJoined", text)
        }
        None => said(true, "Running", text),
    }
}

/// Names a pod that the next attempt waits for.
fn waits(observed: &Observed, said: Said, now: Timestamp) -> Said {
    let waited =
        all_ours(observed).filter(|it| !is_quiet(observed, it, now)).map(|it| name(&it.metadata));
    if let Some(pod) = waited.min() {
        return Said { message: format!("{}; it waits for pod {pod}", said.message), ..said };
    }
    if observed.attached.is_none() {
        let message = format!(
            "{}; the operator is new, and trainers that work on may come back to it",
            said.message
        );
        return Said { message, ..said };
    }
    let Some((attempt, rank)) = trains_on(observed) else { return said };
    let pod = pod_of(observed, attempt, rank).map(|it| {
        let node = node(it).map(|it| format!(" on node {it}")).unwrap_or_default();
        format!("pod {}{node}", name(&it.metadata))
    });
    let who = pod.unwrap_or_else(|| "its pod is gone".to_owned());
    let message = format!(
        "{}; trainer {rank} of attempt {attempt} ({who}) should be gone and is still connected: its node's kubelet is dead \
         and its machine lives, so switch the machine off",
        said.message
    );
    Said { message, ..said }
}

/// Each attempt is a workload of its own to the queue.
fn queued(attempt: u32) -> Said {
    if attempt <= 1 {
        return said(false, "Queued", "the queue has not admitted the attempt yet");
    }
    let text = format!(
        "attempt {attempt} waits in the queue as a new workload; the place of the one before is lost"
    );
    said(false, "QueuePlaceLost", text)
}

fn blocked(obstacle: Obstacle) -> Said {
    let (reason, message) = words(obstacle);
    said(false, reason, message)
}

fn words(obstacle: Obstacle) -> (&'static str, &'static str) {
    match obstacle {
        Obstacle::PoolNotFound => (
            "PoolNotFound",
            "spec.attention.poolRef names no AttentionPool with the job's spec.class; create it, or correct one of the two",
        ),
        Obstacle::PoolRefuses => (
            "PoolRefuses",
            "the pool does not serve this namespace; add it to the pool's spec.access.namespaces",
        ),
        Obstacle::NameTaken => (
            "NameTaken",
            "a Service that is not this job's has the name NAME-trainers; rename one of the two",
        ),
    }
}

/// Whether a job that runs has less than it should.
fn degraded(observed: &Observed, failure: Option<&Failure>) -> Said {
    if let Some(obstacle) = obstacle(observed) {
        let (reason, message) = words(obstacle);
        return said(true, reason, message);
    }
    let newest = newest(observed).map_or(0, |it| it.number);
    match observed.unserved.filter(|it| it.0 == newest && failure.is_none()) {
        // Of trainers that do not come `Running` says why.
        None | Some((_, Unserved::NotCome)) => refused(failure),
        Some((_, why @ (Unserved::OtherBuild { .. } | Unserved::NotWhole { .. }))) => {
            said(true, why.reason(), why.words("the job"))
        }
    }
}

/// Whether something was tried for it and refused.
fn refused(failure: Option<&Failure>) -> Said {
    match failure {
        Some(Failure { reason, message }) => said(true, reason, message),
        None => said(false, "AsItShould", ""),
    }
}
