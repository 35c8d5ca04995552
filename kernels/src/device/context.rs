//! The current context of threads that are not ours.
//!
//! In: a thread of a program that has contexts of its own, as PyTorch has one a GPU. Out: a [`CallersContext`] that puts the current
//! one back. Calls of this crate make that of their GPU current, see [`super::driver`]; who calls for others keeps theirs by this.
//!
//! Invariant: it never fails, and needs no driver.

// Every function of the driver is unsafe to call.
#![allow(unsafe_code)]

use std::sync::OnceLock;

use cudarc::driver::sys;

/// The context that is the calling thread's now, and is again when this is dropped: for callers that have one of their own.
#[derive(Debug)]
pub struct CallersContext(Option<sys::CUcontext>);

impl CallersContext {
    /// Keeps the current context of this thread; does nothing without a driver.
    pub fn keep() -> Self {
        static HAS_DRIVER: OnceLock<bool> = OnceLock::new();
        // SAFETY: opens the driver library, which initialises nothing yet.
        if !HAS_DRIVER.get_or_init(|| unsafe { sys::is_culib_present() }) {
            return Self(None);
        }
        let mut context = std::ptr::null_mut();
        // Before the driver is initialised it fails, and there is no context.
        // SAFETY: writes a handle, or nothing.
        let _ = unsafe { sys::cuCtxGetCurrent(&raw mut context) };
        Self(Some(context))
    }
}

impl Drop for CallersContext {
    fn drop(&mut self) {
        if let Some(context) = self.0 {
            // SAFETY: it was the thread's when the call began, so it is the caller's to keep alive.
            let _ = unsafe { sys::cuCtxSetCurrent(context) };
        }
    }
}
