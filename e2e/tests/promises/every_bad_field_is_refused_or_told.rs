//! Each field of both kinds with a wrong type, range or reference, made from the definitions' own schemas, and wrong
//! combinations: the API server refuses it and names the field, or the operator says in a condition what is wrong. What is bad
//! in one object is no trouble of another.

use anyhow::{Context as _, Result, bail, ensure};
use cadre_e2e::{Cluster, Operator, until};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, PostParams};
use serde_json::{Value, json};

const HERE: &str = "bad-fields";
/// Fields whose good values only somebody else knows: a profile is a file in the trainer's container, a claim is found by the
/// scheduler, a path by a node, an image and a Secret by a kubelet, another controller knows its own name, another operator its
/// class, and any text is a word of a command or the name of a variable.
const OF_OTHERS: [&str; 11] = [
    "spec.attention.profile",
    "spec.checkpoint.claimName",
    "spec.checkpoint.hostPath",
    "spec.class",
    "spec.managedBy",
    "spec.template.spec.containers[0].env[0].name",
    "spec.template.spec.containers[0].image",
    "spec.template.spec.containers[0].command[0]",
    "spec.template.spec.containers[0].args[0]",
    "spec.template.spec.containers[0].workingDir",
    "spec.template.spec.imagePullSecrets[0].name",
];
/// Larger than any number that an object may hold.
const TOO_LARGE: u64 = 1 << 32;

/// A field with a bad value.
#[derive(Clone, Debug)]
struct Bad {
    field: String,
    value: Value,
    object: Value,
}

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    cluster.definitions()?;
    cluster.namespace(HERE).await?;
    let operator = Operator::leading(cluster, 8093).await?;
    let kinds = [("attentionpools", good_pool("good")), ("trainingjobs", good_job("good"))];
    for (plural, good) in &kinds {
        let api = dynamic(cluster, plural);
        api.create(&PostParams::default(), &read(good)?).await?;
    }
    // Jobs that are taken train here: what happens to them is not the good pool's.
    let api = dynamic(cluster, "attentionpools");
    api.create(&PostParams::default(), &read(&good_pool("used"))?).await?;
    let before = at_rest(cluster).await?;

    let (mut refused, mut told) = (0, 0);
    for (plural, good) in &kinds {
        let api = dynamic(cluster, plural);
        let definition =
            cluster.kubectl(&["get", "crd", &format!("{plural}.cadre.dev"), "-o", "json"])?;
        let definition: Value = serde_json::from_str(&definition)?;
        let schema =
            &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
        let mut all = combinations(good);
        walk(schema, "spec", good, &mut all);
        let mut taken = Vec::new();
        for bad in all {
            let parameters = PostParams { dry_run: true, ..PostParams::default() };
            match api.create(&parameters, &read(&bad.object)?).await {
                Ok(_) => taken.push(bad),
                Err(kube::Error::Api(status)) if status.code == 422 => {
                    let last = bad.field.rsplit('.').next().unwrap_or_default();
                    let last = last.split('[').next().unwrap_or_default();
                    let names = status.message.contains(last);
                    ensure!(names, "{} = {}: {}", bad.field, bad.value, status.message);
                    refused += 1;
                }
                Err(kube::Error::Api(status)) if status.code == 400 => refused += 1,
                Err(error) => return Err(error).context(format!("{bad:?}")),
            }
        }
        taken.retain(|it| !OF_OTHERS.contains(&it.field.as_str()));
        told += taken.len();
        all_are_told(&api, taken).await?;
    }
    println!("    {refused} bad values are refused, {told} are told");
    ensure!(refused > 200 && told > 20, "the definitions have more fields than that");
    ensure!(at_rest(cluster).await? == before, "the good ones are as they were");
    cluster.kubectl(&[
        "delete",
        "cadjob,attnpool",
        "--all",
        "--namespace",
        HERE,
        "--timeout=60s",
    ])?;
    operator.stop()
}

