//! The controllers of pools and of jobs: who looks at which object when.
//!
//! In: triggers of the caches, and once all objects. Out: reconciles, a bounded number at a time, never
//! two of one object. After an error an object is looked at again, later each time, but no later than it asked for.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cadre_crds::{Bare, Readable};
use futures_util::{StreamExt as _, stream};
use kube::runtime::controller::{Action, Config};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::{Controller, watcher};
use kube::{Resource, ResourceExt as _};

use crate::context::Context;
use crate::error::Error;
use crate::looked::Looked;
use crate::report;
use crate::triggers::Triggers;
use crate::{job, pool};

/// First and longest pause after an error.
const PAUSES: [Duration; 2] = [Duration::from_millis(500), Duration::from_mins(1)];

/// Shortest pause after an error where an earlier look was asked for.
const SOON: Duration = Duration::from_secs(5);

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
    store: &Store<Readable<K>>,
    triggers: &Triggers,
    reconcile: fn(Arc<Readable<K>>, Arc<Context>) -> F,
) where
    K: Resource<DynamicType = ()> + Bare + Clone + Debug + Send + Sync + 'static,
    Readable<K>: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
    F: Future<Output = Result<Looked, Error>> + Send + 'static,
{
    let kind = K::kind(&()).into_owned();
    let failures: Arc<Mutex<BTreeMap<String, u32>>> = Arc::default();
    // First all objects, since triggers before this moment were not taken; then those that change.
    let all = store.state().into_iter().map(|it| Ok::<_, watcher::Error>(it.as_ref().clone()));
    let start = stream::iter(all.collect::<Vec<_>>()).chain(stream::pending());
    let later = triggers.taken().map(|(namespace, name)| ObjectRef::new(&name).within(&namespace));
    let controller = Controller::for_stream(start, store.clone())
        .with_config(Config::default().concurrency(concurrency))
        .reconcile_on(later);
    let looks = kind.clone();
    let look = move |object: Arc<Readable<K>>, context: Arc<Context>| {
        let (kind, failures) = (looks.clone(), failures.clone());
        async move {
            let began = Instant::now();
            let result = reconcile(object.clone(), context.clone()).await;
            let Looked { again, failed } = match result {
                Ok(looked) => looked,
                Err(error) => {
                    // Not even the status could be written.
                    if !matches!(error, Error::Stale) {
                        report::failure(&context, object.as_ref(), &error).await;
                    }
                    Looked { again: None, failed: Some(error) }
                }
            };
            // Who writes at the same time as others has not failed.
            let is_fine = matches!(failed, None | Some(Error::Stale));
            context.metrics.reconciled(&kind, is_fine, began.elapsed());
            let uid = object.uid().unwrap_or_default();
            let times = match failed {
                None => {
                    locked(&failures).remove(&uid);
                    None
                }
                Some(Error::Stale) => Some(locked(&failures).get(&uid).copied().unwrap_or(0)),
                Some(
                    error @ (Error::Api { .. } | Error::NameTaken { .. } | Error::Issuer { .. }),
                ) => {
                    tracing::warn!("{kind} {}: {error}", object.name_any());
                    let mut failures = locked(&failures);
                    let times = failures.entry(uid).or_default();
                    *times += 1;
                    Some(*times)
                }
            };
            Ok::<_, Error>(next(again, times))
        }
    };
    let never = |_: Arc<Readable<K>>, _: &Error, _| Action::await_change();
    let results = controller.run(look, never, context.clone());
    results
        .for_each(|result| {
            if let Err(error) = result {
                tracing::debug!("{kind}: {error}");
            }
            std::future::ready(())
        })
        .await;
}

/// Time of the next reconcile after `failures` in a row. One that was asked for meets the same failure, but what it is about
/// need not have failed: a drain whose time is over, a load to look at. So it waits for no more than [`SOON`].
fn next(again: Option<Duration>, failures: Option<u32>) -> Action {
    match failures {
        None => again.map_or_else(Action::await_change, Action::requeue),
        Some(times) => {
            let asked = again.map(|it| it.max(SOON));
            Action::requeue(asked.into_iter().fold(pause(times), Duration::min))
        }
    }
}

/// Pause after this many failures in a row.
fn pause(times: u32) -> Duration {
    let [first, longest] = PAUSES;
    first.saturating_mul(1 << times.min(16)).min(longest)
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_in_a_row_are_tried_again_ever_later_and_hold_up_nothing_that_is_due() {
        let seconds = |it| Some(Duration::from_secs(it));
        let due = |again, failures| next(again, Some(failures));
        assert_eq!(next(seconds(1), None), Action::requeue(Duration::from_secs(1)));
        assert_eq!(next(None, None), Action::await_change());
        for (again, failures, expected) in [
            (None, 1, Duration::from_secs(1)),
            (None, 4, Duration::from_secs(8)),
            (None, u32::MAX, PAUSES[1]),
            // As mode Auto asks for.
            (seconds(15), u32::MAX, Duration::from_secs(15)),
            (seconds(15), 2, Duration::from_secs(2)),
            // What is asked for at once is not met at once again.
            (seconds(1), 1, Duration::from_secs(1)),
            (seconds(1), u32::MAX, SOON),
            (seconds(300), u32::MAX, PAUSES[1]),
        ] {
            assert_eq!(due(again, failures), Action::requeue(expected), "{again:?}, {failures}");
        }
    }
}
