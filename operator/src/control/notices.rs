//! What people are to read of jobs and pools: events of the objects.
//!
//! In: notices of conductors, words of the decisions. Out: events, written beside everything else; one that cannot be written
//! holds nothing up. A lost server is acted on, too.

use cadre_control::proto::{self, notice};
use cadre_views::{Input, JobKey, ServerId};
use kube::runtime::reflector::ObjectRef;

use super::service::Service;
use crate::report;
use crate::triggers::Key;

impl Service {
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
