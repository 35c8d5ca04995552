//! Messages between machines: small, serialisable, each for one kind of machine.
//!
//! Every message may be lost with its link, and may come twice or late: all are idempotent, and the
//! machines say again what a peer may have missed. Within one link and direction they are ordered.

use serde::{Deserialize, Serialize};

use crate::{At, Fillers, Nanos, Phase, Round, ServerId, TrainerId, Work};

/// A message of the protocol.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Message {
    /// Trainer to server: my rows of this phase are readable and my landing space is reserved.
    Doorbell {
        /// The phase.
        at: At,
        /// Newest round of the step that the trainer knows.
        round: Round,
        /// Results that the server may free.
        acks: Acks,
        /// Digest of the trainer's plan of the step.
        digest: u64,
    },
    /// Server to trainer: results for you are readable.
    Finished {
        /// The phase.
        at: At,
        /// Work that has results for the trainer.
        works: Vec<Work>,
    },
    /// Trainer to server: acknowledgements that no doorbell carried.
    Ack {
        /// Results that the server may free.
        acks: Acks,
    },
    /// Trainer to conductor: every phase up to this one is whole here.
    PhaseDone {
        /// The last phase of the prefix.
        at: At,
    },
    /// Conductor to all: every trainer has the whole results of every phase up to this one.
    Watermark {
        /// The last phase of the prefix.
        at: At,
    },
    /// Conductor to all: who fills the slots from now on.
    Round {
        /// The step.
        step: u64,
        /// The newest round, equal to the number of tables.
        round: Round,
        /// Fillers of rounds `1..=round`, all of them: who missed one needs no history.
        tables: Vec<Fillers>,
    },
    /// Any machine to the conductor: alive, and what it knows.
    Heartbeat(Box<Heartbeat>),
    /// Conductor to all: alive, and the watermark once more.
    Pulse {
        /// The watermark.
        watermark: Option<At>,
        /// Servers that the conductor cannot reach: do trainers?
        ask: Vec<ServerId>,
    },
    /// Trainer to conductor: this server may be lost.
    Suspect {
        /// Whom.
        server: ServerId,
        /// Why.
        why: Why,
        /// For how long already.
        lasting: Nanos,
    },
    /// Conductor to a server: you were declared lost.
    Leave {
        /// Whom.
        server: ServerId,
    },
    /// Trainer, or the server in its process, to the conductor: these trainers cannot be reached.
    Unreached {
        /// Whom, and for how long already.
        trainers: Vec<(TrainerId, Nanos)>,
    },
    /// Conductor to a server that is to leave: nothing that is not passed is planned for you, and nothing will be.
    Spare {
        /// The watermark.
        watermark: Option<At>,
    },
}

/// Which machine of the receiving process a message is for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Audience {
    /// The trainer machine.
    Trainer,
    /// The server machine, dedicated or in place.
    Server,
    /// The conductor.
    Conductor,
    /// Trainer and server machine, whichever the process has.
    Members,
}

impl Message {
    /// The machine that has to get it.
    pub fn audience(&self) -> Audience {
        match self {
            Self::Doorbell { .. } | Self::Ack { .. } | Self::Leave { .. } | Self::Spare { .. } => {
                Audience::Server
            }
            Self::Finished { .. } => Audience::Trainer,
            Self::PhaseDone { .. }
            | Self::Heartbeat(_)
            | Self::Suspect { .. }
            | Self::Unreached { .. } => Audience::Conductor,
            Self::Watermark { .. } | Self::Round { .. } | Self::Pulse { .. } => Audience::Members,
        }
    }
}

/// Results that a trainer has, or does not want.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct Acks {
    /// Everything up to this phase, whoever made it.
    pub through: Option<At>,
    /// Results of later phases that this server announced.
    pub works: Vec<(At, Work)>,
}

/// What a trainer or dedicated server tells the conductor every 200 ms.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// The watermark that it knows.
    pub watermark: Option<At>,
    /// Trainers: the last phase of the prefix that is whole.
    pub done: Option<At>,
    /// Steps that it has begun and not ended, with the newest round that it knows.
    pub rounds: Vec<(u64, Round)>,
    /// Servers: the earliest phase with work whose rows can all be pulled and which has not run, and
    /// for how long that has been so.
    pub owes: Option<(At, Nanos)>,
    /// Servers: trainers whose rows could not be pulled, and for how long that has been so.
    pub unreached: Vec<(TrainerId, Nanos)>,
    /// Trainers: servers that answered since the conductor asked for them.
    pub reached: Vec<ServerId>,
    /// Servers: this one is to leave the job. Nothing more is to be planned for it.
    pub leaves: bool,
}

/// Why a server is suspect.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Why {
    /// The link to it breaks.
    Broken,
    /// The server's work is late.
    Late {
        /// The step.
        step: u64,
        /// The phase.
        phase: Phase,
    },
}
