//! Names in the exchange: who a peer is, which memory is meant, which bytes of it.
//!
//! Plain values, the same on every machine. What a region key's words mean is the worker's business.

use std::fmt;

use serde::{Deserialize, Serialize};

pub use cadre_protocol::{PeerId, Piece, Role};

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
