//! In the middle of training a pod of higher priority takes a server's GPU: the server drains, training goes on with the
//! same bits, the pod leaves, and the server comes back by itself. The GPUs are numbers that the nodes claim to have.

use anyhow::{Context as _, Result, ensure};
use cadre_crds::AttentionPool;
use cadre_e2e::{Cluster, until};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use serde_json::json;

use crate::objects::{all, find, of_pool};
use crate::release::ready;
use crate::training::{MIDDLE, Training};

const NODES: [&str; 2] = ["node-a", "node-b"];
const CLASSES: &str = "apiVersion: scheduling.k8s.io/v1\nkind: PriorityClass\nmetadata: {name: harvested}\n\
                       value: -10\npreemptionPolicy: Never\n---\n\
                       apiVersion: scheduling.k8s.io/v1\nkind: PriorityClass\nmetadata: {name: pressing}\nvalue: 1000\n";

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    let mut training = Training::prepare(cluster, "harvested").await?;
    training.endless();
    for node in NODES {
        claim_gpus(training.cluster, node, 1).await?;
    }
    training.cluster.kubectl_with(&["apply"], CLASSES)?;
    training.pool["spec"]["fabric"] = json!({"gpusPerServer": 1});
    training.pool["spec"]["template"]["spec"]["priorityClassName"] = "harvested".into();
    training.start(2).await?;
    training.attempted("j-1");
    training.at(MIDDLE).await?;
    let trainers = training.trainers().await?;

    training.cluster.apply(training.here, &pressing().to_string())?;
    let harvested = until("one server and the reason", async || {
        let pool = all::<AttentionPool>(training.cluster, training.here).get("p").await?;
        let told = find(of_pool(&pool), "Degraded").is_some_and(|it| it.reason == "Unschedulable");
        let one = pool.status.as_ref().is_some_and(|it| it.ready == 1);
        Ok((one && told).then_some(()))
    });
    let harvested = harvested.await;
    training.explained(harvested)?;
    let runs = until("the other pod's start", async || {
        let pod = all::<Pod>(training.cluster, training.here).get("pressing").await?;
        Ok((pod.status.and_then(|it| it.phase).as_deref() == Some("Running")).then_some(()))
    });
    let runs = runs.await;
    training.explained(runs)?;
    let without = training.steps();
    training.at(without + MIDDLE).await?;
    let target = ["delete", "pod", "pressing", "--namespace", training.here, "--grace-period=1"];
    training.cluster.kubectl(&target)?;
    let back = ready(training.cluster, training.here, 2).await;
    training.explained(back)?;
    println!("one server was away from step {without}, it was back at step {}", training.steps());
    training.at(training.steps() + MIDDLE).await?;
    ensure!(training.trainers().await? == trainers, "no trainer was touched");
    let losses = training.losses()?;
    // The job goes before the same is made by itself, which wants its processors.
    training.remove()?;
    training.are_those_of(2, &losses)?;
    for node in NODES {
        claim_gpus(training.cluster, node, 0).await?;
    }
    Ok(())
}

/// Lets a node claim GPUs, and waits until the scheduler may count on them.
async fn claim_gpus(cluster: &Cluster, node: &str, count: u32) -> Result<()> {
    let patch = json!({"status": {"capacity": {"nvidia.com/gpu": count.to_string()}}}).to_string();
    let target = ["patch", "node", node, "--subresource=status", "--type=merge", "-p", &patch];
    cluster.kubectl(&target)?;
    let nodes: Api<Node> = Api::all(cluster.client());
    until(&format!("{count} GPUs of {node}"), async || {
        let status = nodes.get(node).await?.status.context("a node has a status")?;
        let free = status.allocatable.unwrap_or_default().remove("nvidia.com/gpu");
        Ok((free.map(|it| it.0) == Some(count.to_string())).then_some(()))
    })
    .await
}

/// A pod that wants a GPU more than a server does.
fn pressing() -> serde_json::Value {
    let container = json!({"name": "main", "image": cadre_e2e::IMAGE, "command": ["pause"],
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"}}});
    let mut pod = crate::training::pod(&container);
    pod["apiVersion"] = "v1".into();
    pod["kind"] = "Pod".into();
    pod["metadata"] = json!({"name": "pressing"});
    pod["spec"]["priorityClassName"] = "pressing".into();
    pod
}
