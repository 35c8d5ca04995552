//! What the reconciles tell the control service.
//!
//! In: facts about pools. Out: the newest ones that the service has not taken, by pool.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use cadre_views::Facts;
use tokio::sync::Notify;

use crate::triggers::Key;

/// What the reconciles have found out about pools, for the service.
#[derive(Debug, Default)]
pub(crate) struct Known {
    facts: Mutex<BTreeMap<Key, Facts>>,
    /// Wakes the service when something was put.
    pub(crate) news: Notify,
}

impl Known {
    /// Takes the facts of a pool.
    pub(crate) fn put(&self, key: Key, facts: Facts) {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner).insert(key, facts);
        self.news.notify_one();
    }

    /// What was put since the last call.
    pub(crate) fn take(&self) -> BTreeMap<Key, Facts> {
        std::mem::take(&mut *self.facts.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
