//! Gates: a stream waits for a word that a thread of the host writes, without waking any processor.
//!
//! In: a stream whose next work needs something that comes from outside, for instance rows of a peer. Out: a [`Gate`] in that
//! stream, and its [`Opener`] for whoever knows when they are there, or that they never will.
//!
//! ```text
//! stream: … kernel ─ gate ───────────── kernel that reads the rows
//! IO thread:  pull … pull ends ─ open(code) ┘
//! ```
//!
//! It has no clock: whoever holds the opener opens it by a deadline, with a code for the failure. Invariant: a gate always opens,
//! at the latest when its opener is dropped; no code is 0. Work behind a gate that was opened with another code than
//! [`Gate::DONE`] reads unspecified rows. The caller looks at the code and discards its results.
//!
//! Before it opens the gate, that thread must not wait for the GPU: freeing a [`super::Buffer`] waits for every stream, also for
//! those that the gate holds.

// Every function of the driver is unsafe to call.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys;

use super::driver::{Gpu, call};
use super::error::Error;
use super::event::Event;
use super::memory::Stream;

/// A gate that streams wait at.
#[derive(Debug)]
pub struct Gate(Arc<Word>);

/// Opens the gate, from the host.
#[derive(Debug)]
pub struct Opener(Arc<Word>);

/// A word of pinned memory.
#[derive(Debug)]
struct Word {
    gpu: Gpu,
    host: NonNull<AtomicU32>,
    device: u64,
    /// Events behind the streams' waits for the word. The word is freed after them.
    waits: Mutex<Vec<Event>>,
}

// SAFETY: the word is an atomic in memory that lives as long as `self`; events go from thread to thread under the lock.
unsafe impl Send for Word {}
// SAFETY: as above.
unsafe impl Sync for Word {}

impl Gate {
    /// Code with which a gate is opened when everything behind it is there.
    pub const DONE: u32 = 1;
    /// Code of a gate whose opener was dropped: the largest possible. Streams compare words
    /// cyclically, so half of all words count as below 1.
    pub const ABANDONED: u32 = i32::MAX as u32;

    /// A closed gate and its opener.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn new(gpu: &Gpu) -> Result<(Self, Opener), Error> {
        gpu.bind()?;
        let mut host: *mut c_void = std::ptr::null_mut();
        // CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP.
        // SAFETY: writes an address, which `drop` frees.
        let code = unsafe { sys::cuMemHostAlloc(&raw mut host, size_of::<AtomicU32>(), 3) };
        call("cuMemHostAlloc", || ", a word".to_owned(), code)?;
        let host = NonNull::new(host.cast::<AtomicU32>()).expect("the driver gave an address");
        // SAFETY: memory of this size and at least this alignment, of which nobody else knows.
        unsafe { host.write(AtomicU32::new(0)) };
        let mut word = Word { gpu: gpu.clone(), host, device: 0, waits: Mutex::default() };
        // SAFETY: pinned memory with an address of the device, which is written.
        let code = unsafe {
            sys::cuMemHostGetDevicePointer_v2(&raw mut word.device, host.as_ptr().cast(), 0)
        };
        call("cuMemHostGetDevicePointer", String::new, code)?;
        let word = Arc::new(word);
        Ok((Self(Arc::clone(&word)), Opener(word)))
    }

    /// Makes work that is enqueued on `stream` from now on wait until the gate is open.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn hold(&self, stream: &Stream) -> Result<(), Error> {
        self.0.gpu.bind()?;
        let at_least = sys::CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the word lives until the wait is over: `drop` waits for the event behind it.
        let code =
            unsafe { sys::cuStreamWaitValue32_v2(stream.handle(), self.0.device, 1, at_least) };
        call("cuStreamWaitValue32", || stream.after(), code)?;
        let behind = Event::record(stream)?;
        self.0.waits.lock().unwrap_or_else(PoisonError::into_inner).push(behind);
        Ok(())
    }

    /// The code with which the gate was opened; none while it is closed.
    pub fn code(&self) -> Option<u32> {
        match self.0.word().load(Ordering::Acquire) {
            0 => None,
            code => Some(code),
        }
    }
}

impl Opener {
    /// Opens the gate.
    ///
    /// # Panics
    ///
    /// With code 0, which means closed, or with one above [`Gate::ABANDONED`], which a stream compares as below 1.
    pub fn open(self, code: u32) {
        assert!((1..=Gate::ABANDONED).contains(&code), "{code} opens no gate");
        self.0.word().store(code, Ordering::Release);
    }
}

impl Drop for Opener {
    fn drop(&mut self) {
        // A code that was written before stays.
        let word = self.0.word();
        let _ = word.compare_exchange(0, Gate::ABANDONED, Ordering::AcqRel, Ordering::Acquire);
    }
}

impl Word {
    fn word(&self) -> &AtomicU32 {
        // SAFETY: written by `Gate::new`, and freed with `self`.
        unsafe { self.host.as_ref() }
    }
}

impl Drop for Word {
    fn drop(&mut self) {
        // The opener is gone, so the word is not 0 and every wait ends.
        let waits = std::mem::take(self.waits.get_mut().unwrap_or_else(PoisonError::into_inner));
        for it in waits {
            let _ = it.wait();
        }
        if self.gpu.bind().is_ok() {
            // SAFETY: allocated by `Gate::new`; no stream waits for it any more.
            let _ = unsafe { sys::cuMemFreeHost(self.host.as_ptr().cast()) };
        }
    }
}
