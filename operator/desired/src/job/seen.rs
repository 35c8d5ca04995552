//! What the pods that are left of an attempt say about its end.
//!
//! In: the pods, what the Job controller has named. Out: the end of the trainer that ended first. What follows from it is
//! [`failure`](super::failure)'s.

use cadre_crds::contract::{LABEL_ATTEMPT, TRAINER_CONTAINER};
use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod};
use k8s_openapi::jiff::Timestamp;

use super::Observed;
use super::attempt::Attempt;
use super::ended::{COULD_NOT_GO_ON, Ended, How, WORDS, told};
use crate::identity;
use crate::names::{label, name};
use crate::pod::{DISRUPTED, State, condition, disruption, end, state};

/// Exit codes of a trainer that was stopped by SIGTERM, and after that by SIGKILL.
const STOPPED: [i32; 2] = [143, 137];

/// Seconds after which a pod that should be gone is taken for lost with its node.
const OVERDUE_SECONDS: i64 = 10;

/// How the attempt ended, by the pods that are left. None if the pod that the Job controller names
/// is gone. If that pod only gave up because of a peer, the pods that are left may still show the
/// cause.
pub(super) fn seen(observed: &Observed, attempt: &Attempt<'_>, now: Timestamp) -> Option<Ended> {
    let own = |it: &Pod| name(&it.metadata).to_owned();
    let mut all: Vec<_> = pods(observed, attempt).collect();
    all.sort_by_key(|it| own(it));
    // The one that the Job controller names was first; what its peers do when they are deleted is no cause.
    let named = told(attempt);
    let is_gone = named.as_ref().filter(|it| all.iter().all(|pod| own(pod) != it.pod));
    if is_gone.is_some_and(|it| it.how != How::Exit(COULD_NOT_GO_ON)) {
        return None;
    }
    let is_gone = is_gone.is_some();
    if let Some(pod) = all.iter().find(|it| is_disrupted(it)) {
        let said = condition(pod, DISRUPTED);
        let words = said.and_then(|it| it.message.as_deref()).unwrap_or("it was taken away");
        let how = How::Disrupted(disruption(pod).to_owned());
        return Some(Ended { pod: own(pod), how, words: words.to_owned() });
    }
    let is_named = |pod: &Pod| named.as_ref().is_some_and(|it| it.pod == own(pod));
    let failed = all.iter().filter_map(|pod| Some((*pod, failure(pod)?)));
    // A pod that was deleted after the named one gave up ends because of that: its end says
    // nothing.
    let obeys = |pod: &Pod, how: &How| is_gone && deleted_at(pod).is_some() && is_stopped(how);
    let failed: Vec<_> = failed.filter(|(pod, (_, how, _))| !obeys(pod, how)).collect();
    let by_itself = failed.iter().filter(|it| deleted_at(it.0).is_none()).map(|it| it.1.0).min();
    // Once a pod has failed the Job controller deletes the others.
    let after_failure = |at: Timestamp| is_gone || by_itself.is_some_and(|it| it <= at);
    let order = |pod: &Pod, at: Timestamp, how: &How| {
        let follows = deleted_at(pod).is_some_and(after_failure) && is_stopped(how);
        let gave_up = *how == How::Exit(COULD_NOT_GO_ON);
        (follows, gave_up, !is_named(pod), at, deleted_at(pod))
    };
    let first = failed.into_iter().min_by_key(|(pod, (at, how, _))| order(pod, *at, how));
    let lost = all.iter().find(|it| never_ends(observed, it, now)).map(|it| Ended {
        pod: own(it),
        how: How::Disrupted("DeletionByPodGC".into()),
        words: "its node is lost".into(),
    });
    let Some((pod, (at, how, words))) = first else {
        if is_gone {
            return lost;
        }
        // The Job controller deletes pods only after the Job has failed, so somebody else deleted
        // this one.
        let leaves = all.iter().find(|it| state(it) == State::Leaving);
        let deleted = leaves.filter(|_| !attempt.has_failed());
        return deleted.map(|it| Ended { pod: own(it), how: How::Deleted, words: String::new() });
    };
    if let Some(lost) = lost.filter(|_| how == How::Exit(COULD_NOT_GO_ON)) {
        return Some(lost);
    }
    if deleted_at(pod).is_some_and(|it| it <= at && !after_failure(it)) {
        return Some(Ended { pod: own(pod), how: How::Deleted, words: String::new() });
    }
    Some(Ended { pod: own(pod), how, words })
}

/// When and how a pod failed, with its last words.
fn failure(pod: &Pod) -> Option<(Timestamp, How, String)> {
    let status = pod.status.as_ref()?;
    if status.phase.as_deref() != Some("Failed") {
        return None;
    }
    let ended = |it: &ContainerStateTerminated| it.finished_at.as_ref().map(|it| it.0);
    if let Some(end) = end(pod, TRAINER_CONTAINER).filter(|it| it.exit_code != 0) {
        let words = end.message.as_deref().unwrap_or_default().trim();
        let tail = words.chars().count().saturating_sub(WORDS);
        let words = words.chars().skip(tail).collect();
        let how = match end.reason.as_deref() {
            Some("OOMKilled") => How::OutOfMemory(end.exit_code),
            Some(_) | None => How::Exit(end.exit_code),
        };
        return Some((ended(end).unwrap_or(Timestamp::MIN), how, words));
    }
    let failed = |it: &ContainerStatus| {
        let end = it.state.as_ref()?.terminated.clone()?;
        (end.exit_code != 0).then_some((it.name.clone(), end))
    };
    let has_begun = end(pod, TRAINER_CONTAINER).is_some();
    let how = |why: String| if has_begun { How::Beside(why) } else { How::NotBegun(why) };
    let containers = status.container_statuses.iter().chain(&status.init_container_statuses);
    if let Some((name, end)) = containers.flatten().find_map(failed) {
        let why = format!("container {name}: exit code {}", end.exit_code);
        let words = end.message.as_deref().unwrap_or_default().trim().to_owned();
        return Some((ended(&end).unwrap_or(Timestamp::MIN), how(why), words));
    }
    let why = status.reason.clone().unwrap_or_else(|| "nobody says why".into());
    let words = status.message.clone().unwrap_or_default();
    Some((deleted_at(pod).unwrap_or(Timestamp::MIN), how(why), words))
}

