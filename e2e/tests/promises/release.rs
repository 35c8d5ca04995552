//! The chart of this tree as a release on real nodes: what the promises there share.
//!
//! In: a cluster with real nodes. Out: an installed release under Pod Security's strictest level, servers that stand still,
//! and how long to wait for them.

use anyhow::Result;
use cadre_crds::AttentionPool;
use cadre_e2e::{Cluster, IMAGE, Release, SYSTEM_NAMESPACE, until};

use crate::objects::{SERVERS, all, pods};

/// A server that stands still: what it would compute does not matter here.
pub(crate) const SERVER: &str = "  drain: {timeoutSeconds: 5}\n  template:\n    spec:\n      \
    securityContext: {runAsNonRoot: true, runAsUser: 65532}\n      containers:\n        \
    - {name: server, image: 'localhost/cadre:e2e', command: [pause]}\n";

/// The chart with the image of this run, installed once for all promises that leave it as it is.
pub(crate) fn shared(cluster: &Cluster) -> Result<Release> {
    Release::shared(cluster, || {
        clean(cluster)?;
        install(cluster)
    })
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
