//! An autoscaler from outside changes a pool of mode `External`: a `HorizontalPodAutoscaler` of the core API, on the pool's
//! scale subresource, finds the servers by the selector of the status, makes more when they are busy and fewer when they
//! are not, and stays at constant load. The operator follows and writes `spec.replicas` at no time. In mode `Auto` both
//! write it, and `cadre explain` says so.
//!
//! What servers use is written here, in the place of a metrics server: objects of `metrics.k8s.io` that the API server
//! stores; `busy_servers_get_company` has a real one. The autoscaler is the one of the controller manager.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use cadre_crds::AttentionPool;
use cadre_e2e::{Cluster, Fake, Operator, until};
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;

use crate::objects::{SERVERS, all, autoscaler, cadre, find, of_pool, pool_with};

const HERE: &str = "autoscaled";
/// What metrics servers serve, as far as autoscalers read it.
const METRICS: &str = "apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\nmetadata:\n  \
    name: pods.metrics.k8s.io\n  annotations: {api-approved.kubernetes.io: 'unapproved, of a test'}\nspec:\n  \
    group: metrics.k8s.io\n  scope: Namespaced\n  names: {plural: pods, singular: podmetrics, kind: PodMetrics, \
    listKind: PodMetricsList}\n  versions:\n  - {name: v1beta1, served: true, storage: true, schema: \
    {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}\n";
const EXTERNAL: &str = "  scaling: {mode: External}\n";

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    cluster.add_fake_nodes(Fake { nodes: 2, gpus: 8, rack: 1 }).await?;
    cluster.kubectl_with(&["apply"], METRICS)?;
    let of = "crd/pods.metrics.k8s.io";
    cluster.kubectl(&["wait", "--for=condition=Established", "--timeout=60s", of])?;
    let operator = Operator::leading(cluster, 8091).await?;
    cluster.namespace(HERE).await?;
    cluster.apply(HERE, &pool_with(2, EXTERNAL))?;
    servers(cluster, 2, 1000).await?;
    cluster.apply(HERE, &autoscaler(2, 6, 500))?;

    // Two servers, each with twice the work that it should have: four.
    servers(cluster, 4, 2000).await?;
    let pool = all::<AttentionPool>(cluster, HERE).get("p").await?;
    let scaling = find(of_pool(&pool), "ScalingActive").context("a condition")?;
    ensure!(scaling.status == "True" && scaling.reason == "External", "{scaling:?}");
    ensure!(owner(&pool).as_deref() == Some("kube-controller-manager"), "{:?}", owner(&pool));
    let stays = looked_again(cluster, 2000).await?;
    ensure!(stays == 4, "at constant load it was scaled to {stays}");
    // More than it may have, then next to nothing.
    servers(cluster, 6, 9000).await?;
    servers(cluster, 2, 100).await?;

    let explain = ["explain", "attnpool/p"];
    let (_, said) = cadre(cluster, HERE, &explain)?;
    let follows =
        said.contains("attnpool autoscaled/p") && !said.contains("horizontalpodautoscaler");
    ensure!(follows, "mode External follows it: {said}");
    cluster.apply(HERE, &pool_with(2, "  scaling: {mode: Auto, min: 1, max: 4}\n"))?;
    let (_, said) = cadre(cluster, HERE, &explain)?;
    ensure!(said.contains("horizontalpodautoscaler p: writes"), "both write it now: {said}");

    cluster.kubectl(&["delete", "hpa", "p", "--namespace", HERE])?;
    cluster.kubectl(&["delete", "cadre", "--all", "--namespace", HERE, "--timeout=60s"])?;
    cluster.kubectl(&["delete", of])?;
    operator.stop()?;
    cluster.remove_fake_nodes().await
}

/// Waits until there are so many ready servers, while all of them together use so many thousandths of a processor.
async fn servers(cluster: &Cluster, count: u32, load: u32) -> Result<()> {
    until(&format!("{count} servers at {load}m"), async || {
        measure(cluster, load).await?;
        let pool = all::<AttentionPool>(cluster, HERE).get("p").await?;
        let ready = pool.status.as_ref().is_some_and(|it| it.ready == count && it.draining == 0);
        let settled = find(of_pool(&pool), "Progressing").is_some_and(|it| it.status == "False");
        Ok((ready && settled && pool.spec.replicas == count).then_some(()))
    })
    .await
}

/// Plays the metrics server: one object for each server.
async fn measure(cluster: &Cluster, load: u32) -> Result<()> {
    let kind = ApiResource {
        group: "metrics.k8s.io".into(),
        version: "v1beta1".into(),
        api_version: "metrics.k8s.io/v1beta1".into(),
        kind: "PodMetrics".into(),
        plural: "pods".into(),
    };
    let api: Api<DynamicObject> = Api::namespaced_with(cluster.client(), HERE, &kind);
    let labels = ListParams::default().labels(SERVERS);
    let servers = all::<Pod>(cluster, HERE).list(&labels).await?.items;
    let each = load / u32::try_from(servers.len().max(1))?;
    let now = k8s_openapi::jiff::Timestamp::now();
    let mut old: BTreeMap<String, DynamicObject> =
        api.list(&labels).await?.into_iter().map(|it| (it.name_any(), it)).collect();
    for server in servers {
        let name = server.name_any();
        old.remove(&name);
        let object = json!({
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {"name": name, "labels": server.labels()},
            "timestamp": now.to_string(),
            "window": "1s",
            "containers": [{"name": "server", "usage": {"cpu": format!("{each}m"), "memory": "1Mi"}}],
        });
        let parameters = PatchParams::apply("metrics").force();
        api.patch(&name, &parameters, &Patch::Apply(&object)).await?;
    }
    for name in old.keys() {
        api.delete(name, &DeleteParams::default()).await?;
    }
    Ok(())
}

/// What the pool is scaled to once the autoscaler has seen the load of four servers.
async fn looked_again(cluster: &Cluster, load: u32) -> Result<u32> {
    until("a look at four servers", async || {
        measure(cluster, load).await?;
        let autoscaler = all::<HorizontalPodAutoscaler>(cluster, HERE).get("p").await?;
        let metrics = autoscaler.status.and_then(|it| it.current_metrics).unwrap_or_default();
        let value = metrics.into_iter().find_map(|it| it.resource?.current.average_value);
        Ok((value.map(|it| it.0).as_deref() == Some("500m")).then_some(()))
    })
    .await?;
    Ok(all::<AttentionPool>(cluster, HERE).get("p").await?.spec.replicas)
}

/// Who wrote `spec.replicas` last.
fn owner(pool: &AttentionPool) -> Option<String> {
    let writes = |it: &&k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry| {
        let fields = it.fields_v1.as_ref().map(|it| &it.0);
        fields.is_some_and(|it| !it["f:spec"]["f:replicas"].is_null())
    };
    let entries = pool.metadata.managed_fields.as_ref()?;
    let newest = entries.iter().filter(writes).max_by_key(|it| it.time.as_ref().map(|it| it.0))?;
    newest.manager.clone()
}
