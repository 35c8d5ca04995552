//! Servers harvest idle GPUs: a pod of higher priority takes theirs, the pool says so and goes on with the rest, and
//! when the pod leaves the servers come back by themselves.

use anyhow::{Result, ensure};
use cadre_crds::AttentionPool;
use cadre_e2e::{Cluster, Fake, Operator, until};

use crate::objects::{SERVERS, all, find, of_pool, pods, pool_with};

const HERE: &str = "harvest";
const CLASSES: &str = "apiVersion: scheduling.k8s.io/v1\nkind: PriorityClass\nmetadata: {name: harvest}\n\
                       value: -10\npreemptionPolicy: Never\n---\n\
                       apiVersion: scheduling.k8s.io/v1\nkind: PriorityClass\nmetadata: {name: urgent}\nvalue: 1000\n";
const SERVER: &str = "  fabric: {gpusPerServer: 1}\n  template: {spec: {priorityClassName: harvest, \
                      containers: [{name: server, image: 'example.com/server:1'}]}}\n";
const URGENT: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: urgent}\nspec:\n  priorityClassName: urgent\n  \
                      containers: [{name: main, image: 'example.com/other:1', \
                      resources: {limits: {nvidia.com/gpu: 5}}}]\n";

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    cluster.add_fake_nodes(Fake { nodes: 1, gpus: 8, rack: 1 }).await?;
    let operator = Operator::leading(cluster, 8089).await?;
    cluster.namespace(HERE).await?;
    cluster.kubectl_with(&["apply"], CLASSES)?;
    cluster.apply(HERE, &pool_with(8, SERVER))?;
    ready(cluster, 8).await?;

    cluster.apply(HERE, URGENT)?;
    let left = ready(cluster, 3).await?;
    let pool = until("the reason", async || {
        let pool = all::<AttentionPool>(cluster, HERE).get("p").await?;
        let told = find(of_pool(&pool), "Degraded").is_some_and(|it| it.reason == "Unschedulable");
        Ok(told.then_some(pool))
    })
    .await?;
    let degraded = find(of_pool(&pool), "Degraded").map_or("", |it| &it.message);
    ensure!(degraded.contains("Insufficient nvidia.com/gpu"), "the scheduler's words: {degraded}");
    let available = find(of_pool(&pool), "Available").map(|it| it.status.clone());
    ensure!(available.as_deref() == Some("True"), "three servers go on: {available:?}");

    cluster.kubectl(&["delete", "pod", "urgent", "--namespace", HERE])?;
    let back = ready(cluster, 8).await?;
    ensure!(left.iter().all(|it| back.contains(it)), "{left:?} were never touched: {back:?}");
    cluster.kubectl(&["delete", "cadre", "--all", "--namespace", HERE, "--timeout=60s"])?;
    operator.stop()?;
    cluster.remove_fake_nodes().await
}

/// Waits until the status counts so many ready servers. Out: those with a node.
async fn ready(cluster: &Cluster, count: u32) -> Result<Vec<(String, String)>> {
    until(&format!("{count} servers ready"), async || {
        let pool = all::<AttentionPool>(cluster, HERE).get("p").await?;
        let is = pool.status.is_some_and(|it| it.ready == count && it.draining == 0);
        if !is {
            return Ok(None);
        }
        let placed = cluster.kubectl(&[
            "get",
            "pods",
            "--namespace",
            HERE,
            "--selector",
            SERVERS,
            "--field-selector",
            "status.phase=Running",
            "-o",
            "name",
        ])?;
        let found = pods(cluster, HERE, SERVERS).await?;
        let running = |name: &str| placed.lines().any(|it| it == format!("pod/{name}"));
        Ok(Some(found.into_iter().filter(|(name, _)| running(name)).collect()))
    })
    .await
}
