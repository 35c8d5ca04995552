//! Writes what is there into an object's status, and says what is new in events.
//!
//! In: the status as it should be. Out: it is so. Nothing is written when nothing has changed; a status
//! that somebody else has changed meanwhile is not overwritten.

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{Patch, PatchParams};
use kube::runtime::events::{Event, EventType};
use kube::{Api, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::context::{Context, MANAGER};
use crate::error::{Error, is_code};

/// Longest note of an event.
const NOTE: usize = 1000;
/// Conditions whose truth is bad news.
const BAD: [&str; 2] = ["Degraded", "Failed"];

/// Writes a status if it differs, then an event for each condition with another reason.
pub(crate) async fn status<K, S>(
    context: &Context,
    object: &K,
    old: Option<&S>,
    new: &S,
    conditions: (&[Condition], &[Condition]),
) -> Result<(), Error>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + DeserializeOwned,
    S: PartialEq + Serialize,
{
    if old == Some(new) {
        return Ok(());
    }
    let patch = json!({
        "apiVersion": K::api_version(&()),
        "kind": K::kind(&()),
        "metadata": {"resourceVersion": object.resource_version()},
        "status": new,
    });
    let api = Api::<K>::namespaced(context.client.clone(), &object.namespace().unwrap_or_default());
    let parameters = PatchParams::apply(MANAGER).force();
    match api.patch_status(&object.name_any(), &parameters, &Patch::Apply(&patch)).await {
        Ok(_) => {}
        Err(error) if is_code(&error, 404) => return Ok(()),
        Err(error) if is_code(&error, 409) => return Err(Error::Stale),
        Err(error) => return Err(Error::api("write the status", error)),
    }
    context.metrics.wrote_status(&K::kind(&()));
    let (before, after) = conditions;
    for condition in after {
        let known = before.iter().find(|it| it.type_ == condition.type_);
        let is_new = known
            .is_none_or(|it| (&it.status, &it.reason) != (&condition.status, &condition.reason));
        let tells = known.is_some() || condition.status == "True";
        if is_new && tells && !condition.message.is_empty() {
            let bad = BAD.contains(&condition.type_.as_str()) == (condition.status == "True");
            let kind = if bad { EventType::Warning } else { EventType::Normal };
            event(context, object, kind, &condition.reason, &condition.message).await;
        }
    }
    Ok(())
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
    // An event is a courtesy: the status says the same.
    if let Err(error) = context.events.publish(&event, &object.object_ref(&())).await {
        tracing::warn!("event {reason} of {}: {error}", object.name_any());
    }
}
