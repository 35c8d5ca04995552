//! A pool of 1000 servers: made, a tenth more, at rest, seen by another leader, gone; and how soon the reason of a server
//! that finds no node is told.
//!
//! In: a cluster with fake nodes. Out: lines.

use std::pin::pin;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cadre_crds::AttentionPool;
use cadre_e2e::{Cluster, Operator, until};
use futures_util::TryStreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{WatchEvent, WatchParams};

use super::{Counted, HERE, Lines, gone, mebibytes, middle_and_most, pool_of, ready};

const SERVERS: u32 = 1000;
const REST: Duration = Duration::from_mins(1);
/// Pools whose server finds no node.
const HOPELESS: usize = 9;

pub(crate) async fn measure(cluster: &Cluster, lines: &mut Lines) -> Result<()> {
    let operator = Operator::leading(cluster, 8080).await?;
    let idle = mebibytes(operator.sample()?.peak_bytes);
    lines.add("no pool: most memory of the operator so far", idle, "MiB");
    let case = format!("pool of {SERVERS}");
    let counted = Counted::from_now(cluster, &operator)?;
    cluster.apply(HERE, &pool_of("p", SERVERS, ""))?;
    ready(cluster, SERVERS).await?;
    counted.tell(&format!("{case}, apply to all ready and said so"), lines)?;

    let more = SERVERS + SERVERS / 10;
    let counted = Counted::from_now(cluster, &operator)?;
    let replicas = format!("--replicas={more}");
    cluster.kubectl(&["scale", "attnpool/p", &replicas, "--namespace", HERE])?;
    ready(cluster, more).await?;
    counted.tell(&format!("{case}, a tenth more"), lines)?;

    let counted = Counted::from_now(cluster, &operator)?;
    tokio::time::sleep(REST).await;
    counted.tell(&format!("{case}, at rest"), lines)?;
    operator.stop()?;

    let began = Instant::now();
    let operator = Operator::leading(cluster, 8081).await?;
    let looks = || operator.metric("cadre_operator_reconciles_total");
    until("a look", async || Ok((looks()? > 0).then_some(()))).await?;
    let sample = operator.sample()?;
    let case_of = |what: &str| format!("{case}, a new operator, until its first look: {what}");
    lines.add(&case_of("wall"), began.elapsed().as_secs_f64(), "s");
    lines.add(&case_of("processor"), sample.processor_seconds, "s");
    lines.add(&case_of("most memory"), mebibytes(sample.peak_bytes), "MiB");

    let counted = Counted::from_now(cluster, &operator)?;
    cluster.kubectl(&["delete", "attnpool", "p", "--namespace", HERE])?;
    gone(cluster).await?;
    counted.tell(&format!("{case}, delete to the last pod gone"), lines)?;
    let mut times = Vec::new();
    for number in 0..HOPELESS {
        times.push(hopeless(cluster, &format!("hopeless-{number}")).await?.as_secs_f64());
    }
    let (middle, most) = middle_and_most(times);
    let case = "from the scheduler's word that a server finds no node to the status";
    lines.add(&format!("{case}, median of {HOPELESS}"), middle, "s");
    lines.add(&format!("{case}, longest"), most, "s");
    cluster.kubectl(&["delete", "attnpool", "--all", "--namespace", HERE])?;
    gone(cluster).await?;
    operator.stop()
}

/// A pool that asks for more GPUs than a node has. Out: how long after the scheduler said so the status does, both as a
/// watch tells them.
async fn hopeless(cluster: &Cluster, name: &str) -> Result<Duration> {
    cluster.apply(HERE, &pool_of(name, 1, "  fabric: {gpusPerServer: 9}\n"))?;
    let pods: Api<Pod> = Api::namespaced(cluster.client(), HERE);
    let pools: Api<AttentionPool> = Api::namespaced(cluster.client(), HERE);
    let of = WatchParams::default().labels(&format!("cadre.dev/pool={name}"));
    let said = async {
        let mut events = pin!(pods.watch(&of, "0").await?);
        while let Some(event) = events.try_next().await? {
            let (WatchEvent::Added(pod) | WatchEvent::Modified(pod)) = event else { continue };
            let conditions = pod.status.and_then(|it| it.conditions).unwrap_or_default();
            if conditions.iter().any(|it| it.reason.as_deref() == Some("Unschedulable")) {
                break;
            }
        }
        anyhow::Ok(Instant::now())
    };
    let field = WatchParams::default().fields(&format!("metadata.name={name}"));
    let told = async {
        let mut events = pin!(pools.watch(&field, "0").await?);
        while let Some(event) = events.try_next().await? {
            let (WatchEvent::Added(pool) | WatchEvent::Modified(pool)) = event else { continue };
            let conditions = pool.status.map(|it| it.conditions).unwrap_or_default();
            if conditions.iter().any(|it| it.reason == "Unschedulable") {
                break;
            }
        }
        anyhow::Ok(Instant::now())
    };
    let (said, told) = tokio::try_join!(said, told).context("a watch")?;
    Ok(told.saturating_duration_since(said))
}
