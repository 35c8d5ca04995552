//! Copies lists to the GPU from pinned memory, so that the caller waits for no stream.
//!
//! In: elements, and their target. Out: copies in the order of a stream ([`Staging`]), or lists in memory of their own, copied on
//! a separate stream beside all other work ([`Upload`]).
//!
//! It frees no list. Invariant: pinned memory is used again only when the copies from it are over.

// A copy reads the host's memory after the call.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;

use super::driver::Gpu;
use super::error::Error;
use super::event::Event;
use super::memory::{Buffer, Stream};
use super::pinned::{Pinned, PinnedPool};
use super::tables::Plain;

/// Pinned memory that unfinished copies read. From other memory the driver may delay a copy, and its caller, until the stream has
/// done all earlier work.
#[derive(Debug)]
pub(super) struct Staging {
    pool: PinnedPool,
    /// Pieces that copies since the last [`Self::sent`] read.
    put: Vec<Pinned>,
    /// Pieces that earlier copies read, with the event of their end, oldest first.
    flying: VecDeque<(Arc<Event>, Vec<Pinned>)>,
}

impl Staging {
    pub(super) fn new(gpu: &Gpu) -> Self {
        Self { pool: PinnedPool::new(gpu), put: Vec::new(), flying: VecDeque::new() }
    }

    /// Copies `from` to the beginning of `to`, in the order of `stream`. A call of [`Self::sent`] on the same stream follows.
    pub(super) fn write<T: Plain>(
        &mut self,
        stream: &Stream,
        to: &mut Buffer<T>,
        from: &[T],
    ) -> Result<(), Error> {
        if from.is_empty() {
            return Ok(());
        }
        let mut room = self.pool.take(size_of_val(from))?;
        room.slice_mut::<T>().copy_from_slice(from);
        // SAFETY: the memory is kept until the copy is over.
        unsafe { to.write_later(stream, 0, room.slice::<T>()) }?;
        self.put.push(room);
        Ok(())
    }

    /// The event behind all copies so far, which are all on `stream`.
    pub(super) fn sent(&mut self, stream: &Stream) -> Result<Arc<Event>, Error> {
        let over = Arc::new(Event::record(stream)?);
        self.flying.push_back((Arc::clone(&over), std::mem::take(&mut self.put)));
        while let Some((first, _)) = self.flying.front() {
            if !first.is_over()? {
                break;
            }
            self.flying.pop_front();
        }
        Ok(over)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        for (over, _) in &self.flying {
            // A GPU that is lost reads no more.
            let _ = over.wait();
        }
        // After an error these copies have no event to wait for. They may still read, so their memory is leaked.
        self.put.drain(..).for_each(std::mem::forget);
    }
}

/// Makes lists on the GPU, on a stream of its own.
#[derive(Debug)]
pub(super) struct Upload {
    stream: Stream,
    staging: Staging,
}

impl Upload {
    pub(super) fn new(gpu: &Gpu) -> Result<Self, Error> {
        Ok(Self { stream: Stream::new(gpu)?, staging: Staging::new(gpu) })
    }

    /// Allocates memory and enqueues a copy of `numbers` into it. Errors name it by `what`.
    pub(super) fn list<T: Plain>(&mut self, numbers: &[T], what: &str) -> Result<Buffer<T>, Error> {
        let mut list = Buffer::new(self.stream.gpu(), numbers.len(), what)?;
        self.staging.write(&self.stream, &mut list, numbers)?;
        Ok(list)
    }

    /// The event behind all lists so far.
    pub(super) fn sent(&mut self) -> Result<Arc<Event>, Error> {
        self.staging.sent(&self.stream)
    }
}
