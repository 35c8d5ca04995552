//! Streams and typed buffers of a GPU.
//!
//! In: a [`Gpu`]. Out: owners of device memory and of orders of work. A buffer is as long as it says; a
//! [`Slice`] of it, or of memory that somebody else owns, is what launches take.
//!
//! Nothing is allocated behind the caller's back. Invariant: memory is freed after all work that was enqueued on streams before,
//! which `cuMemFree` waits for; and copies to and from the host have read or written the host's side when they return.

// Every function of the driver is unsafe to call, and foreign addresses are taken on trust.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::marker::PhantomData;

use cudarc::driver::sys;

use super::check::same_gpu;
use super::driver::{Gpu, call};
use super::error::Error;
use super::event::Event;
use super::slice::{Slice, SliceMut};
use super::tables::Plain;

/// A stream: its work runs in the order in which it was enqueued. One thread at a time uses it.
#[derive(Debug)]
pub struct Stream {
    gpu: Gpu,
    handle: sys::CUstream,
    owned: bool,
    /// Kernel and batch launched last, for errors that show later.
    last: RefCell<String>,
}

// SAFETY: the driver's handle may be used from any thread.
unsafe impl Send for Stream {}

impl Stream {
    /// A stream of its own.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn new(gpu: &Gpu) -> Result<Self, Error> {
        gpu.bind()?;
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes a handle, which `drop` destroys.
        let code = unsafe { sys::cuStreamCreate(&raw mut handle, flags) };
        call("cuStreamCreate", String::new, code)?;
        Ok(Self { gpu: gpu.clone(), handle, owned: true, last: RefCell::default() })
    }

    /// A stream of higher priority: free processors run its launches before those of other streams.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn urgent(gpu: &Gpu) -> Result<Self, Error> {
        gpu.bind()?;
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // A number below 0, the priority of other streams, comes first. The driver takes the nearest priority that it has.
        // SAFETY: writes a handle, which `drop` destroys.
        let code = unsafe { sys::cuStreamCreateWithPriority(&raw mut handle, flags, -1) };
        call("cuStreamCreateWithPriority", String::new, code)?;
        Ok(Self { gpu: gpu.clone(), handle, owned: true, last: RefCell::default() })
    }

    /// A stream that a framework of this process made on the same GPU; 0 is the default one.
    ///
    /// # Safety
    ///
    /// `handle` is a `CUstream` that lives as long as what comes back.
    pub unsafe fn foreign(gpu: &Gpu, handle: u64) -> Self {
        let handle = handle as sys::CUstream;
        Self { gpu: gpu.clone(), handle, owned: false, last: RefCell::default() }
    }

    /// The GPU that the stream is of.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub(super) fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Whether work that is put on the stream is recorded for a graph instead of run.
    pub(super) fn records(&self) -> Result<bool, Error> {
        self.gpu.bind()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream lives; writes one number.
        let code = unsafe { sys::cuStreamIsCapturing(self.handle, &raw mut status) };
        call("cuStreamIsCapturing", || self.after(), code)?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Whether all work on it is done; does not wait.
    ///
    /// # Errors
    ///
    /// What went wrong in it.
    pub fn is_done(&self) -> Result<bool, Error> {
        self.gpu.bind()?;
        // SAFETY: the stream lives.
        let code = unsafe { sys::cuStreamQuery(self.handle) };
        if code == sys::CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        call("cuStreamQuery", || self.after(), code).map(|()| true)
    }

    /// Stores a description of the launch, for errors that appear later.
    pub(super) fn runs(&self, what: String) {
        *self.last.borrow_mut() = what;
    }

    pub(super) fn after(&self) -> String {
        let last = self.last.borrow();
        if last.is_empty() { String::new() } else { format!(", after {last}") }
    }

    /// Waits until all work on it is done.
    ///
    /// # Errors
    ///
    /// What went wrong in it since the last wait, with the kernel and batch that were launched last.
    pub fn wait(&self) -> Result<(), Error> {
        self.gpu.bind()?;
        // SAFETY: the stream lives.
        let code = unsafe { sys::cuStreamSynchronize(self.handle) };
        call("cuStreamSynchronize", || self.after(), code)
    }

    /// Makes work that is enqueued on this stream from now on wait for `event`.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn wait_for(&self, event: &Event) -> Result<(), Error> {
        self.gpu.bind()?;
        // SAFETY: both live.
        let code = unsafe { sys::cuStreamWaitEvent(self.handle, event.handle(), 0) };
        call("cuStreamWaitEvent", || self.after(), code)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned && self.gpu.bind().is_ok() {
            // SAFETY: created by `new`; the driver lets its work end.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.handle) };
        }
    }
}

/// Numbers in device memory.
#[derive(Debug)]
pub struct Buffer<T: Plain> {
    gpu: Gpu,
    address: u64,
    len: usize,
    kind: PhantomData<T>,
}

