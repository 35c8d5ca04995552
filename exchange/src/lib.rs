//! Moves tensors between processes.
//!
//! [`Provider`] is the face: publish memory, ring, pull pieces of a peer's memory into one's own, with
//! deadlines. [`Tcp`] is the provider that is always there; [`Paths`] takes shared memory where a peer is of the same machine, and
//! TCP else; [`Node`] is for memory of a GPU that processes of one machine share. Frames and rules: `docs/exchange.md`. [`Greeter`] is the greeting alone, for links that others carry.
//!
//! This crate knows no steps, rounds or plans; `cadre-protocol` decides, the worker lowers a plan to pulls.
//!
//! Invariant: memory is handed over, never shared mutably, so no peer can write what another reads.

mod buffer;
mod clock;
mod door;
mod files;
mod node;
mod paths;
mod peer;
mod pool;
mod provider;
mod shared;
mod tcp;
#[cfg(test)]
mod tests;
mod trial;
mod ucx;
mod ucx_error;
mod waker;

pub use buffer::Buffer;
pub use clock::{Clock, Hand};
pub use files::allow_links;
pub use node::{Device, Node, NodeConfig, Place, WhenEnded};
pub use paths::{Path, Paths, PathsConfig, Sharing, Traffic};
pub use peer::{PeerId, Piece, RegionKey, Role};
pub use pool::Pool;
pub use provider::{
    Error, Event, LandingId, MAX_MESSAGE_BYTES, MAX_PIECES, Provider, PullError, PullId,
    PullRequest, RingError,
};
pub use tcp::{
    Caller, Encryption, GreetError, Greeter, Guest, Limits, Purpose, Stream, Tcp, TcpConfig,
};
pub use trial::{Trial, TrialError, try_path};
pub use ucx::{Transports, rdma_devices, ucx_here};
pub use ucx_error::UcxError;
pub use waker::Waker;
