//! An autoscaler from outside, on what a metrics server has read from the kubelets: while a job trains, the servers of its
//! pool are busy and get company; when it is gone they are not, and the company leaves.

use anyhow::{Result, ensure};
use cadre_crds::AttentionPool;
use cadre_e2e::Cluster;
use cadre_e2e::until;
use serde_json::json;

use crate::objects::{all, autoscaler};
use crate::training::Training;

/// Thousandths of a processor that a server should use: less than one that computes, more than one that waits.
const BUSY: u32 = 60;

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    let mut training = Training::prepare(cluster, "metered").await?;
    let metrics = training.cluster.metrics_server().await?;
    training.pool["spec"]["scaling"] = json!({"mode": "External"});
    training.endless();
    training.start(1).await?;
    training.attempted("j-1");
    training.cluster.apply(training.here, &autoscaler(1, 2, BUSY))?;
    servers(&training, 2).await?;
    training.cluster.kubectl(&["delete", "cadjob", "j", "--namespace", training.here])?;
    servers(&training, 1).await?;
    training.cluster.kubectl(&["delete", "hpa", "p", "--namespace", training.here])?;
    training.cluster.kubectl(&["delete", "apiservice", "v1beta1.metrics.k8s.io"])?;
    metrics.kill()?;
    training.remove()
}

/// Waits until the pool was scaled to so many servers, and has them.
async fn servers(training: &Training<'_>, count: u32) -> Result<()> {
    let what = format!("{count} servers");
    let found = until(&what, async || {
        let pool = all::<AttentionPool>(training.cluster, training.here).get("p").await?;
        let ready = pool.status.map_or(0, |it| it.ready);
        ensure!(pool.spec.replicas <= 2, "scaled to {}", pool.spec.replicas);
        Ok((pool.spec.replicas == count && ready == count).then_some(()))
    });
    let found = found.await;
    if found.is_err() {
        let words = ["describe", "hpa,podmetrics", "--namespace", training.here];
        println!("{}", training.cluster.kubectl(&words).unwrap_or_else(|it| format!("{it:#}")));
    }
    training.explained(found)
}
