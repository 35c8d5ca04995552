//! The controller of a run on one machine: what the operator is in a cluster.
//!
//! In: a [`RunConfig`]. Out: [`RunEvent`]s, then an [`Outcome`] or a [`RunError`].
//!
//! It starts trainers and dedicated servers, talks to them over a Unix socket, replaces dead
//! servers, offers views to the conductor, restarts the job from its newest checkpoint, fires the
//! faults that the user ordered, and leaves nothing running. It computes nothing and writes no file
//! but the workers' logs.

mod action;
pub mod config;
mod ending;
pub mod event;
mod exit;
pub mod fault;
pub mod launcher;
mod mode;
mod outgoing;
mod registration;
mod room;
mod run;
mod slots;
mod spawn;
mod state;
#[cfg(test)]
mod tests;

pub use config::{Limits, RunConfig};
pub use event::{
    Attempt, Level, LoadRecord, Outcome, ProcessRecord, Role, RunError, RunEvent, ServerKind,
    ServerRecord, StepRecord, WorkerName,
};
pub use fault::Fault;
pub use run::{Interrupt, run};
