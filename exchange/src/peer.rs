//! Names in the exchange: who a peer is, which memory is meant, which bytes of it.
//!
//! Plain values, the same on every machine. What a region key's words mean is the worker's business.

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

/// Names published memory. The owner chooses the words (step, phase, kind, unit) so that a key is used once.
#[derive(
    Clone, Copy, Debug, Default, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize,
)]
pub struct RegionKey(pub [u32; 4]);

impl fmt::Display for RegionKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d] = self.0;
        write!(out, "{a}.{b}.{c}.{d}")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_say_who_they_are() {
        assert_eq!(PeerId::server(1, 2).to_string(), "server 1 (incarnation 2)");
        assert_eq!(PeerId::trainer(0, 0).to_string(), "trainer 0 (incarnation 0)");
        assert_eq!(RegionKey([3, 1, 4, 1]).to_string(), "3.1.4.1");
    }

    #[test]
    fn peers_are_named_in_json_as_in_manifests() {
        let text = serde_json::to_string(&PeerId::server(1, 2)).expect("plain data");
        assert_eq!(text, r#"{"role":"server","index":1,"incarnation":2}"#);
        assert_eq!(
            serde_json::from_str::<PeerId>(&text).expect("what we wrote"),
            PeerId::server(1, 2)
        );
    }
}
