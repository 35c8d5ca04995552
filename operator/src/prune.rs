//! What the caches leave out of objects: whatever no decision reads, so that a large cluster fits into little memory.

use cadre_crds::contract::SERVER_CONTAINER;
use cadre_desired::pool::scale::writes_replicas;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{
    Container, ContainerStatus, Node, NodeSpec, Pod, PodSpec, PodTemplateSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{FieldsV1, ObjectMeta};
use serde_json::json;

/// Taints of nodes that are taken away: by Karpenter, now and before its version 1, and by the Cluster Autoscaler.
const GOING: [&str; 3] =
    ["karpenter.sh/disrupted", "karpenter.sh/disruption", "ToBeDeletedByClusterAutoscaler"];

pub(crate) fn prune(meta: &mut ObjectMeta) {
    meta.managed_fields = None;
    if let Some(annotations) = &mut meta.annotations {
        annotations.remove("kubectl.kubernetes.io/last-applied-configuration");
    }
}

/// Of a pool it counts who has written the number of its servers.
pub(crate) fn prune_pool(meta: &mut ObjectMeta) {
    let written = meta.managed_fields.take();
    prune(meta);
    let mut written = written.unwrap_or_default();
    written.retain(writes_replicas);
    for entry in &mut written {
        entry.fields_v1 = Some(FieldsV1(json!({"f:spec": {"f:replicas": {}}})));
    }
    meta.managed_fields = Some(written);
}

/// Of a pod's spec only its node counts, and of a server the image; of its init containers those that have failed
/// or cannot start.
pub(crate) fn prune_pod(pod: &mut Pod) {
    prune(&mut pod.metadata);
    pod.spec = pod.spec.take().map(|it| {
        let own = it.containers.into_iter().filter(|it| it.name == SERVER_CONTAINER);
        let image =
            |it: Container| Container { name: it.name, image: it.image, ..Container::default() };
        let containers = own.map(image).collect();
        PodSpec { node_name: it.node_name, containers, ..PodSpec::default() }
    });
    if let Some(status) = &mut pod.status {
        let counts = |it: &ContainerStatus| {
            let Some(state) = &it.state else { return false };
            let has_failed = state.terminated.as_ref().is_some_and(|it| it.exit_code != 0);
            let waits = state.waiting.as_ref().and_then(|it| it.reason.as_deref());
            has_failed || waits.is_some_and(|it| it != "PodInitializing")
        };
        let began = status.init_container_statuses.take().unwrap_or_default();
        let count: Vec<_> = began.into_iter().filter(counts).collect();
        status.init_container_statuses = (!count.is_empty()).then_some(count);
        status.ephemeral_container_statuses = None;
    }
}

pub(crate) fn prune_job(job: &mut Job) {
    prune(&mut job.metadata);
    if let Some(spec) = &mut job.spec {
        spec.template = PodTemplateSpec::default();
    }
}

pub(crate) fn prune_node(node: &mut Node) {
    prune(&mut node.metadata);
    node.metadata.annotations = None;
    node.status = None;
    node.spec = node
        .spec
        .take()
        .map(|it| NodeSpec { unschedulable: Some(is_cordoned(&it)), ..NodeSpec::default() });
}

/// Whether nothing new may start on a node: somebody has cordoned it, or an autoscaler takes it away.
fn is_cordoned(node: &NodeSpec) -> bool {
    let mut taints = node.taints.iter().flatten();
    node.unschedulable == Some(true) || taints.any(|it| GOING.contains(&it.key.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_that_an_autoscaler_takes_away_count_as_cordoned() {
        let cordoned = |spec: serde_json::Value| {
            let mut node: Node = serde_json::from_value(json!({"spec": spec})).expect("a node");
            prune_node(&mut node);
            node.spec.and_then(|it| it.unschedulable)
        };
        let taint = |key: &str| json!({"taints": [{"key": key, "effect": "NoSchedule"}]});
        assert_eq!(cordoned(json!({})), Some(false));
        assert_eq!(cordoned(json!({"unschedulable": true})), Some(true));
        assert_eq!(cordoned(taint("nvidia.com/gpu")), Some(false), "its pods may run there");
        for key in GOING {
            assert_eq!(cordoned(taint(key)), Some(true), "{key}");
        }
    }
}
