//! `helm install` on two real nodes: the operator runs under Pod Security's strictest level, servers run and are
//! scaled, an upgrade changes no pod, and `helm uninstall` with objects alive ends.

use anyhow::{Result, ensure};
use cadre_e2e::{Cluster, SYSTEM_NAMESPACE, until};

use crate::objects::{SERVERS, pods, pool_with};
use crate::release::{SERVER, clean, image, install, ready, restricted};

const HERE: &str = "installed";

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    clean(cluster)?;
    let release = install(cluster)?;
    let operators = cluster.kubectl(&[
        "get",
        "pods",
        "--namespace",
        SYSTEM_NAMESPACE,
        "-o",
        "jsonpath={range .items[*]}{.spec.nodeName} {.status.phase}{'\\n'}{end}",
    ])?;
    let mut places: Vec<_> = operators.lines().collect();
    places.sort_unstable();
    ensure!(places == ["node-a Running", "node-b Running"], "operators on {operators}");

    cluster.namespace(HERE).await?;
    restricted(cluster, HERE)?;
    cluster.apply(HERE, &pool_with(2, SERVER))?;
    let two = ready(cluster, HERE, 2).await?;
    cluster.kubectl(&["scale", "attnpool/p", "--replicas=4", "--namespace", HERE])?;
    let four = ready(cluster, HERE, 4).await?;
    ensure!(two.iter().all(|it| four.contains(it)), "{two:?} stay in {four:?}");
    cluster.kubectl(&["scale", "attnpool/p", "--replicas=1", "--namespace", HERE])?;
    let one = ready(cluster, HERE, 1).await?;

    release.upgrade(cluster, &[&image()[..], &["--set=operator.log=debug"]].concat())?;
    let events = cluster.kubectl(&["get", "events", "--namespace", HERE, "-o", "name"])?;
    ensure!(!events.is_empty(), "the operator tells events");
    ensure!(ready(cluster, HERE, 1).await? == one, "an upgrade changes no pod");

    release.uninstall(cluster)?;
    ensure!(pods(cluster, HERE, SERVERS).await? == one, "servers outlive the operator");
    cluster.kubectl(&["delete", "cadre", "--all", "--namespace", HERE, "--timeout=60s"])?;
    until("the servers' end", async || {
        Ok(pods(cluster, HERE, "cadre.dev/pool").await?.is_empty().then_some(()))
    })
    .await
}
