//! Who may use which server: what every controller decides about slots, weights, drains and views.
//!
//! In: what a controller sees (a pool's pods, workers that come, report and go) and the time. Out: what it
//! says to workers ([`Command`]) and what it tells about them ([`Pool::reports`]).
//!
//! ```text
//! facts, hellos, reports ──▶ Pool ──▶ welcomes, rosters, views, drains
//!                             │  └ shares: slots to jobs; lend: what one does not use
//!                             └ each job: slots; each server: load
//! ```
//!
//! The operator runs a [`Pool`] for each object; the local supervisor, which has one job and starts the
//! processes itself, shares [`Slots`]. No IO, no clock, no thread: the same inputs give the same commands.

mod job;
mod lend;
pub mod load;
mod pool;
mod server;
mod settle;
pub mod shares;
pub mod slots;
mod types;
mod usage;

pub use load::{Health, Report, Trouble};
pub use pool::Pool;
pub use slots::{Kind, NOMINAL_WEIGHT, Server, Slot, Slots};
pub use types::{
    Command, Conductor, Facts, Fate, Hello, Input, JobFacts, JobKey, Number, ServerId,
    ServerReport, Trainer, Unserved, View, Who,
};
