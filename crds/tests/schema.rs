//! The definitions as shipped, the page about them, and every rule of theirs both ways.
//!
//! `CADRE_GENERATE=1 cargo test -p cadre-crds --features schema --test schema` writes the shipped
//! files anew. Rules run here by a second implementation of their language; the API server's own is
//! asked by the tests on a cluster.

use std::collections::BTreeSet;
use std::path::Path;

use cadre_crds::schema::{definitions, page, yaml};
use cadre_crds::{AttentionPoolResource, Encryption, TrainingJobResource};
use kube::core::cel::{validate_cel, validate_cel_update};
use serde_json::{Value, json};

/// Compares a shipped file, or writes it.
fn shipped(path: &str, text: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    if std::env::var_os("CADRE_GENERATE").is_some() {
        std::fs::create_dir_all(file.parent().expect("a file in a folder"))
            .expect("the tree can be written");
        std::fs::write(&file, text).expect("the tree can be written");
    }
    let found = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(found == text, "{path} is not what the types say; write it with CADRE_GENERATE=1");
}

#[test]
fn shipped_definitions_and_page_are_those_of_the_types() {
    let definitions = definitions();
    for definition in &definitions {
        let name = definition.metadata.name.as_deref().expect("definitions have names");
        shipped(&format!("charts/cadre/crds/{name}.yaml"), &yaml(definition));
    }
    shipped("docs/api.md", &page::markdown(&definitions));
}

/// Calls `look` with every schema and its path.
fn walk(path: &str, schema: &Value, look: &mut dyn FnMut(&str, &Value)) {
    look(path, schema);
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        walk(&format!("{path}.{name}"), field, look);
    }
    if !schema["items"].is_null() {
        walk(&format!("{path}[]"), &schema["items"], look);
    }
}

