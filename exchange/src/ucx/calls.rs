//! The calling convention of UCX: parameters of requests, immediate answers, and what callbacks leave behind.
//!
//! In: what UCX passes to callbacks. Out: a queue that is read after each turn of progress.
//!
//! Invariant: a callback's note is freed once: by the callback, or by the code that began the request.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};

use cadre_ucx_sys::bindings as b;

/// Zeros behind a peer's bytes, so that UCX reads no other memory when a length in them is wrong.
const MARGIN: usize = 4096;

/// The queue that callbacks write.
#[derive(Default)]
pub(super) struct Told {
    pub(super) done: Vec<(u64, b::ucs_status_t)>,
    /// Endpoints that have failed.
    pub(super) failed: Vec<(usize, b::ucs_status_t)>,
}

pub(super) type Queue = Mutex<Told>;

/// The argument of a read's callback.
pub(super) struct Note {
    pub(super) queue: Arc<Queue>,
    pub(super) get: u64,
    pub(super) free: unsafe extern "C" fn(*mut c_void),
}

pub(super) unsafe extern "C" fn ended(
    request: *mut c_void,
    status: b::ucs_status_t,
    note: *mut c_void,
) {
    // SAFETY: UCX gives back what `begin` gave it, once.
    let note = unsafe { Box::from_raw(note.cast::<Note>()) };
    note.queue.lock().unwrap_or_else(PoisonError::into_inner).done.push((note.get, status));
    // SAFETY: the request has ended, and nobody else has it.
    unsafe { (note.free)(request) };
}

pub(super) unsafe extern "C" fn failed(
    queue: *mut c_void,
    ep: b::ucp_ep_h,
    status: b::ucs_status_t,
) {
    // SAFETY: the queue lives as long as the worker that calls this.
    let queue = unsafe { &*queue.cast::<Queue>() };
    let mut told = queue.lock().unwrap_or_else(PoisonError::into_inner);
    told.failed.push((ep as usize, status));
}

pub(super) fn padded(said: &[u8]) -> Vec<u8> {
    [said, &[0; MARGIN]].concat()
}

pub(super) fn request(
    op_attr_mask: u32,
    flags: u32,
    cb: b::ucp_send_nbx_callback_t,
    user_data: *mut c_void,
) -> b::ucp_request_param_t {
    b::ucp_request_param_t {
        op_attr_mask,
        flags,
        request: ptr::null_mut(),
        cb,
        datatype: 0,
        user_data,
        reply_buffer: ptr::null_mut(),
        memory_type: b::UCS_MEMORY_TYPE_HOST,
        recv_info: ptr::null_mut(),
        memh: ptr::null_mut(),
    }
}

/// The immediate answer of a UCX call: done, a request, or an error.
pub(super) fn taken(
    status: b::ucs_status_ptr_t,
) -> Result<Option<NonNull<c_void>>, b::ucs_status_t> {
    let number = status as isize;
    if (isize::from(b::UCS_ERR_LAST)..0).contains(&number) {
        return Err(number as b::ucs_status_t);
    }
    Ok(NonNull::new(status))
}
