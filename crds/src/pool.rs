//! `AttentionPool`: servers that compute core attention for the jobs that name the pool.
//!
//! Field names, units and defaults of the object; what a combination of fields means is checked in
//! [`crate::manifest`]. No value here is a float, durations name their unit.

use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use serde::{Deserialize, Serialize};

use crate::object::CustomResource;
use crate::update::UpdateStrategy;

/// A pool of attention servers.
pub type AttentionPool = CustomResource<AttentionPoolSpec, AttentionPoolStatus>;

impl AttentionPool {
    /// `kind` of the object.
    pub const KIND: &str = "AttentionPool";
}

/// What a pool should be.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(kube::CustomResource, schemars::JsonSchema))]
#[cfg_attr(
    feature = "schema",
    kube(
        kind = "AttentionPool",
        root = "AttentionPoolResource",
        group = "cadre.dev",
        version = "v1alpha1",
        status = "AttentionPoolStatus",
        namespaced,
        doc = "A pool of attention servers: they compute softmax(QKᵀ)V for the jobs that name the pool.",
        shortname = "attnpool",
        category = "cadre",
        scale(
            spec_replicas_path = ".spec.replicas",
            status_replicas_path = ".status.replicas",
            label_selector_path = ".status.selector"
        ),
        printcolumn(name = "Desired", type_ = "integer", json_path = ".status.desired"),
        printcolumn(name = "Ready", type_ = "integer", json_path = ".status.ready"),
        printcolumn(name = "InPlace", type_ = "integer", json_path = ".status.inPlaceServers"),
        printcolumn(name = "Util", type_ = "integer", json_path = ".status.utilizationPercent"),
        printcolumn(
            name = "Balanced",
            type_ = "string",
            json_path = r#".status.conditions[?(@.type=="Balanced")].status"#
        ),
        printcolumn(
            name = "Placement",
            type_ = "string",
            json_path = r#".status.conditions[?(@.type=="PlacementSatisfied")].reason"#
        ),
        printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
        validation = crate::name::name_rule()
    )
)]
#[cfg_attr(
    feature = "schema",
    schemars(extend("x-kubernetes-validations" = [
        {"rule": "self.replicas > 0 || self.inPlace || self.scaling.mode != 'Fixed'", "message": "spec.replicas is 0 while spec.inPlace is false, so the pool has no server; set spec.replicas to 1 or more, or spec.inPlace to true"},
        {"rule": "has(self.class) == has(oldSelf.class) && (!has(self.class) || self.class == oldSelf.class)", "message": "spec.class never changes; delete the pool and create it anew"},
    ]))
)]
#[serde(default, rename_all = "camelCase")]
pub struct AttentionPoolSpec {
    /// Operator that looks after the pool: the one whose chart has this `class`. Default: the one without a class.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "schema",
        schemars(length(min = 1, max = 32), regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))
    )]
    pub class: Option<String>,
    /// Dedicated servers: processes (pods) of their own. In mode `Auto` the operator writes it: leave it out. Default 0.
    #[cfg_attr(feature = "schema", schemars(range(min = 0, max = 4096)))]
    pub replicas: u32,
    /// The trainers of the pool's jobs serve too. Default true; with `replicas` this is the hybrid.
    pub in_place: bool,
    /// Pod of a dedicated server. Its container is `server`; left out, the chart's image is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(schema_with = "crate::schema::server_template"))]
    pub template: Option<PodTemplateSpec>,
    /// How a changed `template`, `fabric` or `placement` reaches servers that are there.
    pub update_strategy: UpdateStrategy,
    /// Who decides about `replicas`, and within which bounds.
    pub scaling: Scaling,
    /// How near to the trainers the servers have to be.
    pub placement: Placement,
    /// Devices and network of a server.
    pub fabric: Fabric,
    /// How a server leaves.
    pub drain: Drain,
    /// When a server is suspected, slow, or replaced.
    pub health: Health,
    /// Who may use the pool.
    pub access: Access,
}

impl Default for AttentionPoolSpec {
    fn default() -> Self {
        Self {
            class: None,
            replicas: 0,
            in_place: true,
            template: None,
            update_strategy: UpdateStrategy::default(),
            scaling: Scaling::default(),
            placement: Placement::default(),
            fabric: Fabric::default(),
            drain: Drain::default(),
            health: Health::default(),
            access: Access::default(),
        }
    }
}

