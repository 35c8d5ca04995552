//! What the definitions say of a pod template.
//!
//! In: the name of its container. Out: the schema: what people write most has its type and a meaning, so that the API server
//! refuses another type at once and `kubectl explain` knows it. All else passes through, and is checked when a pod is made
//! from it: the whole schema of a pod would make the definitions larger than what `kubectl apply` can store, and tie them to
//! one version of Kubernetes.
//!
//! Nothing is required here but what a rule reads, so that what is missing is told by the pod's own rules.

use schemars::{Schema, json_schema};
use serde_json::{Value, json};

use crate::contract::{CADRE_EXCHANGE, CADRE_PREFIX, RESERVED};

/// How the API server writes that a quantity is one.
const QUANTITY: &str = "^(\\+|-)?(([0-9]+(\\.[0-9]*)?)|(\\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\\+|-)?(([0-9]+(\\.[0-9]*)?)|(\\.[0-9]+))))?$";

/// A pod with one container of a given name, which leaves our variables alone.
pub(super) fn of(container: &str) -> Schema {
    let one = json!({
        "rule": format!("self.size() == 1 && self[0].name == '{container}'"),
        "message": format!(
            "spec.template.spec.containers must be exactly one container, named `{container}`"
        ),
    });
    let mut containers = list(16, "The one container.", &this_container());
    containers["x-kubernetes-validations"] = json!([one]);
    let metadata = open(
        "Labels and annotations of the pods, beside those of Cadre.",
        &json!({
            "labels": map(&text(63, None), "Labels."),
            "annotations": map(&json!({"type": "string"}), "Annotations."),
        }),
    );
    let mut spec = open(
        "The pod. Fields that are not described here are those of a pod of the core API.",
        &json!({
            "containers": containers,
            "volumes": list(256, "Volumes that the container mounts.", &open(
                "A volume.", &json!({"name": text(63, Some("Its name."))}),
            )),
            "nodeSelector": map(&text(63, None), "Labels that a node must have."),
            "tolerations": list(256, "Taints of nodes that keep the pod out no longer.", &open(
                "A taint.", &json!({}),
            )),
            "imagePullSecrets": list(64, "Secrets of the namespace to pull the image with.", &open(
                "A Secret.", &json!({"name": text(253, Some("Its name."))}),
            )),
            "serviceAccountName": text(253, Some("Who the pod is to the API server.")),
            "priorityClassName": text(253, Some("Who gives way to whom.")),
        }),
    );
    spec["required"] = json!(["containers"]);
    json_schema!({
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": true,
        "required": ["spec"],
        "properties": {"metadata": metadata, "spec": spec},
    })
}

fn this_container() -> Value {
    let mut container = open(
        "The container. Fields that are not described here are those of a container of the core API.",
        &json!({
            "name": {"type": "string", "maxLength": 63, "description": "Its name."},
            "image": text(1024, Some("Its image.")),
            "imagePullPolicy": {
                "type": "string",
                "enum": ["Always", "IfNotPresent", "Never"],
                "description": "When the image is pulled.",
            },
            "command": list(1024, "Its program, in the place of the image's.", &text(131_072, None)),
            "args": list(1024, "Arguments of the program.", &text(131_072, None)),
            "workingDir": text(4096, Some("Directory in which it runs.")),
            "env": list(512, "Its variables, beside those that Cadre sets.", &variable()),
            "ports": list(256, "Ports that it listens on.", &port()),
            "resources": resources(),
            "volumeMounts": list(256, "Where it sees volumes.", &open(
                "Where it sees one.",
                &json!({
                    "name": text(63, Some("Name of the volume.")),
                    "mountPath": text(4096, Some("Path in the container.")),
                    "subPath": text(4096, Some("Path in the volume.")),
                    "readOnly": {"type": "boolean", "description": "Whether it only reads."},
                }),
            )),
        }),
    );
    container["required"] = json!(["name"]);
    container
}

fn variable() -> Value {
    let reserved: Vec<_> = RESERVED.iter().map(|it| format!("'{it}'")).collect();
    let reserved = reserved.join(", ");
    let ours = json!({
        "rule": format!(
            "self.name == '{CADRE_EXCHANGE}' || !self.name.startsWith('{CADRE_PREFIX}') && !(self.name in [{reserved}])"
        ),
        "message": "Cadre sets this variable itself; remove it",
    });
    let mut variable = open(
        "A variable.",
        &json!({
            "name": {"type": "string", "minLength": 1, "maxLength": 256, "description": "Its name."},
            "value": text(131_072, Some("Its value; numbers in quotes.")),
            "valueFrom": open("Where its value stands.", &json!({})),
        }),
    );
    variable["required"] = json!(["name"]);
    variable["x-kubernetes-validations"] = json!([ours]);
    variable
}

fn port() -> Value {
    let number = |meaning: &str| json!({"type": "integer", "format": "int32", "minimum": 1, "maximum": 65535, "description": meaning});
    open(
        "A port.",
        &json!({
            "name": text(15, Some("Its name.")),
            "containerPort": number("Its number in the pod."),
            "hostPort": number("Its number on the node."),
            "protocol": {
                "type": "string", "enum": ["TCP", "UDP", "SCTP"], "description": "Its protocol. Default TCP.",
            },
        }),
    )
}

fn resources() -> Value {
    let quantity = json!({
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "x-kubernetes-int-or-string": true,
        "pattern": QUANTITY,
    });
    open(
        "What it needs of a node.",
        &json!({
            "limits": map(&quantity, "Most that it gets."),
            "requests": map(&quantity, "What is kept for it."),
        }),
    )
}

/// An object of which these fields are known.
fn open(meaning: &str, fields: &Value) -> Value {
    let mut object = json!({
        "type": "object", "x-kubernetes-preserve-unknown-fields": true, "description": meaning,
    });
    if fields.as_object().is_some_and(|it| !it.is_empty()) {
        object["properties"] = fields.clone();
    }
    object
}

fn list(most: u32, meaning: &str, item: &Value) -> Value {
    json!({"type": "array", "maxItems": most, "description": meaning, "items": item})
}

fn map(value: &Value, meaning: &str) -> Value {
    json!({"type": "object", "description": meaning, "additionalProperties": value})
}

fn text(most: u32, meaning: Option<&str>) -> Value {
    let mut text = json!({"type": "string", "maxLength": most});
    if let Some(meaning) = meaning {
        text["description"] = meaning.into();
    }
    text
}
