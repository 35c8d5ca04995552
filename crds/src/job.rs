//! `TrainingJob`: trainers that send their core attention to a pool.
//!
//! Field names, units and defaults of the object; what a combination of fields means is checked in
//! [`crate::manifest`]. The job's kind is optional in a cluster: pods of other kinds join by label.

use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use serde::{Deserialize, Serialize};

use crate::checkpoint::Checkpoint;
use crate::failure::FailurePolicy;
use crate::object::CustomResource;

/// A training job whose attention runs on a pool.
pub type TrainingJob = CustomResource<TrainingJobSpec, TrainingJobStatus>;

impl TrainingJob {
    /// `kind` of the object.
    pub const KIND: &str = "TrainingJob";
}

/// What a job should be.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(kube::CustomResource, schemars::JsonSchema))]
#[cfg_attr(
    feature = "schema",
    kube(
        kind = "TrainingJob",
        root = "TrainingJobResource",
        group = "cadre.dev",
        version = "v1alpha1",
        status = "TrainingJobStatus",
        namespaced,
        doc = "A training job whose core attention runs on a pool.",
        shortname = "cadjob",
        category = "cadre",
        printcolumn(name = "Step", type_ = "integer", json_path = ".status.progress.step"),
        printcolumn(name = "Progress", type_ = "integer", json_path = ".status.progress.percent"),
        printcolumn(
            name = "Tokens/s",
            type_ = "integer",
            json_path = ".status.progress.tokensPerSecond"
        ),
        printcolumn(name = "Pool", type_ = "string", json_path = ".spec.attention.poolRef.name"),
        printcolumn(
            name = "Status",
            type_ = "string",
            json_path = r#".status.conditions[?(@.type=="Running")].reason"#
        ),
        printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
        validation = crate::name::name_rule()
    )
)]
#[cfg_attr(
    feature = "schema",
    schemars(extend("x-kubernetes-validations" = [
        {"rule": "self.nodes * self.procsPerNode <= 4096", "message": "spec.nodes × spec.procsPerNode makes more than 4096 trainers; 4096 is the most"},
        {"rule": "self.suspend || oldSelf.suspend || self.nodes == oldSelf.nodes", "message": "spec.nodes changes only while spec.suspend is true; suspend the job first"},
        {"rule": "self.suspend || oldSelf.suspend || self.procsPerNode == oldSelf.procsPerNode", "message": "spec.procsPerNode changes only while spec.suspend is true; suspend the job first"},
        {"rule": "self.suspend || oldSelf.suspend || self.attention.poolRef == oldSelf.attention.poolRef", "message": "spec.attention.poolRef changes only while spec.suspend is true; suspend the job first"},
        {"rule": "has(self.managedBy) == has(oldSelf.managedBy) && (!has(self.managedBy) || self.managedBy == oldSelf.managedBy)", "message": "spec.managedBy never changes; delete the job and create it anew"},
        {"rule": "has(self.class) == has(oldSelf.class) && (!has(self.class) || self.class == oldSelf.class)", "message": "spec.class never changes; delete the job and create it anew"},
    ]))
)]
#[serde(rename_all = "camelCase")]
pub struct TrainingJobSpec {
    /// Operator that looks after the job: the one whose chart has this `class`. Default: the one without a class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "schema",
        schemars(length(min = 1, max = 32), regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))
    )]
    pub class: Option<String>,
    /// Pod of a trainer, with one container named `trainer`.
    #[cfg_attr(feature = "schema", schemars(schema_with = "crate::schema::trainer_template"))]
    pub template: PodTemplateSpec,
    /// Pods of the job. At least 1. Default 1.
    #[serde(default = "one")]
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 4096)))]
    pub nodes: u32,
    /// Trainer processes in each pod. At least 1. Default 1.
    #[serde(default = "one")]
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 4096)))]
    pub procs_per_node: u32,
    /// Where core attention goes.
    pub attention: Attention,
    /// No pods run while this is true. Default false.
    #[serde(default)]
    pub suspend: bool,
    /// Controller that acts on the job instead of Cadre's operator. Default: Cadre's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(length(min = 1, max = 253)))]
    pub managed_by: Option<String>,
    /// What a dead trainer does to the job.
    #[serde(default)]
    pub failure_policy: FailurePolicy,
    /// Longest time that the job may be active. Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub active_deadline_seconds: Option<u32>,
    /// How long a finished job is kept. Default: for ever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(range(min = 0)))]
    pub ttl_seconds_after_finished: Option<u32>,
    /// Where checkpoints go and how many stay.
    #[serde(default)]
    pub checkpoint: Checkpoint,
}

