//! A node that is drained loses its servers one after the other, and a node that dies at once: both times the
//! pool is whole again on the other one, and the dead node may come back.

use anyhow::{Context as _, Result, ensure};
use cadre_crds::AttentionPool;
use cadre_e2e::{Cluster, until};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;

use crate::objects::{SERVERS, all, pool_with};
use crate::release::{SERVER, ready, shared};

const HERE: &str = "machines";

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    shared(cluster)?;
    cluster.namespace(HERE).await?;
    cluster.apply(HERE, &pool_with(4, SERVER))?;
    ready(cluster, HERE, 4).await?;

    cluster.kubectl(&[
        "drain",
        "node-b",
        "--ignore-daemonsets",
        "--delete-emptydir-data",
        "--timeout=120s",
    ])?;
    whole_on(cluster, "node-a").await?;
    cluster.kubectl(&["uncordon", "node-b"])?;

    cluster.kill_node("node-a")?;
    whole_on(cluster, "node-b").await?;
    cluster.start_node(1).await?;
    cluster.kubectl(&["scale", "attnpool/p", "--replicas=6", "--namespace", HERE])?;
    let six = ready(cluster, HERE, 6).await?;
    ensure!(six.len() == 6, "{six:?}");
    cluster.kubectl(&["delete", "attnpool", "p", "--namespace", HERE, "--timeout=60s"]).map(drop)
}

/// Waits until four servers are ready on this node and the status counts them alone.
async fn whole_on(cluster: &Cluster, node: &str) -> Result<()> {
    let done = until(&format!("four servers on {node}"), async || {
        let found = all::<Pod>(cluster, HERE).list(&ListParams::default().labels(SERVERS)).await?;
        let here = found.iter().filter(|it| {
            it.metadata.deletion_timestamp.is_none()
                && it.spec.as_ref().is_some_and(|it| it.node_name.as_deref() == Some(node))
        });
        let pool = all::<AttentionPool>(cluster, HERE).get("p").await?;
        let status = pool.status.context("a pool has a status")?;
        Ok((here.count() == 4 && status.ready == 4).then_some(()))
    })
    .await;
    if done.is_err() {
        println!("{}", cluster.kubectl(&["describe", "attnpool,pods", "--namespace", HERE])?);
    }
    done
}
