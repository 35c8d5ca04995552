//! The paths that an owner of a provider may choose, and the bytes that came by each.
//!
//! In: the owner's choice. Out: types for it and for the counters. Nothing is decided here.

use crate::tcp::TcpConfig;
use crate::ucx::Transports;

/// Which paths rows may take beside links.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Sharing {
    /// Links only; nothing is offered to peers.
    #[default]
    Off,
    /// Shared memory where the peer is of this machine, else UCX where both have network cards for RDMA.
    Auto,
    /// Shared memory from every peer; one that cannot be reached so is closed.
    Required,
    /// UCX over these transports from every peer; one that cannot be reached so is closed.
    Ucx(Transports),
}

/// How to open [`Paths`](super::Paths).
#[derive(Clone, Copy)]
pub struct PathsConfig {
    /// Settings of the links.
    pub tcp: TcpConfig,
    /// Paths that may be used.
    pub sharing: Sharing,
}

/// Bytes of rows that pulls have brought, by their path.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Traffic {
    /// Copied from memory of peers.
    pub shared_bytes: u64,
    /// Read by UCX.
    pub ucx_bytes: u64,
    /// Over links.
    pub tcp_bytes: u64,
    /// Pulls that went over the link though their peer has a better path. Their rows lay in no arena, or in one that was not
    /// mapped yet, or were withdrawn during the copy, or the way failed.
    pub sent_anew: u64,
}

/// How rows of a peer come.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Path {
    /// By tcp, until the peer is connected and has answered whether there is a better path.
    Asked,
    /// By shared memory.
    Shared,
    /// By UCX.
    Ucx,
    /// By tcp.
    Tcp,
}
