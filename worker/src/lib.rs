//! The processes of a job: attention server, reference trainer with the conductor, local supervisor.
//!
//! ```text
//! trainer: main thread ──rows, phases──▶ io thread ◀──rows, results──▶ io thread ◀── compute: server
//!              │ model, in place          │ exchange, protocol machines, conductor
//!              └ all-reduce ring          └ control stream ──▶ supervisor
//! ```
//!
//! The pure crates decide (`cadre-planner`, `cadre-protocol`); here it is carried out. [`planned`] turns a
//! header into plans, [`lowering`] a plan into transfer lists, [`io`] moves them, [`launch`] runs kernels.

pub mod attach;
pub mod compute;
pub mod conduct;
pub mod gpu_memory;
pub mod header;
pub mod io;
pub mod launch;
pub mod lowering;
pub mod memory;
pub mod merge;
pub mod phases;
pub mod planned;
pub mod process;
pub mod server;
pub mod supervisor;
pub mod trace;
pub mod trainer;
mod wire;

pub use cadre_kernels::{Choice, Threads};
pub use io::exchange::Choice as ExchangeChoice;
pub use server::{ServerArgs, server_main};
pub use trainer::process::{TrainArgs, trainer_main};
