//! What trainers tell of their job that the reconciles hear at once: who has joined, and how far it has come for good.
//!
//! In: a trainer that comes, and what one has written. Out: the ranks that have joined, the steps in the newest checkpoint: an
//! attempt may end right after it. Nothing here looks at a volume.

use cadre_views::{JobKey, Who};

use super::figures::tell_job;
use super::service::Service;
use crate::told::Trainers;

impl Service {
    /// A trainer of an attempt has joined.
    pub(super) fn joined(&mut self, attempt: &JobKey, rank: u32) {
        if let Some(figures) = self.jobs.joined(attempt, rank) {
            tell_job(&self.context, attempt, figures);
        }
    }

    /// Which trainers are connected now.
    pub(super) fn tell_attached(&self) {
        let mut now = Trainers::new();
        for (_, who) in self.workers.keys() {
            if let Who::Trainer(of, rank) = who {
                let key = (of.namespace.clone(), of.name.clone());
                now.entry(key).or_default().insert((of.attempt, *rank));
            }
        }
        for key in self.context.told.tell_attached(now) {
            self.context.caches.job_triggers.put(key);
        }
    }

    /// A checkpoint of an attempt holds `steps` steps.
    pub(super) fn saved(&mut self, attempt: &JobKey, steps: u64) {
        if let Some(figures) = self.jobs.saved(attempt, steps) {
            tell_job(&self.context, attempt, figures);
        }
    }
}
