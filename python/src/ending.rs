//! What this process exits with, and what SIGTERM means to it.
//!
//! In: how a rank left its job, signals. Out: the exit code that the controller reads: 2 where another attempt would fail in
//! the same way, 3 where a peer is the cause, 143 after a stop. It stands in for Python's 0 and 1 alone: a code that the
//! script chose stays, as `spec.failurePolicy.rules` may name it. A rank that has left is a Python program as any other: SIGTERM
//! does what it did before the rank joined.
//!
//! Invariant: a forked child exits as it would without, and whatever libraries do at the end of a process is done.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::path::PathBuf;
use std::process;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::time::Duration;

use cadre_worker::process::{Error, Termination, last_words};
use cadre_worker::session::{Ending, LeaveError, Session};
use pyo3::PyErr;

use crate::refusal::failed;

/// Exit code of bad input.
pub(crate) const BAD_INPUT: u8 = 2;
/// Exit code of a rank that cannot go on without a peer.
pub(crate) const COULD_NOT_GO_ON: u8 = 3;
/// Exit code of a rank that was stopped: what a process ended by SIGTERM has.
pub(crate) const STOPPED: u8 = 143;
/// Longest wait until a reason is out, before the session ends.
const FAREWELL: Duration = Duration::from_secs(2);
/// What Python exits with after an exception that nothing caught.
const RAISED: c_int = 1;

unsafe extern "C" {
    fn on_exit(call: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
    fn exit(status: c_int) -> !;
    fn sigaction(signal: c_int, new: *const Action, old: *mut Action) -> c_int;
}

/// Number of SIGTERM.
const SIGTERM: c_int = 15;

/// What a signal does to a process: room for the system's `struct sigaction`, of which only the handler is looked at, its first
/// word.
#[derive(Clone, Copy)]
#[repr(C)]
struct Action([usize; 32]);

/// What SIGTERM did before a rank joined, and what it does since.
static HANDLERS: Mutex<Option<[Action; 2]>> = Mutex::new(None);

/// The code to exit with; 0: Python's own.
static CODE: AtomicI32 = AtomicI32::new(0);
/// The process that has registered.
static PROCESS: AtomicU32 = AtomicU32::new(0);
static REGISTERED: Once = Once::new();
/// Whether SIGTERM has come.
static ASKED: AtomicBool = AtomicBool::new(false);

/// Where this process leaves the code that it exits with, for a launcher that exits with one of its own.
static LEAVES: Mutex<Option<PathBuf>> = Mutex::new(None);

/// From now on this process leaves the code that it exits with in `file`.
pub(crate) fn leave_code_in(file: PathBuf) {
    *LEAVES.lock().unwrap_or_else(PoisonError::into_inner) = Some(file);
    register();
}

/// Makes this process exit with `code` where Python would exit with 0 or 1; 0 takes that back.
pub(crate) fn exit_with(code: u8) {
    CODE.store(code.into(), Ordering::SeqCst);
    register();
}

/// What Python raises where a rank does not leave as it said; the process exits as one whose job has failed.
pub(crate) fn left(error: LeaveError, is_pod: bool) -> PyErr {
    if let LeaveError::Failed { reason, bad_input } = &error {
        exit_with(if *bad_input { BAD_INPUT } else { COULD_NOT_GO_ON });
        last_words(reason);
    }
    if let LeaveError::Stopped { .. } = &error {
        exit_with(if is_pod || asked() { STOPPED } else { 0 });
    }
    failed(error)
}

/// Ends the job of a session everywhere. The reason why it ends, and this rank's exit code: 3 where it is not the cause.
pub(crate) fn fail(session: Option<&Session>, reason: &str, for_good: bool) -> (String, u8) {
    let own = (reason.to_owned(), if for_good { BAD_INPUT } else { 1 });
    let Some(session) = session else { return own };
    let had_ended = session.ending(Duration::ZERO).is_some();
    if for_good {
        session.fail_for_good(reason.to_owned());
    } else {
        session.fail(reason.to_owned());
    }
    // A thread inside a call of the session learns the reason too.
    match session.ending(FAREWELL) {
        Some(Ending::Failed { reason, bad_input: true }) => (reason, BAD_INPUT),
        Some(Ending::Failed { reason, bad_input: false }) if had_ended => (reason, COULD_NOT_GO_ON),
        Some(Ending::Failed { reason, bad_input: false }) => (reason, own.1),
        Some(Ending::Completed | Ending::Stopped { .. }) | None => own,
    }
}

fn register() {
    REGISTERED.call_once(|| {
        PROCESS.store(process::id(), Ordering::SeqCst);
        // SAFETY: the function lives as long as the process, since nothing unloads a module of Python, and takes no argument.
        unsafe { on_exit(exiting, std::ptr::null_mut()) };
    });
}

/// Called by `exit`, when Python is through.
extern "C" fn exiting(status: c_int, _: *mut c_void) {
    if process::id() != PROCESS.load(Ordering::SeqCst) {
        return;
    }
    let code = match CODE.load(Ordering::SeqCst) {
        0 => status,
        _ if !(0..=RAISED).contains(&status) => status,
        code => code,
    };
    if let Some(file) = LEAVES.lock().unwrap_or_else(PoisonError::into_inner).take() {
        // Where nothing can be written, the launcher's code has to do.
        let _ = std::fs::write(file, code.to_string());
    }
    if code == status {
        return;
    }
    // SAFETY: glibc allows it in a handler: `exit` goes on with the handlers that are left, and takes the last code.
    unsafe { exit(code) }
}

/// What SIGTERM does now.
fn on_sigterm_now() -> Action {
    let mut now = Action([0; 32]);
    // SAFETY: the room is larger than the system's structure; nothing is set.
    unsafe { sigaction(SIGTERM, std::ptr::null(), &raw mut now) };
    now
}

/// From now on SIGTERM calls `stop`, on a thread of its own; a handler that Python had before runs, too.
pub(crate) fn on_sigterm(stop: impl Fn() + Send + 'static) -> Result<(), Error> {
    let termination = Termination::default();
    termination.set(move || {
        ASKED.store(true, Ordering::SeqCst);
        stop();
    });
    let before = on_sigterm_now();
    termination.listen(STOPPED.into())?;
    *HANDLERS.lock().unwrap_or_else(PoisonError::into_inner) = Some([before, on_sigterm_now()]);
    Ok(())
}

/// SIGTERM does again what it did before [`on_sigterm`]; what a script has installed since stays.
pub(crate) fn give_sigterm_back() {
    let handlers = HANDLERS.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some([before, own]) = handlers
        && on_sigterm_now().0[0] == own.0[0]
    {
        // SAFETY: the system wrote what is set.
        unsafe { sigaction(SIGTERM, &raw const before, std::ptr::null_mut()) };
    }
}

/// Whether this process was asked to end.
pub(crate) fn asked() -> bool {
    ASKED.load(Ordering::SeqCst)
}
