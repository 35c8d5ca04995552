//! A whole node with a server and the operator's leader on it is gone in the middle of a step, while the trainers are on the
//! other one: the step is finished by who is left, the pool is whole again there, the next leader learns the job's last
//! figures, and the bits are those of a run that nobody disturbed.

use anyhow::{Context as _, Result, ensure};
use cadre_e2e::{Cluster, SYSTEM_NAMESPACE, until};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::ListParams;
use serde_json::json;

use crate::objects::{SERVERS, all};
use crate::training::{MIDDLE, Training};

/// Where the trainers are.
const KEPT: &str = "node-a";
/// What crashes, and its number.
const LOST: (&str, usize) = ("node-b", 2);

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    let mut training = Training::prepare(cluster, "crashed").await?;
    let here = json!({"kubernetes.io/hostname": KEPT});
    training.job["spec"]["template"]["spec"]["nodeSelector"] = here;
    // The scheduler only prefers to spread them; a strict rule would keep the lost one from coming back.
    training.pool["spec"]["template"]["spec"]["topologySpreadConstraints"] = json!([{"maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"cadre.dev/role": "server"}}}]);
    lead_from(training.cluster, LOST.0).await?;
    training.start(2).await?;
    training.attempted("j-1");
    training.at(MIDDLE).await?;
    let trainers = training.trainers().await?;
    let lost = on(&training, LOST.0).await?.pop();
    let lost = lost.with_context(|| format!("no server is on {}", LOST.0))?;

    training.cluster.kill_node(LOST.0)?;
    let survived = survived(&training).await;
    // The promises after this one want it, and its pods can only end there.
    training.cluster.start_node(LOST.1).await?;
    training.explained(survived)?;
    ensure!(training.trainers().await? == trainers, "no trainer was touched");
    let replaced = until("two servers elsewhere", async || {
        let found = on(&training, KEPT).await?;
        Ok((found.len() == 2).then_some(found))
    });
    let replaced = replaced.await;
    let replaced = training.explained(replaced)?;
    ensure!(!replaced.contains(&lost), "{lost} is replaced: {replaced:?}");
    training.are_those_of(2, &training.losses()?)?;
    training.remove()
}

async fn survived(training: &Training<'_>) -> Result<()> {
    // The leader was on that node, too: who is done says so to the next one.
    training.complete().await?;
    let status = training.look().await?.status.unwrap_or_default();
    ensure!(status.attempt == 1, "{status:?}");
    Ok(())
}

/// Lets an operator on this node lead: who leads elsewhere is ended, and another takes over.
async fn lead_from(cluster: &Cluster, node: &str) -> Result<()> {
    let there = ["--namespace", SYSTEM_NAMESPACE];
    let ask = |what: &[&str], path: &str| {
        let output = format!("--output=jsonpath={{{path}}}");
        cluster.kubectl(&[&["get"], what, &there[..], &[&output, "--ignore-not-found"]].concat())
    };
    until("a leader on the node", async || {
        let leader = ask(&["lease", "cadre-operator"], ".spec.holderIdentity")?;
        if leader.is_empty() {
            return Ok(None);
        }
        let at = ask(&["pod", &leader], ".spec.nodeName")?;
        if !at.is_empty() && at != node {
            cluster.kubectl(&[&["delete", "pod", &leader], &there[..]].concat())?;
        }
        Ok((at == node).then_some(()))
    })
    .await
}

/// Servers on a node that are not on their way out.
async fn on(training: &Training<'_>, node: &str) -> Result<Vec<String>> {
    let servers = ListParams::default().labels(SERVERS);
    let found = all::<Pod>(training.cluster, training.here).list(&servers).await?.items;
    let here = |it: &&Pod| {
        it.metadata.deletion_timestamp.is_none()
            && it.spec.as_ref().is_some_and(|it| it.node_name.as_deref() == Some(node))
    };
    Ok(found.iter().filter(here).map(ResourceExt::name_any).collect())
}
