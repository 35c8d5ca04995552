//! Conductors that have said all, and wait until it lasts.
//!
//! In: workers whose streams have ended, and which statuses were written. Out: a conductor that has said goodbye hears that it may
//! go when the status of its job holds its last figures. If this leader dies before, the conductor says them again to the next
//! one. Every other worker may go at once.

use std::time::{Duration, Instant};

use cadre_control::proto::Finished;
use cadre_control::server::Link;
use cadre_views::{JobKey, Who};
use kube::runtime::reflector::ObjectRef;

use super::figures::tell_job;
use super::service::Service;
use super::words::last_words;
use crate::triggers::Key;

/// Longest wait for a status, which the API server may refuse: less than a worker waits for its farewell (5 s).
const LAST_FIGURES_WITHIN: Duration = Duration::from_secs(4);

impl Service {
    /// The conductor of an attempt says its last word.
    pub(super) fn ends(&mut self, attempt: &JobKey, said: Finished) {
        if let Some(figures) = self.jobs.end(attempt, last_words(attempt.attempt, said)) {
            tell_job(&self.context, attempt, figures);
        }
    }

    /// The conductor of an attempt ends by itself.
    pub(super) fn leaves(&mut self, attempt: &JobKey) {
        if let Some(figures) = self.jobs.leaves(attempt) {
            tell_job(&self.context, attempt, figures);
        }
    }

    /// The stream of a worker has ended: one that has said goodbye may go, at once or later.
    pub(super) fn lets_go(&mut self, who: &Who, link: Option<Link>) {
        let Some(link) = link else { return };
        let waits = match who {
            Who::Trainer(job, 0) => Some((job.namespace.clone(), job.name.clone())),
            Who::Trainer(..) | Who::Server(_) => None,
        };
        match waits.filter(|it| self.is_owed(it)) {
            Some(key) => self.parting.push((Instant::now(), key, link)),
            None => link.farewell(),
        }
    }

    /// Lets those go whose last figures are written.
    pub(super) fn part_heard(&mut self) {
        for (since, key, link) in std::mem::take(&mut self.parting) {
            if self.is_owed(&key) && since.elapsed() < LAST_FIGURES_WITHIN {
                self.parting.push((since, key, link));
            } else {
                link.farewell();
            }
        }
    }

    /// Whether there is a status that is to hold a job's last figures. A job of another kind has none.
    fn is_owed(&self, key: &Key) -> bool {
        let job = ObjectRef::new(&key.1).within(&key.0);
        self.context.told.owes(key) && self.context.caches.trainings.get(&job).is_some()
    }
}
