//! What requests and answers of the API server in memory are made of.
//!
//! In: JSON. Out: merged objects, selections, answers.

use axum::body::Body;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::fields::{self, Way};

pub(super) fn born(namespace: &str, name: &str) -> Value {
    json!({"metadata": {
        "namespace": namespace,
        "name": name,
        "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }})
}

/// JSON merge patch, RFC 7396.
pub(super) fn merge(object: &mut Value, change: &Value) {
    let Value::Object(change) = change else {
        *object = change.clone();
        return;
    };
    if !object.is_object() {
        *object = Value::Object(Map::new());
    }
    for (key, value) in change {
        if value.is_null() {
            object.as_object_mut().expect("made one").remove(key);
        } else {
            merge(&mut object[key], value);
        }
    }
}

/// The answer to a patch that names another object, or another version of it.
pub(super) fn other(object: &Value, named: &Value) -> Option<Response> {
    let differs = |it| !named[it].is_null() && named[it] != object["metadata"][it];
    if differs("resourceVersion") {
        return Some(refuse(409));
    }
    // A uid is a field that nobody may change.
    let words =
        format!("it is invalid: metadata.uid: Invalid value: {}: field is immutable", named["uid"]);
    differs("uid").then(|| refuse_with(422, &words))
}

/// An object as the API server makes it: the pods of a Job have its name.
pub(super) fn made(resource: &str, (namespace, name): (&str, &str), body: &Value) -> Value {
    let mut object = born(namespace, name);
    merge(&mut object, body);
    if resource == "jobs" {
        let own = object["metadata"]["name"].clone();
        object["spec"]["template"]["metadata"]["labels"]["batch.kubernetes.io/job-name"] = own;
    }
    object
}

/// Whether an object is another one, or another version of it, than a request names.
pub(super) fn is_other(object: &Value, named: &Value) -> bool {
    let differs = |it| !named[it].is_null() && named[it] != object["metadata"][it];
    ["resourceVersion", "uid"].into_iter().any(differs)
}

/// Patches an object: of its status the whole, else by merging, also in a server-side apply.
pub(super) fn patched(
    object: &mut Value,
    body: &Value,
    (resource, part, applies, query): (&str, Option<&str>, bool, &str),
) -> Result<(), Box<Response>> {
    if part == Some("status") {
        // As the definitions say.
        let said = body["status"]["conditions"].as_array().into_iter().flatten();
        let longest = said.filter_map(|it| it["message"].as_str()).map(|it| it.chars().count());
        if longest.max() > Some(32_768) {
            let words = "status.conditions: Too long: may not be more than 32768";
            return Err(refuse_with(422, words).into());
        }
        object["status"] = body["status"].clone();
        return Ok(());
    }
    let number = body["spec"]["replicas"].as_u64();
    if resource == "attentionpools" && (applies || number.is_some()) {
        let manager = parameter(query, "fieldManager").unwrap_or("unknown");
        let is_forced = query.contains("force=true");
        let way = if applies { Way::Apply { is_forced } } else { Way::Update };
        if !fields::write(object, manager, way, number) {
            return Err(refuse(409).into());
        }
    }
    merge(object, body);
    Ok(())
}

pub(super) fn parameter<'a>(query: &'a str, name: &str) -> Option<&'a str> {
    query.split('&').find_map(|it| it.strip_prefix(name)?.strip_prefix('='))
}

/// Selectors of the forms `key` and `key=value`.
pub(super) fn selected(object: &Value, query: &str) -> bool {
    let Some(selector) = parameter(query, "labelSelector") else { return true };
    let selector = selector.replace("%2F", "/").replace("%3D", "=");
    let labels = &object["metadata"]["labels"];
    match selector.split_once('=') {
        Some((key, value)) => labels[key] == value,
        None => !labels[&selector].is_null(),
    }
}

/// What a watch with a selector tells of an event; of an object that the selector leaves out by now, that it is gone.
pub(super) fn shown<'a>(event: &'a str, object: &Value, query: &str) -> Option<&'a str> {
    match event {
        _ if selected(object, query) => Some(event),
        "MODIFIED" => Some("DELETED"),
        _ => None,
    }
}

pub(super) fn reply(object: &Value) -> Response {
    Response::new(Body::from(object.to_string()))
}

pub(super) fn refuse(code: u16) -> Response {
    refuse_with(code, "refused")
}

pub(super) fn refuse_with(code: u16, words: &str) -> Response {
    let reason = if code == 404 { "NotFound" } else { "Refused" };
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
        "message": words, "reason": reason, "metadata": {},
    });
    let mut response = reply(&status);
    *response.status_mut() = StatusCode::from_u16(code).expect("a code of HTTP");
    response
}
