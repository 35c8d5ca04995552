//! What workers of one job ring to each other: protocol messages, and the words that only the worker knows.
//!
//! In and out: bytes of postcard; both ends have the same data version, so there is no other compatibility. Who may say what is
//! decided here ([`Said::speaker`], [`speaker`]), by name alone: the exchange has proved the name.
//!
//! Invariant: no [`Envelope`] grows with a step's documents, so that each fits a message of the exchange; a [`Said`] may, and
//! is pulled where it does ([`crate::words`]).

use cadre_planner::Stretch;
use cadre_protocol::PeerId;
use cadre_protocol::{Heartbeat, Message, Peer};
use serde::{Deserialize, Serialize};

use crate::header::Header;
use crate::turns::Turns;
use crate::words::{Body, Life, Stream};

/// What one ring carries.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub enum Envelope {
    /// For a protocol machine.
    Protocol(Message),
    /// A [`Said`], sent again until a [`Self::Heard`] covers it.
    Word {
        /// The stream of words that it belongs to.
        stream: Stream,
        /// Number of the word in its stream, from 0.
        number: u64,
        /// The encoded [`Said`], or where it is.
        body: Body,
    },
    /// An acknowledgement of every word before a number.
    Heard {
        /// The life that has heard them.
        by: Life,
        /// The stream of words that is acknowledged.
        stream: Stream,
        /// Number of the word that is wanted next.
        through: u64,
    },
    /// A [`Message::Heartbeat`] for the conductor's machine, with the sender's life. The life shows
    /// that a process came back under its name before its first word does.
    Beat {
        /// The life that beats.
        by: Life,
        /// The heartbeat.
        beat: Box<Heartbeat>,
    },
}

/// Content of a word.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub enum Said {
    /// Trainer to conductor: what my stream of a step holds.
    Lengths(Lengths),
    /// Trainer to conductor: my steps are those before this one, and no other follows.
    Steps(u64),
    /// Trainer to conductor: whether my main thread stands still.
    Standing(Stands),
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
    /// Conductor to all: no step after this.
    End(Ending),
    /// Trainer to conductor: this process was asked to end.
    Leaving,
    /// Worker to conductor: I cannot go on, and no other can for me.
    Failed {
        /// One line.
        reason: String,
        /// Whether the cause lies in what the user gave, as in [`Ending::Failed`].
        bad_input: bool,
    },
}

/// Whether a trainer's main thread makes the calls that are due.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Stands {
    /// No call for too long; the text names the trainer, the call that is due and the time.
    Still(String),
    /// The thread makes its calls again.
    No,
    /// It has left the job and will make none, although a step is out that is not over there.
    Left {
        /// The trainer, and the call that was due.
        what: String,
        /// Whether it had submitted a phase of that step.
        in_mid_step: bool,
        /// Whether it says that the job is complete: its program counts other steps, and would do so again.
        as_done: bool,
    },
}

/// The processes that may say something; from any other it is ignored.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Speaker {
    /// The conductor.
    Conductor,
    /// A trainer, for itself.
    Trainer,
    /// Every worker, for itself.
    Worker,
}

impl Speaker {
    /// Whether a peer is one.
    pub fn is(self, peer: Peer) -> bool {
        match self {
            Self::Conductor => peer == Peer::CONDUCTOR,
            Self::Trainer => matches!(peer, Peer::Trainer(_)),
            Self::Worker => true,
        }
    }
}

impl Said {
    /// The processes that may say this.
    pub fn speaker(&self) -> Speaker {
        match self {
            Self::Header { .. } | Self::Addresses(_) | Self::End(_) => Speaker::Conductor,
            Self::Lengths(_)
            | Self::Steps(_)
            | Self::Standing(_)
            | Self::StepDone(_)
            | Self::Leaving => Speaker::Trainer,
            // Every trainer has a server in place.
            Self::ServerStep(_) | Self::Failed { .. } => Speaker::Worker,
        }
    }

    /// Name of the content, for warnings.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Lengths(_) => "lengths",
            Self::Steps(_) => "how many steps it has",
            Self::Standing(_) => "whether its main thread stands still",
            Self::Header { .. } => "a header",
            Self::Addresses(_) => "addresses",
            Self::StepDone(_) => "the end of a step",
            Self::ServerStep(_) => "what a server did",
            Self::End(_) => "the end of the job",
            Self::Leaving => "that it leaves",
            Self::Failed { .. } => "that it failed",
        }
    }
}

/// The processes that may send a message of the protocol, and the message's name for warnings.
pub fn speaker(message: &Message) -> (Speaker, &'static str) {
    match message {
        Message::Watermark { .. } => (Speaker::Conductor, "a watermark"),
        Message::Pulse { .. } => (Speaker::Conductor, "a pulse"),
        Message::Round { .. } => (Speaker::Conductor, "a round"),
        Message::Leave { .. } => (Speaker::Conductor, "that a server is lost"),
        Message::Spare { .. } => (Speaker::Conductor, "that a server may go"),
        Message::Doorbell { .. } => (Speaker::Trainer, "a doorbell"),
        Message::Ack { .. } => (Speaker::Trainer, "acknowledgements"),
        Message::PhaseDone { .. } => (Speaker::Trainer, "a whole phase"),
        Message::Suspect { .. } => (Speaker::Trainer, "a suspicion"),
        Message::Unreached { .. } => (Speaker::Trainer, "that trainers are out of reach"),
        Message::Finished { .. } => (Speaker::Worker, "results"),
        Message::Heartbeat(_) => (Speaker::Worker, "a heartbeat"),
    }
}

/// One trainer's stretch of every packed stream of a step.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Lengths {
    /// The step.
    pub step: u64,
    /// The order of its phases, the same at every trainer; none: all its nano-batches go forward, then all of them backward.
    pub turns: Option<Turns>,
    /// Documents of each nano-batch.
    pub nanos: Vec<NanoLengths>,
}

/// One trainer's stretch of one packed stream.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct NanoLengths {
    /// The documents that this trainer holds rows of: number in the stream and whole length.
    pub documents: Vec<(u32, u32)>,
    /// Rows of this trainer, in stream order.
    pub stretches: Vec<Stretch>,
}

/// What a trainer tells about a finished step.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct StepDone {
    /// The step.
    pub step: u64,
    /// Mean loss over all trainers.
    pub loss: f32,
    /// Norm of the summed gradient, before clipping.
    pub gradient_norm: f32,
    /// Learning rate of the update.
    pub learning_rate: f32,
    /// Mean loss of documents that are held out, after the update; none in a step that computes none.
    pub validation_loss: Option<f32>,
    /// Rows of all trainers and nano-batches.
    pub tokens: u64,
    /// From header to header.
    pub seconds: f64,
    /// Time in attention calls in which the trainer computed nothing.
    pub exposed_wait_seconds: f64,
    /// Time between the step before and this one in which the trainer waited for its header and plan; 0 in the first one.
    #[serde(default)]
    pub header_wait_seconds: f64,
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
    /// Bytes that it pulled from other processes.
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
        /// Whether the cause lies in what the user gave (exit code 2), not in what happened (3).
        bad_input: bool,
    },
}

#[cfg(test)]
mod tests;
