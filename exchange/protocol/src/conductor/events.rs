//! What the shell in trainer 0 tells the conductor, and what the conductor asks of it.

use crate::{End, Fillers, Message, Peer, Round, ServerId, TrainerId};

/// What happens to the conductor.
#[derive(Clone, Debug)]
pub enum Event {
    /// Who fills the slots of headers to come. The first comes before the first `HeaderReady`.
    View(Fillers),
    /// A step can be published as soon as there is room for it. Steps come in order.
    HeaderReady {
        /// The step.
        step: u64,
        /// The number of phases of the step, not 0.
        phases: u32,
    },
    /// The answer to [`Command::Publish`]: every bundle of the step's header has a slot.
    Published {
        /// The step.
        step: u64,
    },
    /// The answer to [`Command::Propose`]: every bundle has a slot.
    Placed {
        /// The step.
        step: u64,
        /// Which proposal.
        proposal: u64,
    },
    /// The answer to [`Command::Propose`] or [`Command::Publish`]: some bundle fits no live slot.
    Unplaceable {
        /// The step.
        step: u64,
        /// Which proposal, or [`HEADER`](super::HEADER).
        proposal: u64,
    },
    /// A server that nobody has named here yet says something. It is not heard, but it lives: so nothing is to be learnt from
    /// silence of the server that had its place before.
    Unnamed(ServerId),
    /// A message for this machine.
    Message {
        /// Who sent it.
        from: Peer,
        /// What.
        message: Message,
    },
    /// The link to or from a peer broke, or a try to open it failed.
    Closed(Peer),
    /// A trainer has left the job, as it said: that it is not there any more is no news.
    Left(TrainerId),
    /// The deadline has come.
    Tick,
}

/// What the conductor's shell has to do.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Command {
    /// Make the header of the step with these fillers as round 0; `Header` commands follow. If some
    /// bundle then has no slot, come back with [`Event::Unplaceable`] of [`HEADER`](super::HEADER) before any other
    /// event, and send no header: the step is published again with other fillers.
    Publish {
        /// The step.
        step: u64,
        /// By slot.
        fillers: Fillers,
    },
    /// Send the header of a published step, again if need be; to trainer 0, begin it.
    Header {
        /// The step.
        step: u64,
        /// To whom.
        to: Peer,
    },
    /// Send, opening a link if there is none. To the own process: hand to the machine it is for.
    Send {
        /// To whom.
        to: Peer,
        /// What.
        message: Message,
    },
    /// The same as [`Self::Send`] to each of them.
    SendAll {
        /// To whom.
        to: Vec<Peer>,
        /// What.
        message: Message,
    },
    /// Find out whether reassigning over these tables, one after the other, gives every bundle a slot,
    /// and come back with [`Event::Placed`] or [`Event::Unplaceable`].
    Propose {
        /// The step.
        step: u64,
        /// Which proposal. An answer to an older one is ignored.
        proposal: u64,
        /// Fillers of rounds `1..`.
        tables: Vec<Fillers>,
    },
    /// This server is lost: tell the controller, close its links.
    DeclareLost(ServerId),
    /// No live slot can take a bundle of the step, and no step runs before it; the job waits, goes local or ends.
    PoolLost {
        /// The step.
        step: u64,
    },
    /// A round was sent: what fills the slots of this step now.
    Filled {
        /// The step.
        step: u64,
        /// The round.
        round: Round,
    },
    /// Every trainer has every result of the step.
    StepDone(u64),
    /// Nothing more comes from this machine; the job ends.
    End(End),
}
