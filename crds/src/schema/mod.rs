//! The definitions of our kinds (`CustomResourceDefinition`): what the API server knows about our objects.
//!
//! In: the types of this crate, with the rules and bounds written beside their fields. Out:
//! [`definitions`], their YAML as the chart ships it, and [`page::markdown`], the API page.
//!
//! Of pod templates (`template`) that is described which people write most; the rest passes through, and is checked by the
//! API server when a pod is made from it.
//!
//! Every list and text that a rule reads is bounded: the API server refuses rules whose cost it
//! cannot bound.

pub mod page;
mod template;

use std::borrow::Cow;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt as _;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::Value;

use crate::contract::{SERVER_CONTAINER, TRAINER_CONTAINER};
use crate::{AttentionPoolResource, Encryption, TrainingJobResource};

/// The definitions of all our kinds, ready for the API server.
pub fn definitions() -> Vec<CustomResourceDefinition> {
    [AttentionPoolResource::crd(), TrainingJobResource::crd()].into_iter().map(finished).collect()
}

/// A definition as the chart ships it.
///
/// # Panics
///
/// Never for what [`definitions`] returns.
pub fn yaml(definition: &CustomResourceDefinition) -> String {
    let mut value = serde_json::to_value(definition).expect("a definition is plain data");
    whole_numbers(&mut value);
    let options = serde_saphyr::ser_options! { compact_list_indent: false };
    let body = serde_saphyr::to_string_with_options(&value, options).expect("plain data is YAML");
    format!(
        "# Generated from the types of crds/ by its test `schema`; see there how to write it anew.\n\
         # yamllint disable rule:line-length\n{body}"
    )
}

/// Takes out what schemars writes and the API server does not know.
fn finished(definition: CustomResourceDefinition) -> CustomResourceDefinition {
    let mut value = serde_json::to_value(definition).expect("a definition is plain data");
    for version in value["spec"]["versions"].as_array_mut().into_iter().flatten() {
        tidy(&mut version["schema"]["openAPIV3Schema"]);
    }
    serde_json::from_value(value).expect("only formats and line ends were changed")
}

/// Unsigned formats become the signed one of the API (bounds say that they are not negative), null is
/// no value of ours, and descriptions are one line each.
fn tidy(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            if map.get("format").is_some_and(|it| it == "uint32" || it == "uint64") {
                map.insert("format".into(), "int64".into());
            }
            map.remove("nullable");
            if let Some(Value::Array(words)) = map.get_mut("enum") {
                words.retain(|it| !it.is_null());
            }
            if let Some(Value::String(text)) = map.get_mut("description") {
                *text = text.split_whitespace().collect::<Vec<_>>().join(" ");
            }
            map.values_mut().for_each(tidy);
        }
        Value::Array(list) => list.iter_mut().for_each(tidy),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Bounds are floats in the type of a definition; ours are written as the whole numbers they are.
fn whole_numbers(value: &mut Value) {
    match value {
        Value::Number(number) => {
            if let Some(float) = number.as_f64().filter(|it| number.is_f64() && it.fract() == 0.0) {
                *value = (float as i64).into();
            }
        }
        Value::Object(map) => map.values_mut().for_each(whole_numbers),
        Value::Array(list) => list.iter_mut().for_each(whole_numbers),
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

/// Pod of a dedicated server.
pub(crate) fn server_template(_: &mut SchemaGenerator) -> Schema {
    template::of(SERVER_CONTAINER)
}

/// Pod of a trainer.
pub(crate) fn trainer_template(_: &mut SchemaGenerator) -> Schema {
    template::of(TRAINER_CONTAINER)
}

/// Objects that were stored with the earlier word stay valid.
impl JsonSchema for Encryption {
    fn schema_name() -> Cow<'static, str> {
        "Encryption".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "enum": ["Tcp", "Required", "Off", "Tls"]})
    }
}

/// Conditions are merged by their type; as in the core API.
pub(crate) fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 16,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status", "lastTransitionTime", "reason", "message"],
            "properties": {
                "type": {"type": "string", "minLength": 1, "maxLength": 316},
                "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
                "lastTransitionTime": {"type": "string", "format": "date-time"},
                "reason": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 1024,
                    "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
                },
                "message": {"type": "string", "maxLength": 32768},
            },
        },
    })
}
