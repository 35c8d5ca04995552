//! A pool of mode `Auto` on a real API server: the operator writes the number through the scale subresource, with the rights
//! of the chart. Numbers of others, and a manifest that leaves the number out, take no server away; who writes again and again
//! is named, and not fought.

use anyhow::{Result, ensure};
use cadre_crds::AttentionPool;
use cadre_e2e::{Cluster, Operator, until};

use crate::objects::{SERVERS, all, find, of_pool, pods};

const HERE: &str = "automatic";
const AUTO: &str = "{mode: Auto, min: 3, max: 6}";

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    cluster.namespace(HERE).await?;
    let operator = Operator::leading(cluster, 8096).await?;
    apply(cluster, "", AUTO)?;
    is_ours(cluster, 3).await?;
    let servers = until("three servers", async || {
        let found = pods(cluster, HERE, SERVERS).await?;
        Ok((found.len() == 3).then_some(found))
    })
    .await?;

    cluster.kubectl(&["scale", "attnpool/p", "--replicas=1", "--namespace", HERE])?;
    is_ours(cluster, 3).await?;
    apply(cluster, "replicas: 2", AUTO)?;
    is_ours(cluster, 3).await?;
    ensure!(pods(cluster, HERE, SERVERS).await? == servers, "nobody was told to leave");

    // The third within an hour. More servers are what a pool begins with.
    apply(cluster, "replicas: 4", AUTO)?;
    told(cluster, "OthersScale", "kubectl writes spec.replicas again and again").await?;
    let four = until("four servers", async || {
        let found = pods(cluster, HERE, SERVERS).await?;
        Ok((found.len() == 4).then_some(found))
    })
    .await?;
    apply(cluster, "", AUTO)?;
    let pool = seen(cluster).await?;
    ensure!(pool.spec.replicas == 0, "nobody has written a number: {:?}", pool.spec.replicas);
    ensure!(pods(cluster, HERE, SERVERS).await? == four, "what is not said takes nobody away");

    apply(cluster, "replicas: 2", "{mode: External}")?;
    until("two servers", async || {
        Ok((pods(cluster, HERE, SERVERS).await?.len() == 2).then_some(()))
    })
    .await?;
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

/// Waits until the number is this one, and the operator's.
async fn is_ours(cluster: &Cluster, replicas: u32) -> Result<()> {
    until("the operator's number", async || {
        let pool = all::<AttentionPool>(cluster, HERE).get("p").await?;
        let written = pool.metadata.managed_fields.as_deref().unwrap_or_default();
        let ours = written.iter().any(|it| {
            let fields = it.fields_v1.as_ref().map(|it| &it.0);
            it.manager.as_deref() == Some("cadre-operator")
                && fields.is_some_and(|it| !it["f:spec"]["f:replicas"].is_null())
        });
        Ok((ours && pool.spec.replicas == replicas).then_some(()))
    })
    .await
}

/// Waits until `ScalingActive` says this.
async fn told(cluster: &Cluster, reason: &str, words: &str) -> Result<()> {
    until(reason, async || {
        let pool = all::<AttentionPool>(cluster, HERE).get("p").await?;
        let scaling = find(of_pool(&pool), "ScalingActive");
        let is_told =
            scaling.is_some_and(|it| it.reason == reason && it.message.starts_with(words));
        Ok(is_told.then_some(()))
    })
    .await
}

/// The pool, once the operator has looked at it as it is.
async fn seen(cluster: &Cluster) -> Result<AttentionPool> {
    until("a look at the pool", async || {
        let pool = all::<AttentionPool>(cluster, HERE).get("p").await?;
        let looked = pool.status.as_ref().map(|it| it.observed_generation);
        Ok((looked == pool.metadata.generation).then_some(pool))
    })
    .await
}
