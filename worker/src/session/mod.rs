//! A rank's side of a job as a library: rows of Q, K and V go in, O comes out, and the gradients likewise.
//!
//! ```text
//! Session::join ─▶ announce(lengths of step 0)
//!   begin(step) ─▶ announce(lengths of step + 1)
//!     submit(phase, rows) ─▶ Ticket ─▶ wait(ticket, room for results)     for every phase, in the order of the step's turns
//!   done(step) ─▶ begin(step + 1) …
//! busy(how long), from any place, while the rank does something else: saves, evaluates
//! announce_end(steps), where the number of steps was not known before
//! leave(outcome)
//! ```
//!
//! In: what the rank's loader and model have. Out: results, whatever servers were lost on the way. The
//! session owns the threads *io* (with the conductor in rank 0), *plan*, *control* and *rescue*, and *copies* once rows are lent that
//! lie on a GPU ([`LentInputs`]). What the
//! plan gives to this rank's own processor is computed inside `begin` and `wait`, on the calling thread.
//! Any number of threads may wait; meanwhile others submit, poll and ask, and never wait for those.
//!
//! A rank may have no rows of a nano-batch: it announces it without documents, and makes no call for its phases. The session
//! says of each that it is done here, and *rescue* computes what the plan gives to this rank in them.
//!
//! It sums no gradients, writes no checkpoint, installs no signal handler, and never ends the process. A call out of turn or
//! with rows of another size is an [`Error`] that names rank, phase and remedy; nothing of it is sent, and the job ends
//! everywhere with that reason.
//!
//! Invariant: `wait` returns only when the rank's rows are complete and every work of that phase that was planned for this
//! rank's in-place server has run, so no other rank waits for this one's next call. The session keeps no tensor of the
//! caller's; its own copies of a phase's rows stay readable until every rank has all results of that phase.

mod call;
mod copies;
mod join;
mod join_error;
mod leave;
mod lent;
mod lent_rows;
mod merging;
mod model;
mod rank;
mod rows;
mod side;
#[cfg(test)]
mod tests;
mod turn;
mod waiting;

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use cadre_control::client;
use cadre_exchange::{Greeter, Waker};
use cadre_protocol::At;

use crate::io::After;

pub use self::call::{Error, Inputs, Outputs, PhaseInputs, PhaseOutputs};
use self::join::Once;
pub use self::join::{First, Join};
pub use self::join_error::JoinError;
use self::leave::BusyTold;
pub use self::leave::{LeaveError, Outcome};
pub use self::lent_rows::{LentInputs, LentOutputs};
pub use self::model::Model;
pub use self::rank::Rank;
pub use self::rows::{PerHead, PerHeadMut, Rows, RowsMut};

// What calls take and give, wherever it is decided: a trainer names no other crate of the data plane, and nothing else of this one.
// `scripts/purity` holds the reference trainer and the example to it.
pub use crate::attach::{ALL_JOIN_WITHIN, Contract};
pub use crate::headers;
pub use crate::io::exchange::Choice as ExchangeChoice;
pub use crate::launch::{heads as kernel_heads, mask as kernel_mask};
pub use crate::trace::{Activity, Tracer};
pub use cadre_control::proto::{finished, notice};
pub use cadre_control::{Endpoint, Settings};
pub use cadre_crds::Wire;
pub use cadre_kernels::{Choice as EngineChoice, Threads};
pub use cadre_planner::{DocumentId, Heads, Mask, Stretch, Tolerance};
pub use cadre_step::envelope::{Ending, Lengths, NanoLengths, StepDone};
pub use cadre_step::header::{Header, KvHeads};
pub use cadre_step::layers::{Factor, Kind, Layers, Sinks, dim_in, heads_in};
pub use cadre_step::phases::{Direction, PhaseAt, PhaseOrder};
pub use cadre_step::planned::{PlannedStep, TooManyPlans, check_plans};
pub use cadre_step::turns::{Error as TurnsError, Turn, Turns, Which};

/// Links of the ranks among themselves, over which the session's [`Session::greeter`] proves who is there.
pub mod links {
    pub use cadre_exchange::{Caller, Encryption, Greeter, Guest, PeerId, Purpose, Stream, Waker};
}

/// What a rank's process does about its parent and its signals. The session itself does nothing about them.
pub mod process {
    pub use crate::process::{Error, Termination, arm_parent_death, last_words};
}

/// What the conductor wants next.
#[derive(Clone, Debug)]
pub enum Next {
    /// Run this step.
    Step(Arc<PlannedStep>),
    /// No step follows.
    End(Ending),
}

/// A submitted phase, to be waited for once.
#[derive(Debug)]
#[must_use = "a phase that is not waited for holds its results"]
pub struct Ticket {
    planned: Arc<PlannedStep>,
    at: At,
    phase: PhaseAt,
}

impl Ticket {
    /// Which phase it is of.
    pub fn phase(&self) -> PhaseAt {
        self.phase
    }
}

/// See the module.
pub struct Session {
    rank: Rank,
    pod: bool,
    greeter: Greeter,
    interrupt: Waker,
    settings: Settings,
    control: client::Sender,
    busy: BusyTold,
    /// Until it has left.
    io: Option<JoinHandle<After>>,
    _once: Once,
}

/// What is asked of a rank's phases is asked of its session.
impl Deref for Session {
    type Target = Rank;

    fn deref(&self) -> &Rank {
        &self.rank
    }
}

impl Session {
    /// What the job says.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Whether the controller is the operator, which keeps nothing of the job itself.
    pub fn is_pod(&self) -> bool {
        self.pod
    }

    /// Proves to other ranks, over links of the caller's, that this one belongs to the job.
    pub fn greeter(&self) -> &Greeter {
        &self.greeter
    }

    /// Is used when the job ends: for waits of the caller that are not for this session.
    pub fn interrupt(&self) -> &Waker {
        &self.interrupt
    }
}

/// A thread that panicked while it held a lock has left nothing half done that a later call would read.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
