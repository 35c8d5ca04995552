//! Closes endpoints by force, and with them reads that nobody can cancel.
//!
//! In: ends that are given up. Out: the ends of all their reads: at once, or when UCX has ended them.
//!
//! Invariant: when the close of an endpoint is over, nothing writes for its reads any more. Until then it lingers, and other
//! endpoints go on.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::time::Instant;

use cadre_ucx_sys::bindings as b;

use super::calls::{request, taken};
use super::net::{Done, End, EndId, GetId, Net, Reading};

impl End {
    /// Begins to close the endpoint by force, unless that has begun. Destroys keys that no read uses first, as UCX demands. The
    /// other keys are destroyed when their reads have ended.
    fn close(&mut self, of: &b::Functions) {
        if std::mem::replace(&mut self.is_closed, true) {
            return;
        }
        if self.flying == 0 {
            self.destroy_keys(of);
        }
        let param =
            request(b::UCP_OP_ATTR_FIELD_FLAGS, b::UCP_EP_CLOSE_FLAG_FORCE, None, ptr::null_mut());
        // SAFETY: the endpoint is open, and is not used after this.
        let status = unsafe { (of.ucp_ep_close_nbx)(self.ep, &raw const param) };
        self.closing = taken(status).unwrap_or_default();
    }

    /// Whether its close has ended, with all its reads.
    fn is_over(&mut self, of: &b::Functions) -> bool {
        if let Some(closing) = self.closing {
            // SAFETY: it is a request that was not freed yet.
            let status = unsafe { (of.ucp_request_check_status)(closing.as_ptr()) };
            if status == b::UCS_INPROGRESS {
                return false;
            }
            self.free_close(of);
        }
        if self.flying > 0 {
            return false;
        }
        self.destroy_keys(of);
        true
    }

    /// Frees the request of its close. If the close has not ended, UCX frees it later.
    fn free_close(&mut self, of: &b::Functions) {
        if let Some(closing) = self.closing.take() {
            // SAFETY: it was not freed yet, and nobody else has it.
            unsafe { (of.ucp_request_free)(closing.as_ptr()) };
        }
    }

    /// Destroys the keys of an end, of which none is used any more.
    fn destroy_keys(&mut self, of: &b::Functions) {
        for key in std::mem::take(&mut self.keys) {
            // SAFETY: no read uses it any more, and none can begin.
            unsafe { (of.ucp_rkey_destroy)(key) };
        }
    }
}

impl Net {
    /// Closes an endpoint by force, and waits a short time for that. Reads that [`Self::done`] has not returned by then may still
    /// write: the endpoint lingers until UCX has ended them all. No other endpoint is affected.
    pub(crate) fn close(&mut self, end: EndId) {
        let Some(reading) = &mut self.reading else { return };
        let Some(it) = reading.ends.get_mut(&end.0).filter(|it| !it.is_closed) else { return };
        it.close(&self.context.ucx.functions);
        reading.lingering.push(end);
        self.wait(|it| it.reading.as_ref().is_none_or(|it| !it.lingering.contains(&end)));
    }

    /// Makes progress until something has come, but not for long.
    fn wait(&mut self, has_come: impl Fn(&Self) -> bool) {
        let until = Instant::now() + self.closing;
        self.bury();
        while !has_come(self) && Instant::now() < until {
            self.progress();
        }
    }

    /// Forgets ends whose close has ended.
    pub(super) fn bury(&mut self) {
        let Some(Reading { ends, lingering, .. }) = &mut self.reading else { return };
        let of = &self.context.ucx.functions;
        lingering.retain(|id| {
            let is_over = ends.get_mut(&id.0).is_none_or(|it| it.is_over(of));
            if is_over {
                ends.remove(&id.0);
            }
            !is_over
        });
    }

    /// Destroys the reading worker with all its endpoints, because some linger for too long. After this nothing writes for its
    /// reads. [`Self::lost`] returns the endpoints that were not closed themselves.
    pub(crate) fn cut(&mut self) {
        self.collect();
        let Some(Reading { worker, queue, mut ends, gets, .. }) = self.reading.take() else {
            return;
        };
        let of = &self.context.ucx.functions;
        let lost = ends.iter().filter(|it| !it.1.is_closed);
        self.lost.extend(lost.map(|it| EndId(*it.0)));
        if self.emulates {
            // UCX 1.13 ends the process when a worker is destroyed that has sent requests for reads. What comes for them lands when
            // the worker makes progress, which it never does again; it stays as it is until the process ends.
            self.context.is_abandoned = true;
            let mut descriptor = -1;
            // SAFETY: the worker is open; it writes the number.
            unsafe { (of.ucp_worker_get_efd)(worker, &raw mut descriptor) };
            if descriptor >= 0 {
                // SAFETY: it is open as long as its worker, which is never destroyed.
                self.left.push(unsafe { BorrowedFd::borrow_raw(descriptor) });
            }
            std::mem::forget(queue);
            for end in ends.values_mut() {
                end.free_close(of);
            }
        } else {
            destroy(of, worker, &mut ends);
        }
        for (get, (_, words)) in gets {
            std::mem::forget(words);
            let result = Err("its worker was ended".to_owned());
            self.done.push_back(Done { get: GetId(get), words: Vec::new(), result });
        }
    }
}

/// Destroys a worker with its ends.
fn destroy(of: &b::Functions, worker: b::ucp_worker_h, ends: &mut BTreeMap<u64, End>) {
    // What still waits to be sent by an end goes with its close, so nothing looks at keys after it.
    for end in ends.values_mut() {
        end.close(of);
        end.free_close(of);
        end.destroy_keys(of);
    }
    // SAFETY: it is destroyed once: nothing else has it any more. Its queue is still there.
    unsafe { (of.ucp_worker_destroy)(worker) };
}

impl Drop for Net {
    fn drop(&mut self) {
        if let Some(Reading { ends, lingering, .. }) = &mut self.reading {
            for (id, end) in ends.iter_mut().filter(|it| !it.1.is_closed) {
                end.close(&self.context.ucx.functions);
                lingering.push(EndId(*id));
            }
        }
        self.wait(|it| it.reading.as_ref().is_none_or(|it| it.lingering.is_empty()));
        if self.emulates {
            // Replies to reads of others may wait in the worker that serves: UCX 1.13 frees what it never had when it purges them.
            // Both workers stay as they are until the process ends.
            self.context.is_abandoned = true;
            return std::mem::forget(self.reading.take());
        }
        let of = &self.context.ucx.functions;
        if let Some(Reading { worker, queue: _queue, mut ends, .. }) = self.reading.take() {
            destroy(of, worker, &mut ends);
        }
        // SAFETY: it is destroyed once.
        unsafe { (of.ucp_worker_destroy)(self.serving) };
    }
}