impl TrainingJobSpec {
    /// Trainer processes of the job: `nodes` × `procsPerNode`.
    pub fn trainers(&self) -> u32 {
        self.nodes.saturating_mul(self.procs_per_node)
    }
}

fn one() -> u32 {
    1
}

/// Where core attention goes and how.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Attention {
    /// The pool.
    pub pool_ref: PoolRef,
    /// Weight of this job among the jobs of the pool, 1 to 1000. Default 100.
    #[serde(default = "hundred")]
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 1000)))]
    pub share: u32,
    /// Dedicated servers that the job needs, as `cadre plan` counts them. A pool of mode `Auto` makes as many while the job waits
    /// for its first one; afterwards it follows the load. Default: one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 4096)))]
    pub servers: Option<u32>,
    /// Type of Q, K, V, O, dO and dQ on the wire; `Bf16` moves half the bytes. Default: that of the trainers' rows where they say
    /// it, as scripts of PyTorch do, else `F32`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wire: Option<Wire>,
    /// Same bits for the same slots: nominal weights, servers of one numerics id. Default false.
    #[serde(default)]
    pub reproducible: bool,
    /// Whether workers of the job encrypt what they send each other: `Tcp` their links, so that only rows by RDMA go in the clear;
    /// `Required` all, so that no rows go by RDMA; `Off` nothing. Counts from the next attempt on. Default: `Tcp` for a new job of
    /// a cluster, then what the attempt before had; of `cadre run`, `Off`. `Tls` is an earlier word for `Required`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<Encryption>,
    /// What happens when no server is left. Default `Wait`.
    #[serde(default)]
    pub on_pool_loss: OnPoolLoss,
    /// How long `Wait` waits for a server before the job fails. Default 300 s.
    #[serde(default = "pool_wait_seconds")]
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub pool_wait_seconds: u32,
    /// Memory of each trainer for rows of others, as it serves in place or stands by, in MiB. Default 4096.
    #[serde(default = "trainer_memory")]
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 16_777_216)))]
    pub in_place_memory_mebibytes: u32,
    /// Calibration that plans are made with: a file of `cadre calibrate` in the trainer's container, or `h200-hopper`,
    /// `h100-hopper` or `h200-fa2`. A file may also say where workers are and which cannot reach each other. Default: nominal
    /// costs and equal links.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(length(min = 1, max = 1024)))]
    pub profile: Option<String>,
    /// How uneven plans may be: the last finish over the mean of all, a ratio from 1 to 2 as text, such as "1.05". Above 1.002
    /// unevenness is spent on less work for the busiest link. Default "1.002".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "schema",
        schemars(
            length(min = 1, max = 8),
            regex(pattern = r"^(1([.][0-9]{1,6})?|2([.]0{1,6})?)$")
        )
    )]
    pub tolerance: Option<String>,
}

fn trainer_memory() -> u32 {
    crate::contract::TRAINER_MEMORY_MIB
}

/// What a manifest means that says nothing; of no pool.
impl Default for Attention {
    fn default() -> Self {
        Self {
            pool_ref: PoolRef::default(),
            share: hundred(),
            servers: None,
            wire: None,
            reproducible: false,
            encryption: None,
            on_pool_loss: OnPoolLoss::default(),
            pool_wait_seconds: pool_wait_seconds(),
            in_place_memory_mebibytes: trainer_memory(),
            profile: None,
            tolerance: None,
        }
    }
}

fn hundred() -> u32 {
    100
}

