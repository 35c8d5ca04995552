//! How ends are closed, and with them reads that nobody can call back.
//!
//! In: ends that are given up. Out: the ends of all their reads, at once.
//!
//! Invariant: when an end is closed, nothing is written for its reads any more.

#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::ptr;
use std::time::Instant;

use cadre_ucx_sys::bindings as b;

use super::calls::{request, taken};
use super::net::{Done, End, EndId, GetId, Net, Reading};

impl End {
    /// Begins to close it by force, unless that was done. Keys that no read uses are destroyed first, as UCX asks for; others when
    /// their reads have ended.
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

    /// Destroys the keys of an end, of which none is used any more.
    fn destroy_keys(&mut self, of: &b::Functions) {
        for key in std::mem::take(&mut self.keys) {
            // SAFETY: no read uses it any more, and none can begin.
            unsafe { (of.ucp_rkey_destroy)(key) };
        }
    }
}

impl Net {
    /// Closes an end by force. When this returns, none of its reads is under way: [`Self::done`] tells each of them. Where UCX does
    /// not end them in time, all other ends are closed with it: [`Self::lost`] tells each of those.
    pub(crate) fn close(&mut self, end: EndId) {
        let Some(reading) = &mut self.reading else { return };
        let Some(it) = reading.ends.get_mut(&end.0).filter(|it| !it.is_closed) else { return };
        it.close(&self.context.ucx.functions);
        let until = Instant::now() + self.closing;
        while !self.is_over(end) {
            if Instant::now() >= until {
                return self.cut();
            }
            self.progress();
        }
    }

    /// Whether the close of an end has ended, with all its reads; then nothing of it is left.
    fn is_over(&mut self, id: EndId) -> bool {
        let of = &self.context.ucx.functions;
        let Some(reading) = &mut self.reading else { return true };
        let Some(end) = reading.ends.get_mut(&id.0) else { return true };
        if let Some(closing) = end.closing {
            // SAFETY: it is a request that was not freed yet.
            let status = unsafe { (of.ucp_request_check_status)(closing.as_ptr()) };
            if status == b::UCS_INPROGRESS {
                return false;
            }
            // SAFETY: it has ended, and nobody else has it.
            unsafe { (of.ucp_request_free)(closing.as_ptr()) };
            end.closing = None;
        }
        if end.flying > 0 {
            return false;
        }
        end.destroy_keys(of);
        reading.ends.remove(&id.0);
        true
    }

    /// Ends the reading worker with all its ends: after this nothing is written for any of its reads.
    fn cut(&mut self) {
        self.collect();
        let Some(Reading { worker, queue, is_watched: _, mut ends, gets }) = self.reading.take()
        else {
            return;
        };
        let of = &self.context.ucx.functions;
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
            let lost = ends.iter().filter(|it| !it.1.is_closed);
            self.lost.extend(lost.map(|it| EndId(*it.0)));
        } else {
            // What still waits to be sent by an end goes with its close, so nothing looks at keys after it.
            let lost = ends.iter_mut().filter(|it| !it.1.is_closed);
            self.lost.extend(lost.map(|it| EndId(*it.0)));
            for end in ends.values_mut() {
                end.close(of);
                end.destroy_keys(of);
            }
            // SAFETY: it is destroyed once: nothing else has it any more. Its queue is still there.
            unsafe { (of.ucp_worker_destroy)(worker) };
        }
        for (get, (_, words)) in gets {
            std::mem::forget(words);
            let result = Err("its worker was ended".to_owned());
            self.done.push_back(Done { get: GetId(get), words: Vec::new(), result });
        }
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        let ends = self.reading.iter().flat_map(|it| it.ends.keys().copied());
        for end in ends.collect::<Vec<_>>() {
            self.close(EndId(end));
        }
        if self.emulates {
            // Replies to reads of others may wait in the worker that serves: UCX 1.13 frees what it never had when it purges them.
            // Both workers stay as they are until the process ends.
            self.context.is_abandoned = true;
            return std::mem::forget(self.reading.take());
        }
        let reading = self.reading.take().map(|it| (it.worker, it.queue));
        let destroy = self.context.ucx.functions.ucp_worker_destroy;
        if let Some((worker, _queue)) = reading {
            // SAFETY: it has no ends any more, and is destroyed once.
            unsafe { destroy(worker) };
        }
        // SAFETY: it is destroyed once.
        unsafe { destroy(self.serving) };
    }
}
