//! Everything that a report of a fault needs, in one archive.
//!
//! In: what was [`Seen`], and logs. Out: a `.tar.gz`: objects with their status, events, explanations, the last lines of
//! every pod. Values of environment variables, and of annotations that keep a whole object, are left out: they may hold
//! secrets. Secrets themselves are never read.
//!
//! The step headers of a job are files of its trainers (`headers.jsonl` in the checkpoint directory), which the API server
//! does not show: `README` in the archive says where to find them.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde::Serialize;
use serde_json::Value;

use crate::explain::explain;
use crate::logs::{self, Wanted};
use crate::read::{Cluster, Error};
use crate::seen::{Kind, Seen, Target, name, namespace};
use crate::status;

/// Last lines of each pod's log.
const MAX_LOG_LINES: i64 = 2_000;
/// Most pods whose logs are taken.
const MAX_LOGGED_PODS: usize = 256;

const README: &str = "\
status.txt      all pools and jobs at a glance
explain/        why each is as it is
objects/        pools, jobs, attempts, pods, autoscalers, nodes of pods that are not ready, leases; values of environment variables are left out
events.yaml     what was said about them
logs/           the last lines of each pod, PREVIOUS those of the run before

The plan of a step can be made again from its header: add headers.jsonl from the checkpoint directory of trainer 0.
";

/// A file of the archive.
type File = (String, String);

/// Logs of the pods that were seen.
pub async fn logs(cluster: &Cluster, seen: &Seen) -> Vec<(String, String)> {
    let mut files = Vec::new();
    for pod in seen.pods.iter().chain(&seen.operators).take(MAX_LOGGED_PODS) {
        let place = format!("logs/{}/{}", namespace(&pod.metadata), name(&pod.metadata));
        for (previous, suffix) in [(false, ".log"), (true, ".PREVIOUS.log")] {
            let wanted = Wanted { follow: false, tail: Some(MAX_LOG_LINES), previous };
            let text = logs::text(cluster, pod, wanted).await;
            match text {
                Ok(text) => files.push((place.clone() + suffix, text)),
                Err(Error::Request { why, .. }) if !previous => {
                    files.push((place.clone() + suffix, format!("not read: {why}\n")));
                }
                // Most pods have no run before.
                Err(_) => {}
            }
        }
    }
    files
}

/// Writes the archive.
///
/// # Errors
///
/// The output cannot be written.
pub fn write(seen: &Seen, logs: Vec<(String, String)>, out: impl Write) -> std::io::Result<()> {
    let mut archive = tar::Builder::new(GzEncoder::new(out, Compression::default()));
    for (path, text) in files(seen).into_iter().chain(logs) {
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(seen.now.as_second().max(0) as u64);
        archive.append_data(&mut header, format!("cadre-bundle/{path}"), text.as_bytes())?;
    }
    archive.into_inner()?.finish()?.flush()
}

fn files(seen: &Seen) -> Vec<File> {
    let mut files: Vec<File> =
        vec![("README".into(), README.into()), ("status.txt".into(), status::text(seen))];
    let metas = seen.pools.iter().map(|it| (Kind::Pool, &it.metadata));
    let metas = metas.chain(seen.jobs.iter().map(|it| (Kind::Job, &it.metadata)));
    for (kind, meta) in metas {
        let target = Target { kind, name: name(meta).to_owned() };
        if let Ok(found) = explain(seen, namespace(meta), &target) {
            let path = format!("explain/{}/{kind}-{}.txt", namespace(meta), name(meta));
            files.push((path, found.text()));
        }
    }
    files.push(("events.yaml".into(), yaml(&seen.events)));
    for (what, text) in [
        ("attentionpools", yaml(&seen.pools)),
        ("trainingjobs", yaml(&seen.jobs)),
        ("jobs", yaml(&seen.attempts)),
        ("pods", yaml(&seen.pods)),
        ("autoscalers", yaml(&seen.autoscalers)),
        ("operators", yaml(&seen.operators)),
        ("nodes", yaml(&seen.nodes)),
        ("leases", yaml(&seen.leases)),
    ] {
        files.push((format!("objects/{what}.yaml"), text));
    }
    files
}

fn yaml(objects: &impl Serialize) -> String {
    let mut value = match serde_json::to_value(objects) {
        Ok(value) => value,
        Err(error) => return format!("# cannot be written: {error}\n"),
    };
    redact(&mut value);
    serde_saphyr::to_string(&value)
        .unwrap_or_else(|error| format!("# cannot be written: {error}\n"))
}

/// Takes out what may be secret.
fn redact(value: &mut Value) {
    match value {
        Value::Array(all) => all.iter_mut().for_each(redact),
        Value::Object(fields) => {
            fields.remove("managedFields");
            if let Some(Value::Object(annotations)) = fields.get_mut("annotations") {
                // This annotation repeats the whole object, environment included.
                annotations.remove("kubectl.kubernetes.io/last-applied-configuration");
            }
            if let Some(Value::Array(env)) = fields.get_mut("env") {
                for it in env.iter_mut().filter_map(Value::as_object_mut) {
                    let ours = it.get("name").and_then(Value::as_str).is_some_and(is_ours);
                    if !ours && let Some(text) = it.get_mut("value") {
                        *text = Value::from("(left out)");
                    }
                }
            }
            fields.values_mut().for_each(redact);
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Variables that Cadre or a launcher sets; none is a secret but the job's.
fn is_ours(variable: &str) -> bool {
    let prefix = ["CADRE_", "PET_"].iter().any(|it| variable.starts_with(it));
    let named = ["MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"];
    (prefix || named.contains(&variable))
        && !variable.contains("SECRET")
        && !variable.contains("TOKEN")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_that_may_be_secret_are_left_out() {
        let mut value = json!({"spec": {"containers": [{"env": [
            {"name": "HF_TOKEN", "value": "hunter2"},
            {"name": "CADRE_SECRET", "value": "hunter2"},
            {"name": "RANK", "value": "3"},
            {"name": "X", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        ]}]}, "metadata": {"managedFields": ["hunter2"], "annotations": {
            "kubectl.kubernetes.io/last-applied-configuration": "hunter2", "a": "b"}}});
        redact(&mut value);
        let text = value.to_string();
        assert!(!text.contains("hunter2"), "{text}");
        for kept in ["\"3\"", "HF_TOKEN", "secretKeyRef", "\"a\":\"b\""] {
            assert!(text.contains(kept), "{kept} of {text}");
        }
    }
}
