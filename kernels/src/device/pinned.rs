//! A pool of pinned host memory, which the GPU copies from and to while the processor does something else.
//!
//! In: lengths. Out: [`Pinned`] with one owner, which goes back to its [`PinnedPool`] when it is dropped.
//!
//! It copies nothing. Invariant: a piece is dropped only after every copy that reads or writes it has ended.

// Every function of the driver is unsafe to call, and its memory has to be looked at as numbers.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use super::driver::{Gpu, call};
use super::error::Error;
use super::tables::Plain;

/// Maximum free pieces that the pool keeps: as many as a few phases use.
const MOST: usize = 32;

/// A pool of pinned host memory: dropped pieces are kept for later requests. Clones share one pool.
#[derive(Clone, Debug)]
pub struct PinnedPool {
    gpu: Gpu,
    free: Arc<Mutex<Vec<Piece>>>,
}

/// A pinned piece of memory with one owner, of which the first bytes are in use.
#[derive(Debug)]
pub struct Pinned {
    /// None once it is dropped, or of no bytes.
    piece: Option<Piece>,
    bytes: usize,
    pool: PinnedPool,
}

#[derive(Debug)]
struct Piece {
    gpu: Gpu,
    host: NonNull<u8>,
    bytes: usize,
}

// SAFETY: memory with one owner.
unsafe impl Send for Piece {}
// SAFETY: as above; a shared piece is only read.
unsafe impl Sync for Piece {}

impl PinnedPool {
    /// An empty pool for copies from and to `gpu`.
    pub fn new(gpu: &Gpu) -> Self {
        Self { gpu: gpu.clone(), free: Arc::default() }
    }

    /// A piece of `bytes` bytes, with unspecified content.
    ///
    /// # Errors
    ///
    /// The machine has no memory to pin, or the driver's.
    pub fn take(&self, bytes: usize) -> Result<Pinned, Error> {
        if bytes == 0 {
            return Ok(Pinned { piece: None, bytes, pool: self.clone() });
        }
        // Lengths differ from step to step. Rounding them up makes pieces reusable.
        let length = bytes.next_power_of_two();
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let piece = match free.iter().position(|it| it.bytes == length) {
            Some(at) => free.swap_remove(at),
            None => Piece::new(&self.gpu, length)?,
        };
        Ok(Pinned { piece: Some(piece), bytes, pool: self.clone() })
    }
}

impl Pinned {
    pub(super) fn address(&mut self) -> *mut u8 {
        self.piece.as_ref().map_or(std::ptr::null_mut(), |it| it.host.as_ptr())
    }

    /// Bytes of the memory.
    pub fn bytes(&self) -> &[u8] {
        self.slice()
    }

    /// The memory as elements of `T`. Bytes that do not fill an element are left out.
    pub fn slice<T: Plain>(&self) -> &[T] {
        let Some(piece) = &self.piece else { return &[] };
        // SAFETY: initialised memory of that many numbers, aligned as the driver's are to pages, which nobody writes meanwhile.
        unsafe {
            std::slice::from_raw_parts(piece.host.as_ptr().cast::<T>(), self.bytes / size_of::<T>())
        }
    }

    /// As [`Self::slice`], for writing.
    pub fn slice_mut<T: Plain>(&mut self) -> &mut [T] {
        let Some(piece) = &mut self.piece else { return &mut [] };
        let numbers = self.bytes / size_of::<T>();
        // SAFETY: as above; its one owner is borrowed.
        unsafe { std::slice::from_raw_parts_mut(piece.host.as_ptr().cast::<T>(), numbers) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let Some(piece) = self.piece.take() else { return };
        let mut free = self.pool.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() == MOST {
            free.swap_remove(0);
        }
        free.push(piece);
    }
}

impl Piece {
    fn new(gpu: &Gpu, bytes: usize) -> Result<Self, Error> {
        gpu.bind()?;
        let mut host: *mut c_void = std::ptr::null_mut();
        // CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP.
        // SAFETY: writes an address, which `drop` frees.
        let code = unsafe { sys::cuMemHostAlloc(&raw mut host, bytes, 3) };
        let done = call("cuMemHostAlloc", || format!(", {bytes} bytes"), code);
        done.map_err(|error| match (code, error) {
            (sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY, Error::Call { text, .. }) => {
                Error::Unpinned { bytes, text }
            }
            (_, error) => error,
        })?;
        let host = NonNull::new(host.cast::<u8>()).expect("the driver gave an address");
        // SAFETY: memory of this length of which nobody else knows: what is never written is read as numbers, too.
        unsafe { host.write_bytes(0, bytes) };
        Ok(Self { gpu: gpu.clone(), host, bytes })
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: allocated by `new`; no copy uses it any more.
            let _ = unsafe { sys::cuMemFreeHost(self.host.as_ptr().cast()) };
        }
    }
}