/// Makes all of them, and waits until a condition of each says what is wrong.
async fn all_are_told(api: &Api<DynamicObject>, taken: Vec<Bad>) -> Result<()> {
    let mut waiting = Vec::new();
    for (at, mut bad) in taken.into_iter().enumerate() {
        let name = format!("bad-{at}");
        bad.object["metadata"]["name"] = name.as_str().into();
        let made = api.create(&PostParams::default(), &read(&bad.object)?).await;
        made.with_context(|| format!("{bad:?} was taken before"))?;
        waiting.push((name, bad));
    }
    until("a condition of each", async || {
        let found = api.list(&ListParams::default()).await?;
        let silent: Vec<_> = waiting
            .iter()
            .filter(|(name, bad)| {
                let object = found.items.iter().find(|it| it.metadata.name.as_ref() == Some(name));
                !object.is_some_and(|it| is_told(&it.data["status"]["conditions"], &bad.value))
            })
            .map(|(name, bad)| format!("{name}: {} = {}", bad.field, bad.value))
            .collect();
        if silent.is_empty() {
            return Ok(Some(()));
        }
        bail!("silence about {silent:#?}")
    })
    .await?;
    let found = api.list(&ListParams::default()).await?.items;
    let of = |name: &String| found.iter().find(|it| it.metadata.name.as_ref() == Some(name));
    let late = waiting
        .iter()
        .filter_map(|(name, bad)| Some((told_after(of(name)?, &bad.value)?, &bad.field)));
    if let Some((seconds, field)) = late.max() {
        println!(
            "    the last of {} was told {seconds} s after it was made: {field}",
            waiting.len()
        );
    }
    Ok(())
}

/// Whole seconds from the object's creation to the first condition that tells of it.
fn told_after(object: &DynamicObject, bad: &Value) -> Option<i64> {
    let made = object.metadata.creation_timestamp.as_ref()?.0;
    let conditions = object.data["status"]["conditions"].as_array()?;
    let telling = conditions.iter().filter(|it| is_told(&json!([it]), bad));
    let at = |it: &Value| it["lastTransitionTime"].as_str()?.parse::<Timestamp>().ok();
    let first = telling.filter_map(at).min()?;
    Some(first.as_second() - made.as_second())
}

/// Whether a condition says that somebody has to change the object; or, what the scheduler says of a bad reference.
fn is_told(conditions: &Value, bad: &Value) -> bool {
    let all = || conditions.as_array().into_iter().flatten();
    let stalls = |it: &Value| it["type"] == "Stalled" && it["status"] == "True";
    let named = bad.as_str().unwrap_or("nothing");
    let names = |it: &Value| {
        it["status"] == "False" && it["message"].as_str().is_some_and(|it| it.contains(named))
    };
    all().any(|it| stalls(it) && it["message"] != "") || all().any(names)
}

/// Versions of the good objects once nothing changes them any more.
async fn at_rest(cluster: &Cluster) -> Result<Vec<String>> {
    until("rest", async || {
        let mut versions = Vec::new();
        for (plural, settled) in [("attentionpools", "Ready"), ("trainingjobs", "Scheduled")] {
            let found = dynamic(cluster, plural).get("good").await?;
            let conditions = found.data["status"]["conditions"].as_array();
            let word = conditions.into_iter().flatten().find(|it| it["type"] == settled);
            let Some(word) = word.filter(|it| it["reason"] != "Waiting") else { return Ok(None) };
            versions.push(format!("{} {}", found.metadata.uid.unwrap_or_default(), word));
        }
        Ok(Some(versions))
    })
    .await
}

fn dynamic(cluster: &Cluster, plural: &str) -> Api<DynamicObject> {
    let kind = if plural == "attentionpools" { "AttentionPool" } else { "TrainingJob" };
    let kind = GroupVersionKind::gvk("cadre.dev", "v1alpha1", kind);
    let resource = ApiResource::from_gvk_with_plural(&kind, plural);
    Api::namespaced_with(cluster.client(), HERE, &resource)
}

fn read(object: &Value) -> Result<DynamicObject> {
    serde_json::from_value(object.clone()).context("an object")
}

/// A pool whose servers are its trainers.
fn good_pool(name: &str) -> Value {
    json!({
        "apiVersion": "cadre.dev/v1alpha1", "kind": "AttentionPool",
        "metadata": {"name": name}, "spec": {},
    })
}

fn good_job(name: &str) -> Value {
    json!({
        "apiVersion": "cadre.dev/v1alpha1", "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "attention": {"poolRef": {"name": if name == "good" { "good" } else { "used" }}},
            "template": {"spec": {"containers": [{"name": "trainer", "image": "example.com/i:1"}]}},
        },
    })
}

