//! The objects that the API server stores, and the names that pods and workers agree on.
//!
//! In: YAML manifests of users. Out: [`AttentionPool`] and [`TrainingJob`], checked.
//! [`manifest`] reads and checks them, [`contract`] lists labels and environment variables.
//!
//! With the feature `schema`, a module of that name makes their definitions for the API server and the page about them.
//!
//! No cluster and no process: reading the manifest files is the only IO here, and
//! [`manifest::parse`] does without. The same text gives the same objects or the same error.

mod checkpoint;
pub mod contract;
mod failure;
mod fields;
mod job;
pub mod manifest;
mod name;
mod nearest;
mod object;
mod pool;
mod readable;
mod resource;
#[cfg(feature = "schema")]
pub mod schema;
mod update;
pub mod validate;

pub use checkpoint::Checkpoint;
pub use failure::{FailureAction, FailurePolicy, FailureRule};
#[cfg(feature = "schema")]
pub use job::TrainingJobResource;
pub use job::{
    Attention, Encryption, OnPoolLoss, PoolRef, Progress, TrainingJob, TrainingJobSpec,
    TrainingJobStatus, Wire,
};
pub use k8s_openapi;
pub use object::CustomResource;
#[cfg(feature = "schema")]
pub use pool::AttentionPoolResource;
pub use pool::{
    Access, AttentionPool, AttentionPoolSpec, AttentionPoolStatus, Colocation, Drain, Fabric,
    Health, Holder, Placement, ScaleDecision, Scaling, ScalingMode, WorstServer,
};
pub use readable::{Bare, Readable};
pub use update::{RollingUpdate, UpdateStrategy, UpdateType};
