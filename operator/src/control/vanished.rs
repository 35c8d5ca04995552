//! Pools that are gone.
//!
//! In: the caches, who is connected. Out: nothing is kept of a pool that is in no cache any more and of which no worker is
//! connected. Trainers may outlive their pool: a pool that is made anew under its name serves them.

use std::collections::BTreeSet;

use kube::runtime::reflector::ObjectRef;

use super::service::Service;
use crate::triggers::Key;

impl Service {
    pub(super) fn forget_pools(&mut self) {
        let pools = &self.context.caches.pools;
        let is_there = |it: &Key| pools.get(&ObjectRef::new(&it.1).within(&it.0)).is_some();
        let connected: BTreeSet<&Key> = self.workers.keys().map(|it| &it.0).collect();
        let known = self.pools.keys().filter(|it| !connected.contains(it));
        let gone: Vec<Key> = known.filter(|it| !is_there(it)).cloned().collect();
        for key in gone {
            self.pools.remove(&key);
            self.noted.remove(&key);
            self.ways.retain(|(of, _), _| *of != key);
            self.context.told.forget_pool(&key);
        }
    }
}
