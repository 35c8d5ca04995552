//! What the chart says about a whole cluster.
//!
//! In: one YAML mapping of the chart's values. Out: [`Settings`], with the defaults below. Nothing
//! here changes while an operator runs.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{LocalObjectReference, ResourceRequirements, Toleration};
use serde::Deserialize;

/// Settings that the chart passes to the operator.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Settings {
    /// Image of a server whose pool has no template.
    pub server_image: String,
    /// Priority class of a server whose pool has no template; empty: the cluster's default.
    pub server_priority_class: String,
    /// Secrets with which nodes pull its image.
    pub server_pull_secrets: Vec<LocalObjectReference>,
    /// Taints that it tolerates.
    pub server_tolerations: Vec<Toleration>,
    /// Requests and limits of its container.
    pub server_resources: ResourceRequirements,
    /// Name of the extended resource for GPUs.
    pub gpu_resource: String,
    /// Labels of nodes that servers with GPUs may run on.
    pub gpu_node_selector: BTreeMap<String, String>,
    /// Topology keys, nearest first, of pools that name none.
    pub levels: Vec<String>,
    /// Address of the control service, `https://…`.
    pub control: String,
    /// `ConfigMap`, in each namespace, with the certificate of the control service's issuer as `ca.crt`.
    pub control_ca: String,
    /// Audience of the tokens that pods show to the control service.
    pub audience: String,
    /// Size of `/dev/shm` of a worker.
    pub shared_memory: String,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            server_image: "cadre:0.1.0".into(),
            server_priority_class: String::new(),
            server_pull_secrets: Vec::new(),
            server_tolerations: Vec::new(),
            server_resources: ResourceRequirements::default(),
            gpu_resource: "nvidia.com/gpu".into(),
            gpu_node_selector: BTreeMap::new(),
            levels: vec!["kubernetes.io/hostname".into(), "topology.kubernetes.io/zone".into()],
            control: "https://cadre-operator.cadre-system.svc:9443".into(),
            control_ca: "cadre-control-ca".into(),
            audience: "cadre.dev/control".into(),
            shared_memory: "1Gi".into(),
        }
    }
}
