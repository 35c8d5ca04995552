//! Events: points in a stream's work that others can wait for.
//!
//! In: a [`Stream`]. Out: an [`Event`] that others wait for or ask for, with its time if that is wanted. It orders nothing by
//! itself.
//!
//! Invariant: an event stands for all work that was on its stream when it was recorded.

// Every function of the driver is unsafe to call.
#![allow(unsafe_code)]

use cudarc::driver::sys;

use super::driver::{Gpu, call};
use super::error::Error;
use super::memory::Stream;

/// A moment in a stream.
#[derive(Debug)]
pub struct Event {
    gpu: Gpu,
    handle: sys::CUevent,
    stream: StreamHandle,
}

/// Identifies the stream. It is only compared, never used as a handle.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct StreamHandle(sys::CUstream);

// SAFETY: the driver's handle may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; an event that was recorded is only asked for.
unsafe impl Sync for Event {}

/// Flag: waiting threads sleep. Without it the driver busy-waits.
const SLEEP: u32 = sys::CUevent_flags_enum::CU_EVENT_BLOCKING_SYNC as u32;
/// Flag: the event has no time stamp, which is cheaper.
const UNTIMED: u32 = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;

impl Event {
    /// Records the point at which all work that is on `stream` now is done, without a time stamp.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn record(stream: &Stream) -> Result<Self, Error> {
        Self::with(stream, SLEEP | UNTIMED)
    }

    /// As [`Self::record`], with a time stamp for [`Self::seconds_since`].
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn timed(stream: &Stream) -> Result<Self, Error> {
        Self::with(stream, SLEEP)
    }

    fn with(stream: &Stream, flags: u32) -> Result<Self, Error> {
        let gpu = stream.gpu().clone();
        gpu.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes a handle, which `drop` destroys.
        let code = unsafe { sys::cuEventCreate(&raw mut handle, flags) };
        call("cuEventCreate", String::new, code)?;
        let mut event = Self { gpu, handle, stream: StreamHandle(stream.handle()) };
        event.record_again(stream)?;
        Ok(event)
    }

    /// Records the event anew, at the end of what is on `stream` now. Streams that already wait for
    /// the earlier moment are not affected.
    pub(super) fn record_again(&mut self, stream: &Stream) -> Result<(), Error> {
        self.gpu.bind()?;
        self.stream = StreamHandle(stream.handle());
        // SAFETY: both live.
        let code = unsafe { sys::cuEventRecord(self.handle, stream.handle()) };
        call("cuEventRecord", || stream.after(), code)
    }

    pub(super) fn handle(&self) -> sys::CUevent {
        self.handle
    }

    /// Whether both events are of one stream. Then the later one is over only after the earlier one.
    pub fn is_of_stream_of(&self, other: &Self) -> bool {
        self.stream == other.stream
    }

    /// Whether it is over; does not wait.
    ///
    /// # Errors
    ///
    /// What went wrong in its stream before it.
    pub fn is_over(&self) -> Result<bool, Error> {
        self.gpu.bind()?;
        // SAFETY: the event lives.
        let code = unsafe { sys::cuEventQuery(self.handle) };
        if code == sys::CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        call("cuEventQuery", String::new, code).map(|()| true)
    }

    /// Waits for it.
    ///
    /// # Errors
    ///
    /// What went wrong in its stream before it.
    pub fn wait(&self) -> Result<(), Error> {
        self.gpu.bind()?;
        // SAFETY: the event lives.
        let code = unsafe { sys::cuEventSynchronize(self.handle) };
        call("cuEventSynchronize", String::new, code)
    }

    /// Seconds from `start` to this event. Both are [`Self::timed`] and over.
    ///
    /// # Errors
    ///
    /// One of them is not over yet, or has no time.
    pub fn seconds_since(&self, start: &Self) -> Result<f64, Error> {
        self.gpu.bind()?;
        let mut milliseconds = 0.0_f32;
        // SAFETY: writes one number.
        let code =
            unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, start.handle, self.handle) };
        call("cuEventElapsedTime", String::new, code)?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: created by `record`.
            let _ = unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}
