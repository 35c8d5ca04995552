//! What the sides of the IO thread give to one another, and to the other threads of the process.
//!
//! In: what machines and the exchange brought about. Out: one [`Output`] after the other, in the order in which they came to be. They
//! are handed on at one place, by `Io::settle`.
//!
//! Invariant: an output is put once and taken once; nothing waits for being looked for.

use std::collections::VecDeque;

use cadre_control::proto;
use cadre_protocol::{At, End, Message, PullId, PullResult};
use cadre_step::envelope::{Ending, Said};

use super::encoded::Unread;
use super::planning::{Finished, Ready, Reassign, Wanted};
use super::whole::{Part, Whole};
use crate::launch::Work;
use crate::memory::Memory;

/// A machine of this process.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Side {
    /// The trainer's.
    Trainer,
    /// The server's.
    Server,
}

/// Whether a work was planned for the server that runs it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Planned {
    /// The work was.
    Here,
    /// Its own server was lost.
    Elsewhere,
}

/// One of them.
#[derive(Debug)]
pub enum Output<M: Memory> {
    /// A message between machines of this process.
    Message(Message),
    /// What this process tells the conductor that lives in it.
    Conductor(Said),
    /// The device copies for a machine's pull, all of it.
    Begun(Side, PullId),
    /// A machine's pull ended.
    Pulled(Side, PullId, PullResult),
    /// A part of dK and dV, for the trainer's main thread.
    Part(Box<Part<M>>),
    /// A phase is whole, for the trainer's main thread.
    Whole(Box<Whole<M>>),
    /// A work can run, on the thread that it was planned for or on the other.
    Ready(Box<Work<M>>, Planned),
    /// A work that went out early counts since.
    Kept,
    /// Up to here nothing is wanted any more.
    Cancelled(At),
    /// A step is over for a machine.
    Over(u64),
    /// A step can begin in the conductor's process.
    Begin(Box<Ready>),
    /// The conductor's next header is to be made, or planned.
    Plan(Wanted),
    /// A long word that is to be read.
    Read(Box<Unread>),
    /// Bundles of a step that are to be dealt out.
    Reassign(Reassign),
    /// What is to be dropped beside the IO thread.
    Finished(Finished),
    /// What the controller is told.
    Report(Box<proto::WorkerMessage>),
    /// The conductor says that no step follows.
    Ending(Ending),
    /// The conductor's machine says why the job cannot go on.
    JobEnd(End),
    /// A machine says why nothing more comes from it.
    End(Side, End),
    /// This process can move nothing more.
    Broken(String),
    /// The job has more peers than the machine lets this process have links with.
    Crowded(String),
}

/// Outputs that nobody has taken yet.
#[derive(Debug)]
pub struct Outputs<M: Memory>(VecDeque<Output<M>>);

impl<M: Memory> Default for Outputs<M> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<M: Memory> Outputs<M> {
    /// Behind the others.
    pub fn put(&mut self, output: Output<M>) {
        self.0.push_back(output);
    }

    /// Something for the controller.
    pub fn report(&mut self, report: impl Into<proto::WorkerMessage>) {
        self.put(Output::Report(Box::new(report.into())));
    }

    /// The oldest.
    pub fn take(&mut self) -> Option<Output<M>> {
        self.0.pop_front()
    }
}
