//! What a job says to each of its workers, sent by the controller in its welcome.
//!
//! The controller makes it from the AttentionPool and the TrainingJob; a worker never reads those. One
//! JSON object, unknown fields refused, so that a worker of another version fails by name.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::header::{Placement, Wire};
use crate::phases::Direction;

/// What happens when no server is left for some bundle.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub enum PoolLoss {
    /// Wait for a server, up to [`JobSettings::pool_wait_seconds`].
    #[default]
    Wait,
    /// The trainers compute the rest of the step, and later steps say local.
    Local,
    /// The job fails.
    Fail,
}

/// A place in a run at which the controller wants to fire a fault.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct FaultPoint {
    /// The step.
    pub step: u64,
    /// Forward or backward pass of it.
    pub direction: Direction,
}

/// Settings of one attempt of a job.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct JobSettings {
    /// Name of the job.
    pub job: String,
    /// Counts starts of the job, from 1.
    pub attempt: u32,
    /// Number of trainers.
    pub trainers: u16,
    /// Where core attention is computed.
    pub placement: Placement,
    /// Type of rows on the wire.
    pub wire: Wire,
    /// The same bits whatever happens to the pool; refuses servers of another numerics id.
    pub reproducible: bool,
    /// What happens when the pool is lost.
    pub on_pool_loss: PoolLoss,
    /// Longest wait for a server under [`PoolLoss::Wait`].
    pub pool_wait_seconds: u64,
    /// A server silent for so long is lost.
    pub suspect_after_milliseconds: u64,
    /// Bytes that a trainer may use for others' rows (in place, and standing by).
    pub trainer_memory_bytes: u64,
    /// Headers to replay.
    pub replay: Option<PathBuf>,
    /// Where checkpoints and traces go.
    pub out: PathBuf,
    /// Continue from the newest checkpoint under `out`.
    pub resume: bool,
    /// Keep a timeline.
    pub trace: bool,
    /// Where the controller waits to be told that the step has got there.
    pub faults: Vec<FaultPoint>,
}