/// How `replicas` changes.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(
    feature = "schema",
    schemars(extend("x-kubernetes-validations" = [
        {"rule": "self.mode != 'Auto' || has(self.max)", "message": "spec.scaling.max is missing while spec.scaling.mode is Auto; say how many servers there may be at most"},
        {"rule": "!has(self.max) || self.max >= self.min", "message": "spec.scaling.max is below spec.scaling.min; write a number from spec.scaling.min to 4096"},
    ]))
)]
#[serde(default, rename_all = "camelCase")]
pub struct Scaling {
    /// Who changes `replicas`. Default `Fixed`.
    pub mode: ScalingMode,
    /// Least dedicated servers of mode `Auto`. Default 0.
    #[cfg_attr(feature = "schema", schemars(range(min = 0, max = 4096)))]
    pub min: u32,
    /// Most dedicated servers of mode `Auto`. No default: `Auto` needs it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 4096)))]
    pub max: Option<u32>,
    /// Busy share that `Auto` aims at, 1 to 100 percent. Default 70.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 100)))]
    pub target_utilization_percent: u32,
    /// How long fewer servers must have sufficed before `Auto` removes one. Default 300 s.
    #[cfg_attr(feature = "schema", schemars(range(min = 0, max = 86400)))]
    pub scale_down_stabilization_seconds: u32,
}

impl Default for Scaling {
    fn default() -> Self {
        Self {
            mode: ScalingMode::Fixed,
            min: 0,
            max: None,
            target_utilization_percent: 70,
            scale_down_stabilization_seconds: 300,
        }
    }
}

/// Who changes `replicas`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum ScalingMode {
    /// The user alone.
    #[default]
    Fixed,
    /// The operator, from the servers' load and the jobs that wait.
    Auto,
    /// An autoscaler through the scale subresource.
    External,
}

/// Where servers run, seen from the trainers.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct Placement {
    /// Topology keys, nearest first, such as `kubernetes.io/hostname`. Default: the chart's.
    #[cfg_attr(feature = "schema", schemars(length(max = 16), inner(length(min = 1, max = 316)), extend("x-kubernetes-list-type" = "set")))]
    pub levels: Vec<String>,
    /// Jobs to be near to. Default: all jobs of the pool.
    #[cfg_attr(feature = "schema", schemars(length(max = 64), inner(length(min = 1, max = 63)), extend("x-kubernetes-list-type" = "set")))]
    pub colocate_with: Vec<String>,
    /// Whether a server may start elsewhere. Default `Preferred`.
    pub colocation: Colocation,
}

/// How strict a placement is.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Colocation {
    /// Near if possible.
    #[default]
    Preferred,
    /// Near or not at all.
    Required,
}

/// Devices and network of a server.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct Fabric {
    /// GPUs, hence lanes, of one server; 0 (default) computes on the CPU.
    #[cfg_attr(feature = "schema", schemars(range(min = 0, max = 64)))]
    pub gpus_per_server: u32,
    /// Extended resources that give a pod its RDMA devices, such as `rdma/ib`. Default none.
    #[cfg_attr(feature = "schema", schemars(length(max = 8), inner(length(min = 1, max = 316)), extend("x-kubernetes-list-type" = "set")))]
    pub rdma_resources: Vec<String>,
    /// Measured bandwidth below which a link is reported, in megabits per second. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub min_bandwidth_mbps: Option<u32>,
}

/// How a server leaves.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct Drain {
    /// How long a server may take to hand over its slot before it is deleted. Default 60 s.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub timeout_seconds: u32,
}

impl Default for Drain {
    fn default() -> Self {
        Self { timeout_seconds: 60 }
    }
}

/// When a server is suspected, slow, or replaced.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct Health {
    /// Silence after which the conductor suspects a server. At least 400 (two heartbeats). Default
    /// 1000 ms.
    #[cfg_attr(feature = "schema", schemars(range(min = 400, max = 600_000)))]
    pub suspect_after_milliseconds: u32,
    /// Age after which a load report no longer counts. Default 10 s.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub report_timeout_seconds: u32,
    /// Time that a slot may stay vacant before it leaves the view; later steps may then have other
    /// bits. Default 600 s.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub reshape_after_seconds: u32,
    /// Observed over expected time, in percent, from which a server counts as slow. Above 100.
    /// Default 150.
    #[cfg_attr(feature = "schema", schemars(range(min = 101, max = 10000)))]
    pub slow_factor_percent: u32,
    /// Failures or slow reports in a row until a server is quarantined. Default 3.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub quarantine_after: u32,
}

