//! What the API server said of the pods that attempts and pools lack.
//!
//! In: answers to tries of [`crate::lacks`], and what became of the servers that were to be made. Out: the last answer, whether
//! it is time for another try, and since when servers are refused. Nothing is asked here.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cadre_desired::Failure;
use k8s_openapi::jiff::Timestamp;

/// Between two tries for one job.
pub(crate) const TRIES_APART: Duration = Duration::from_secs(30);

/// When a pod was last tried for a job, and why it was refused, by the job's uid.
#[derive(Debug, Default)]
pub(crate) struct Tries(Mutex<BTreeMap<String, (Instant, Option<Failure>)>>);

impl Tries {
    /// Why the last one was refused, if it was.
    pub(crate) fn of(&self, uid: &str) -> Option<Failure> {
        self.locked().get(uid)?.1.clone()
    }

    /// Time until the next one.
    pub(crate) fn left(&self, uid: &str, now: Instant) -> Duration {
        let last = self.locked().get(uid).map(|it| now.duration_since(it.0));
        last.map_or(Duration::ZERO, |it| TRIES_APART.saturating_sub(it))
    }

    /// The API server has said this. Of jobs that are gone nothing is kept.
    pub(crate) fn tried(&self, uid: String, now: Instant, refused: Option<Failure>) {
        let mut tries = self.locked();
        tries.retain(|_, it| now.duration_since(it.0) < 2 * TRIES_APART);
        tries.insert(uid, (now, refused));
    }

    /// An attempt of the job has its pods.
    pub(crate) fn forget(&self, uid: &str) {
        self.locked().remove(uid);
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<String, (Instant, Option<Failure>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Since when servers of a pool are refused, by the pool's uid.
#[derive(Debug, Default)]
pub(crate) struct Unmade(Mutex<BTreeMap<String, Timestamp>>);

impl Unmade {
    /// In a look at `now`, some of those that were to be made were not, or all were.
    pub(crate) fn tell(&self, uid: &str, lacks_some: bool, now: Timestamp) {
        let mut since = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lacks_some {
            since.entry(uid.to_owned()).or_insert(now);
        } else {
            since.remove(uid);
        }
    }

    /// Since when, if they are.
    pub(crate) fn since(&self, uid: &str) -> Option<Timestamp> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(uid).copied()
    }
}
