//! Names of things: trainers, servers, slots, phases, work, pulls, and virtual time.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
        pub struct $name(pub $inner);
    };
}

id! {
    /// A trainer, `0..trainers`. The conductor sits with trainer 0.
    TrainerId(u16)
}
id! {
    /// A place for a server in the plan, `0..slots`.
    Slot(u16)
}
id! {
    /// Index of a phase in its step, in step order.
    Phase(u32)
}
id! {
    /// Index of a bundle in its [`Shape`](crate::Shape).
    Bundle(u32)
}
id! {
    /// Index of a unit of work in its [`Shape`](crate::Shape): forward a task, backward a bundle.
    Work(u32)
}
id! {
    /// Index of a parcel in its [`Shape`](crate::Shape): rows of one bundle that one trainer holds, pulled in one go.
    Parcel(u32)
}
id! {
    /// Count of reassignments inside a step; 0 is what the header says.
    Round(u32)
}
id! {
    /// A pull of one machine. Each machine counts its own: in a process with two machines, the shell
    /// keeps them apart.
    PullId(u64)
}
/// Nanoseconds: a moment since some start that the shell chose, or a span.
#[derive(
    Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, Deserialize,
)]
pub struct Nanos(pub u64);

impl Nanos {
    /// A span of whole milliseconds.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis * 1_000_000)
    }

    /// Whole milliseconds.
    pub const fn millis(self) -> u64 {
        self.0 / 1_000_000
    }

    /// The moment `span` later.
    #[must_use]
    pub const fn after(self, span: Self) -> Self {
        Self(self.0.saturating_add(span.0))
    }

    /// The earlier of two moments of which either may never come.
    #[must_use]
    pub fn first_of(one: Option<Self>, other: Option<Self>) -> Option<Self> {
        match (one, other) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        }
    }

    /// The span since `earlier`, zero if that is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }
}

/// A dedicated server process: a replacement has the same index and a higher incarnation.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
pub struct ServerId {
    /// Which server.
    pub index: u16,
    /// Which life of it.
    pub incarnation: u32,
}

/// A process of the data plane. An in-place server is reached through its trainer.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
pub enum Peer {
    /// A trainer with its in-place server; trainer 0 also with the conductor.
    Trainer(TrainerId),
    /// A dedicated server.
    Server(ServerId),
}

impl Peer {
    /// The process in which the conductor lives.
    pub const CONDUCTOR: Self = Self::Trainer(TrainerId(0));

    /// The incarnation that a pull from this peer has to find.
    pub const fn incarnation(self) -> u32 {
        match self {
            Self::Trainer(_) => 0,
            Self::Server(id) => id.incarnation,
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Trainer(id) => write!(f, "trainer {}", id.0),
            Self::Server(id) => write!(f, "server {} (incarnation {})", id.index, id.incarnation),
        }
    }
}

/// A phase of the whole run, ordered as the job goes through them.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
pub struct At {
    /// The step.
    pub step: u64,
    /// The phase in it.
    pub phase: Phase,
}

impl At {
    /// Phase `phase` of step `step`.
    pub const fn new(step: u64, phase: u32) -> Self {
        Self { step, phase: Phase(phase) }
    }
}
