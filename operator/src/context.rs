//! What all reconciles share: the client, the chart's settings, caches, recent writes, metrics.
//!
//! Owns the memory of mode `Auto`, by the pool's uid, and when what became of a job was seen, by the job's. Nothing else is
//! remembered between two looks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

pub(crate) use cadre_desired::MANAGER;
use cadre_desired::job::Watched;
use cadre_desired::pool::scale::Memory;
use cadre_desired::{Failure, Settings};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::events::{Recorder, Reporter};
use kube::{Client, ResourceExt as _};

use crate::caches::{Caches, Scope};
use crate::issuer::Issuer;
use crate::known::Known;
use crate::metrics::Metrics;
use crate::pace::Pace;
use crate::prune::{prune_job, prune_pod};
use crate::recent::Recent;
use crate::told::Told;
use crate::tries::{Tries, Unmade};
use crate::triggers::key;
use crate::troubles::{Troubles, What};

/// What all reconciles share.
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) settings: Settings,
    pub(crate) caches: Caches,
    pub(crate) recent_pods: Recent<Pod>,
    pub(crate) recent_jobs: Recent<Job>,
    pub(crate) metrics: Metrics,
    pub(crate) events: Recorder,
    /// From the control service to the reconciles.
    pub(crate) told: Told,
    /// From the reconciles to the control service.
    pub(crate) known: Known,
    pub(crate) issuer: Issuer,
    pub(crate) pace: Pace,
    pub(crate) tries: Tries,
    pub(crate) unmade: Unmade,
    troubles: Troubles,
    memories: Mutex<BTreeMap<String, Memory>>,
    watched: Mutex<BTreeMap<String, Watched>>,
}

impl Context {
    pub(crate) fn new(client: Client, settings: Settings, scope: &Scope, issuer: Issuer) -> Self {
        let reporter = Reporter { controller: MANAGER.into(), instance: None };
        Self {
            caches: Caches::start(&client, scope),
            events: Recorder::new(client.clone(), reporter),
            client,
            settings,
            recent_pods: Recent::new(prune_pod),
            recent_jobs: Recent::new(prune_job),
            metrics: Metrics::default(),
            told: if issuer.folder.is_some() { Told::awaiting() } else { Told::default() },
            known: Known::default(),
            issuer,
            pace: Pace::default(),
            tries: Tries::default(),
            unmade: Unmade::default(),
            troubles: Troubles::default(),
            memories: Mutex::default(),
            watched: Mutex::default(),
        }
    }

    /// Something that all workers need was tried; tells it to all objects if that is news.
    pub(crate) fn tried(&self, what: What, refused: Option<String>) {
        if self.troubles.tell(what, refused, Instant::now()) {
            let Caches { pools, trainings, pool_triggers, job_triggers, .. } = &self.caches;
            pools.state().iter().for_each(|it| pool_triggers.put(key(it.as_ref())));
            trainings.state().iter().for_each(|it| job_triggers.put(key(it.as_ref())));
        }
    }

    /// What keeps all workers out, if something does and the object has some, and when it may be over.
    pub(crate) fn trouble(&self, has_workers: bool) -> Option<(Failure, Duration)> {
        self.troubles.there(Instant::now()).filter(|_| has_workers)
    }

    /// What mode `Auto` remembers of a pool.
    pub(crate) fn memory(&self, uid: &str) -> Memory {
        let memories = self.memories.lock().unwrap_or_else(PoisonError::into_inner);
        memories.get(uid).cloned().unwrap_or_default()
    }

    /// Remembers it; of a pool that is gone, nothing.
    pub(crate) fn remember(&self, uid: &str, memory: Option<Memory>) {
        let mut memories = self.memories.lock().unwrap_or_else(PoisonError::into_inner);
        match memory {
            Some(memory) => drop(memories.insert(uid.to_owned(), memory)),
            None => drop(memories.remove(uid)),
        }
    }

    /// What was seen of a job up to its last look; none where it was never looked at.
    pub(crate) fn watched(&self, uid: &str) -> Option<Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner).get(uid).cloned()
    }

    /// Remembers what was seen of a job; of those that are gone, nothing.
    pub(crate) fn watch(&self, uid: &str, seen: Watched) {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        if watched.insert(uid.to_owned(), seen).is_none() {
            let all = self.caches.trainings.state();
            let there: BTreeSet<_> = all.iter().filter_map(|it| it.uid()).collect();
            watched.retain(|it, _| it == uid || there.contains(it));
        }
    }
}
