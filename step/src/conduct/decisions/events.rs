//! What happens to the conductor of a job, and what it has its shell do.
//!
//! In and out: plain values. Nothing is decided here.

use std::sync::Arc;

use cadre_protocol::{End, Fillers, Message, Peer, PeerId, ServerId, conductor};

use crate::conduct::{self, Filled, Made, Making, View};
use crate::envelope::{Ending, Said, ServerStep, StepDone};
use crate::header::Header;
use crate::phases::Direction;
use crate::planned::PlannedStep;

/// A place in a run at which faults are fired: before the first phase of a step that goes this way.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct FaultAt {
    /// Step, from 0.
    pub step: u64,
    /// Which way.
    pub direction: Direction,
}

/// What happens to the conductor of a job.
#[derive(Debug)]
pub enum Event {
    /// Who the trainers are and where they listen, by rank.
    Trainers(Vec<(PeerId, String)>),
    /// The controller offers servers.
    View(View),
    /// The controller wants the job to end after the last step that is out.
    Stop {
        /// Whether a checkpoint is to be written first.
        checkpoint: bool,
    },
    /// The controller has fired the faults of a place.
    Fired(FaultAt),
    /// The process of the trainer of this rank was asked to end: the job ends after the last step that is out.
    Asked(u16),
    /// A worker tells something of itself.
    Told(Peer, Said),
    /// A peer beats in another life than the one that heard the headers of live steps.
    CameBack(Peer),
    /// The job has failed, and ends now.
    Failed,
    /// Something for the machine of the protocol; its tick is also the tick of what is decided here.
    Protocol(conductor::Event),
    /// The answer to [`Command::Make`].
    Made(Result<Made, conduct::Error>),
    /// The answer to [`Command::Plan`].
    Planned(Result<Arc<PlannedStep>, Refused>),
    /// This step has begun in this process, as [`Command::Begin`] asked.
    Begun(u64),
    /// The answer to [`Command::Propose`].
    Proposed {
        /// The step.
        step: u64,
        /// Which proposal.
        proposal: u64,
        /// Whether every bundle has a slot.
        placed: Result<(), cadre_planner::Error>,
    },
}

/// Why a header was not planned.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Refused {
    /// Some bundle fits no slot that is filled. Other fillers may do.
    Unplaceable(String),
    /// There is no plan.
    Impossible(String),
}

/// What the conductor has its shell do, in this order.
#[derive(Debug)]
pub enum Command {
    /// Make a header, and come back with [`Event::Made`].
    Make(Box<Making>),
    /// Plan a header, and come back with [`Event::Planned`]. The list is told with it: trainers and where they listen.
    Plan(Box<Filled>, Vec<(PeerId, String)>),
    /// Begin a step that was planned in this process.
    Begin(u64),
    /// Tell another process the header of a step that was planned, until it has heard it.
    Header {
        /// The step.
        step: u64,
        /// To whom.
        to: Peer,
    },
    /// Learn where a server listens.
    Know(PeerId, String),
    /// Tell all other trainers where servers listen, until they have heard it.
    Addresses(Vec<(PeerId, String)>),
    /// Send once; to the own process: hand to the machine that it is for.
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
    /// Find out whether dealing out the bundles of a step that has begun over these fillers, one after the other, gives every
    /// bundle a slot; come back with [`Event::Proposed`].
    Propose {
        /// The step.
        step: u64,
        /// Which proposal.
        proposal: u64,
        /// Fillers of rounds `1..`.
        tables: Vec<Fillers>,
    },
    /// A server is lost: it is owed nothing more, and its links are closed.
    Lost(ServerId),
    /// Who is owed something and does not [hear](super::Decisions::hears) any more is owed nothing.
    ForgetGone,
    /// Drop what nobody needs any more; it takes as long as a step has documents.
    Drop(Arc<Header>),
    /// Tell the controller that a step has got to where faults are fired, and come back with [`Event::Fired`].
    Reached(FaultAt),
    /// Tell the controller of a step that is over, and forget it.
    Over(Box<Over>),
    /// Tell the controller something that people read.
    Say(About, String),
    /// Write something into the log of this process.
    Log(Level, String),
    /// No step follows.
    Ending(Ending),
    /// The machine of the protocol says why the job cannot go on.
    End(End),
}

/// What people are told about.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum About {
    /// Something that they should look at.
    Warning,
    /// A server was declared lost.
    ServerLost(ServerId),
    /// No server is left for some work of a step.
    PoolLost,
    /// There are servers again.
    PoolBack,
}

/// How much a line of the log matters.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Level {
    /// Something is not as it should be.
    Warning,
    /// Something has changed.
    Information,
    /// For who looks for a fault.
    Detail,
}

/// A step that is over.
#[derive(Clone, Debug)]
pub struct Over {
    /// The step.
    pub planned: Arc<PlannedStep>,
    /// What trainers told, by rank: of all of them, unless the job has failed.
    pub done: Vec<StepDone>,
    /// What servers did.
    pub served: Vec<Served>,
    /// Servers lost since the step before was over.
    pub failovers: u32,
    /// Servers lost in the job so far.
    pub failovers_so_far: u32,
    /// Steps of the job; none while nobody has said how many.
    pub steps: Option<u64>,
}

/// What a server did in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Served {
    /// Who.
    pub by: Peer,
    /// The slot that it fills.
    pub slot: usize,
    /// What it told.
    pub did: ServerStep,
}
