//! Moves tensors between processes.
//!
//! [`Provider`] is the face: publish memory, ring, pull pieces of a peer's memory into one's own, with
//! deadlines. [`Tcp`] is the provider that is always there; [`Node`] is for memory of a GPU that processes of one
//! machine share. Frames and rules: `docs/exchange.md`.
//!
//! This crate knows no steps, rounds or plans; `cadre-protocol` decides, the worker lowers a plan to pulls.
//!
//! Invariant: memory is handed over, never shared mutably, so no peer can write what another reads.

mod buffer;
mod node;
mod peer;
mod provider;
mod tcp;
mod waker;

pub use buffer::Buffer;
pub use node::{Device, Node, NodeConfig, Place, WhenEnded};
pub use peer::{PeerId, Piece, RegionKey, Role};
pub use provider::{
    Error, Event, LandingId, MAX_MESSAGE_BYTES, MAX_PIECES, Provider, PullError, PullId, RingError,
};
pub use tcp::{Limits, Tcp, TcpConfig};
pub use waker::Waker;
