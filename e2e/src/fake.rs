//! Nodes that only exist in the API server, with pods that kwok says are running.
//!
//! In: how many, with how many GPUs, and how many share a rack. Out: they are ready. The scheduler, the
//! controllers and our operator cannot tell them from real ones; no process of a pod runs.

use std::process::Command;

use anyhow::Result;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::Node;
use kube::api::{ListParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;

use crate::access::Access;
use crate::plane::Patience;
use crate::process::Process;
use crate::programs::root;
use crate::wait::until;

/// Nodes that kwok keeps.
const ANNOTATION: &str = "kwok.x-k8s.io/node";
/// Requests in flight while nodes are made.
const AT_ONCE: usize = 16;
/// Label of the rack of a node.
pub const RACK: &str = "example.com/rack";

/// What fake nodes there are.
#[derive(Clone, Copy, Debug)]
pub struct Fake {
    /// Nodes.
    pub nodes: usize,
    /// GPUs of each.
    pub gpus: usize,
    /// Nodes of a rack.
    pub rack: usize,
}

/// Starts kwok and makes the nodes; returns when all are ready.
pub(crate) async fn start(cluster: &Access, wanted: Fake, patience: Patience) -> Result<Process> {
    let mut kwok = Process::start(
        "kwok",
        cluster.folder(),
        Command::new(cluster.programs().path("kwok")?).args([
            format!("--kubeconfig={}", cluster.config().display()),
            format!("--config={}", root().join("e2e/kwok/stages.yaml").display()),
            "--manage-all-nodes=false".into(),
            format!("--manage-nodes-with-annotation-selector={ANNOTATION}=fake"),
            format!("--node-lease-duration-seconds={}", patience.seconds().0),
            "--server-address=127.0.0.1:10247".into(),
        ]),
    )?;
    let nodes: Api<Node> = Api::all(cluster.client());
    let parameters = PostParams::default();
    stream::iter(0..wanted.nodes)
        .map(|at| {
            let node = node(at, wanted);
            let (nodes, parameters) = (&nodes, &parameters);
            async move { nodes.create(parameters, &node).await.map(drop) }
        })
        .buffer_unordered(AT_ONCE)
        .try_collect::<()>()
        .await?;
    until("the fake nodes", async || {
        kwok.check()?;
        let found = nodes.list(&ListParams::default()).await?;
        let ready =
            found.iter().filter(|it| it.annotations().contains_key(ANNOTATION) && is_ready(it));
        Ok((ready.count() >= wanted.nodes).then_some(()))
    })
    .await?;
    Ok(kwok)
}

/// Takes them away again.
pub(crate) async fn remove(cluster: &Access) -> Result<()> {
    let nodes: Api<Node> = Api::all(cluster.client());
    for node in nodes.list(&ListParams::default()).await? {
        if node.annotations().contains_key(ANNOTATION) {
            match nodes.delete(&node.name_any(), &kube::api::DeleteParams::default()).await {
                Err(kube::Error::Api(it)) if it.code == 404 => {}
                result => drop(result?),
            }
        }
    }
    Ok(())
}

/// Whether a node takes pods.
pub(crate) fn is_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|it| it.conditions.as_ref());
    conditions.is_some_and(|it| it.iter().any(|it| it.type_ == "Ready" && it.status == "True"))
}

fn node(at: usize, wanted: Fake) -> Node {
    let name = format!("fake-{at}");
    let rack = format!("rack-{}", at / wanted.rack.max(1));
    let capacity = json!({
        "cpu": "128", "memory": "2Ti", "pods": "256", "ephemeral-storage": "2Ti",
        "nvidia.com/gpu": wanted.gpus.to_string(),
    });
    let node = json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {ANNOTATION: "fake"},
            "labels": {
                "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", RACK: rack,
                "nvidia.com/gpu.product": "NVIDIA-H200",
            },
        },
        "status": {"capacity": capacity, "allocatable": capacity},
    });
    serde_json::from_value(node).expect("it is written as a node is")
}
