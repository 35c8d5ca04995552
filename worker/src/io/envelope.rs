//! What workers of one job ring to each other: protocol messages, and the few that only the worker knows.
//!
//! Encoded with postcard; both ends have the same data version, so there is no other compatibility.

use cadre_exchange::PeerId;
use cadre_planner::Stretch;
use cadre_protocol::Message;
use serde::{Deserialize, Serialize};

use crate::header::Header;

/// One ring.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub enum Envelope {
    /// For a protocol machine.
    Protocol(Message),
    /// Trainer to conductor: what my stream of a step holds.
    Lengths(Lengths),
    /// Conductor to all: plan this step.
    Header {
        /// What to plan.
        header: Box<Header>,
        /// Every trainer and where its exchange listens, by rank.
        trainers: Vec<(PeerId, String)>,
    },
    /// Conductor to trainers: where servers listen that may fill slots within a step.
    Addresses(Vec<(PeerId, String)>),
    /// Trainer to conductor: my step is over.
    StepDone(StepDone),
    /// Server to conductor: what I did in a step.
    ServerStep(ServerStep),
    /// Conductor to trainers: no step after this.
    End(Ending),
    /// Trainer to conductor: this process was asked to end.
    Leaving,
}

/// One trainer's stretch of every packed stream of a step.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Lengths {
    /// The step.
    pub step: u64,
    /// By nano-batch.
    pub nanos: Vec<NanoLengths>,
}

/// One trainer's stretch of one packed stream.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct NanoLengths {
    /// The documents that this trainer holds rows of: number in the stream and whole length.
    pub documents: Vec<(u32, u32)>,
    /// Its rows, in stream order.
    pub stretches: Vec<Stretch>,
}

/// What a trainer tells about a finished step.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct StepDone {
    /// The step.
    pub step: u64,
    /// Mean loss over all trainers.
    pub loss: f32,
    /// Rows of all trainers and nano-batches.
    pub tokens: u64,
    /// From header to header.
    pub seconds: f64,
    /// Time in attention calls in which the trainer computed nothing.
    pub exposed_wait_seconds: f64,
}

/// What a server did in a step.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct ServerStep {
    /// The step.
    pub step: u64,
    /// Tasks (forward) and bundles (backward) that it ran.
    pub tasks: u32,
    /// Time in kernels.
    pub busy_seconds: f64,
    /// From other processes.
    pub bytes_pulled: u64,
}

/// Why no step follows.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Ending {
    /// All steps are done.
    Completed,
    /// The controller said stop.
    Stopped {
        /// Write a checkpoint first.
        checkpoint: bool,
    },
    /// The job cannot go on; the last completed step is worth a checkpoint.
    Failed {
        /// One line.
        reason: String,
        /// Its fault lies in what the user gave (exit code 2), not in what happened (3).
        bad_input: bool,
    },
}
