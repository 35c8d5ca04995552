//! Ends a provider's poll, or another wait for descriptors, from another thread.
//!
//! An event counter of the kernel, so that it sits in the same wait as sockets. Wakes are counted together:
//! several before a poll end one poll.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

/// Wakes one poll: readable from the first wake on. Cheap to clone; may outlive the provider.
#[derive(Clone, Debug)]
pub struct Waker {
    counter: Arc<OwnedFd>,
}

impl Waker {
    /// Of a new provider.
    ///
    /// # Errors
    ///
    /// The process is out of descriptors.
    pub fn new() -> io::Result<Self> {
        let counter = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { counter: Arc::new(counter) })
    }

    /// Ends the poll that is under way, or else the next one.
    pub fn wake(&self) {
        // The only failure is a full counter, and then the poll is woken already.
        let _ = rustix::io::write(&self.counter, &1_u64.to_ne_bytes());
    }

    /// Forgets the wakes so far.
    pub(crate) fn clear(&self) {
        let _ = rustix::io::read(&self.counter, &mut [0_u8; 8]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.counter.as_fd()
    }
}
