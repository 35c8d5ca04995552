//! Steps of a training job on machines that one does not have.
//!
//! In: lengths of documents, a model, a machine. Out: how long a step takes, and why. The plans are those of the real
//! planner; what computes and what travels is simulated event by event, in whole nanoseconds.
//!
//! Nothing here does IO, reads a clock or starts a thread: the same input gives the same table everywhere.

pub mod churn;
mod cluster;
mod engine;
mod greedy;
mod machine;
pub mod ours;
mod packing;
mod phase;
mod pipeline;
pub mod published;
mod sampler;
mod step;
pub mod trial;

pub use cluster::{Cluster, Lay};
pub use greedy::greedy;
pub use machine::{Direction, Kernel, Machine, Model, Nanos};
pub use phase::{Bytes, Phase, Share};
pub use sampler::{LengthSet, SampleError, Sampler};
pub use step::{Overlap, Pass, Step, StepTime};

/// Why there is no table.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum SimulationError {
    /// Documents cannot be drawn.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// The planner refuses what was drawn.
    #[error(transparent)]
    Planner(#[from] cadre_planner::Error),
    /// No packing of the sweep holds all documents.
    #[error(
        "no packing of the sweep holds the longest documents; shorten the sequences or add ranks"
    )]
    NoPacking,
}
