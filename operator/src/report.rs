//! Writes what is there into an object's status, and says what is new in events.
//!
//! In: the status as it should be. Out: it is so, or when to look again. Nothing is written when nothing has changed; a
//! status of which only numbers have changed, at most every [`APART`], since each write goes to all who watch the object;
//! one that somebody else has changed meanwhile is not overwritten.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

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

/// Between two writes of one object's status that tell no other truth or reason.
const APART: Duration = Duration::from_secs(10);
/// Longest note of an event.
const NOTE: usize = 1000;
/// Conditions whose truth is bad news.
const BAD: [&str; 2] = ["Degraded", "Failed"];
/// Conditions that say for tools what others say for people.
const REPEATS: [&str; 3] = ["Ready", "Stalled", "Reconciling"];

/// When which status was written last, by uid.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    written: Mutex<BTreeMap<String, Instant>>,
}

impl Pace {
    /// How long numbers alone have to wait.
    fn wait(&self, uid: &str, now: Instant) -> Option<Duration> {
        let written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let left = APART.saturating_sub(now.duration_since(*written.get(uid)?));
        Some(left).filter(|it| !it.is_zero())
    }

    fn wrote(&self, uid: String, now: Instant) {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.retain(|_, at| now.duration_since(*at) < APART);
        written.insert(uid, now);
    }
}

/// Writes a status if it differs, then an event for each condition with another reason. With `at_once` it is
/// written even if all conditions are as they were. Out: when to try again what had to wait.
pub(crate) async fn status<K, S>(
    context: &Context,
    object: &K,
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
        Err(error) if is_code(&error, 404) => return Ok(None),
        Err(error) if is_code(&error, 409) => return Err(Error::Stale),
        Err(error) => return Err(Error::api("write the status", error)),
    }
    context.pace.wrote(uid, Instant::now());
    context.metrics.wrote_status(&K::kind(&()));
    for condition in after {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_wait_for_their_turn_and_old_turns_are_forgotten() {
        let pace = Pace::default();
        let start = Instant::now();
        assert_eq!(pace.wait("a", start), None, "the first is written at once");
        pace.wrote("a".into(), start);
        assert_eq!(pace.wait("a", start + APART / 4), Some(APART / 4 * 3));
        assert_eq!(pace.wait("b", start), None, "each object has its own turns");
        assert_eq!(pace.wait("a", start + APART), None);
        pace.wrote("b".into(), start + APART);
        assert_eq!(pace.written.lock().expect("nobody panicked").len(), 1);
    }
}
