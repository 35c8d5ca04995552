//! What a forked child, such as a worker of a loader, closes of the rank that it was forked from.
//!
//! In: the descriptors of this process. Out: none of them is a socket of the session's any more, so that others see at once when
//! the rank dies, though the child lives. A connection to an operator, over TLS, stays: nobody waits for its end.
//!
//! Invariant: called in a child alone, which uses nothing of the session.
#![allow(unsafe_code)]

use std::os::fd::{BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use cadre_worker::process::is_own_socket;

/// See the module.
pub(crate) fn close_sockets() {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return };
    let numbers = entries.filter_map(|it| it.ok()?.file_name().to_str()?.parse::<RawFd>().ok());
    let numbers: Vec<RawFd> = numbers.collect();
    for number in numbers {
        // SAFETY: the system has just named it; if it was that of the list itself, it is closed, and an error says so.
        let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
        if is_own_socket(descriptor) {
            // SAFETY: its owner is the parent's session, of which nothing is used or dropped in this process.
            drop(unsafe { OwnedFd::from_raw_fd(number) });
        }
    }
}
