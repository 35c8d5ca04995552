//! Manifests that promises share, and short ways to look at what became of them.

use std::process::Command;

use anyhow::{Context as _, Result};
use cadre_crds::{AttentionPool, TrainingJob};
use cadre_e2e::Cluster;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::ListParams;
use kube::{Api, Resource, ResourceExt as _};

/// Pods that are servers of pool `p`.
pub(crate) const SERVERS: &str = "cadre.dev/pool=p,cadre.dev/role=server";

/// A pool `p` of dedicated servers.
pub(crate) fn pool(replicas: u32) -> String {
    pool_with(replicas, "")
}

/// A pool `p` with more in its spec, lines of YAML in two spaces.
pub(crate) fn pool_with(replicas: u32, more: &str) -> String {
    format!(
        "apiVersion: cadre.dev/v1alpha1\nkind: AttentionPool\nmetadata: {{name: p}}\nspec:\n  \
         replicas: {replicas}\n  inPlace: false\n{more}"
    )
}

/// A job `j` of two trainers on pool `p`, with more in its spec.
pub(crate) fn job(more: &str) -> String {
    format!(
        "apiVersion: cadre.dev/v1alpha1\nkind: TrainingJob\nmetadata: {{name: j}}\nspec:\n  \
         nodes: 2\n  attention: {{poolRef: {{name: p}}}}\n  template:\n    spec:\n      \
         containers: [{{name: trainer, image: 'example.com/trainer:1'}}]\n{more}"
    )
}

/// An autoscaler `p` of pool `p`: between so many servers, each to use so many thousandths of a processor.
pub(crate) fn autoscaler(least: u32, most: u32, millicores: u32) -> String {
    format!(
        "apiVersion: autoscaling/v2\nkind: HorizontalPodAutoscaler\nmetadata: {{name: p}}\nspec:\n  \
         scaleTargetRef: {{apiVersion: cadre.dev/v1alpha1, kind: AttentionPool, name: p}}\n  minReplicas: {least}\n  \
         maxReplicas: {most}\n  metrics:\n  - type: Resource\n    resource: {{name: cpu, target: {{type: AverageValue, \
         averageValue: {millicores}m}}}}\n  behavior: {{scaleDown: {{stabilizationWindowSeconds: 0}}}}\n"
    )
}

/// The API of a kind in a namespace.
pub(crate) fn all<K>(cluster: &Cluster, namespace: &str) -> Api<K>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
{
    Api::namespaced(cluster.client(), namespace)
}

/// Names and uids of pods with these labels that are not on their way out, by name.
pub(crate) async fn pods(
    cluster: &Cluster,
    namespace: &str,
    labels: &str,
) -> Result<Vec<(String, String)>> {
    let found = all::<Pod>(cluster, namespace).list(&ListParams::default().labels(labels)).await?;
    let alive = found.items.into_iter().filter(|it| it.metadata.deletion_timestamp.is_none());
    let mut names: Vec<_> = alive.map(|it| (it.name_any(), it.uid().unwrap_or_default())).collect();
    names.sort();
    Ok(names)
}

/// What `cadre` says about a namespace with the administrator's rights, and whether it was happy.
pub(crate) fn cadre(cluster: &Cluster, namespace: &str, words: &[&str]) -> Result<(bool, String)> {
    let mut command = Command::new(cluster.programs().own("cadre")?);
    command.env("KUBECONFIG", cluster.config()).args(words).args(["--namespace", namespace]);
    let output = command.output().context("cadre")?;
    let said = if output.status.success() { output.stdout } else { output.stderr };
    Ok((output.status.success(), String::from_utf8_lossy(&said).into_owned()))
}

/// A condition of a list.
pub(crate) fn find<'a>(conditions: &'a [Condition], type_: &str) -> Option<&'a Condition> {
    conditions.iter().find(|it| it.type_ == type_)
}

/// Conditions of a pool; none before its first status.
pub(crate) fn of_pool(pool: &AttentionPool) -> &[Condition] {
    pool.status.as_ref().map_or(&[], |it| &it.conditions)
}

/// Conditions of a job; none before its first status.
pub(crate) fn of_job(job: &TrainingJob) -> &[Condition] {
    job.status.as_ref().map_or(&[], |it| &it.conditions)
}