fn schemas() -> Vec<Value> {
    let schema = |definition: &_| {
        let value = serde_json::to_value(definition).expect("plain data");
        value["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
    };
    definitions().iter().map(schema).collect()
}

#[test]
fn every_field_is_described_and_bounded_and_none_is_a_float() {
    for schema in schemas() {
        walk("", &schema, &mut |path, field| {
            assert_ne!(field["type"], "number", "{path}");
            assert!(field["oneOf"].is_null() && field["anyOf"].is_null(), "{path} is structural");
            assert!(field["$ref"].is_null(), "{path} is written out");
            if field["type"] == "array" {
                assert!(field["maxItems"].is_u64(), "{path} has a longest length");
                // Several appliers share a list of names, and none of them is there twice.
                let is_set = field["x-kubernetes-list-type"] == "set";
                let of_text = path.starts_with(".spec")
                    && !path.contains(".template.")
                    && field["items"]["type"] == "string";
                assert_eq!(is_set, of_text, "{path}");
            }
            let text = field["type"] == "string" && field["enum"].is_null();
            if path.starts_with(".spec") && text {
                assert!(field["maxLength"].is_u64(), "{path} has a longest length");
            }
            if path.starts_with(".spec") && field["type"] == "integer" {
                assert!(field["minimum"].is_number(), "{path} has a least value");
            }
        });
        for part in ["spec", "status"] {
            let fields = schema["properties"][part]["properties"].as_object().unwrap();
            for (name, field) in fields {
                let described = field["description"].is_string() || name == "conditions";
                assert!(described || name == "template", "{part}.{name} has no description");
            }
        }
    }
}

#[test]
fn the_scale_subresource_has_a_default_and_a_selector() {
    let value = serde_json::to_value(&definitions()[0]).unwrap();
    let version = &value["spec"]["versions"][0];
    assert_eq!(
        version["subresources"]["scale"],
        json!({
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        })
    );
    let schema = &version["schema"]["openAPIV3Schema"]["properties"];
    assert_eq!(schema["spec"]["properties"]["replicas"]["default"], 0);
    assert_eq!(schema["status"]["properties"]["selector"]["type"], "string");
}

#[test]
fn columns_come_from_named_fields_and_conditions() {
    let columns = |at: usize| {
        let columns = definitions()[at].spec.versions[0].additional_printer_columns.clone();
        let names = columns.unwrap_or_default().into_iter().map(|it| it.name.to_uppercase());
        names.collect::<Vec<_>>().join(" ")
    };
    assert_eq!(columns(0), "DESIRED READY INPLACE UTIL BALANCED PLACEMENT AGE");
    assert_eq!(columns(1), "STEP PROGRESS TOKENS/S POOL STATUS AGE");
}

fn pool() -> Value {
    json!({
        "metadata": {"name": "p"},
        "spec": {
            "replicas": 2,
            "inPlace": false,
            "template": {"spec": {"containers": [{"name": "server", "env": [{"name": "A"}]}]}},
        },
    })
}

fn job() -> Value {
    json!({
        "metadata": {"name": "j"},
        "spec": {
            "nodes": 2,
            "attention": {"poolRef": {"name": "p"}},
            "template": {"spec": {"containers": [{"name": "trainer", "env": [{"name": "A"}]}]}},
        },
    })
}

/// The object with other values at some places; null removes.
fn changed(mut object: Value, changes: &[(&str, Value)]) -> Value {
    for (path, value) in changes {
        let (parent, last) = path.rsplit_once('/').expect("a path from the root");
        let mut place = &mut object;
        for part in parent.split('/').skip(1) {
            place = match part.parse::<usize>() {
                Ok(at) => &mut place[at],
                Err(_) => &mut place[part],
            };
        }
        if value.is_null() {
            place.as_object_mut().expect("an object").remove(last);
        } else {
            place[last] = value.clone();
        }
    }
    object
}

/// What the rules say: nothing, or the one message.
fn pool_says(changes: &[(&str, Value)]) -> Option<String> {
    let object: AttentionPoolResource =
        serde_json::from_value(changed(pool(), changes)).expect("right types");
    said(validate_cel(&object))
}

fn job_says(changes: &[(&str, Value)]) -> Option<String> {
    let object: TrainingJobResource =
        serde_json::from_value(changed(job(), changes)).expect("right types");
    said(validate_cel(&object))
}

fn job_update_says(before: &[(&str, Value)], after: &[(&str, Value)]) -> Option<String> {
    let read = |changes| -> TrainingJobResource {
        serde_json::from_value(changed(job(), changes)).expect("right types")
    };
    said(validate_cel_update(&read(after), &read(before)))
}

fn pool_update_says(before: &[(&str, Value)], after: &[(&str, Value)]) -> Option<String> {
    let read = |changes| -> AttentionPoolResource {
        serde_json::from_value(changed(pool(), changes)).expect("right types")
    };
    said(validate_cel_update(&read(after), &read(before)))
}

fn said(result: Result<(), kube::core::cel::ValidationErrors>) -> Option<String> {
    result.err().map(|errors| errors.to_string())
}

/// The changed object is refused with a message that holds the words.
fn refused(says: impl Fn(&[(&str, Value)]) -> Option<String>, bad: &[(&str, Value)], words: &str) {
    let message = says(bad).unwrap_or_else(|| panic!("{bad:?} passes, expected: {words}"));
    assert!(message.contains(words), "{bad:?}: {message}");
}

#[test]
fn rules_of_pools_refuse_and_let_pass() {
    assert_eq!(pool_says(&[]), None);
    let none = "the pool has no server";
    refused(pool_says, &[("/spec/replicas", 0.into())], none);
    assert_eq!(pool_says(&[("/spec/replicas", 0.into()), ("/spec/inPlace", true.into())]), None);
    let external = [("/spec/replicas", 0.into()), ("/spec/scaling", json!({"mode": "External"}))];
    assert_eq!(pool_says(&external), None);

    refused(
        pool_says,
        &[("/spec/scaling", json!({"mode": "Auto"}))],
        "spec.scaling.max is missing",
    );
    assert_eq!(pool_says(&[("/spec/scaling", json!({"mode": "Auto", "max": 4}))]), None);
    refused(
        pool_says,
        &[("/spec/scaling", json!({"min": 3, "max": 2}))],
        "is below spec.scaling.min",
    );
    assert_eq!(pool_says(&[("/spec/scaling", json!({"min": 3, "max": 3}))]), None);

    let strategy = |it: Value| [("/spec/updateStrategy", it)];
    let both = strategy(json!({"type": "OnDelete", "rollingUpdate": {"maxUnavailable": 2}}));
    refused(pool_says, &both, "spec.updateStrategy.rollingUpdate is of no use");
    for good in [json!({"type": "OnDelete"}), json!({"rollingUpdate": {"maxUnavailable": 2}})] {
        assert_eq!(pool_says(&strategy(good)), None);
    }

    let container = "/spec/template/spec/containers/0";
    let name = format!("{container}/name");
    refused(pool_says, &[(&name, "other".into())], "exactly one container, named `server`");
    let two = json!([{"name": "server"}, {"name": "other"}]);
    refused(pool_says, &[("/spec/template/spec/containers", two)], "exactly one container");
    let variable = format!("{container}/env/0/name");
    for ours in ["RANK", "CADRE_INDEX", "PET_NNODES", "MASTER_ADDR"] {
        refused(pool_says, &[(&variable, ours.into())], "Cadre sets this variable itself");
    }
    assert_eq!(pool_says(&[(&variable, "RANKS".into())]), None);
    assert_eq!(pool_says(&[("/spec/template", Value::Null)]), None);

    let long = "p".repeat(53);
    for wrong in [long.as_str(), "a.b"] {
        refused(pool_says, &[("/metadata/name", wrong.into())], "metadata.name is longer than 52");
    }
    assert_eq!(pool_says(&[("/metadata/name", long[..52].into())]), None);
}

#[test]
fn rules_of_jobs_refuse_and_let_pass() {
    assert_eq!(job_says(&[]), None);
    let many = [("/spec/nodes", 4096.into()), ("/spec/procsPerNode", 2.into())];
    refused(job_says, &many, "more than 4096 trainers");
    let most = [("/spec/nodes", 2048.into()), ("/spec/procsPerNode", 2.into())];
    assert_eq!(job_says(&most), None);

    let both = json!({"claimName": "a", "hostPath": "/b"});
    refused(job_says, &[("/spec/checkpoint", both)], "keep one of them");
    assert_eq!(job_says(&[("/spec/checkpoint", json!({"claimName": "a"}))]), None);
    assert_eq!(job_says(&[("/spec/checkpoint", json!({"hostPath": "/b"}))]), None);

    let from = |it: &str| {
        let place = json!({"claimName": "a", "resumeFrom": it});
        job_says(&[("/spec/checkpoint", place)])
    };
    for good in ["i-0123abcd", "i-0123abcd/step-40", "7b-uid-7"] {
        assert_eq!(from(good), None, "{good}");
    }
    for bad in ["../i-1", "i-1/", "i-1/..", "i-1/step-", "i-1/step-4/x", "/i-1", "I-1", "-i", ""] {
        let said = from(bad).unwrap_or_else(|| panic!("{bad} passes"));
        assert!(said.contains("write NAME-UID, or NAME-UID/step-N"), "{bad}: {said}");
    }
    refused(job_says, &[("/spec/checkpoint", json!({"resumeFrom": "i-1"}))], "name that job's");

    // What is left out is the default, 30 and 1800.
    for (policy, is_fine) in [
        (json!({"stalledAfterSeconds": 31}), true),
        (json!({"stalledAfterSeconds": 30}), false),
        (json!({"suspectAfterSeconds": 1800}), false),
        (json!({"suspectAfterSeconds": 1799}), true),
    ] {
        let changes = [("/spec/failurePolicy", policy)];
        if is_fine {
            assert_eq!(job_says(&changes), None);
        } else {
            refused(job_says, &changes, "is not above spec.failurePolicy.suspectAfterSeconds");
        }
    }

    let name = "/spec/template/spec/containers/0/name";
    refused(job_says, &[(name, "server".into())], "exactly one container, named `trainer`");
    let variable = "/spec/template/spec/containers/0/env/0/name";
    refused(job_says, &[(variable, "WORLD_SIZE".into())], "Cadre sets this variable itself");
    assert_eq!(job_says(&[(variable, "CADRE_EXCHANGE".into())]), None);
    refused(job_says, &[("/metadata/name", "a.b".into())], "metadata.name is longer than 52");
}

#[test]
fn rules_about_changes_of_jobs_refuse_and_let_pass() {
    let suspended = ("/spec/suspend", Value::from(true));
    for (path, value) in [
        ("/spec/nodes", Value::from(3)),
        ("/spec/procsPerNode", Value::from(2)),
        ("/spec/attention/poolRef", json!({"name": "q"})),
    ] {
        let change = (path, value);
        let update = |after: &[(&str, Value)]| job_update_says(&[], after);
        refused(update, std::slice::from_ref(&change), "only while spec.suspend is true");
        assert_eq!(job_update_says(&[], &[change.clone(), suspended.clone()]), None);
        assert_eq!(job_update_says(std::slice::from_ref(&suspended), &[change]), None);
    }
    // Each attempt keeps what it began with.
    for word in ["Tcp", "Required", "Off", "Tls"] {
        let edit = ("/spec/attention/encryption", Value::from(word));
        assert_eq!(job_update_says(&[], &[edit]), None, "{word}");
    }
    let from = |it: &str| ("/spec/checkpoint", json!({"claimName": "a", "resumeFrom": it}));
    let none = ("/spec/checkpoint", json!({"claimName": "a"}));
    for (before, after) in
        [(none.clone(), from("i-1")), (from("i-1"), none), (from("i-1"), from("i-2"))]
    {
        let update =
            |after: &[(&str, Value)]| job_update_says(std::slice::from_ref(&before), after);
        refused(update, std::slice::from_ref(&after), "spec.checkpoint.resumeFrom never changes");
    }
    assert_eq!(job_update_says(&[from("i-1")], &[from("i-1")]), None);
    let managed = ("/spec/managedBy", Value::from("kueue.x-k8s.io/multikueue"));
    let never = "spec.managedBy never changes";
    refused(|after| job_update_says(&[], after), std::slice::from_ref(&managed), never);
    refused(|after| job_update_says(std::slice::from_ref(&managed), after), &[], never);
    let same = std::slice::from_ref(&managed);
    assert_eq!(job_update_says(same, same), None);
}

/// What the rules say of a change.
type Says = fn(&[(&str, Value)], &[(&str, Value)]) -> Option<String>;

#[test]
fn a_class_never_changes() {
    let class = |it: &str| ("/spec/class", Value::from(it));
    let never = "spec.class never changes";
    for says in [job_update_says as Says, pool_update_says] {
        let before = [class("trial")];
        refused(|after| says(&[], after), &[class("trial")], never);
        refused(|after| says(&before, after), &[], never);
        refused(|after| says(&before, after), &[class("other")], never);
        assert_eq!(says(&before, &before), None);
        assert_eq!(says(&[], &[]), None);
    }
}

#[test]
fn words_of_encryption_are_all_read_and_the_earlier_one_means_required() {
    for schema in schemas() {
        walk("", &schema, &mut |path, field| {
            if !path.ends_with(".encryption") {
                return;
            }
            let words = field["enum"].as_array().expect("a choice");
            for word in words.iter().filter_map(Value::as_str) {
                let read: Encryption = serde_json::from_value(word.into()).expect("it is read");
                assert_eq!(Encryption::of(word), Some(read), "{path}");
                let expected = if word == "Tls" { "Required" } else { word };
                assert_eq!((read.word(), json!(read)), (expected, json!(expected)), "{path}");
            }
            assert_eq!(words.len(), 4, "{path}");
        });
    }
}

#[test]
fn every_rule_is_tested_here() {
    let mut rules = BTreeSet::new();
    for schema in schemas() {
        walk("", &schema, &mut |path, field| {
            for rule in field["x-kubernetes-validations"].as_array().into_iter().flatten() {
                assert!(rule["message"].is_string(), "{path}: a rule without a message");
                rules.insert(rule["message"].as_str().unwrap_or_default().to_owned());
            }
        });
    }
    // A new rule: write both of its cases above, then count it here.
    assert_eq!(rules.len(), 20, "{rules:#?}");
}
