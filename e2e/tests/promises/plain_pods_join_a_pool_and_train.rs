//! Pods of a plain Indexed Job, which the operator did not make, join a pool by its label and a token of their own, and
//! train on its servers; their header log makes the same bits again.

use anyhow::{Result, ensure};
use cadre_e2e::{Cluster, until};
use k8s_openapi::api::batch::v1::Job;
use serde_json::{Value, json};

use crate::objects::all;
use crate::release::ready;
use crate::training::{STEPS, Training, loss, pod, trainer};

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    let mut training = Training::prepare(cluster, "joined").await?;
    training.cluster.apply(training.here, &training.pool.to_string())?;
    ready(training.cluster, training.here, 2).await?;
    training.cluster.apply(training.here, &plain().to_string())?;
    training.attempted("plain");
    training.at(*STEPS).await?;
    ends(&training).await?;
    let losses = training.losses()?;
    let fixed = training.alone(2, losses.len())?;
    for (step, (one, other)) in losses.iter().zip(&fixed).enumerate() {
        let apart = (loss(one)? - loss(other)?).abs();
        ensure!(apart <= 1e-4, "step {step}: {one} and {other} are {apart} apart");
    }
    let text = std::fs::read_to_string(training.headers()?)?;
    ensure!(text.lines().all(|it| it.contains("\"server\"")), "a step had no dedicated server");
    ensure!(training.replayed(2, losses.len())? == losses, "a replay has other bits");
    training.remove()
}

/// What a user writes who wants no `TrainingJob`.
fn plain() -> Value {
    let mut container = trainer("/documents", *STEPS);
    container["env"] = json!([]);
    indexed(container, &[json!({"name": "documents", "configMap": {"name": "documents"}})])
}

/// A Job `plain` of two ranks that join the pool by themselves. The container has what it runs, its mounts and its environment;
/// added is what it needs for the pool.
pub(crate) fn indexed(mut container: Value, volumes: &[Value]) -> Value {
    let index = "metadata.annotations['batch.kubernetes.io/job-completion-index']";
    let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let text = |name: &str, value: &str| json!({"name": name, "value": value});
    let env = container["env"].as_array_mut().expect("a container has an environment");
    env.extend([
        text("CADRE_ROLE", "trainer"),
        text("CADRE_CONTROL", "https://cadre-operator.cadre-system.svc:9443"),
        text("CADRE_CONTROL_CA", "/var/run/cadre/ca.crt"),
        text("CADRE_CONTROL_TOKEN", "/var/run/cadre/token"),
        text("CADRE_CHECKPOINTS", "/checkpoints/plain"),
        field("CADRE_HOST", "status.podIP"),
        field("RANK", index),
        text("WORLD_SIZE", "2"),
    ]);
    let mounts = container["volumeMounts"].as_array_mut().expect("a trainer has mounts");
    mounts.push(json!({"name": "cadre", "mountPath": "/var/run/cadre", "readOnly": true}));
    mounts.push(json!({"name": "checkpoints", "mountPath": "/checkpoints"}));
    container["securityContext"] = json!({"allowPrivilegeEscalation": false,
        "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"}});
    let mut template = pod(&container);
    template["metadata"] = json!({"labels": {"cadre.dev/pool": "p"}});
    template["spec"]["restartPolicy"] = "Never".into();
    let token = json!({"serviceAccountToken": {"audience": "cadre.dev/control", "path": "token"}});
    let issuer = json!({"configMap": {"name": "cadre-control-ca",
        "items": [{"key": "ca.crt", "path": "ca.crt"}]}});
    let mut volumes = volumes.to_vec();
    volumes.extend([
        json!({"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints"}}),
        json!({"name": "cadre", "projected": {"sources": [token, issuer]}}),
    ]);
    template["spec"]["volumes"] = volumes.into();
    json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "plain"},
        "spec": {"completions": 2, "parallelism": 2, "completionMode": "Indexed", "backoffLimit": 0,
            "template": template}})
}

/// Waits until both ranks of it have ended well.
pub(crate) async fn ends(training: &Training<'_>) -> Result<()> {
    let done = until("the end of the job", async || {
        let job = all::<Job>(training.cluster, training.here).get("plain").await?;
        let status = job.status.unwrap_or_default();
        ensure!(status.failed.unwrap_or(0) == 0, "a trainer failed: {status:?}");
        Ok((status.succeeded == Some(2)).then_some(()))
    });
    let done = done.await;
    training.explained(done)
}
