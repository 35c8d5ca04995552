//! Why an attempt has fewer pods than it should.
//!
//! In: the Job of an attempt whose controller makes no more pods. Out: the API server's words about a pod of its template, which
//! is tried and not made: a quota, Pod Security, a service account. The Job controller itself tells them in events alone.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cadre_crds::{Readable, TrainingJob};
use cadre_desired::Failure;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::{Api, ResourceExt as _};

use crate::context::{Context, MANAGER};
use crate::error::Error;

/// Between two tries for one job.
const APART: Duration = Duration::from_secs(30);

/// When a pod was last tried for a job, and why it was refused, by the job's uid.
#[derive(Debug, Default)]
pub(crate) struct Tries(Mutex<BTreeMap<String, (Instant, Option<Failure>)>>);

impl Tries {
    /// Why the last one was refused, if it was.
    pub(crate) fn of(&self, uid: &str) -> Option<Failure> {
        self.locked().get(uid)?.1.clone()
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<String, (Instant, Option<Failure>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tries a pod of an attempt that lacks some, unless that was done lately; forgets what was said where none is lacking. Out:
/// when to try again.
pub(crate) async fn one(
    context: &Context,
    object: &Readable<TrainingJob>,
    attempt: Option<&str>,
) -> Option<Duration> {
    let uid = object.uid().unwrap_or_default();
    let Some(attempt) = attempt else {
        context.tries.locked().remove(&uid);
        return None;
    };
    let now = Instant::now();
    let last = context.tries.locked().get(&uid).map(|it| it.0);
    let left = last.map(|it| APART.saturating_sub(now.duration_since(it)));
    if let Some(left) = left.filter(|it| !it.is_zero()) {
        return Some(left);
    }
    let namespace = object.namespace().unwrap_or_default();
    let refused = tried(context, &namespace, attempt).await.err();
    let mut tries = context.tries.locked();
    // Jobs that are gone are asked for no more.
    tries.retain(|_, it| now.duration_since(it.0) < 2 * APART);
    tries.insert(uid, (now, refused.as_ref().and_then(Error::failure)));
    Some(APART)
}

async fn tried(context: &Context, namespace: &str, attempt: &str) -> Result<(), Error> {
    let jobs = Api::<Job>::namespaced(context.client.clone(), namespace);
    let found = jobs.get_opt(attempt).await;
    let found = found.map_err(|it| Error::api(format!("look at Job {attempt}"), it))?;
    let Some(job) = found else { return Ok(()) };
    let template = job.spec.unwrap_or_default().template;
    let mut pod = Pod { spec: template.spec, ..Pod::default() };
    pod.metadata = template.metadata.unwrap_or_default();
    // The same each time, as the status tells it.
    pod.metadata.name = Some(format!("{attempt}-try"));
    pod.metadata.namespace = Some(namespace.to_owned());
    let parameters = PostParams { dry_run: true, field_manager: Some(MANAGER.into()) };
    let pods = Api::<Pod>::namespaced(context.client.clone(), namespace);
    let made = pods.create(&parameters, &pod).await;
    made.map(drop).map_err(|it| Error::api(format!("try a pod of Job {attempt}"), it))
}
