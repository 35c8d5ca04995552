//! Reports on paths: which one each peer's rows take, why not a better one, and the bytes of each.
//!
//! In: the state of ways. Out: values for reports. Nothing is changed here.

use super::{Path, Paths, Traffic};
use crate::peer::PeerId;

impl Paths {
    /// Whether rows may come by UCX.
    pub fn has_ucx(&self) -> bool {
        self.remote.is_some()
    }

    /// Bytes pulled so far, by path.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Number of ways that failed: they were open, or should have been.
    pub fn failed_ways(&self) -> u64 {
        self.sharing.as_ref().map_or(0, |it| it.ways.failures)
            + self.remote.as_ref().map_or(0, |it| it.failures)
    }

    /// The path that a peer's rows take now.
    pub fn path(&self, peer: PeerId) -> Path {
        if !self.tcp.is_opening(peer) {
            return Path::Asked;
        }
        let shared = self.sharing.as_ref().map_or(Path::Tcp, |it| {
            let path = it.ways.path(peer);
            // Rows wait for their memory only where it is demanded.
            let is_taken = it.required || it.ways.is_mapped(peer);
            if path == Path::Shared && !is_taken { Path::Tcp } else { path }
        });
        let remote = self.remote.as_ref().and_then(|it| it.path(peer)).unwrap_or(Path::Tcp);
        // Prefers the best path that is open, then one that may open.
        [Path::Shared, Path::Ucx, Path::Asked]
            .into_iter()
            .find(|it| shared == *it || remote == *it)
            .unwrap_or(Path::Tcp)
    }

    /// Why a peer's rows come by TCP. None where they take another path, or may soon.
    pub fn why_tcp(&self, peer: PeerId) -> Option<&str> {
        if self.path(peer) != Path::Tcp {
            return None;
        }
        // A peer of another machine has no reason of this kind.
        let shared = self.sharing.as_ref().and_then(|it| it.ways.why_not(peer));
        shared.or_else(|| match &self.remote {
            Some(remote) => remote.why_shut(peer),
            None => Some(&self.no_ucx),
        })
    }
}
