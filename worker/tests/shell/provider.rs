//! The exchange of one simulated process: what [`Exchange`] asks for, over a [`Net`].
//!
//! Nothing is decided here. Polls never wait: the world gives a process its turn when something came.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use cadre_exchange::{
    Buffer, Error, Event, LandingId, PeerId, Piece, PullId, PullRequest, RegionKey, RingError,
    Waker,
};
use cadre_kernels::device;
use cadre_worker::io::exchange::Exchange;
use cadre_worker::memory::{Host, HostRows};

use crate::net::{Life, Net};

/// See the module.
pub(crate) struct Wires {
    pub(crate) net: Rc<RefCell<Net>>,
    pub(crate) life: Life,
    pub(crate) waker: Waker,
}

impl Wires {
    /// How much has come and was not looked at.
    pub(crate) fn news(&self) -> usize {
        self.net.borrow().endpoints[self.life].events.len()
    }
}

impl Exchange for Wires {
    type Memory = HostRows;

    fn place(&self) -> &Host {
        &Host
    }

    fn resumes(&self) -> bool {
        self.net.borrow().resumes()
    }

    fn path(&self, _peer: PeerId) -> Option<&'static str> {
        self.net.borrow().path(self.life)
    }

    fn address(&self) -> String {
        self.net.borrow().address(self.life)
    }

    fn connect(&mut self, peer: PeerId, address: &str) {
        self.net.borrow_mut().connect(self.life, peer, address);
    }

    fn publish(&mut self, key: RegionKey, memory: &HostRows) {
        self.net.borrow_mut().publish(self.life, key, Arc::clone(memory));
    }

    fn withdraw(&mut self, key: RegionKey) {
        self.net.borrow_mut().withdraw(self.life, key);
    }

    fn land(&mut self, bytes: usize) -> Result<LandingId, device::Error> {
        Ok(self.net.borrow_mut().land(self.life, bytes))
    }

    fn copies_landed(&self) -> bool {
        true
    }

    fn copy_landed(&self, from: LandingId, pieces: &[Piece], to: &mut Buffer) -> Result<(), Error> {
        self.net.borrow_mut().copy_landed(self.life, from, pieces, to)
    }

    fn is_busy(&self, landing: LandingId) -> bool {
        self.net.borrow().is_busy(self.life, landing)
    }

    fn take(&mut self, landing: LandingId) -> Result<Buffer, Error> {
        self.net.borrow_mut().take(self.life, landing)
    }

    fn discard(&mut self, landing: LandingId) {
        self.net.borrow_mut().discard(self.life, landing);
    }

    fn pull(&mut self, request: PullRequest) -> PullId {
        self.net.borrow_mut().pull(self.life, request)
    }

    fn found(&self, pull: PullId) -> Option<u32> {
        self.net.borrow().endpoints[self.life].found.get(&pull).copied()
    }

    fn ring(&mut self, peer: PeerId, message: &[u8]) -> Result<(), RingError> {
        self.net.borrow_mut().ring(self.life, peer, message)
    }

    fn poll(&mut self, _timeout: Duration, events: &mut Vec<Event>) {
        events.append(&mut self.net.borrow_mut().endpoints[self.life].events);
    }

    fn waker(&self) -> Waker {
        self.waker.clone()
    }

    fn close(&mut self, peer: PeerId) {
        self.net.borrow_mut().close(self.life, peer);
    }
}
