//! A job becomes a Service and an Indexed Job per attempt; suspending takes its pods away and resuming
//! makes another attempt; a queue's label passes through and the queue decides about the start.

use anyhow::{Context as _, Result, ensure};
use cadre_crds::TrainingJob;
use cadre_e2e::{Cluster, Operator, until};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::ResourceExt as _;
use kube::api::ListParams;

use crate::objects::{SERVERS, all, find, job, of_job, pods, pool};

const HERE: &str = "jobs";
const TRAINERS: &str = "cadre.dev/job=j,cadre.dev/role=trainer";

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    let operator = Operator::leading(cluster, 8082).await?;
    cluster.namespace(HERE).await?;
    cluster.apply(HERE, &job(""))?;
    status(cluster, "Running", "PoolNotFound").await?;
    cluster.apply(HERE, &pool(1))?;
    let jobs = all::<Job>(cluster, HERE);
    let first = until("the first attempt", async || Ok(jobs.get_opt("j-1").await?)).await?;
    let spec = first.spec.clone().context("a Job has a spec")?;
    ensure!(spec.completion_mode.as_deref() == Some("Indexed"), "an Indexed Job");
    ensure!((spec.completions, spec.backoff_limit) == (Some(2), Some(0)), "{spec:?}");
    let service = all::<Service>(cluster, HERE).get("j-trainers").await?;
    ensure!(service.owner_references().iter().any(|it| it.name == "j"), "an owner");
    until("two trainers", async || trainers(cluster, 2).await).await?;
    environment(cluster).await?;
    status(cluster, "Scheduled", "Unschedulable").await?;

    suspend(cluster, true)?;
    until("no trainer", async || trainers(cluster, 0).await).await?;
    status(cluster, "Suspended", "Suspended").await?;
    suspend(cluster, false)?;
    until("the second attempt", async || Ok(jobs.get_opt("j-2").await?)).await?;
    until("two trainers", async || trainers(cluster, 2).await).await?;
    until("attempt 2 in the status", async || {
        let status = all::<TrainingJob>(cluster, HERE).get("j").await?.status.unwrap_or_default();
        Ok((status.attempt == 2 && status.restarts == 0).then_some(()))
    })
    .await?;
    cluster.kubectl(&["delete", "cadjob", "j", "--namespace", HERE, "--timeout=60s"])?;
    until("no attempt", async || {
        let found = jobs.list(&ListParams::default()).await?;
        Ok(found.items.is_empty().then_some(()))
    })
    .await?;
    until("no trainer", async || trainers(cluster, 0).await).await?;
    queue(cluster).await?;
    // Later promises have nodes: what stayed here would start there, and their operators would tell of it.
    cluster.kubectl(&["delete", "cadre", "--all", "--namespace", HERE, "--timeout=60s"])?;
    until("no server", async || Ok(pods(cluster, HERE, SERVERS).await?.is_empty().then_some(())))
        .await?;
    ensure!(!operator.log().contains("Forbidden"), "the role suffices:\n{}", operator.log());
    operator.stop()
}

async fn trainers(cluster: &Cluster, count: usize) -> Result<Option<()>> {
    Ok((pods(cluster, HERE, TRAINERS).await?.len() == count).then_some(()))
}

fn suspend(cluster: &Cluster, yes: bool) -> Result<()> {
    let patch = format!("{{\"spec\":{{\"suspend\":{yes}}}}}");
    cluster
        .kubectl(&["patch", "cadjob", "j", "--namespace", HERE, "--type=merge", "-p", &patch])
        .map(drop)
}

async fn status(cluster: &Cluster, condition: &str, reason: &str) -> Result<()> {
    until(&format!("{condition} for {reason}"), async || {
        let job = all::<TrainingJob>(cluster, HERE).get("j").await?;
        Ok(find(of_job(&job), condition).filter(|it| it.reason == reason).map(drop))
    })
    .await
}

/// What a trainer is told, as the API server stores it.
async fn environment(cluster: &Cluster) -> Result<()> {
    let found = all::<Pod>(cluster, HERE).list(&ListParams::default().labels(TRAINERS)).await?;
    for pod in found {
        let spec = pod.spec.context("a pod has a spec")?;
        ensure!(spec.subdomain.as_deref() == Some("j-trainers"), "a name in the Service");
        let env = spec.containers[0].env.clone().unwrap_or_default();
        let value = |name: &str| {
            env.iter()
                .find(|it| it.name == name)
                .and_then(|it| it.value.clone())
                .unwrap_or_default()
        };
        ensure!(value("MASTER_ADDR").starts_with("j-1-0.j-trainers"), "{}", value("MASTER_ADDR"));
        ensure!(value("WORLD_SIZE") == "2" && value("CADRE_ATTEMPT") == "1", "{env:?}");
        ensure!(env.iter().any(|it| it.name == "RANK" && it.value_from.is_some()), "RANK {env:?}");
        let security = spec.containers[0].security_context.clone().unwrap_or_default();
        ensure!(security.allow_privilege_escalation == Some(false), "{security:?}");
    }
    Ok(())
}

/// With a queue's label the attempt is made suspended; the queue, here played by us, starts it and takes
/// it back.
async fn queue(cluster: &Cluster) -> Result<()> {
    let queued = job("").replace("{name: j}", "{name: j, labels: {kueue.x-k8s.io/queue-name: q}}");
    cluster.apply(HERE, &queued)?;
    let jobs = all::<Job>(cluster, HERE);
    let attempt = until("a suspended attempt", async || Ok(jobs.get_opt("j-1").await?)).await?;
    ensure!(attempt.spec.as_ref().and_then(|it| it.suspend) == Some(true), "suspended");
    ensure!(attempt.labels().contains_key("kueue.x-k8s.io/queue-name"), "the label passes through");
    status(cluster, "Admitted", "Queued").await?;
    let patch = |suspend: bool| {
        let patch = format!("{{\"spec\":{{\"suspend\":{suspend}}}}}");
        cluster.kubectl(&["patch", "job", "j-1", "--namespace", HERE, "--type=merge", "-p", &patch])
    };
    patch(false)?;
    until("two trainers", async || trainers(cluster, 2).await).await?;
    status(cluster, "Admitted", "Admitted").await?;
    patch(true)?;
    let next = until("a next attempt that waits", async || {
        Ok(jobs
            .get_opt("j-2")
            .await?
            .filter(|it| it.spec.as_ref().is_some_and(|it| it.suspend == Some(true))))
    })
    .await?;
    ensure!(
        next.annotations()["cadre.dev/restarts"] == "0",
        "what a queue takes back does not count"
    );
    Ok(())
}
