//! Both controllers: who looks at which object when.
//!
//! In: triggers of the caches, and once all objects. Out: reconciles, a bounded number at a time, never
//! two of one object. After an error an object is looked at again, later each time.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream};
use kube::runtime::controller::{Action, Config};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::{Controller, watcher};
use kube::{Resource, ResourceExt as _};
use serde::de::DeserializeOwned;

use crate::caches::Guarded;
use crate::context::Context;
use crate::error::Error;
use crate::report;
use crate::triggers::Triggers;
use crate::{job, pool};

/// First and longest pause after an error.
const PAUSES: [Duration; 2] = [Duration::from_millis(500), Duration::from_mins(1)];

/// Runs until the process ends.
pub(crate) async fn run(context: &Arc<Context>, concurrency: u16) {
    let caches = &context.caches;
    let pools = one(context, concurrency, &caches.pools, &caches.pool_triggers, pool::reconcile);
    let jobs = one(context, concurrency, &caches.trainings, &caches.job_triggers, job::reconcile);
    tokio::join!(pools, jobs);
}

async fn one<K, F>(
    context: &Arc<Context>,
    concurrency: u16,
    store: &Store<Guarded<K>>,
    triggers: &Triggers,
    reconcile: fn(Arc<Guarded<K>>, Arc<Context>) -> F,
) where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
    Guarded<K>: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
    F: Future<Output = Result<Action, Error>> + Send + 'static,
{
    let kind = K::kind(&()).into_owned();
    let failures: Arc<Mutex<BTreeMap<String, u32>>> = Arc::default();
    // All objects once, since nobody took triggers out before; then what changes.
    let all = store.state().into_iter().map(|it| Ok::<_, watcher::Error>(it.as_ref().clone()));
    let start = stream::iter(all.collect::<Vec<_>>()).chain(stream::pending());
    let later = triggers.taken().map(|(namespace, name)| ObjectRef::new(&name).within(&namespace));
    let controller = Controller::for_stream(start, store.clone())
        .with_config(Config::default().concurrency(concurrency))
        .reconcile_on(later);
    let (looks, counts) = (kind.clone(), failures.clone());
    let look = move |object: Arc<Guarded<K>>, context: Arc<Context>| {
        let (kind, failures) = (looks.clone(), counts.clone());
        async move {
            let began = Instant::now();
            let result = reconcile(object.clone(), context.clone()).await;
            context.metrics.reconciled(&kind, result.is_ok(), began.elapsed());
            let uid = object.uid().unwrap_or_default();
            match &result {
                Ok(_) => drop(locked(&failures).remove(&uid)),
                Err(Error::Stale) => {}
                Err(error) => {
                    *locked(&failures).entry(uid).or_default() += 1;
                    report::failure(&context, object.as_ref(), error).await;
                }
            }
            result
        }
    };
    let pause = move |object: Arc<Guarded<K>>, error: &Error, _| {
        let [first, longest] = PAUSES;
        let times = locked(&failures).get(&object.uid().unwrap_or_default()).copied().unwrap_or(0);
        if !matches!(error, Error::Stale) {
            tracing::warn!("{} {}: {error}", K::kind(&()), object.name_any());
        }
        Action::requeue(first.saturating_mul(1 << times.min(16)).min(longest))
    };
    let results = controller.run(look, pause, context.clone());
    results
        .for_each(|result| {
            if let Err(error) = result {
                tracing::debug!("{kind}: {error}");
            }
            std::future::ready(())
        })
        .await;
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
