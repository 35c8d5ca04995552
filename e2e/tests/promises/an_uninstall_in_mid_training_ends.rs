//! An uninstall while servers serve a job ends. The job trains on without an operator, and its namespace can be deleted
//! from under it.

use anyhow::{Result, ensure};
use cadre_e2e::Cluster;
use serde_json::json;

use crate::training::{MIDDLE, Training};

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    let mut training = Training::prepare(cluster, "left").await?;
    // The job must not end before its namespace does.
    training.endless();
    training.pool["spec"]["drain"] = json!({"timeoutSeconds": 5});
    training.start(2).await?;
    training.attempted("j-1");
    training.at(MIDDLE).await?;
    let trainers = training.trainers().await?;
    let path = "--output=jsonpath={.metadata.finalizers}";
    let target = ["get", "attnpool/p", path, "--namespace", training.here];
    let guarded = training.cluster.kubectl(&target)?;
    ensure!(guarded.contains("cadre.dev/drain"), "servers serve: {guarded}");

    training.release.uninstall(training.cluster)?;
    let left = training.cluster.kubectl(&target)?;
    ensure!(left.is_empty(), "nothing waits for an operator: {left}");
    training.at(training.steps() + MIDDLE).await?;
    ensure!(training.trainers().await? == trainers, "no trainer was touched");

    let gone = training.cluster.kubectl(&["delete", "namespace", training.here, "--timeout=240s"]);
    training.explained(gone).map(drop)
}
