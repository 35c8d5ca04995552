//! Writes what is there into an object's status, and says what is new in events.
//!
//! In: the status as it should be. Out: it is so, or when to look again. Nothing is written when nothing has changed; a
//! status of which only numbers have changed, at most every [`APART`](crate::pace::APART), since each write goes to all who watch the object;
//! one that somebody else has changed meanwhile is not overwritten.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::events::{Event, EventType};
use kube::{Api, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::context::{Context, MANAGER};
use crate::error::{Error, is_code, status as status_of};

/// Longest note of an event.
const NOTE: usize = 1000;
/// Conditions whose truth is bad news.
const BAD: [&str; 2] = ["Degraded", "Failed"];
/// Conditions that say for tools what others say for people.
const REPEATS: [&str; 3] = ["Ready", "Stalled", "Reconciling"];

/// Writes a status if it differs, then an event for each condition with another reason. With `at_once` it is
/// written even if all conditions are as they were. Not if somebody has changed the object since it had its `version`: by
/// default the one that was looked at. Out: when to try again what had to wait.
pub(crate) async fn status<K, S>(
    context: &Context,
    (object, version): (&K, Option<String>),
    old: Option<&S>,
    new: &S,
    conditions: (&[Condition], &[Condition]),
    at_once: bool,
) -> Result<Option<Duration>, Error>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + DeserializeOwned,
    S: PartialEq + Serialize,
{
    if old == Some(new) {
        return Ok(None);
    }
    let (before, after) = conditions;
    let uid = object.uid().unwrap_or_default();
    if !at_once
        && before.iter().map(truth).eq(after.iter().map(truth))
        && let Some(wait) = context.pace.wait(&uid, Instant::now())
    {
        return Ok(Some(wait));
    }
    let mut told = conditions.1.to_vec();
    let mut patch = json!({
        "apiVersion": K::api_version(&()),
        "kind": K::kind(&()),
        "metadata": {"resourceVersion": version.or_else(|| object.resource_version())},
        "status": new,
    });
    let api = Api::<K>::namespaced(context.client.clone(), &object.namespace().unwrap_or_default());
    let parameters = PatchParams::apply(MANAGER).force();
    let mut done = api.patch_status(&object.name_any(), &parameters, &Patch::Apply(&patch)).await;
    if let Err(error) = &done
        && let Some(unknown) = unknown_fields(error)
    {
        tell_unknown(before, &mut told, &unknown);
        if let Some(status) = patch["status"].as_object_mut() {
            status.retain(|it, _| !unknown.contains(it));
            status.insert("conditions".into(), json!(told));
        }
        done = api.patch_status(&object.name_any(), &parameters, &Patch::Apply(&patch)).await;
    }
    match done {
        Ok(_) => {}
        Err(error) if is_code(&error, 404) => return Ok(None),
        Err(error) if is_code(&error, 409) => return Err(Error::Stale),
        Err(error) => return Err(Error::api("write the status", error)),
    }
    context.pace.wrote(uid, Instant::now());
    context.metrics.wrote_status(&K::kind(&()));
    for condition in &told {
        let known = before.iter().find(|it| it.type_ == condition.type_);
        let is_new = known
            .is_none_or(|it| (&it.status, &it.reason) != (&condition.status, &condition.reason));
        let tells = known.is_some() || condition.status == "True";
        let tells = tells && !REPEATS.contains(&condition.type_.as_str());
        if is_new && tells && !condition.message.is_empty() {
            let bad = BAD.contains(&condition.type_.as_str()) == (condition.status == "True");
            let kind = if bad { EventType::Warning } else { EventType::Normal };
            event(context, object, kind, &condition.reason, &condition.message).await;
        }
    }
    Ok(None)
}

/// Fields of a status that the definitions in the cluster do not know: they are of another build, since Helm never changes them.
fn unknown_fields(error: &kube::Error) -> Option<BTreeSet<String>> {
    let message = &status_of(error)?.message;
    if !message.contains("field not declared in schema") {
        return None;
    }
    let name = |it: &str| it.chars().take_while(char::is_ascii_alphanumeric).collect::<String>();
    let fields: BTreeSet<_> = message.split(".status.").skip(1).map(name).collect();
    (!fields.is_empty() && !fields.contains("conditions")).then_some(fields)
}

/// Tells that these fields are not told.
fn tell_unknown(before: &[Condition], told: &mut [Condition], unknown: &BTreeSet<String>) {
    let names: Vec<_> = unknown.iter().map(|it| format!("status.{it}")).collect();
    let is_it = |it: &&Condition| it.type_ == "Degraded" && it.status == "True";
    let since = before.iter().find(is_it).map(|it| it.last_transition_time.clone());
    if let Some(degraded) = told.iter_mut().find(|it| it.type_ == "Degraded") {
        degraded.status = "True".into();
        degraded.reason = "OldDefinitions".into();
        degraded.message = format!(
            "the definitions in the cluster are of another build and do not know {}: apply those of this build \
             (charts/cadre/crds)",
            names.join(", ")
        );
        degraded.last_transition_time = since.unwrap_or_else(|| Time(Timestamp::now()));
    }
}

/// A condition without the numbers in its message.
fn truth(condition: &Condition) -> (&str, &str, &str) {
    (&condition.type_, &condition.status, &condition.reason)
}

/// Says in an event what could not be done.
pub(crate) async fn failure<K: Resource<DynamicType = ()>>(
    context: &Context,
    object: &K,
    error: &Error,
) {
    event(context, object, EventType::Warning, error.reason(), &error.to_string()).await;
}

/// Says in an event what workers said.
pub(crate) async fn say<K: Resource<DynamicType = ()>>(
    context: &Context,
    object: &K,
    warns: bool,
    reason: &str,
    note: &str,
) {
    let kind = if warns { EventType::Warning } else { EventType::Normal };
    event(context, object, kind, reason, note).await;
}

async fn event<K: Resource<DynamicType = ()>>(
    context: &Context,
    object: &K,
    type_: EventType,
    reason: &str,
    note: &str,
) {
    let note: String = note.chars().take(NOTE).collect();
    let event = Event {
        type_,
        reason: reason.to_owned(),
        note: Some(note),
        action: "Reconcile".to_owned(),
        secondary: None,
    };
    // A lost event does no harm: the status says the same.
    if let Err(error) = context.events.publish(&event, &object.object_ref(&())).await {
        tracing::warn!("event {reason} of {}: {error}", object.name_any());
    }
}
