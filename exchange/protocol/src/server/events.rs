//! What a server machine is told, and what it tells its shell to do.

use std::sync::Arc;

use crate::{
    At, End, Filler, Fillers, Message, Nanos, Parcel, Peer, PullId, PullResult, Round, RoundTable,
    ServerId, Step, TrainerId, Work,
};

/// Who a server machine is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Host {
    /// A process of its own.
    Dedicated(ServerId),
    /// A library in a trainer's process.
    InPlace(TrainerId),
}

impl Host {
    pub(super) fn fills(self, filler: Filler) -> bool {
        match (self, filler) {
            (Self::Dedicated(me), Filler::Server(id)) => me == id,
            (Self::InPlace(me), Filler::InPlace(id)) => me == id,
            (_, Filler::Server(_) | Filler::InPlace(_) | Filler::Standby(_)) => false,
        }
    }

    pub(super) fn peer(self) -> Peer {
        match self {
            Self::Dedicated(id) => Peer::Server(id),
            Self::InPlace(id) => Peer::Trainer(id),
        }
    }
}

/// What happens to a server.
#[derive(Clone, Debug)]
pub enum Event {
    /// The header of a step is here and planned.
    Begin(Arc<Step>),
    /// A message for this machine.
    Message {
        /// Who sent it.
        from: Peer,
        /// What.
        message: Message,
    },
    /// A pull ended. Every pull ends exactly once.
    Pulled {
        /// Which.
        pull: PullId,
        /// How.
        result: PullResult,
    },
    /// A launch ended. Every work made ready is named exactly once, also after [`Command::Cancel`].
    Ran {
        /// The phase.
        at: At,
        /// All work of the launch.
        works: Vec<Work>,
    },
    /// The answer to [`Command::Reassign`].
    Round(Arc<RoundTable>),
    /// The link to or from a peer broke, or a try to open it failed.
    Closed(Peer),
    /// Messages to a peer were dropped because too many waited for it. Its link stands, and has room again.
    Unsaid(Peer),
    /// This server is to leave the job: see [`Server::is_spare`](super::Server::is_spare).
    Leave,
    /// The deadline has come.
    Tick,
}

/// What a server's shell has to do.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Command {
    /// Send, opening a link if there is none. To the own process: hand to the machine it is for.
    Send {
        /// To whom.
        to: Peer,
        /// What.
        message: Message,
    },
    /// Pull a parcel. In place, from the own trainer: take it.
    Pull {
        /// The name of the pull.
        pull: PullId,
        /// Whose rows.
        peer: TrainerId,
        /// The phase.
        at: At,
        /// Which rows.
        parcel: Parcel,
        /// When it ends with [`PullFailure::Deadline`](crate::PullFailure::Deadline) if nothing has come from the peer;
        /// every byte that comes, for this pull or another one of the link, moves it on by as much as it is away now.
        deadline: Nanos,
    },
    /// What this pull brought counts; keep it until [`Command::FreeInput`].
    Accept {
        /// Which pull.
        pull: PullId,
        /// The phase.
        at: At,
        /// Which rows.
        parcel: Parcel,
    },
    /// What this pull brought, if anything, does not count; free its landing space.
    Discard {
        /// Which pull.
        pull: PullId,
    },
    /// All rows of the work's bundle are here and its results have room: queue it.
    Ready {
        /// The phase.
        at: At,
        /// The work.
        work: Work,
    },
    /// All rows of these works of one bundle are here and their results have room, but rows that others of the bundle need
    /// are not. Queue them on a copy of their rows, with room for all of the bundle's, which is gone when the last of them
    /// ran.
    Ahead {
        /// The phase.
        at: At,
        /// The works.
        works: Vec<Work>,
    },
    /// Nothing of this phase is wanted any more: drop queued work, and report it as ran.
    Cancel(At),
    /// An accepted parcel is needed no more.
    FreeInput {
        /// The phase.
        at: At,
        /// Which rows.
        parcel: Parcel,
    },
    /// The results of a work that ran are needed no more; their readers have them.
    FreeResult {
        /// The phase.
        at: At,
        /// The work.
        work: Work,
    },
    /// Every phase of the step is passed and nothing of it is held here.
    StepOver(u64),
    /// Compute the assignments that follow from these tables, one after the other, and come back with
    /// [`Event::Round`].
    Reassign {
        /// The step.
        step: u64,
        /// The newest round.
        round: Round,
        /// Fillers of rounds `1..=round`.
        tables: Vec<Fillers>,
    },
    /// Close the links with a peer by force: every pull from it ends at once.
    Close(Peer),
    /// Nothing more comes from this machine.
    End(End),
}