/// When somebody asked for a pod's deletion; its time is when it should be gone.
pub(super) fn deleted_at(pod: &Pod) -> Option<Timestamp> {
    let gone_by = pod.metadata.deletion_timestamp.as_ref()?.0;
    let grace = pod.metadata.deletion_grace_period_seconds.unwrap_or(0);
    Timestamp::from_second(gone_by.as_second().saturating_sub(grace)).ok()
}

/// Whether a pod may have ended so because it was deleted.
fn is_stopped(how: &How) -> bool {
    match how {
        How::Exit(code) => STOPPED.contains(code),
        How::NotBegun(_) | How::Beside(_) => true,
        How::Disrupted(_) | How::Deleted | How::Stands(_) | How::OutOfMemory(_) => false,
    }
}

/// The pods of the job's attempts, also of those that are gone.
pub(super) fn all_ours(observed: &Observed) -> impl Iterator<Item = &Pod> {
    let own = name(&observed.job.metadata);
    observed.pods.iter().filter(move |it| identity::is_trainer_of(it, own))
}

/// The pods of an attempt. A former job of the same name had one of the same number, whose pods may be lost for long.
pub(super) fn pods<'a>(
    observed: &'a Observed,
    attempt: &Attempt<'_>,
) -> impl Iterator<Item = &'a Pod> + use<'a> {
    let (number, job) = (attempt.number.to_string(), attempt.job.metadata.uid.clone());
    let of_attempt = move |it: &&Pod| {
        let mut owners = it.metadata.owner_references.iter().flatten();
        let owner = owners.find(|it| it.controller == Some(true));
        let is_its = owner.is_none_or(|it| Some(&it.uid) == job.as_ref());
        is_its && label(&it.metadata, LABEL_ATTEMPT) == Some(&number)
    };
    all_ours(observed).filter(of_attempt)
}

pub(super) fn all_quiet(observed: &Observed, attempt: &Attempt<'_>, now: Timestamp) -> bool {
    pods(observed, attempt).all(|it| is_quiet(observed, it, now))
}

/// A trainer, by attempt and rank, that is still connected although it should be gone: its node's kubelet is dead, and its
/// machine lives.
pub(super) fn trains_on(observed: &Observed) -> Option<(u32, u32)> {
    let has_ended = |(attempt, rank): (u32, u32)| {
        // A controller may say of a pod whose kubelet is silent that it has failed.
        let pod = pod_of(observed, attempt, rank);
        pod.is_some_and(|it| state(it) == State::Ended && end(it, TRAINER_CONTAINER).is_some())
    };
    observed.attached.iter().flatten().copied().find(|it| !has_ended(*it))
}

/// The pod of a trainer, if it is there.
pub(super) fn pod_of(observed: &Observed, attempt: u32, rank: u32) -> Option<&Pod> {
    let is_of = |it: &&Pod| {
        let number = label(&it.metadata, LABEL_ATTEMPT).and_then(|it| it.parse().ok());
        let ranks = identity::ranks(it, &observed.job);
        number == Some(attempt) && ranks.is_some_and(|it| it.contains(&rank))
    };
    all_ours(observed).find(is_of)
}

/// Whether the trainers of a pod of this attempt have joined the control service; none where that is not known.
pub(super) fn has_joined(observed: &Observed, attempt: u32, pod: &Pod) -> Option<bool> {
    let joined = observed.joined.as_ref()?;
    let mut ranks = identity::ranks(pod, &observed.job)?;
    let all = joined.attempt == attempt && ranks.all(|it| joined.ranks.contains(&it));
    Some(all || state(pod) == State::Ended)
}

/// Whether the pod computes nothing any more, now or because its node is lost.
pub(super) fn is_quiet(observed: &Observed, pod: &Pod, now: Timestamp) -> bool {
    state(pod) == State::Ended || is_overdue(observed, pod, now)
}

/// Whether the pod should be gone for long and has not ended: then its node is lost.
pub(super) fn never_ends(observed: &Observed, pod: &Pod, now: Timestamp) -> bool {
    state(pod) != State::Ended && is_overdue(observed, pod, now)
}

/// Whether the pod should have been gone for so long that its node must be lost.
fn is_overdue(observed: &Observed, pod: &Pod, now: Timestamp) -> bool {
    let seen = observed.watched.as_ref().and_then(|it| it.deleted(pod));
    let grace = pod.metadata.deletion_grace_period_seconds.unwrap_or(0);
    let late = |it: Timestamp| it.as_second() + grace + OVERDUE_SECONDS <= now.as_second();
    seen.or_else(|| deleted_at(pod)).is_some_and(late)
}

/// The platform takes the pod away. What it only announces it may take back.
fn is_disrupted(pod: &Pod) -> bool {
    let goes = pod.metadata.deletion_timestamp.is_some() || state(pod) == State::Ended;
    goes && condition(pod, DISRUPTED).is_some_and(|it| it.status == "True")
}
