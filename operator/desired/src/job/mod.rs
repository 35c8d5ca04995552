//! A `TrainingJob`: one Job of the core API for each attempt, and a Service that names its pods.
//!
//! In: an [`Observed`] and the time. Out: [`decide`], the actions and when to look again; [`status`],
//! what is there.
//!
//! ```text
//!              ┌────────── suspended ◀───────┐
//!              ▼                             │
//! blocked ─▶ waiting ─▶ pausing ─▶ start ─▶ active ─▶ completed
//!              ▲                             │  └───▶ failed, late
//!              ├────────── restart ◀─────────┘         │
//!              └──────── more restarts allowed ◀───────┘ where they were used up
//! ```
//!
//! An attempt is a Job of its own since the core controller replaces one pod, late, where all trainers
//! have to start anew. The number of the attempt and the restarts that counted stand on the Job, so
//! nothing hangs on a status that was not written.
//!
//! Invariant: an attempt is created only when all others make no pods any more, their pods are quiet and none of their trainers
//! is connected to the control service, and the longer after
//! the end of the one before, the more in a row have ended without a newer checkpoint.

mod attempt;
mod encryption;
mod ended;
mod failure;
mod manifest;
mod seen;
mod stage;
mod status;
mod watched;

use std::collections::BTreeSet;

use cadre_crds::contract::ANNOTATION_ENDED;
use cadre_crds::validate::Refusal;
use cadre_crds::{AttentionPool, Progress, TrainingJob};
use cadre_views::Unserved;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::jiff::Timestamp;

use self::status::TRAINER_JOINS_SECONDS;
use crate::action::{Action, Failure, Kind, Object, Reference};
use crate::names::{is_owned, name};
use crate::owned;
use crate::pod::{joins_by, set_up_by};
use crate::settings::Settings;
use attempt::{Attempt, attempts, newest};
pub use encryption::encryption;
pub use failure::{Cause, LastWords};
use seen::{all_ours, has_joined, pods};
use stage::Stage;
pub use status::status;
pub use watched::{Watched, watch};

/// Seconds after which pods that should be gone are looked at again.
const LOOK_AGAIN_SECONDS: i64 = 5;

/// Seconds that the Job controller has to make the pods of an attempt.
const PODS_COME_SECONDS: i64 = 5;

/// State of a job in the cluster, and what its conductor reported.
#[derive(Clone, Debug)]
pub struct Observed {
    /// The object.
    pub job: TrainingJob,
    /// What of it cannot be read: nothing is made from its spec.
    pub unreadable: Option<Refusal>,
    /// The pool that it names, if there is one.
    pub pool: Option<AttentionPool>,
    /// The Service of its trainers, if there is one by that name.
    pub service: Option<Service>,
    /// The Jobs of its attempts.
    pub jobs: Vec<Job>,
    /// The pods of its trainers.
    pub pods: Vec<Pod>,
    /// Last progress that the conductor reported.
    pub progress: Option<Progress>,
    /// Steps in the newest checkpoint that the trainers reported.
    pub checkpoint: u64,
    /// Servers lost in its steps, as its conductor counts them.
    pub failovers: u32,
    /// The conductor's last message about an attempt that has failed.
    pub last_words: Option<LastWords>,
    /// Who has joined the control service; none where that is not known: there is no such service, or trainers may still
    /// come back to a new leader.
    pub joined: Option<Arrived>,
    /// Trainers that are connected to the control service now, by attempt and rank; none while they may still come back to a
    /// new leader.
    pub attached: Option<BTreeSet<(u32, u32)>>,
    /// Why a pod of the attempt that should have more was refused when it was tried.
    pub refused_pod: Option<Failure>,
    /// The attempt that has none of the pool's servers though its conductor is there, and why.
    pub unserved: Option<(u32, Unserved)>,
    /// What the operator has seen of the job by its own clock; none where it looks at it for the first time.
    pub watched: Option<Watched>,
}

/// Trainers that have joined the control service.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Arrived {
    /// Number of their attempt.
    pub attempt: u32,
    /// Their ranks.
    pub ranks: BTreeSet<u32>,
}

/// What to do for an object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    /// In this order.
    pub actions: Vec<Action>,
    /// Seconds after which to look again although nothing has changed.
    pub again: Option<i64>,
    /// Pods are there or come that talk to the control service: they mount its issuer's certificate.
    pub has_workers: bool,
    /// Name of the Job of an attempt that should have more pods by now: its controller tells nobody but its events why it
    /// makes none, so one is tried without being made.
    pub lacks_pods: Option<String>,
}

