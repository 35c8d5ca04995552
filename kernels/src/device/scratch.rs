//! Memory that launches need while they run, and nobody reads afterwards: parts of O and LSE, sums of dQ.
//!
//! In: how much a plan needs. Out: where it is. Plans whose runs are enqueued on one stream may share a [`Scratch`], which is then as
//! large as the largest of them needs, not as all of them together.
//!
//! It grows and never shrinks by itself. Invariant: sums of dQ are zero when a run begins, whatever became of the one before.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::driver::Gpu;
use super::error::Error;
use super::memory::{Buffer, Stream};

/// See the module; clones are the same memory. Runs that share it are enqueued on one stream, or behind each other.
#[derive(Clone, Debug)]
pub struct Scratch(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    gpu: Gpu,
    part_o: Buffer<f32>,
    part_lse: Buffer<f32>,
    sums: Buffer<f32>,
    /// A run was put that adds to the sums, and not the end of it that zeroes them.
    dirty: bool,
}

impl Inner {
    fn empty(gpu: &Gpu) -> Result<Self, Error> {
        let buffer = |what| Buffer::new(gpu, 0, what);
        Ok(Self {
            gpu: gpu.clone(),
            part_o: buffer("parts of O")?,
            part_lse: buffer("parts of LSE")?,
            sums: buffer("sums of dQ")?,
            dirty: false,
        })
    }
}

impl Scratch {
    /// On `gpu`; no memory is taken yet.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn new(gpu: &Gpu) -> Result<Self, Error> {
        Ok(Self(Arc::new(Mutex::new(Inner::empty(gpu)?))))
    }

    /// Gives all of it back, behind what runs now. Plans take anew what they need.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn release(&self) -> Result<(), Error> {
        let mut inner = self.lock();
        *inner = Inner::empty(&inner.gpu)?;
        Ok(())
    }

    /// Memory of the GPU that it has taken.
    pub fn len_bytes(&self) -> u64 {
        let inner = self.lock();
        [&inner.part_o, &inner.part_lse, &inner.sums].map(Buffer::len_bytes).iter().sum()
    }

    /// Addresses of room for so many numbers of parts of O, and of LSE.
    pub(super) fn parts(&self, [o, lse]: [usize; 2]) -> Result<[u64; 2], Error> {
        let mut inner = self.lock();
        inner.part_o.reserve(o, "parts of O")?;
        inner.part_lse.reserve(lse, "parts of LSE")?;
        Ok([inner.part_o.slice().place().0, inner.part_lse.slice().place().0])
    }

    /// The address of `numbers` sums, which are zero in the order of `stream`.
    pub(super) fn sums(&self, stream: &Stream, numbers: usize) -> Result<u64, Error> {
        let mut inner = self.lock();
        if inner.dirty || inner.sums.len() < numbers {
            // Where one of both fails the next run begins here again.
            inner.dirty = true;
            inner.sums.reserve(numbers, "sums of dQ")?;
            let all = inner.sums.len();
            inner.sums.clear(stream, all)?;
            inner.dirty = false;
        }
        Ok(inner.sums.slice().place().0)
    }

    /// Whether sums are not zero behind what was put so far.
    pub(super) fn are_sums_dirty(&self, dirty: bool) {
        self.lock().dirty = dirty;
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
