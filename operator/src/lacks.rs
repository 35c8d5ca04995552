//! Why an attempt has fewer pods than it should.
//!
//! In: the Job of an attempt whose controller makes no more pods. Out: the API server's words about a pod of its template, which
//! is tried and not made: a quota, Pod Security, a service account. The Job controller itself tells them in events alone.

use std::time::{Duration, Instant};

use cadre_crds::{Readable, TrainingJob};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::{Api, ResourceExt as _};

use crate::context::{Context, MANAGER};
use crate::error::Error;
use crate::tries::TRIES_APART;

/// Tries a pod of an attempt that lacks some, unless that was done lately; forgets what was said where none is lacking. Out:
/// when to try again.
pub(crate) async fn try_pod(
    context: &Context,
    object: &Readable<TrainingJob>,
    attempt: Option<&str>,
) -> Option<Duration> {
    let uid = object.uid().unwrap_or_default();
    let Some(attempt) = attempt else {
        context.tries.forget(&uid);
        return None;
    };
    let now = Instant::now();
    let left = context.tries.left(&uid, now);
    if !left.is_zero() {
        return Some(left);
    }
    let namespace = object.namespace().unwrap_or_default();
    let refused = tried(context, &namespace, attempt).await.err();
    context.tries.tried(uid, now, refused.as_ref().and_then(Error::failure));
    Some(TRIES_APART)
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
