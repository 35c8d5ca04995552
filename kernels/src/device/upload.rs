//! Lists on their way to the GPU, from pinned memory: who puts them there waits for no stream.
//!
//! In: numbers, and where they belong. Out: copies that a stream does when it comes to them ([`Staging`]); lists in memory of their
//! own, whose copies run beside everything else ([`Upload`]).
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

/// Pinned memory that copies read which are not over. The driver may hold up a copy from other memory, and its caller, until the
/// stream is done with all work before it.
#[derive(Debug)]
pub(super) struct Staging {
    pool: PinnedPool,
    /// Read by copies since the last [`Self::sent`].
    put: Vec<Pinned>,
    /// Read by earlier ones, with their ends, oldest first.
    flying: VecDeque<(Arc<Event>, Vec<Pinned>)>,
}

impl Staging {
    pub(super) fn new(gpu: &Gpu) -> Self {
        Self { pool: PinnedPool::new(gpu), put: Vec::new(), flying: VecDeque::new() }
    }

    /// Copies `from` to the beginning of `to` when `stream` comes to it. [`Self::sent`] follows, on the same stream.
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

    /// The end of all that was written so far, which is all on `stream`.
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
        // Copies without an end that could be waited for: after an error. They may still read.
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

    /// Memory that will have `numbers`; `what` is named where memory is short.
    pub(super) fn list<T: Plain>(&mut self, numbers: &[T], what: &str) -> Result<Buffer<T>, Error> {
        let mut list = Buffer::new(self.stream.gpu(), numbers.len(), what)?;
        self.staging.write(&self.stream, &mut list, numbers)?;
        Ok(list)
    }

    /// When all lists so far are there.
    pub(super) fn sent(&mut self) -> Result<Arc<Event>, Error> {
        self.staging.sent(&self.stream)
    }
}
