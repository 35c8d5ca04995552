//! Steps, rounds, pulls and watermarks as state machines.
//!
//! Three machines: [`trainer::Trainer`], [`server::Server`] (dedicated or in place) and
//! [`conductor::Conductor`]. Each takes events with the time at which they happened and appends
//! commands; a shell (the worker, or the simulation in `tests/`) carries the commands out.
//!
//! The crate does no IO, reads no clock, starts no thread, and knows neither the planner nor what
//! the bytes mean: a [`Step`] says which bundle needs which parcels and who wants which results.
//!
//! Invariants that others rely on, all asserted by the simulation:
//! * a trainer accepts every result that it wants exactly once, made from the rows of that phase;
//! * [`trainer::Command::Release`] comes only when no result still wanted can need the rows;
//! * a server never holds more bytes than [`server::Server::budget`];
//! * the earliest phase that is not complete never waits for a later one.

mod assigned;
pub mod conductor;
mod groups;
mod ids;
mod message;
mod peer;
mod rules;
pub mod server;
mod settings;
mod shape;
mod step;
pub mod trainer;

pub use assigned::AssignedRounds;
pub use groups::Groups;
pub use ids::{
    At, Bundle, Nanos, Parcel, Peer, Phase, PullId, Round, ServerId, Slot, TrainerId, Work,
};
pub use message::{Acks, Audience, Heartbeat, Message, Why};
pub use peer::{PeerId, Piece, Role};
pub use rules::Rules;
pub use settings::{OnPoolLoss, Settings};
pub use shape::{BundleShape, ParcelShape, Shape, ShapeError, WorkOf, WorkShape, Works};
pub use step::{Assignment, Filler, Fillers, RoundTable, Step, StepError, alive};

/// How a pull ended: the incarnation found at the far side after the last byte, or why it failed.
///
/// Trainers have incarnation 0. Where a connection names its peer (tcp) the incarnation found is the
/// one asked for; where memory is mapped (shared memory) it is the generation word read afterwards.
pub type PullResult = Result<u32, PullFailure>;

/// Why a pull brought nothing; of two reasons the later one here says more of the path.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, thiserror::Error)]
pub enum PullFailure {
    /// The far side no longer (or not yet) has it.
    #[error("the peer does not have it")]
    Gone,
    /// The endpoint was closed by force.
    #[error("the link was closed")]
    Cancelled,
    /// The link broke.
    #[error("the link to the peer broke")]
    PeerFailed,
    /// The deadline passed.
    #[error("the deadline passed")]
    Deadline,
}

/// Trainers that are named; of more there is only the number.
const NAMED: usize = 16;

fn dead(trainers: &[TrainerId]) -> String {
    let names: Vec<_> = trainers.iter().take(NAMED).map(|it| it.0.to_string()).collect();
    match trainers.len() {
        1 => format!("trainer {} is dead", names[0]),
        count if count > NAMED => {
            format!("trainers {} and {} others are dead", names.join(", "), count - NAMED)
        }
        _ => format!("trainers {} are dead", names.join(", ")),
    }
}

/// Why a machine has ended: the last command that it gives. The job ends, unless it says otherwise.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum End {
    /// The conductor declared this server lost. The process ends and may come back with a new
    /// incarnation; the job goes on.
    #[error("server {} (incarnation {}) was declared lost; start it anew with a higher incarnation", .0.index, .0.incarnation)]
    DeclaredLost(ServerId),
    /// Two processes have different plans.
    #[error("plan digest {ours:016x} differs from {theirs:016x} of trainer {}; run the same build everywhere", from.0)]
    Digest {
        /// Who rang.
        from: TrainerId,
        /// Digest of our plan.
        ours: u64,
        /// Digest of the trainer's plan.
        theirs: u64,
    },
    /// Nothing was heard from the conductor.
    #[error("nothing heard from the conductor for {} ms; restart the job", .0.millis())]
    ConductorSilent(Nanos),
    /// Trainers are dead or cannot be reached.
    #[error("{}; restart the job from its checkpoint", dead(.0))]
    TrainersDead(Vec<TrainerId>),
    /// One trainer cannot reach servers that the others reach.
    #[error(
        "trainer {} cannot reach servers {} and {}, which others reach; mend its network or move it to another machine, then restart the job from its checkpoint",
        trainer.0, servers[0].index, servers[1].index
    )]
    TrainerCutOff {
        /// Who is cut off.
        trainer: TrainerId,
        /// From whom; if the indices are equal, from two lives of one server.
        servers: [ServerId; 2],
    },
    /// Two trainers do not get rows of each other.
    #[error(
        "trainers {} and {} do not get rows of each other, although the conductor hears both; mend the network between them or move one to another machine, then restart the job from its checkpoint",
        .0[0].0, .0[1].0
    )]
    TrainersApart([TrainerId; 2]),
    /// No server is left and the job does not go on without.
    #[error("no attention server is left in step {step}; start servers or set onPoolLoss")]
    PoolLost {
        /// The step that cannot go on.
        step: u64,
    },
    /// A server's memory cannot hold its part of a step.
    #[error(
        "step {step} needs {needed} bytes on this server, it has {memory}; give it more memory or cut documents shorter"
    )]
    Memory {
        /// The step.
        step: u64,
        /// Bytes that the step needs.
        needed: u64,
        /// Bytes that the server has.
        memory: u64,
    },
    /// A peer sent more than it may.
    #[error("trainer {} rang {count} times for steps that have not begun; restart the job", from.0)]
    Flooded {
        /// Who rang.
        from: TrainerId,
        /// How often.
        count: usize,
    },
    /// Too many rounds in one step.
    #[error("step {step} had {rounds} rounds; servers come and go too fast")]
    Rounds {
        /// The step.
        step: u64,
        /// Rounds so far.
        rounds: usize,
    },
}
