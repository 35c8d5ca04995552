//! When an operator saw what has become of a job, by its own clock.
//!
//! In: what is observed, what was seen before. Out: what has been seen by now, for the next look.
//!
//! The API server and the Job controller write times by their own clocks, which may be ahead of the operator's or behind it. So
//! pauses and deadlines count from when the operator first saw what they are about. What a process saw already at its first
//! look at a job counts from when others say that it was, but from no time that is still to come.
//!
//! Bounded by the pods that are there.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;

use super::Observed;
use super::attempt::newest;
use super::seen::{all_ours, deleted_at};

/// What an operator saw of a job. See the module.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Watched {
    /// Uid of the newest attempt's Job.
    attempt: Option<String>,
    started: Option<Timestamp>,
    failed: Option<Timestamp>,
    /// Pods that somebody has deleted, by uid.
    deleted: BTreeMap<String, Timestamp>,
}

/// Sees what is there now.
pub fn watch(observed: &Observed, now: Timestamp) -> Watched {
    let before = observed.watched.as_ref();
    let first = |at: Timestamp| if before.is_some() { now } else { at.min(now) };
    let newest = newest(observed);
    let attempt = newest.and_then(|it| it.job.metadata.uid.clone());
    let known = before.filter(|it| it.attempt == attempt);
    let said = newest.and_then(|it| it.failed_at());
    let failed = said.map(|at| known.and_then(|it| it.failed).unwrap_or_else(|| first(at)));
    let said = newest.and_then(|it| Some(it.job.status.as_ref()?.start_time.as_ref()?.0));
    let started = said.map(|at| known.and_then(|it| it.started).unwrap_or_else(|| first(at)));
    let deleted = all_ours(observed).filter_map(|it| {
        let (uid, at) = (it.metadata.uid.as_ref()?, deleted_at(it)?);
        let known = before.and_then(|it| it.deleted.get(uid).copied());
        Some((uid.clone(), known.unwrap_or_else(|| first(at))))
    });
    Watched { attempt, started, failed, deleted: deleted.collect() }
}

impl Watched {
    /// When the newest attempt has started.
    pub(super) fn started(&self) -> Option<Timestamp> {
        self.started
    }

    /// When the newest attempt has failed.
    pub(super) fn failed(&self) -> Option<Timestamp> {
        self.failed
    }

    /// When a pod was deleted.
    pub(super) fn deleted(&self, pod: &Pod) -> Option<Timestamp> {
        self.deleted.get(pod.metadata.uid.as_ref()?).copied()
    }
}
