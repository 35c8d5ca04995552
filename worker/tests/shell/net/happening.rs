//! What happens at a moment: to threads of a process, to its controller, on the wires.

use cadre_control::{Moment, proto};
use cadre_exchange::{PeerId, PullId};

use super::{Life, LinkId};

/// What happens at a moment.
#[derive(Debug)]
pub(crate) enum Happening {
    /// Something came for the IO thread of a process.
    Turn(Life),
    /// Something is due for it.
    Timer(Life),
    /// Its main thread has written what it writes last.
    Leave(Life),
    /// One of the threads that compute.
    Thread(Life, Thread),
    /// The thread that plans has a plan.
    Planned(Life),
    /// The controller says something to a process.
    Told(Life, Box<proto::ControllerMessage>),
    /// The controller looks at what it knows.
    Control(Chore),
    /// The world does something to processes or links.
    Fault(usize),
    /// A paused process goes on.
    Resume(Life),
    /// A main thread that stood still goes on.
    Moves(Life),
    /// A trainer leaves, though its job has further steps.
    Quits(Life),
    /// On the wires.
    Signal(Signal),
}

/// A thread that computes.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum Thread {
    /// The trainer's, or a server's compute thread.
    Main,
    /// Works whose own server was lost.
    Rescue,
}

/// What a controller does after a while.
#[derive(Debug)]
pub(crate) enum Chore {
    /// Says who is in the view.
    View,
    /// Starts a server of this index.
    Spawn(u16),
    /// Sees that a process is gone.
    Gone(Life),
    /// A server that another job had comes back.
    Return(PeerId),
    /// Has the faults of a moment come.
    Fire(Moment),
}

/// What travels.
#[derive(Debug)]
pub(crate) enum Signal {
    Dial(LinkId),
    GreetingLate(LinkId),
    Opened(LinkId),
    Message(LinkId, Vec<u8>),
    /// A message that has come before.
    Again(LinkId, Vec<u8>),
    Ask(LinkId, Life, PullId),
    Copied(LinkId, Life, PullId),
    Late(Life, PullId),
    /// A device has copied for a pull that had ended.
    Freed(Life, PullId),
    /// An end of a link learns that it is closed.
    Farewell(Life, LinkId),
}
