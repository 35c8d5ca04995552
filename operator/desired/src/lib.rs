//! What the operator wants: observed state in, actions out.
//!
//! In: a [`job::Observed`] or a [`pool::Observed`], the chart's [`Settings`] and the time. Out: a list
//! of [`Action`]s, and a status made from what is there after they were carried out ([`Applied`]).
//!
//! ```text
//! observe ──▶ validate ──▶ decide ──▶ apply ──▶ report
//!                  here ───────▲                  ▲ here: status
//! ```
//!
//! No IO, no clock, no thread: the same observation gives the same actions. What is remembered stands
//! in the objects themselves (labels, annotations, status), so an operator may die at any point and
//! another goes on. Invariants that the tests hold:
//!
//! * From any state, carrying out the actions again and again ends where there are none, and stays.
//! * Two attempts of a job never train at once; no server with work goes away without a drain.
//! * Nothing that belongs to somebody else is touched: objects are created, never taken over.

mod action;
mod conditions;
pub mod identity;
pub mod job;
mod names;
mod owned;
mod pod;
mod podspec;
pub mod pool;
mod settings;

pub use action::{Action, Applied, Failure, Kind, Object, Reference};
pub use names::{
    MANAGER, SCALER, server as server_name, servers_budget, servers_service, trainers_service,
};
pub use settings::Settings;
