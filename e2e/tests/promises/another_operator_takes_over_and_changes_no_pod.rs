//! An operator that is killed, replaced or upgraded changes no pod; of two, one leads, and the other takes
//! over when the leader is gone or stands still.

use anyhow::{Result, ensure};
use cadre_crds::AttentionPool;
use cadre_e2e::{Cluster, Operator, until};

use crate::objects::{SERVERS, all, job, pods, pool};

const HERE: &str = "operators";
const ALL: &str = "cadre.dev/pool=p";

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    cluster.namespace(HERE).await?;
    let first = start(cluster, 8083).await?;
    first.leads().await?;
    cluster.apply(HERE, &pool(4))?;
    cluster.apply(HERE, &job(""))?;
    let before = until("four servers and two trainers", async || {
        let found = pods(cluster, HERE, ALL).await?;
        Ok((found.len() == 6).then_some(found))
    })
    .await?;
    let second = start(cluster, 8084).await?;
    ensure!(second.metric("cadre_operator_leader")? == 0, "one leads at a time");

    // The leader dies; nobody asks it. What changes meanwhile is done by the next one.
    first.kill()?;
    second.leads().await?;
    settled(cluster, &second).await?;
    ensure!(pods(cluster, HERE, ALL).await? == before, "a new leader changes no pod");
    cluster.kubectl(&["scale", "attnpool/p", "--replicas=5", "--namespace", HERE])?;
    let grown = until("five servers", async || {
        let found = pods(cluster, HERE, SERVERS).await?;
        Ok((found.len() == 5).then_some(found))
    })
    .await?;

    // The leader stands still; when it goes on it must end by itself, since another leads.
    second.pause()?;
    let third = start(cluster, 8085).await?;
    third.leads().await?;
    let mut second = second;
    second.resume()?;
    let status = second.process().ended().await?;
    ensure!(!status.success(), "who has lost the lease ends with an error, not with {status}");
    ensure!(pods(cluster, HERE, SERVERS).await? == grown, "an overlap changes no pod");

    // No operator at all: nothing changes, and the next one finds all as it should be.
    third.stop()?;
    let fourth = start(cluster, 8086).await?;
    fourth.leads().await?;
    settled(cluster, &fourth).await?;
    ensure!(pods(cluster, HERE, SERVERS).await? == grown, "an upgrade changes no pod");
    cluster.kubectl(&["delete", "cadre", "--all", "--namespace", HERE, "--timeout=60s"])?;
    fourth.stop()
}

/// Starts an operator that looks after our namespace alone: what promises beside this one make is nothing to it.
async fn start(cluster: &Cluster, port: u16) -> Result<Operator> {
    Operator::start_with(cluster, port, &[&format!("--namespace={HERE}")]).await
}

/// Waits until an operator has looked at the pool and found nothing to do.
async fn settled(cluster: &Cluster, operator: &Operator) -> Result<()> {
    let seen = operator.metric("cadre_operator_reconciles_total")?;
    // Another one each time: an annotation that stays as it is is no change.
    let mark = k8s_openapi::jiff::Timestamp::now();
    cluster.kubectl(&[
        "annotate",
        "--overwrite",
        "attnpool/p",
        &format!("seen={mark}"),
        "--namespace",
        HERE,
    ])?;
    until("a look at the pool", async || {
        Ok((operator.metric("cadre_operator_reconciles_total")? > seen).then_some(()))
    })
    .await?;
    let status = all::<AttentionPool>(cluster, HERE).get("p").await?.status.unwrap_or_default();
    ensure!(status.draining == 0, "nobody drains: {status:?}");
    Ok(())
}
