//! Warns, once for each peer, when rows come over the link though the user demanded another path.
//!
//! In: pulls and how they ended. Out: a warning in the reader's log, since the reader demanded the path.

use std::collections::{BTreeMap, BTreeSet};

use super::Sharing;
use crate::peer::PeerId;
use crate::provider::PullId;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Demanded {
    /// The user's name of the demanded path; none where any path will do.
    path: Option<&'static str>,
    pulls: BTreeMap<PullId, PeerId>,
    said: BTreeSet<PeerId>,
}

impl Demanded {
    pub(super) fn new(sharing: Sharing) -> Self {
        let path = match sharing {
            Sharing::Off | Sharing::Auto => None,
            Sharing::Required => Some("shm"),
            Sharing::Ucx(_) => Some("ucx"),
        };
        Self { path, ..Self::default() }
    }

    pub(super) fn begins(&mut self, pull: PullId, peer: PeerId) {
        if self.path.is_some() {
            self.pulls.insert(pull, peer);
        }
    }

    /// A pull has ended; `by_link` of its bytes came over the link.
    pub(super) fn ended(&mut self, pull: PullId, by_link: u64) {
        if let Some(peer) = self.pulls.remove(&pull)
            && let Some(path) = self.path
            && by_link > 0
            && self.said.insert(peer)
        {
            tracing::warn!(
                "rows of {peer:?} came by tcp, though --exchange is {path}: they lie in memory that it cannot show by {path}; its log says why; or say --exchange auto"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use super::super::{Paths, PathsConfig};
    use super::*;
    use crate::buffer::Buffer;
    use crate::peer::{Piece, RegionKey, Role};
    use crate::pool::Pool;
    use crate::provider::{Event, Provider, PullRequest};
    use crate::tcp::{Encryption, Limits, TcpConfig};

    #[test]
    fn rows_that_no_demanded_path_can_show_are_told_of_at_the_reader_once() {
        let open = |index| {
            let me = PeerId { role: Role::Trainer, index, incarnation: 0 };
            let (bind, limits) = (IpAddr::V4(Ipv4Addr::LOCALHOST), Limits::default());
            let encryption = Encryption::Off;
            let tcp = TcpConfig { bind, me, secret: [3; 32], data_version: 1, encryption, limits };
            (me, Paths::open(PathsConfig { tcp, sharing: Sharing::Required }).unwrap())
        };
        let ((_, mut reader), (peer, mut owner)) = (open(0), open(1));
        let pool = Pool::shared_and_poisoned(1 << 20).unwrap();
        let [shown, hidden] = [1, 2].map(|it| RegionKey([it; 4]));
        owner.publish(shown, Arc::new(pool.take(64)));
        owner.publish(hidden, Arc::new(Buffer::zeroed(64)));
        reader.connect(peer, &owner.address());
        for (key, told) in [(shown, 0), (hidden, 1), (hidden, 1)] {
            let landing = reader.land(Buffer::zeroed(64));
            let pieces = vec![Piece { remote: 0, local: 0, bytes: 64 }];
            let patience = Duration::from_secs(20);
            let pull = reader.pull(PullRequest { peer, key, pieces, landing, patience });
            let start = Instant::now();
            let mut events = Vec::new();
            let over = |it: &Event| matches!(it, Event::Pulled { pull: it, result } if *it == pull && result.is_ok());
            while !events.iter().any(over) {
                assert!(start.elapsed() < patience, "{events:?}");
                owner.poll(Duration::ZERO, &mut Vec::new());
                reader.poll(Duration::from_millis(1), &mut events);
            }
            assert_eq!(reader.demanded.said.len(), told);
            assert!(reader.demanded.pulls.is_empty());
        }
    }
}
