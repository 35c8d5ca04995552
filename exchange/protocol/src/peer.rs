//! Names that all parts of the data plane share: who a process is, and which bytes of a region are meant.
//!
//! Plain values, the same on every machine; nothing is decided here.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a process of the data plane is.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// One rank of the job.
    Trainer,
    /// A dedicated attention server.
    Server,
}

impl fmt::Display for Role {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Trainer => "trainer",
            Self::Server => "server",
        })
    }
}

/// One life of one process: a replacement has the same role and index and a higher incarnation.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct PeerId {
    /// What it is.
    pub role: Role,
    /// Which one of its role.
    pub index: u16,
    /// How often this role and index was started before; a newer one shuts the older out.
    pub incarnation: u32,
}

impl PeerId {
    /// Trainer `index` in its `incarnation`.
    pub fn trainer(index: u16, incarnation: u32) -> Self {
        Self { role: Role::Trainer, index, incarnation }
    }

    /// Dedicated server `index` in its `incarnation`.
    pub fn server(index: u16, incarnation: u32) -> Self {
        Self { role: Role::Server, index, incarnation }
    }
}

impl fmt::Display for PeerId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} {} (incarnation {})", self.role, self.index, self.incarnation)
    }
}

/// Bytes to copy from a remote region into a landing.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Piece {
    /// First byte in the peer's region.
    pub remote: u64,
    /// First byte in the landing.
    pub local: u64,
    /// How many bytes; zero is allowed and moves nothing.
    pub bytes: u64,
}
