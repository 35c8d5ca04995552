//! Exchanges of rows in the host's memory: every [`Provider`] of such rows is one.

use std::sync::Arc;
use std::time::Duration;

use cadre_exchange::{
    Buffer, Error, Event, LandingId, Path as PeerPath, Paths, PeerId, Piece, Provider, PullId,
    PullRequest, RegionKey, RingError, Tcp, Waker,
};
use cadre_kernels::device;

use super::Exchange;
use crate::memory::{self, Host, HostRows};

/// A provider of rows in the host's memory.
pub trait OnHost: Provider<Memory = Buffer> {
    /// As [`Exchange::path`].
    fn path_of(&self, peer: PeerId) -> Option<&'static str>;

    /// As [`Exchange::why_tcp`].
    #[expect(clippy::unnecessary_literal_bound, reason = "others say what they keep")]
    fn why_tcp_of(&self, _peer: PeerId) -> &str {
        ""
    }

    /// A landing, of which only those bytes may be read to which no pull writes any more.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownLanding`].
    fn landed(&self, landing: LandingId) -> Result<&Buffer, Error>;
}

impl OnHost for Tcp {
    fn path_of(&self, _peer: PeerId) -> Option<&'static str> {
        Some("tcp")
    }

    fn landed(&self, landing: LandingId) -> Result<&Buffer, Error> {
        Self::landed(self, landing)
    }
}

impl OnHost for Paths {
    fn path_of(&self, peer: PeerId) -> Option<&'static str> {
        match self.path(peer) {
            PeerPath::Asked => None,
            PeerPath::Tcp => Some("tcp"),
            PeerPath::Shared => Some("shm"),
            PeerPath::Ucx => Some("ucx"),
        }
    }

    fn why_tcp_of(&self, peer: PeerId) -> &str {
        self.why_tcp(peer).unwrap_or_default()
    }

    fn landed(&self, landing: LandingId) -> Result<&Buffer, Error> {
        Self::landed(self, landing)
    }
}

impl<P: OnHost> Exchange for P {
    type Memory = HostRows;

    fn place(&self) -> &Host {
        &Host
    }

    fn path(&self, peer: PeerId) -> Option<&'static str> {
        self.path_of(peer)
    }

    fn why_tcp(&self, peer: PeerId) -> &str {
        self.why_tcp_of(peer)
    }

    fn address(&self) -> String {
        Provider::address(self)
    }

    fn resumes(&self) -> bool {
        true
    }

    fn allow(&self, peers: u64) -> Result<(), Error> {
        cadre_exchange::allow_links(peers)
    }

    fn connect(&mut self, peer: PeerId, address: &str) {
        Provider::connect(self, peer, address);
    }

    fn publish(&mut self, key: RegionKey, memory: &HostRows) {
        Provider::publish(self, key, Arc::clone(memory));
    }

    fn withdraw(&mut self, key: RegionKey) {
        drop(Provider::withdraw(self, key));
    }

    fn land(&mut self, bytes: usize) -> Result<LandingId, device::Error> {
        Ok(Provider::land(self, memory::landing(bytes)))
    }

    fn copies_landed(&self) -> bool {
        true
    }

    fn copy_landed(&self, from: LandingId, pieces: &[Piece], to: &mut Buffer) -> Result<(), Error> {
        memory::copy(self.landed(from)?, pieces, to);
        Ok(())
    }

    fn is_busy(&self, landing: LandingId) -> bool {
        Provider::is_busy(self, landing)
    }

    fn take(&mut self, landing: LandingId) -> Result<Buffer, Error> {
        Provider::take(self, landing)
    }

    fn discard(&mut self, landing: LandingId) {
        Provider::discard(self, landing);
    }

    fn pull(&mut self, request: PullRequest) -> PullId {
        Provider::pull(self, request)
    }

    fn ring(&mut self, peer: PeerId, message: &[u8]) -> Result<(), RingError> {
        Provider::ring(self, peer, message)
    }

    fn poll(&mut self, timeout: Duration, events: &mut Vec<Event>) {
        Provider::poll(self, timeout, events);
    }

    fn waker(&self) -> Waker {
        Provider::waker(self)
    }

    fn close(&mut self, peer: PeerId) {
        Provider::close(self, peer);
    }
}
