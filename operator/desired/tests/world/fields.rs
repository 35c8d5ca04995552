//! What the API server makes of a write of `spec.replicas`, with what `managedFields` say of it afterwards.
//!
//! In: an object as JSON, who writes and how. Out: the object as Kubernetes 1.36 would have it; each rule was seen there. Of
//! `managedFields` there are only the entries of who has `spec.replicas`.

use serde_json::{Value, json};

/// A way to write.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Way {
    /// The scale subresource: `kubectl scale`, autoscalers.
    Scale,
    /// Server-side apply, which does or does not take what others have.
    Apply { is_forced: bool },
    /// Any other write: `kubectl apply` without `--server-side`, `edit`, `patch`, `replace`.
    Update,
}

/// Writes a number as `manager`, or a manifest that leaves the number out, which matters to who had written one. Out: whether
/// the API server has taken it; else there is a conflict.
pub(crate) fn write(object: &mut Value, manager: &str, way: Way, number: Option<u64>) -> bool {
    let old = object["spec"]["replicas"].as_u64().unwrap_or(0);
    let has = |it: &Value| it["fieldsV1"]["f:spec"].get("f:replicas").is_some();
    let is_own = |it: &Value| it["manager"] == manager && it["operation"] == "Apply";
    let mut entries = object["metadata"]["managedFields"].as_array().cloned().unwrap_or_default();
    let is_anybodys = entries.iter().any(has);
    let was_own = entries.iter().any(is_own);
    let number = match (way, number) {
        (Way::Apply { .. }, None) => {
            entries.retain(|it| !is_own(it));
            // The field goes with the last one who has it, and gets its default.
            if was_own && !entries.iter().any(has) { 0 } else { old }
        }
        (Way::Scale | Way::Update, None) => return write(object, manager, way, Some(0)),
        (Way::Apply { is_forced }, Some(number)) => {
            let is_others = entries.iter().any(|it| has(it) && !is_own(it));
            if number != old && is_others && !is_forced {
                return false;
            }
            entries.retain(|it| number == old && !is_own(it));
            entries.push(entry(manager, "Apply", None));
            number
        }
        // Who changes nothing has nothing.
        (Way::Scale | Way::Update, Some(number)) if number == old => number,
        (Way::Scale, Some(number)) => {
            entries.clear();
            // Of a field that nobody has it is not noted who writes it here.
            if is_anybodys {
                entries.push(entry(manager, "Update", Some("scale")));
            }
            number
        }
        (Way::Update, Some(number)) => {
            entries.clear();
            entries.push(entry(manager, "Update", None));
            number
        }
    };
    if number != old {
        let generation = object["metadata"]["generation"].as_i64().unwrap_or(0);
        object["metadata"]["generation"] = (generation + 1).into();
    }
    object["spec"]["replicas"] = number.into();
    object["metadata"]["managedFields"] = entries.into();
    true
}

fn entry(manager: &str, operation: &str, subresource: Option<&str>) -> Value {
    let mut entry = json!({
        "manager": manager, "operation": operation, "fieldsType": "FieldsV1",
        "fieldsV1": {"f:spec": {"f:replicas": {}}},
    });
    if let Some(subresource) = subresource {
        // Without a time.
        entry["subresource"] = subresource.into();
    } else {
        entry["time"] = "2026-01-01T00:00:00Z".into();
    }
    entry
}