/// Decides what to do for a job.
pub fn decide(observed: &Observed, settings: &Settings, now: Timestamp) -> Decision {
    let stage = stage::of(observed, now);
    let has_workers = matches!(
        stage,
        Stage::Failing(_)
            | Stage::Waiting { .. }
            | Stage::Pausing { .. }
            | Stage::Start { .. }
            | Stage::Active { .. }
    );
    let all = attempts(observed);
    let runs = |it: &Attempt<'_>| !it.has_failed() && !it.is_complete();
    // What still runs of a job that has become invalid talks to the control service, too.
    let is_invalid = matches!(stage, Stage::Invalid(_));
    let has_workers = has_workers || is_invalid && all.iter().any(runs);
    let delete = |job: &Job| Action::Delete(Reference::new(Kind::Job, &job.metadata));
    let mut decision = Decision { has_workers, ..Decision::default() };
    note(observed, &stage, now, &mut decision);
    match &stage {
        Stage::Deleted
        | Stage::Foreign
        | Stage::Invalid(_)
        | Stage::Blocked(_)
        | Stage::Completed
        | Stage::Failed(_) => {}
        Stage::Finished { at } => {
            // What a failed job still has running ends; the last attempt stays for its logs.
            let ended: Vec<_> =
                all.iter().filter(|it| it.has_failed() || it.is_complete()).collect();
            let stays = ended.last().map(|it| it.number);
            let others = all.iter().filter(|it| Some(it.number) != stays);
            decision.actions.extend(others.map(|it| delete(it.job)));
            if let Some(ttl) = observed.job.spec.ttl_seconds_after_finished {
                let left = at.as_second() + i64::from(ttl) - now.as_second();
                if left <= 0 {
                    decision.actions.push(Action::DeleteSelf);
                } else {
                    decision.again = Some(left);
                }
            }
        }
        Stage::Suspended | Stage::Late { .. } => {
            let stays = kept(&all).map(|it| it.number);
            let others = all.iter().filter(|it| Some(it.number) != stays);
            decision.actions.extend(others.map(|it| delete(it.job)));
        }
        Stage::Failing(_) => decision.again = Some(LOOK_AGAIN_SECONDS),
        Stage::Waiting { restarts, .. } => {
            // An attempt with a pod on a lost node would run for ever, so it is deleted. If it is
            // the proof that a restart counts, it is deleted only after the status has the count.
            let counted = observed.job.status.as_ref().map_or(0, |it| it.restarts);
            let newest = newest(observed).map(|it| it.number);
            let is_told = |it: &Attempt<'_>| counted >= restarts.all || Some(it.number) != newest;
            let ends = all.iter().filter(|it| !it.is_over() && is_told(it));
            decision.actions.extend(ends.map(|it| delete(it.job)));
            decision.again = Some(LOOK_AGAIN_SECONDS);
        }
        Stage::Pausing { until, .. } => {
            let late = stage::deadline(observed);
            let next = late.into_iter().chain([*until]).min();
            decision.again = next.map(|it| (it - now.as_second()).max(1));
        }
        Stage::Start { number, restarts, .. } => {
            ensure_service(observed, &mut decision);
            let job = manifest::job(observed, settings, *number, *restarts);
            decision.actions.push(Action::Create(Object::Job(Box::new(job))));
        }
        Stage::Active { number } => {
            ensure_service(observed, &mut decision);
            // The one that ended last stays for its logs until another one ends.
            let older: Vec<_> = all.iter().copied().filter(|it| it.number < *number).collect();
            let stays = kept(&older).map(|it| it.number);
            let others = older.iter().filter(|it| Some(it.number) != stays);
            decision.actions.extend(others.map(|it| delete(it.job)));
            let late = stage::deadline(observed).map(|it| (it - now.as_second()).max(1));
            // A pod whose node is lost is never news again.
            let leaves = all_ours(observed).any(|it| it.metadata.deletion_timestamp.is_some());
            let leaves = leaves.then_some(LOOK_AGAIN_SECONDS);
            let patience = newest(observed).and_then(|it| failure::patience(observed, &it, now));
            // What is late by then is told.
            let not_joined = |it: &Pod| {
                joins_by(it, TRAINER_JOINS_SECONDS)
                    .filter(|_| has_joined(observed, *number, it) == Some(false))
            };
            let told = all_ours(observed).filter_map(|it| set_up_by(it).or_else(|| not_joined(it)));
            let lacks = newest(observed).and_then(|it| lacks_pods_from(observed, &it));
            decision.lacks_pods = newest(observed)
                .filter(|_| lacks.is_some_and(|it| it <= now.as_second()))
                .map(|it| name(&it.job.metadata).to_owned());
            let told = told.chain(lacks).map(|it| it - now.as_second()).filter(|it| *it > 0);
            decision.again = late.into_iter().chain(leaves).chain(patience).chain(told).min();
        }
    }
    decision
}

/// The second from which on an attempt should have all of its pods, if it has not.
fn lacks_pods_from(observed: &Observed, attempt: &Attempt<'_>) -> Option<i64> {
    let wanted = observed.job.spec.nodes as usize;
    if attempt.is_suspended() || pods(observed, attempt).count() >= wanted {
        return None;
    }
    let made = attempt.job.metadata.creation_timestamp.as_ref()?;
    Some(made.0.as_second() + PODS_COME_SECONDS)
}

/// The attempt whose pods stay for their logs: of those that have ended by themselves, the newest.
fn kept<'a>(all: &[Attempt<'a>]) -> Option<Attempt<'a>> {
    all.iter().copied().rfind(Attempt::is_over)
}

/// What ended the newest attempt, noted on its Job before anything follows from it: the pods that show it are gone
/// soon.
fn note(observed: &Observed, stage: &Stage, now: Timestamp, decision: &mut Decision) {
    let (Stage::Active { .. }
    | Stage::Failing(_)
    | Stage::Failed(_)
    | Stage::Blocked(_)
    | Stage::Waiting { .. }
    | Stage::Pausing { .. }
    | Stage::Start { .. }) = stage
    else {
        return;
    };
    let Some(newest) = newest(observed) else { return };
    if let Some(text) = failure::unwritten(observed, &newest, now) {
        let object = Reference::new(Kind::Job, &newest.job.metadata);
        decision.actions.push(Action::Note { object, annotation: ANNOTATION_ENDED, text });
    }
}

/// Makes the Service, unless there is one. A Service of somebody else is left alone; the status
/// names it.
fn ensure_service(observed: &Observed, decision: &mut Decision) {
    let wanted = manifest::service(&observed.job);
    match &observed.service {
        None => decision.actions.push(Action::Create(Object::Service(Box::new(wanted)))),
        Some(found) if is_owned(&found.metadata, &observed.job.metadata) => {
            if !owned::is_service(found, &wanted) {
                decision.actions.push(Action::Apply(Object::Service(Box::new(wanted))));
            }
        }
        Some(_) => {}
    }
}
