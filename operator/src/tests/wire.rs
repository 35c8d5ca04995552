//! What requests and answers of the API server in memory are made of.
//!
//! In: JSON. Out: merged objects, selections, answers.

use axum::body::Body;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Map, Value, json};

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
