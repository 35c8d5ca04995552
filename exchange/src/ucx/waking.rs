//! Descriptors by which UCX workers end the wait of their thread.
//!
//! In: whoever waits. Out: descriptors to wait for. Nothing is read here.
//!
//! Invariant: once [`Net::arm`] has returned that there is nothing to do, the next event makes a descriptor readable.

#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::ptr;

use cadre_ucx_sys::bindings as b;

use super::UcxError;
use super::context::call;
use super::net::Net;

impl Net {
    /// The next descriptor to be unwatched.
    pub(crate) fn left(&mut self) -> Option<BorrowedFd<'static>> {
        self.left.pop()
    }

    /// Readies the descriptors that end a wait. Returns false where there is something to do already.
    pub(crate) fn arm(&mut self) -> bool {
        if !self.done.is_empty() {
            return false;
        }
        let reading = self.reading.as_ref().map_or(ptr::null_mut(), |it| it.worker);
        [self.serving, reading].into_iter().filter(|it| !it.is_null()).all(|worker| {
            // SAFETY: the worker is open.
            unsafe { (self.context.ucx.functions.ucp_worker_arm)(worker) != b::UCS_ERR_BUSY }
        })
    }

    /// The descriptor of the serving worker. It is readable when a reader needs an answer.
    pub(crate) fn serving(&self) -> Result<BorrowedFd<'_>, UcxError> {
        self.descriptor(self.serving)
    }

    /// Passes the descriptor of the reading worker to `watch`, unless it is watched already.
    pub(crate) fn watch_reading(
        &mut self,
        watch: impl FnOnce(BorrowedFd<'_>) -> std::io::Result<()>,
    ) -> Result<(), UcxError> {
        let Some(worker) = self.reading.as_ref().filter(|it| !it.is_watched).map(|it| it.worker)
        else {
            return Ok(());
        };
        watch(self.descriptor(worker)?)
            .map_err(|it| UcxError::Call { what: "be waited for", why: it.to_string() })?;
        if let Some(reading) = &mut self.reading {
            reading.is_watched = true;
        }
        Ok(())
    }

    /// Number of endpoints.
    #[cfg(test)]
    pub(crate) fn ends(&self) -> usize {
        self.reading.as_ref().map_or(0, |it| it.ends.len())
    }

    fn descriptor(&self, worker: b::ucp_worker_h) -> Result<BorrowedFd<'_>, UcxError> {
        let mut descriptor = -1;
        // SAFETY: the worker is open; it writes the number.
        let status =
            unsafe { (self.context.ucx.functions.ucp_worker_get_efd)(worker, &raw mut descriptor) };
        call(self.context.ucx, "wake who waits for it", status)?;
        // SAFETY: it is open as long as its worker, which goes no sooner than what borrows from it.
        Ok(unsafe { BorrowedFd::borrow_raw(descriptor) })
    }
}