impl<T: Plain> Buffer<T> {
    /// Memory for `len` elements, with unspecified content. Errors name it by `what`.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`], or the driver's.
    pub fn new(gpu: &Gpu, len: usize, what: &str) -> Result<Self, Error> {
        let mut buffer = Self { gpu: gpu.clone(), address: 0, len, kind: PhantomData };
        let bytes = len * size_of::<T>();
        if bytes == 0 {
            return Ok(buffer);
        }
        gpu.bind()?;
        // SAFETY: writes an address, which `drop` frees.
        let code = unsafe { sys::cuMemAlloc_v2(&raw mut buffer.address, bytes) };
        if code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let free = gpu.memory()?.0;
            return Err(Error::OutOfMemory { what: what.into(), bytes, free });
        }
        call("cuMemAlloc", || format!(", {bytes} bytes for {what}"), code)?;
        Ok(buffer)
    }

    /// Enqueues a copy of `numbers` on `stream`, into new memory.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`], or the driver's.
    pub fn of(stream: &Stream, numbers: &[T], what: &str) -> Result<Self, Error> {
        let mut buffer = Self::new(&stream.gpu, numbers.len(), what)?;
        buffer.write(stream, 0, numbers)?;
        Ok(buffer)
    }

    /// Grows the buffer to at least `len` elements. It loses its content if it grows.
    ///
    /// # Errors
    ///
    /// As [`Self::new`]; the buffer is empty then.
    pub fn reserve(&mut self, len: usize, what: &str) -> Result<(), Error> {
        if len > self.len {
            // The old memory is freed first, since both together may not fit.
            *self = Self::new(&self.gpu, 0, what)?;
            *self = Self::new(&self.gpu, len, what)?;
        }
        Ok(())
    }

    /// How many numbers there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Device address, for callers in other languages; 0 for an empty buffer.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How much memory they take.
    pub fn len_bytes(&self) -> u64 {
        (self.len * size_of::<T>()) as u64
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All of it.
    pub fn slice(&self) -> Slice<'_, T> {
        Slice::new(self.address, self.len)
    }

    /// All of it, to be written.
    pub fn slice_mut(&mut self) -> SliceMut<'_, T> {
        SliceMut::new(self.address, self.len)
    }

    /// Copies `from`, which is no pinned memory, to the place `at`; it has been read when this returns. The driver may wait for
    /// the stream first.
    ///
    /// # Errors
    ///
    /// A stream of another GPU, or the driver's.
    ///
    /// # Panics
    ///
    /// Beyond the end.
    pub fn write(&mut self, stream: &Stream, at: usize, from: &[T]) -> Result<(), Error> {
        // SAFETY: the source is no pinned memory, so the driver has copied it to memory of its own when it returns; it may wait
        // for the stream before it does.
        unsafe { self.write_later(stream, at, from) }
    }

    /// As [`Self::write`], but from pinned memory, which is read when `stream` comes to the copy. The call waits for nothing.
    ///
    /// # Safety
    ///
    /// `from` does not change until the copy is over.
    pub(super) unsafe fn write_later(
        &mut self,
        stream: &Stream,
        at: usize,
        from: &[T],
    ) -> Result<(), Error> {
        assert!(at + from.len() <= self.len, "numbers are written inside a buffer");
        same_gpu("the memory", self.gpu.device(), stream.gpu.device())?;
        if from.is_empty() {
            return Ok(());
        }
        self.gpu.bind()?;
        let to = self.address + (at * size_of::<T>()) as u64;
        // SAFETY: inside the buffer, as asserted; the source is the caller's promise.
        let code = unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), size_of_val(from), stream.handle)
        };
        call("cuMemcpyHtoD", || stream.after(), code)
    }

    /// Waits for `stream` and copies elements from `at` on into `to`.
    ///
    /// # Errors
    ///
    /// A stream of another GPU, the driver's, and what went wrong in the stream before.
    ///
    /// # Panics
    ///
    /// Beyond the end.
    pub fn read(&self, stream: &Stream, at: usize, to: &mut [T]) -> Result<(), Error> {
        assert!(at + to.len() <= self.len, "numbers are read inside a buffer");
        same_gpu("the memory", self.gpu.device(), stream.gpu.device())?;
        if to.is_empty() {
            return Ok(());
        }
        stream.wait()?;
        let from = self.address + (at * size_of::<T>()) as u64;
        // SAFETY: inside the buffer, as asserted; a blocking copy of plain numbers.
        let code = unsafe { sys::cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), from, size_of_val(to)) };
        call("cuMemcpyDtoH", || stream.after(), code)
    }

    /// Zeroes the first `len` numbers; in the order of `stream`.
    ///
    /// # Errors
    ///
    /// The driver's.
    ///
    /// # Panics
    ///
    /// Beyond the end, or for numbers that are no multiple of 4 bytes.
    pub fn clear(&mut self, stream: &Stream, len: usize) -> Result<(), Error> {
        assert!(
            len <= self.len && size_of::<T>().is_multiple_of(4),
            "words of a buffer are cleared"
        );
        if len == 0 {
            return Ok(());
        }
        self.gpu.bind()?;
        let words = len * size_of::<T>() / 4;
        // SAFETY: inside the buffer, as asserted; 0 is a value of every plain type.
        let code = unsafe { sys::cuMemsetD32Async(self.address, 0, words, stream.handle) };
        call("cuMemsetD32", || stream.after(), code)
    }
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.address != 0 && self.gpu.bind().is_ok() {
            // SAFETY: allocated by `new`; the driver waits for work that may use it.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}
