//! Saves the current CUDA context of a caller's thread, and restores it.
//!
//! In: a thread of a program that has contexts of its own, as PyTorch has one for each GPU. Out: a [`CallersContext`] that
//! restores the current one. Calls of this crate make the context of their GPU current, see [`super::driver`]. Callers that need
//! their own context back hold one of these.
//!
//! Invariant: it never fails, and works without a driver.

// Every function of the driver is unsafe to call.
#![allow(unsafe_code)]

use std::sync::OnceLock;

use cudarc::driver::sys;

/// The calling thread's current context. Dropping this makes it current again.
#[derive(Debug)]
pub struct CallersContext(Option<sys::CUcontext>);

impl CallersContext {
    /// Saves the current context of this thread. Does nothing without a driver.
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