fn pool_wait_seconds() -> u32 {
    300
}

/// Names a pool.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct PoolRef {
    /// Name of the pool.
    #[cfg_attr(feature = "schema", schemars(length(min = 1, max = 52)))]
    pub name: String,
    /// Its namespace. Default: the job's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(length(min = 1, max = 63)))]
    pub namespace: Option<String>,
}

/// Type of rows on the wire. If it is left out: that of the trainers' rows where they say it, as scripts of PyTorch do, else
/// `F32`. LSE, Δ, dK and dV are f32 whatever it says.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Wire {
    /// Single precision.
    F32,
    /// Brain float: half the bytes, rounded once when rows are published.
    Bf16,
}

/// Whether what workers of a job send each other is encrypted.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Deserialize, Serialize)]
pub enum Encryption {
    /// Links are TLS 1.3 with keys of the moment; the job's secret says whose they are. Rows may take paths that encrypt nothing.
    Tcp,
    /// As [`Self::Tcp`], and no row crosses a network in the clear. Releases that had no third value called it `Tls`.
    #[serde(alias = "Tls")]
    Required,
    /// Readable for whoever is on the way.
    Off,
}

impl Encryption {
    /// As manifests and annotations say it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Tcp => "Tcp",
            Self::Required => "Required",
            Self::Off => "Off",
        }
    }

    /// What a word of a manifest or an annotation means.
    pub fn of(word: &str) -> Option<Self> {
        match word {
            "Tcp" => Some(Self::Tcp),
            "Required" | "Tls" => Some(Self::Required),
            "Off" => Some(Self::Off),
            _ => None,
        }
    }
}

/// What a job does when no server is left.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum OnPoolLoss {
    /// Wait for a server, `poolWaitSeconds` at most.
    #[default]
    Wait,
    /// Trainers compute core attention themselves.
    Local,
    /// The job fails.
    Fail,
}

/// What a job is, by its applied objects.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct TrainingJobStatus {
    /// Generation of the spec that this status answers.
    pub observed_generation: i64,
    /// How far training is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// Number of the run of the trainers, from 1; only rises, resumes count.
    pub attempt: u32,
    /// Generation of the spec that the newest attempt was made from; below `metadata.generation`, what was changed since then
    /// counts from the next attempt on. 0: not known.
    pub attempt_generation: i64,
    /// Restarts that counted, of the whole job.
    pub restarts: u32,
    /// Those of them since a newer checkpoint was heard of; `failurePolicy.maxRestarts` is about these.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restarts_without_progress: Option<u32>,
    /// Steps in the newest checkpoint that was heard of.
    pub checkpoint_step: u64,
    /// Since when the job is active, restarts included; gone while it is suspended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// Whether the workers of the newest attempt encrypt what they send each other: a value of `spec.attention.encryption`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encryption: Option<Encryption>,
    /// Servers lost in steps of the job.
    pub failovers: u32,
    /// `Admitted`, `Scheduled`, `Running`, `Degraded`, `Suspended`, `Complete`, `Failed`; while they are true also `Stalled`
    /// and `Reconciling`.
    #[cfg_attr(feature = "schema", schemars(schema_with = "crate::schema::conditions"))]
    pub conditions: Vec<Condition>,
}

impl TrainingJobStatus {
    /// Restarts without progress; what an operator wrote that did not tell them apart are all that counted.
    pub fn in_a_row(&self) -> u32 {
        self.restarts_without_progress.unwrap_or(self.restarts)
    }
}

/// How far training is.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct Progress {
    /// Steps done.
    pub step: u64,
    /// Steps wanted.
    pub total: u64,
    /// Share done.
    pub percent: u32,
    /// Seconds left at the present speed.
    pub eta_seconds: u64,
    /// Tokens trained on per second, all trainers together.
    pub tokens_per_second: u64,
    /// Time that the worst trainer waited for attention, in percent of the step.
    pub exposed_wait_percent: u32,
    /// Busiest server over the mean, in percent.
    pub imbalance_percent: u32,
}
