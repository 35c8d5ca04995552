//! A pool of mode `Auto` on a real API server: the operator writes `spec.replicas`, with the rights of the chart, and
//! `managedFields` say that the number is its own. Numbers of others, a manifest without one, and an operator and a status that
//! are lost meanwhile take no server away; its own number does. Who writes again and again is named, and not fought.

use anyhow::{Result, ensure};
use cadre_crds::AttentionPool;
use cadre_e2e::{Cluster, Operator, until};

use crate::objects::{SERVERS, all, find, of_pool, pods};

const HERE: &str = "automatic";
const AUTO: &str = "{mode: Auto, min: 3, max: 6}";

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    cluster.namespace(HERE).await?;
    let operator = Operator::leading(cluster, 8096).await?;
    apply(cluster, "", "{mode: Auto, min: 4, max: 6}")?;
    is_ours(cluster, 4).await?;
    servers(cluster, 4).await?;
    apply(cluster, "", "{mode: Auto, min: 1, max: 2}")?;
    is_ours(cluster, 2).await?;
    servers(cluster, 2).await?;
    apply(cluster, "", AUTO)?;
    let pool = is_ours(cluster, 3).await?;
    let three = servers(cluster, 3).await?;

    apply(cluster, "", AUTO)?;
    let same = is_ours(cluster, 3).await?;
    ensure!(same.metadata.generation == pool.metadata.generation, "nothing has changed");
    scale(cluster, 1)?;
    is_ours(cluster, 3).await?;
    ensure!(servers(cluster, 3).await? == three, "nobody was told to leave");

    operator.stop()?;
    scale(cluster, 1)?;
    let lost = r#"{"status":null}"#;
    let patch = ["patch", "attnpool/p", "--subresource=status", "--type=merge", "--patch", lost];
    cluster.kubectl(&[&patch[..], &["--namespace", HERE]].concat())?;
    let operator = Operator::leading(cluster, 8096).await?;
    is_ours(cluster, 3).await?;
    ensure!(servers(cluster, 3).await? == three, "another operator finds no status");

    // Too often within an hour. More servers are what a pool goes on with.
    apply(cluster, "replicas: 4", AUTO)?;
    told(cluster, "OthersScale", "kubectl writes spec.replicas again and again").await?;
    let four = servers(cluster, 4).await?;
    ensure!(three.iter().all(|it| four.contains(it)), "{three:?} are not among {four:?}");
    apply(cluster, "", AUTO)?;
    told(cluster, "OthersScale", "somebody writes spec.replicas again and again").await?;
    let pool = all::<AttentionPool>(cluster, HERE).get("p").await?;
    ensure!(pool.spec.replicas == 0, "nobody has written a number: {}", pool.spec.replicas);
    ensure!(servers(cluster, 4).await? == four, "what is not said takes nobody away");

    apply(cluster, "replicas: 2", "{mode: External}")?;
    servers(cluster, 2).await?;
    cluster.kubectl(&["delete", "cadre", "--all", "--namespace", HERE, "--timeout=60s"])?;
    operator.stop()
}

fn apply(cluster: &Cluster, replicas: &str, scaling: &str) -> Result<()> {
    let manifest = format!(
        "apiVersion: cadre.dev/v1alpha1\nkind: AttentionPool\nmetadata: {{name: p}}\nspec:\n  inPlace: false\n  \
         scaling: {scaling}\n  {replicas}\n"
    );
    let forced = ["apply", "--server-side", "--force-conflicts", "--namespace", HERE];
    cluster.kubectl_with(&forced, &manifest).map(drop)
}

fn scale(cluster: &Cluster, replicas: u32) -> Result<()> {
    let replicas = format!("--replicas={replicas}");
    cluster.kubectl(&["scale", "attnpool/p", &replicas, "--namespace", HERE]).map(drop)
}

/// Waits until there are so many servers. Out: their names and uids.
async fn servers(cluster: &Cluster, count: usize) -> Result<Vec<(String, String)>> {
    until(&format!("{count} servers"), async || {
        let found = pods(cluster, HERE, SERVERS).await?;
        Ok((found.len() == count).then_some(found))
    })
    .await
}

/// Waits until the number is this one and the operator's, and the operator has looked at it. Out: the pool.
async fn is_ours(cluster: &Cluster, replicas: u32) -> Result<AttentionPool> {
    until(&format!("the operator's number {replicas}"), async || {
        let pool = all::<AttentionPool>(cluster, HERE).get("p").await?;
        let written = pool.metadata.managed_fields.as_deref().unwrap_or_default();
        let ours = written.iter().any(|it| {
            let fields = it.fields_v1.as_ref().map(|it| &it.0);
            it.manager.as_deref() == Some("cadre-operator-scale")
                && fields.is_some_and(|it| !it["f:spec"]["f:replicas"].is_null())
        });
        let looked = pool.status.as_ref().map(|it| it.observed_generation);
        let is_there = ours && pool.spec.replicas == replicas && looked == pool.metadata.generation;
        Ok(is_there.then_some(pool))
    })
    .await
}

/// Waits until `ScalingActive` says this.
async fn told(cluster: &Cluster, reason: &str, words: &str) -> Result<()> {
    until(words, async || {
        let pool = all::<AttentionPool>(cluster, HERE).get("p").await?;
        let scaling = find(of_pool(&pool), "ScalingActive");
        let is_told = scaling.is_some_and(|it| {
            it.status == "False" && it.reason == reason && it.message.starts_with(words)
        });
        Ok(is_told.then_some(()))
    })
    .await
}
