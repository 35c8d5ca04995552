//! What people are to read of jobs, pools and pods: events of the objects.
//!
//! In: notices of conductors, words of the decisions, workers that are turned away. Out: events, written beside everything else; one that cannot be written
//! holds nothing up. A lost server is acted on, too, and so is a step for which there are too few.

use std::time::Instant;

use cadre_control::Caller;
use cadre_control::proto::{self, notice};
use cadre_control::server::Link;
use cadre_views::{Input, JobKey, ServerId, Who};
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::reflector::ObjectRef;

use super::service::Service;
use crate::report;
use crate::triggers::Key;

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

    /// What a conductor wants people to read becomes an event of the job; a lost server is acted on, and so is a
    /// step for which there are too few.
    pub(super) fn notice(&mut self, key: &Key, job: &JobKey, notice: proto::Notice) {
        if let (notice::Event::ServerLost, Some(server)) = (notice.event(), notice.server) {
            let id = ServerId { index: server.index, incarnation: server.incarnation };
            self.put(key, Input::Lost(job.clone(), id));
        }
        if notice.event() == notice::Event::PoolLost {
            self.put(key, Input::Lacking(job.clone()));
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

    /// Jobs that have no servers say so in their status, and their pool does not ask for servers for them.
    pub(super) fn tell_unserved(&self, key: &Key) {
        let Some(pool) = self.pools.get(key) else { return };
        let now =
            pool.unserved(self.started.elapsed()).map(|(job, why)| (job.clone(), why)).collect();
        let caches = &self.context.caches;
        for job in self.context.told.tell_unserved(key, now) {
            caches.pool_triggers.put(key.clone());
            caches.job_triggers.put((job.namespace, job.name));
        }
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
