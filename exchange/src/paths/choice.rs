//! What paths there are to be, and what came by each.
//!
//! In: an owner's choice. Out: the words for it, and for what is counted. Nothing is decided here.

use crate::tcp::TcpConfig;
use crate::ucx::Transports;

/// Whether rows take other paths than links.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Sharing {
    /// Never; nothing is offered either.
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
    /// Pulls from peers with a better path that had to be sent over the link: rows in no arena or one that was not mapped yet, rows
    /// that were withdrawn while they were copied, and those of a way that failed.
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