/// Fields that are good one by one, and values of templates that the definitions let pass.
fn combinations(good: &Value) -> Vec<Bad> {
    let is_pool = good["kind"] == "AttentionPool";
    let mut all: Vec<(&str, Value)> = Vec::new();
    if is_pool {
        all.push(("spec", json!({"replicas": 0, "inPlace": false})));
        all.push(("spec.scaling", json!({"mode": "Auto"})));
        all.push(("spec.scaling", json!({"min": 3, "max": 2})));
        all.push(("spec.access.namespaces", json!(["a", "a"])));
        let both = json!({"type": "OnDelete", "rollingUpdate": {"maxUnavailable": 2}});
        all.push(("spec.updateStrategy", both));
    } else {
        all.push(("spec.checkpoint", json!({"claimName": "a", "hostPath": "/b"})));
        all.push(("spec.attention.poolRef", json!({"name": "nowhere"})));
        all.push(("spec.attention.poolRef", json!({"name": "used", "namespace": "nowhere"})));
    }
    let own = if is_pool { "server" } else { "trainer" };
    let containers = "spec.template.spec.containers";
    let one = |more: Value| {
        let mut one = json!({"name": own, "image": "example.com/i:1"});
        let fields = more.as_object().cloned().unwrap_or_default();
        one.as_object_mut().expect("an object").extend(fields);
        json!([one])
    };
    for bad in [
        json!([]),
        json!([{"name": "other", "image": "i"}]),
        json!([{"name": own, "image": "i"}, {"name": "other", "image": "i"}]),
        one(json!({"env": [{"name": "X", "value": 1}]})),
        one(json!({"env": [{"name": "RANK", "value": "1"}]})),
        one(json!({"env": [{"name": "CADRE_X", "value": "1"}]})),
        one(json!({"image": 7})),
        one(json!({"ports": "none"})),
        one(json!({"ports": [{"containerPort": 70000}]})),
        one(json!({"resources": {"limits": {"cpu": "lots"}}})),
        one(json!({"volumeMounts": [{"name": "nobodys", "mountPath": "/x"}]})),
        one(json!({"imagePullPolicy": "Perhaps"})),
    ] {
        all.push((containers, bad));
    }
    all.push(("spec.template.spec.volumes", json!("none")));
    all.push(("spec.template.spec.nodeSelector", json!({"a b": "c"})));
    all.push(("spec.template.metadata.labels", json!({"a b": "c"})));
    all.into_iter().map(|(field, value)| bad(good, field, value)).collect()
}

/// Bad values of a field of the schema and of all below it.
fn walk(schema: &Value, field: &str, good: &Value, all: &mut Vec<Bad>) {
    let mut values = Vec::new();
    let limit = |name: &str| schema[name].as_i64();
    let count = |name: &str| limit(name).and_then(|it| usize::try_from(it).ok());
    match schema["type"].as_str().unwrap_or_default() {
        "integer" => {
            values.extend([json!("seven"), json!(true), json!(1.5), json!(TOO_LARGE), json!(-1)]);
            values.extend(limit("minimum").map(|it| json!(it - 1)));
            values.extend(limit("maximum").map(|it| json!(it + 1)));
        }
        "boolean" => values.extend([json!("yes"), json!(1)]),
        "string" => {
            values.extend([json!(7), json!(true), json!({}), json!("Not A Name!")]);
            values.extend(limit("minLength").map(|_| json!("")));
            values.extend(count("maxLength").map(|it| json!("a".repeat(it + 1))));
        }
        "array" => {
            values.extend([json!("none"), json!({})]);
            values.extend(count("minItems").map(|_| json!([])));
            let many = count("maxItems").map(|it| vec![json!("a"); it + 1]);
            values.extend(many.map(Value::from));
        }
        _ => values.extend([json!("none"), json!([])]),
    }
    all.extend(values.into_iter().map(|value| bad(good, field, value)));
    for (name, below) in schema["properties"].as_object().into_iter().flatten() {
        walk(below, &format!("{field}.{name}"), good, all);
    }
    if !schema["items"].is_null() {
        walk(&schema["items"], &format!("{field}[0]"), good, all);
    }
}

/// The good object under another name, with this value in the field.
fn bad(good: &Value, field: &str, value: Value) -> Bad {
    let is_pool = good["kind"] == "AttentionPool";
    let mut object = if is_pool { good_pool("bad") } else { good_job("bad") };
    if is_pool {
        // So that there is something to make from it.
        object["spec"] = json!({"replicas": 1, "inPlace": false});
        if field.starts_with("spec.template.") {
            let one = json!([{"name": "server", "image": "example.com/i:1"}]);
            object["spec"]["template"] = json!({"spec": {"containers": one}});
        }
    }
    let mut place = &mut object;
    for part in field.split('.') {
        let (name, is_list) = part.strip_suffix("[0]").map_or((part, false), |it| (it, true));
        place = &mut place[name];
        if is_list {
            if !place.is_array() {
                *place = json!([{}]);
            }
            place = &mut place[0];
        }
    }
    *place = value.clone();
    if field.starts_with("spec.failurePolicy.rules[0].") {
        let rule = &mut object["spec"]["failurePolicy"]["rules"][0];
        for (name, usual) in [("action", json!("Restart")), ("exitCodes", json!([9]))] {
            if rule[name].is_null() {
                rule[name] = usual;
            }
        }
    }
    Bad { field: field.to_owned(), value, object }
}
