//! What people are to read of jobs, pools and pods: events of the objects.
//!
//! In: notices of conductors, words of the decisions, workers that are turned away. Out: events, written beside everything else; one that cannot be written
//! holds nothing up. A lost server is acted on, too.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cadre_control::Caller;
use cadre_control::proto::{self, notice};
use cadre_control::server::Link;
use cadre_views::{Input, JobKey, ServerId, Who};
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::reflector::ObjectRef;

use super::service::Service;
use crate::report;
use crate::triggers::Key;

/// How long a worker waits at the door before it is told on its pod; most come too early by a second.
const LONG: Duration = Duration::from_secs(10);
/// After this time without another try its wait is over.
const OVER: Duration = Duration::from_mins(1);

/// Pods whose workers wait at the door, by uid.
#[derive(Debug, Default)]
pub(super) struct Waiting(BTreeMap<String, Wait>);

#[derive(Debug)]
struct Wait {
    first: Instant,
    last: Instant,
    is_told: bool,
}

impl Waiting {
    /// A worker was turned away for now. Out: whether that is to be told on its pod: once, if it waits for long.
    fn is_long(&mut self, pod: &str, now: Instant) -> bool {
        self.0.retain(|_, it| now.duration_since(it.last) < OVER);
        let new = || Wait { first: now, last: now, is_told: false };
        let wait = self.0.entry(pod.to_owned()).or_insert_with(new);
        wait.last = now;
        let is_long = now.duration_since(wait.first) >= LONG;
        is_long && !std::mem::replace(&mut wait.is_told, is_long)
    }
}

impl Service {
    /// Turns a worker away for now; it comes again.
    pub(super) fn postpone(&mut self, link: Link, caller: &Caller, reason: String) {
        link.postpone(&reason);
        if self.waiting.is_long(&caller.uid, Instant::now()) {
            let mut pod = Pod::default();
            pod.metadata.name = Some(caller.pod.clone());
            pod.metadata.namespace = Some(caller.namespace.clone());
            pod.metadata.uid = Some(caller.uid.clone());
            let context = self.context.clone();
            tokio::spawn(async move {
                report::say(&context, &pod, true, "NotAdmitted", &reason).await;
            });
        }
    }

    /// Ends a worker's link with a word to it.
    pub(super) fn part(&mut self, worker: &(Key, Who), say: impl FnOnce(Link)) {
        if let Some(link) = self.workers.remove(worker) {
            self.links.remove(&link.id());
            say(link);
        }
    }

    /// What a conductor wants people to read becomes an event of the job; a lost server is acted on.
    pub(super) fn notice(&mut self, key: &Key, job: &JobKey, notice: proto::Notice) {
        if let (notice::Event::ServerLost, Some(server)) = (notice.event(), notice.server) {
            let id = ServerId { index: server.index, incarnation: server.incarnation };
            self.put(key, Input::Lost(job.clone(), id));
        }
        let reason = match notice.event() {
            notice::Event::ServerLost => "ServerLost",
            notice::Event::PoolLost => "PoolLost",
            notice::Event::PoolBack => "PoolBack",
            notice::Event::CheckpointWritten => "CheckpointWritten",
            notice::Event::SlotFilled | notice::Event::Unspecified => return,
        };
        let reference = ObjectRef::new(&job.name).within(&job.namespace);
        let Some(object) = self.context.caches.trainings.get(&reference) else { return };
        let (context, warns) = (self.context.clone(), notice.level() != notice::Level::Information);
        tokio::spawn(async move {
            report::say(&context, object.as_ref(), warns, reason, &notice.text).await;
        });
    }

    /// What the decisions want people to read becomes an event of the pool.
    pub(super) fn say(&self, (namespace, name): &Key, reason: &'static str, text: String) {
        let reference = ObjectRef::new(name).within(namespace);
        let Some(object) = self.context.caches.pools.get(&reference) else { return };
        let context = self.context.clone();
        tokio::spawn(async move {
            report::say(&context, object.as_ref(), true, reason, &text).await;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_told_once_when_it_is_long_and_one_that_was_given_up_begins_anew() {
        let (mut waiting, start) = (Waiting::default(), Instant::now());
        let mut told = |pod, at| waiting.is_long(pod, start + Duration::from_secs(at));
        let tries: Vec<u64> = (0..40).chain(100..120).filter(|it| told("u", *it)).collect();
        assert_eq!(tries, [10, 110]);
        assert!(!told("other", 900));
        assert_eq!(waiting.0.len(), 1, "the first one has given up");
    }
}
