//! `helm install` on two real nodes: the operator runs under Pod Security's strictest level, servers run and are
//! scaled, an upgrade changes no pod, and `helm uninstall` with objects alive ends.

use anyhow::{Result, ensure};
use cadre_crds::AttentionPool;
use cadre_e2e::{Cluster, IMAGE, Release, SYSTEM_NAMESPACE, until};

use crate::objects::{SERVERS, all, pods, pool_with};

const HERE: &str = "installed";
/// A server that stands still: what it would compute does not matter here.
pub(crate) const SERVER: &str = "  drain: {timeoutSeconds: 5}\n  template:\n    spec:\n      \
    securityContext: {runAsNonRoot: true, runAsUser: 65532}\n      containers:\n        \
    - {name: server, image: 'localhost/cadre:e2e', command: [pause]}\n";

pub(crate) async fn keep(cluster: &mut Cluster) -> Result<()> {
    cluster.real_nodes().await?;
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

/// Installs the chart with the image of this run.
pub(crate) fn install(cluster: &Cluster) -> Result<Release> {
    cluster.kubectl_with(
        &["apply"],
        &format!("{{apiVersion: v1, kind: Namespace, metadata: {{name: {SYSTEM_NAMESPACE}}}}}"),
    )?;
    restricted(cluster, SYSTEM_NAMESPACE)?;
    Release::install(cluster, &image())
}

/// Values that name it.
pub(crate) fn image() -> [&'static str; 2] {
    assert_eq!(IMAGE, "localhost/cadre:e2e", "the values name the run's image");
    ["--set=image.repository=localhost/cadre", "--set=image.tag=e2e"]
}

/// What promises without helm have put there would belong to nobody.
pub(crate) fn clean(cluster: &Cluster) -> Result<()> {
    let target = ["--ignore-not-found", "--timeout=120s"];
    cluster.kubectl(&[&["delete", "namespace", SYSTEM_NAMESPACE], &target[..]].concat())?;
    for kind in ["clusterrole", "clusterrolebinding"] {
        let label = "--selector=app.kubernetes.io/name=cadre-operator";
        cluster.kubectl(&[&["delete", kind, label], &target[..]].concat())?;
    }
    Ok(())
}

/// Refuses pods that do not meet the level *restricted*.
pub(crate) fn restricted(cluster: &Cluster, namespace: &str) -> Result<()> {
    let label = "pod-security.kubernetes.io/enforce=restricted";
    cluster.kubectl(&["label", "--overwrite", "namespace", namespace, label]).map(drop)
}

/// Waits for so many servers, all ready and none more. Out: they.
pub(crate) async fn ready(
    cluster: &Cluster,
    namespace: &str,
    count: u32,
) -> Result<Vec<(String, String)>> {
    let found = until(&format!("{count} servers"), async || {
        let pool = all::<AttentionPool>(cluster, namespace).get("p").await?;
        let Some(status) = pool.status else { return Ok(None) };
        let all = (status.desired, status.ready, status.replicas) == (count, count, count);
        let found = pods(cluster, namespace, SERVERS).await?;
        Ok((all && found.len() == count as usize).then_some(found))
    })
    .await;
    if found.is_err() {
        println!("{}", cluster.kubectl(&["describe", "attnpool,pods", "--namespace", namespace])?);
    }
    found
}