impl Default for Health {
    fn default() -> Self {
        Self {
            suspect_after_milliseconds: 1000,
            report_timeout_seconds: 10,
            reshape_after_seconds: 600,
            slow_factor_percent: 150,
            quarantine_after: 3,
        }
    }
}

/// Who may use a pool.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct Access {
    /// Namespaces whose jobs may join. Default: the pool's own.
    #[cfg_attr(feature = "schema", schemars(length(max = 64), inner(length(min = 1, max = 63)), extend("x-kubernetes-list-type" = "set")))]
    pub namespaces: Vec<String>,
    /// Most dedicated servers that one job may be given. Default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub max_servers_per_job: Option<u32>,
}

/// What a pool is, by its applied objects.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct AttentionPoolStatus {
    /// Generation of the spec that this status answers.
    pub observed_generation: i64,
    /// Dedicated servers wanted.
    pub desired: u32,
    /// Pods of dedicated servers that are there, draining ones too; what the scale subresource reports.
    pub replicas: u32,
    /// Servers whose pod is ready.
    pub ready: u32,
    /// Servers with a live control connection.
    pub registered: u32,
    /// Servers of the update revision.
    pub updated_replicas: u32,
    /// Name of the `ControllerRevision` that servers come back with until a change has reached them.
    #[cfg_attr(feature = "schema", schemars(length(max = 253)))]
    pub current_revision: String,
    /// Name of the `ControllerRevision` of the spec as it is; the current one once the change has reached all servers.
    #[cfg_attr(feature = "schema", schemars(length(max = 253)))]
    pub update_revision: String,
    /// Servers on their way out.
    pub draining: u32,
    /// Servers kept out for slowness or failures.
    pub quarantined: u32,
    /// Trainers that serve in place.
    pub in_place_servers: u32,
    /// Label selector of the servers' pods, for the scale subresource.
    #[cfg_attr(feature = "schema", schemars(length(max = 512)))]
    pub selector: String,
    /// Busy share of the pool in percent, rounded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilization_percent: Option<u32>,
    /// The slowest servers, worst first, at most 8.
    #[cfg_attr(feature = "schema", schemars(length(max = 8)))]
    pub worst_servers: Vec<WorstServer>,
    /// Jobs that servers work for, by namespace and name; who works for none is not in it.
    #[cfg_attr(feature = "schema", schemars(length(max = 4096)))]
    pub holders: Vec<Holder>,
    /// The last change of `replicas` by mode `Auto`, with what it was made from. For people: no operator reads it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_scale_decision: Option<ScaleDecision>,
    /// `Available`, `Progressing`, `Balanced`, `ScalingActive`, `PlacementSatisfied`, `Degraded`, `Ready`; while they are
    /// true also `Stalled` and `Reconciling`.
    #[cfg_attr(feature = "schema", schemars(schema_with = "crate::schema::conditions"))]
    pub conditions: Vec<Condition>,
}

/// Servers that have worked for one job since the same time.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Holder {
    /// Namespace of the job.
    #[cfg_attr(feature = "schema", schemars(length(max = 63)))]
    pub namespace: String,
    /// Its name; of a job of another kind, what the labels of its pods say.
    #[cfg_attr(feature = "schema", schemars(length(max = 253)))]
    pub name: String,
    /// Since when.
    pub since: Time,
    /// Names of the servers' pods.
    #[cfg_attr(feature = "schema", schemars(length(max = 4096), inner(length(max = 63))))]
    pub servers: Vec<String>,
    /// Servers of the job's share that others have while it uses none: lent, and given back when it goes on. Not set: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lent: Option<u32>,
}

/// One of the slowest servers of a pool.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct WorstServer {
    /// Name of its pod.
    pub name: String,
    /// Observed over expected time, in percent.
    pub slow_factor_percent: u32,
}

/// Why mode `Auto` changed `replicas`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ScaleDecision {
    /// When.
    pub time: Time,
    /// `replicas` before.
    pub from: u32,
    /// `replicas` after.
    pub to: u32,
    /// Busy share that it was made from, in percent.
    pub utilization_percent: u32,
    /// The rule that fired, one sentence.
    pub reason: String,
}
