//! Records launches of plans as a graph that runs again with one call: for steps whose shapes repeat.
//!
//! In: a stream and the calls that enqueue work on it. Out: a [`Graph`] that does all of it with one call of the driver, on any
//! stream. Its arguments are those of the recording: the same tensors, at the same addresses.
//!
//! Nothing runs while it is recorded. Invariant: a graph lives no longer than the plans and tensors that it was recorded with.
//! The recording fails for what cannot be recorded (copies of the host's memory, waits).

// Every function of the driver is unsafe to call.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use cudarc::driver::sys;

use super::driver::{Gpu, call};
use super::error::Error;
use super::memory::Stream;

/// A recorded graph, ready to run.
#[derive(Debug)]
pub struct Graph<'a> {
    gpu: Gpu,
    handle: sys::CUgraphExec,
    what: String,
    of: PhantomData<&'a mut ()>,
}

// SAFETY: the driver's handle may be used from any thread, one at a time.
unsafe impl Send for Graph<'_> {}

impl<'a> Graph<'a> {
    /// Records the work that `put` enqueues on `stream`; errors name it by `what`.
    ///
    /// # Errors
    ///
    /// Those of `put`, and the driver's where something cannot be recorded. The stream can be used afterwards either way.
    pub fn record(
        stream: &Stream,
        what: &str,
        put: impl FnOnce(&Stream) -> Result<(), Error> + 'a,
    ) -> Result<Self, Error> {
        let gpu = stream.gpu().clone();
        gpu.bind()?;
        let after = || format!(", recording {what}");
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives; the recording is ended below.
        let code = unsafe { sys::cuStreamBeginCapture_v2(stream.handle(), mode) };
        call("cuStreamBeginCapture", after, code)?;
        let done = put(stream);
        let mut recorded = std::ptr::null_mut();
        // SAFETY: writes a handle, or null where the recording had failed.
        let code = unsafe { sys::cuStreamEndCapture(stream.handle(), &raw mut recorded) };
        let ended = call("cuStreamEndCapture", after, code);
        let made = done.and(ended).and_then(|()| {
            let mut handle = std::ptr::null_mut();
            // SAFETY: a graph that was just recorded; writes a handle, which `drop` destroys.
            let code = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut handle, recorded, 0) };
            call("cuGraphInstantiate", after, code).map(|()| handle)
        });
        if !recorded.is_null() {
            // SAFETY: what was instantiated does not need it.
            let _ = unsafe { sys::cuGraphDestroy(recorded) };
        }
        Ok(Self { gpu, handle: made?, what: what.to_owned(), of: PhantomData })
    }

    /// Enqueues the graph on `stream`. A second run begins after the first, also on another stream.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn run(&mut self, stream: &Stream) -> Result<(), Error> {
        self.gpu.bind()?;
        stream.runs(format!("the graph of {}", self.what));
        // SAFETY: both live; the borrow of plans and tensors lasts as long as `self`.
        let code = unsafe { sys::cuGraphLaunch(self.handle, stream.handle()) };
        call("cuGraphLaunch", || stream.after(), code)
    }
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: created by `record`; the driver lets runs end.
            let _ = unsafe { sys::cuGraphExecDestroy(self.handle) };
        }
    }
}
