//! What the IO thread and the other threads of its process say to each other: what these ask for, and what they are told.
//!
//! In and out: nothing is done here. [`super::queues`] carry requests and notices, with their bounds; [`super::outlets`] are where
//! they come and go.

use std::sync::Arc;

use cadre_exchange::PeerId;
use cadre_protocol::{At, Nanos};
use cadre_step::conduct::{self, Made};
use cadre_step::envelope::{Ending, Lengths, Stands, StepDone};
use cadre_step::planned::PlannedStep;

use super::encoded::{Encoded, Read};
use super::planning::{self, Ready, Reassigned};
use super::whole::{Part, Whole};
use crate::launch::{Done, PhaseRows, Work};
use crate::memory::Memory;

/// What other threads ask for, with rows of the process or without.
#[derive(Debug)]
pub enum Asked<M> {
    /// Something without rows.
    For(Request),
    /// The trainer's rows of a phase.
    Submit(At, PhaseRows<M>),
    /// A work ran.
    Ran(Done<M>),
    /// A work was dropped, because nobody wants it any more.
    Dropped(Work<M>),
}

impl<M> From<Request> for Asked<M> {
    fn from(request: Request) -> Self {
        Self::For(request)
    }
}

/// What other threads want, wherever rows live.
#[derive(Debug)]
pub enum Request {
    /// The trainer has no rows of a phase, nor of those behind it, so many in all.
    Skip(At, u32),
    /// What the trainer's stream of a step holds; and as the conductor is told, if that is in another process.
    Lengths(Lengths, Option<Encoded>),
    /// The trainer has so many steps.
    Steps(u64),
    /// The trainer's main thread is at work elsewhere, for so long at most.
    Busy(Nanos, u64),
    /// The trainer's step is over.
    StepDone(StepDone),
    /// A kernel refused, or something else that cannot go on.
    Fail(String),
    /// The caller of the session made a mistake: the job ends as one whose input is bad.
    Refuse(String),
    /// The process ends; and which call is due that the trainer will not make.
    Leave(Option<Stands>),
    /// The process was asked to end.
    Terminate,
    /// The conductor's next header was made, but for its fillers.
    Made(Box<Result<Made, conduct::Error>>),
    /// A header was planned.
    Planned(Box<Result<Ready, planning::Error>>),
    /// A long word was read.
    Read(Box<Read>),
    /// The bundles of a step were dealt out for a round.
    Reassigned(Box<Reassigned>),
    /// What was finished is dropped.
    Freed,
}

/// What the threads that compute are told.
#[derive(Debug)]
pub enum Notice<M: Memory> {
    /// Who the trainers are and where they listen for the all-reduce, by rank.
    Trainers(Vec<(PeerId, String)>),
    /// A step can be submitted to.
    Step(Arc<PlannedStep>),
    /// A part of a phase's dK and dV.
    Part(Box<Part<M>>),
    /// A phase is whole; its parts came before.
    Whole(Box<Whole<M>>),
    /// A work can run.
    Work(Box<Work<M>>),
    /// Nothing up to here is wanted any more.
    Cancelled(At),
    /// This server can do nothing more, and why.
    Lost(String),
    /// No step follows.
    End(Ending),
}
