//! The mark of the pod that leads: a label, by which the chart's Service sends workers to that pod alone.
//!
//! In: the place of the lease, whose holder is called as its pod. Out: the pod that leads has the label, and no other pod of its
//! release has it; or the status of all objects with workers says why not. Without the mark nothing is decided otherwise: only the
//! leader listens to workers.
//!
//! A process that begins takes the label off its own pod, where an earlier process may have led; one that leads takes it off
//! all others, and looks again every minute. An operator that runs in no pod marks none.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};

use crate::context::{Context, MANAGER};
use crate::error::{is_code, words};
use crate::leader::Place;
use crate::troubles::What;

/// The label of the pod that leads; its value is `true`.
pub(crate) const LABEL_LEADS: &str = "cadre.dev/leads";
/// Labels that the pods of one release share.
const RELEASE: [&str; 2] = ["app.kubernetes.io/name", "app.kubernetes.io/instance"];
/// Between two looks, after one that went well and after one that did not.
const LOOKS_APART: [Duration; 2] = [Duration::from_mins(1), Duration::from_secs(2)];

/// Takes the label off this process's pod. Where that cannot be done, workers may try this pod in vain, as they try another one.
pub(crate) async fn take_off(client: &Client, place: &Place) {
    let pods = Api::<Pod>::namespaced(client.clone(), &place.namespace);
    if let Err(error) = set(&pods, &place.identity, Value::Null).await {
        tracing::warn!("pod {} keeps the label {LABEL_LEADS}: {error}", place.identity);
    }
}

/// Keeps the label on this process's pod alone, while it leads. Does not return.
pub(crate) async fn keep_on(context: &Context, place: &Place) {
    let mut trouble = String::new();
    loop {
        let done = put_on(&context.client, place).await;
        let label = || format!("label pod {} with {LABEL_LEADS}", place.identity);
        let error = done.as_ref().err().map(|it| format!("{}: {}", label(), words(it)));
        let text = error.clone().unwrap_or_default();
        if !text.is_empty() && text != trouble {
            tracing::warn!("workers may not find the pod that leads: {text}");
        }
        trouble = text;
        context.tried(What::Mark, error);
        let [well, ill] = LOOKS_APART;
        tokio::time::sleep(if done.is_ok() { well } else { ill }).await;
    }
}

async fn put_on(client: &Client, place: &Place) -> kube::Result<()> {
    let pods = Api::<Pod>::namespaced(client.clone(), &place.namespace);
    let Some(own) = pods.get_opt(&place.identity).await? else { return Ok(()) };
    if own.labels().get(LABEL_LEADS).is_none_or(|it| it != "true") {
        set(&pods, &place.identity, "true".into()).await?;
    }
    let marked = pods.list(&ListParams::default().labels(LABEL_LEADS)).await?;
    let is_ours =
        |it: &Pod| RELEASE.iter().all(|key| it.labels().get(*key) == own.labels().get(*key));
    for other in marked.items.iter().filter(|it| it.name_any() != place.identity && is_ours(it)) {
        set(&pods, &other.name_any(), Value::Null).await?;
    }
    Ok(())
}

/// Sets the label of a pod, if that is there.
async fn set(pods: &Api<Pod>, name: &str, value: Value) -> kube::Result<()> {
    let patch = json!({"metadata": {"labels": {LABEL_LEADS: value}}});
    let parameters = PatchParams { field_manager: Some(MANAGER.into()), ..PatchParams::default() };
    match pods.patch(name, &parameters, &Patch::Merge(patch)).await {
        Err(error) if !is_code(&error, 404) => Err(error),
        Ok(_) | Err(_) => Ok(()),
    }
}
