//! The data plane of a job: an attention server's process, and a rank's side with the conductor, as a library.
//!
//! ```text
//! trainer: main thread ──rows, phases──▶ io thread ◀──rows, results──▶ io thread ◀── compute: server
//!              │ model, in place          │ exchange, protocol machines, conductor
//!              └ all-reduce ring          └ control stream ──▶ controller
//! ```
//!
//! The pure crates decide (`cadre-planner`, `cadre-protocol`, `cadre-step`); here it is carried out. [`io`] moves rows,
//! [`launch`] runs kernels, [`session`] is what a rank calls.

pub mod attach;
pub mod compute;
pub mod gpu_memory;
pub mod headers;
mod heads;
pub mod io;
pub mod launch;
pub mod memory;
pub mod merge;
pub mod process;
pub mod profile;
pub mod server;
pub mod session;
mod sums;
pub mod trace;
mod wire;

pub use cadre_kernels::{Choice, Threads};
pub use io::exchange::Choice as ExchangeChoice;
pub use server::{ServerArgs, server_main};
