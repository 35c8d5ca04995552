//! How the IO thread and the other threads of its process speak to each other: what these ask for, what they are told, and where
//! it goes.
//!
//! In: nothing is done here. [`super::queues`] are what carries requests and notices, with their bounds.
//!
//! Invariant: whoever waits for a notice is told when the IO thread panics.

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use cadre_control::proto;
use cadre_exchange::{PeerId, Waker};
use cadre_protocol::{At, Nanos};
use cadre_step::conduct::{self, Made};
use cadre_step::envelope::{Ending, Lengths, StepDone};
use cadre_step::planned::PlannedStep;

use super::planning::{self, Plans, Ready, Reassigned};
use super::queues::Outlet;
use super::rows::{Part, Whole};
use super::telling::{Encoded, Read};
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
    /// The trainer has no rows of a phase.
    Skip(At),
    /// What the trainer's stream of a step holds; and as the conductor is told, if that is in another process.
    Lengths(Lengths, Option<Encoded>),
    /// The trainer has so many steps.
    Steps(u64),
    /// The trainer's main thread is at work elsewhere, for so long at most.
    Busy(Nanos),
    /// The trainer's step is over.
    StepDone(StepDone),
    /// A kernel refused, or something else that cannot go on.
    Fail(String),
    /// The caller of the session made a mistake: the job ends as one whose input is bad.
    Refuse(String),
    /// The process ends.
    Leave,
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

/// How the IO thread and the others of its process speak to each other.
pub struct Lines<M: Memory> {
    /// What others ask for, through handles.
    pub requests: Receiver<Asked<M>>,
    /// Where headers go to be made and planned.
    pub plans: Plans,
    /// Both ends of the controller's stream.
    pub control: Control,
    /// Where steps, phases and works go.
    pub outlets: Outlets<M>,
}

/// Where works go.
#[derive(Debug)]
pub struct Outlets<M: Memory> {
    /// The trainer's main thread, or the server's compute thread.
    pub main: Outlet<M>,
    /// Works whose own server was lost; in place only.
    pub rescue: Option<Outlet<M>>,
    /// Ends waits of the main thread that are not for notices, once the end was told.
    pub interrupt: Option<Waker>,
}

impl<M: Memory> Outlets<M> {
    /// Hands on what waited for room.
    pub(super) fn flush(&mut self) {
        self.main.flush();
        if let Some(rescue) = &mut self.rescue {
            rescue.flush();
        }
    }
}

impl<M: Memory> Drop for Outlets<M> {
    /// An IO thread that panics has ended the job for the threads of its process: whatever they wait for ends.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let lost = || Notice::Lost("the io thread panicked; its log says where".into());
            self.main.tell(lost());
            self.rescue.iter_mut().for_each(|it| it.tell(lost()));
            self.interrupt.iter().for_each(Waker::wake);
        }
    }
}

/// Both ends of the controller's stream.
pub struct Control {
    /// To it; says whether it was queued. Never waits.
    pub sender:
        Box<dyn Fn(proto::WorkerMessage) -> Result<(), cadre_control::client::Error> + Send>,
    /// From it.
    pub receiver: Receiver<proto::ControllerMessage>,
}
