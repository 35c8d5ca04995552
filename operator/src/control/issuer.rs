//! Brings the certificate of the control service's issuer to the namespaces of pools and jobs.
//!
//! In: the file that the chart mounts, and a namespace. Out: a `ConfigMap` there with `ca.crt`, which pods
//! mount. It is written when a namespace is first seen, when the file has changed, and every so often, in
//! case somebody has removed it; otherwise nothing is asked of the API server. No Secret is read.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use cadre_desired::job::Decision;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Patch, PatchParams};
use kube::{Api, Resource, ResourceExt as _};
use serde_json::json;

use crate::context::{Context, MANAGER};
use crate::error::Error;

/// After so long it is written again, whether or not it seems to be there.
const AGAIN: Duration = Duration::from_mins(10);
/// Key in the `ConfigMap`, and name of the file.
pub(crate) const FILE: &str = "ca.crt";

/// What was written where.
#[derive(Debug, Default)]
pub(crate) struct Issuer {
    /// Folder of the certificates; none: there is no control service.
    pub(crate) folder: Option<PathBuf>,
    written: Mutex<BTreeMap<String, (Instant, String)>>,
}

impl Issuer {
    pub(crate) fn new(folder: Option<PathBuf>) -> Self {
        Self { folder, written: Mutex::default() }
    }

    fn is_written(&self, namespace: &str, certificate: &str) -> bool {
        let written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.get(namespace).is_some_and(|(at, it)| at.elapsed() < AGAIN && it == certificate)
    }
}

/// Sees to it that an object's namespace has the certificate, if the object has workers. Pods that are made after this
/// find it when they start.
pub(crate) async fn bring<K: Resource>(
    context: &Context,
    object: &K,
    decision: &Decision,
) -> Result<(), Error> {
    let folder = context.issuer.folder.as_ref().filter(|_| decision.has_workers);
    let Some(folder) = folder else { return Ok(()) };
    let namespace = object.namespace().unwrap_or_default();
    let path = folder.join(FILE);
    let certificate = tokio::fs::read_to_string(&path).await;
    let certificate = certificate.map_err(|source| Error::Issuer { path: path.clone(), source })?;
    if context.issuer.is_written(&namespace, &certificate) {
        return Ok(());
    }
    let name = &context.settings.control_ca;
    let object = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": MANAGER},
        },
        "data": {FILE: certificate},
    });
    let api = Api::<ConfigMap>::namespaced(context.client.clone(), &namespace);
    let parameters = PatchParams::apply(MANAGER).force();
    let applied = api.patch(name, &parameters, &Patch::Apply(&object)).await;
    applied.map_err(|it| Error::api(format!("write ConfigMap {namespace}/{name}"), it))?;
    let mut written = context.issuer.written.lock().unwrap_or_else(PoisonError::into_inner);
    written.insert(namespace, (Instant::now(), certificate));
    Ok(())
}
