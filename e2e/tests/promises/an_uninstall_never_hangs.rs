//! An uninstall never hangs: finalizers go when no operator leads any more, and objects can be deleted when no
//! operator is left.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use cadre_e2e::{Cluster, Operator, until};

use crate::objects::{job, pods, pool};

const HERE: &str = "uninstall";
const FINALIZER: &str =
    "{\"metadata\":{\"finalizers\":[\"cadre.dev/drain\",\"example.com/other\"]}}";

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    let operator = Operator::leading(cluster, 8087).await?;
    cluster.namespace(HERE).await?;
    cluster.apply(HERE, &pool(2))?;
    cluster.apply(HERE, &job(""))?;
    until("two servers and two trainers", async || {
        Ok((pods(cluster, HERE, "cadre.dev/pool=p").await?.len() == 4).then_some(()))
    })
    .await?;
    operator.stop()?;

    // As if servers served: the operator would wait for them, but it is gone.
    let target = ["attnpool/p", "--namespace", HERE];
    cluster.kubectl(&[&["patch", "--type=merge", "-p", FINALIZER], &target[..]].concat())?;
    let status = Command::new(cluster.programs().own("cadre-operator")?)
        .arg("--release-finalizers")
        .env("KUBECONFIG", cluster.operators_config().await?)
        .status()
        .context("the uninstall hook")?;
    ensure!(status.success(), "the hook ended with {status}");
    let path = "jsonpath={.metadata.finalizers}";
    let left = cluster.kubectl(&[&["get", "-o", path], &target[..]].concat())?;
    ensure!(left == "[\"example.com/other\"]", "ours goes, those of others stay: {left}");
    let none = "{\"metadata\":{\"finalizers\":null}}";
    cluster.kubectl(&[&["patch", "--type=merge", "-p", none], &target[..]].concat())?;

    cluster.kubectl(&["delete", "cadre", "--all", "--namespace", HERE, "--timeout=60s"])?;
    cluster.kubectl(&["delete", "namespace", HERE, "--timeout=120s"])?;
    Ok(())
}
