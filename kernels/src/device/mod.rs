//! Core attention on an NVIDIA GPU: the only place that names CUDA.
//!
//! In: rows in device memory, or through [`host::HostRows`] in that of the host. Out: what [`crate::forward`] and
//! [`crate::backward`] give, by the kernels of `kernels/cuda`. The driver is opened at run time: a build with kernels starts
//! on machines without a GPU and says why it has none.
//!
//! ```text
//! host                   rows of the host: packs, copies, launches
//!   forward, backward    plans: lists on the GPU, made once, run for every layer
//!     scratch, upload    what runs need one after the other; lists on their way to the GPU
//!     plan, check        what a launch is; what is refused
//!     batch              launches of a plan, as errors name them
//!     lists, tiles       tile lists, dearest first: pure
//!       tables           as the kernels read them
//! linear                 a trainer's linear layers: weights that stay for a step
//!   blas                 products of f32, by cuBLASLt
//! rooms                  rows that stay on the GPU: room to write, parts to read
//!   arena, gate          memory that other processes read; words that streams wait for
//!   pieces, rows         many pieces at once: by the copy engine, or in one launch
//! ferry                  copies of a framework's rows from and to the host
//!   lent, pinned         these rows; memory of the host that is copied while others work
//! graph                  runs recorded once, launched again as one
//! watch                  where warps wait that wait too long: for builds of the kernels that tell
//!     memory, driver     buffers, streams, events; the library
//!       modules          the kernels' files, entry points and launches
//!         family         which kernels a GPU runs: those for Hopper, or the portable ones
//!     context            the current context of the caller's thread
//! ```
//!
//! It plans nothing and talks to no peer. Invariant: what reaches the GPU was checked; a lost GPU is an error, no panic.

mod arena;
mod backward;
mod batch;
mod blas;
mod check;
mod context;
mod driver;
mod error;
mod event;
mod family;
mod ferry;
mod forward;
mod gate;
mod graph;
pub mod host;
mod lent;
pub(crate) mod linear;
mod lists;
mod memory;
mod modules;
mod pieces;
mod pinned;
mod plan;
mod rooms;
mod rows;
mod scratch;
mod shelf;
mod slice;
pub mod tables;
mod tiles;
mod upload;
mod watch;

pub use arena::{Arena, ArenaMemory, CopyPiece, Imported};
pub use backward::{BackwardPlan, BackwardTensors, Order, QueryGradients};
pub(crate) use blas::version as blas_version;
pub use check::Refusal;
pub use context::CallersContext;
pub use driver::Gpu;
pub use error::Error;
pub use event::Event;
pub use family::{FAMILY_VARIABLE, Family};
pub(crate) use family::{compiler, runs_machine_code};
pub use ferry::{Coming, Ferry, Going};
pub use forward::{ForwardPlan, ForwardTensors};
pub use gate::{Gate, Opener};
pub use graph::Graph;
pub use lent::{Element, Elements, Lent, LentError, LentMut, Spread, check_lender};
pub use memory::{Buffer, Stream};
pub use pieces::PieceCopier;
pub use pinned::{Pinned, PinnedPool};
pub use plan::{BackwardBundle, ForwardTask, Keys, Shape, TaskRows};
pub use rooms::{Part, Room, Rooms};
pub use rows::{RowCopier, RowCopy};
pub use scratch::Scratch;
pub use slice::{Slice, SliceMut};
pub use watch::{Told, WaitingWarp, Watch};
