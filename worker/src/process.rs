//! What a worker process does about its parent, and its last words.
//!
//! In: `CADRE_PARENT_PID`, set by the supervisor. Out: a process that dies with it. Nothing is done
//! for processes that no supervisor started. And what a SIGTERM means, and which sockets are its own.

use std::io::Write as _;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

use cadre_crds::contract::{CADRE_CONTROL, CADRE_PARENT_PID};
use rustix::net::{SocketAddrUnix, getpeername};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

/// Makes this process die with its supervisor, even by `kill -9`.
///
/// # Caveats
///
/// The kernel sends the signal when the *thread* that started this process ends, so the supervisor
/// starts all workers from one thread that outlives them. To be called from a thread of this process
/// that lives as long as it, best the main one, before any other is started.
///
/// # Errors
///
/// The supervisor is gone already, or the kernel refuses.
pub fn arm_parent_death() -> Result<(), Error> {
    let Ok(text) = std::env::var(CADRE_PARENT_PID) else { return Ok(()) };
    let expected: i32 = text.parse().map_err(|_| Error::Malformed { text })?;
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|source| Error::Refused { source: source.into() })?;
    // The supervisor may have died before the line above; then there is another parent by now.
    let parent = getppid().map_or(0, rustix::process::Pid::as_raw_pid);
    if parent == expected { Ok(()) } else { Err(Error::Gone { expected, parent }) }
}

/// Handler of SIGTERM. `cadre run` ends its workers in another way; whoever shuts a machine down may not.
#[derive(Clone, Default)]
pub struct Termination(Arc<Mutex<Option<Hearer>>>);

type Hearer = Box<dyn Fn() + Send>;

impl Termination {
    /// Listens from now on, on a thread of its own. While no handler is set, the process has
    /// nothing to hand over and exits at once with `code`.
    ///
    /// # Errors
    ///
    /// No thread, or no signal, to be had.
    pub fn listen(&self, code: i32) -> Result<(), Error> {
        use tokio::signal::unix::{SignalKind, signal};
        let failed = |source| Error::Signals { source };
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let entered = runtime.enter();
        let mut signals = signal(SignalKind::terminate()).map_err(failed)?;
        drop(entered);
        let own = self.clone();
        let wait = move || {
            runtime.block_on(async {
                while signals.recv().await.is_some() {
                    tracing::info!("asked to end");
                    match own.hearer().as_ref() {
                        Some(hear) => hear(),
                        None => std::process::exit(code),
                    }
                }
            });
        };
        std::thread::Builder::new().name("signals".into()).spawn(wait).map_err(failed)?;
        Ok(())
    }

    /// Sets the handler.
    pub fn set(&self, hear: impl Fn() + Send + 'static) {
        *self.hearer() = Some(Box::new(hear));
    }

    /// Removes the handler.
    pub fn clear(&self) {
        *self.hearer() = None;
    }

    fn hearer(&self) -> std::sync::MutexGuard<'_, Option<Hearer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a descriptor is a socket of the exchange, or the connection to the controller of the same machine: what a process that
/// is forked from this one has to close, since others learn of this one's end by them. That to an operator, over TLS, is not known.
pub fn is_own_socket(descriptor: impl AsFd) -> bool {
    let control = || std::env::var_os(CADRE_CONTROL).filter(|it| !it.is_empty());
    let peer = || SocketAddrUnix::try_from(getpeername(&descriptor).ok().flatten()?).ok();
    cadre_exchange::is_own_socket(&descriptor)
        || peer().is_some_and(|it| {
            let path = it.path().map(std::borrow::Cow::into_owned);
            path.is_some_and(|it| {
                control().is_some_and(|to| to.as_encoded_bytes() == it.to_bytes())
            })
        })
}

/// Writes the reason of an exit to stderr, on one line. Unlike `eprintln!` it does not panic if
/// stderr is a log on a full disk; then the exit code has to do.
pub fn last_words(reason: &str) {
    let line = reason.split_whitespace().collect::<Vec<_>>().join(" ");
    let _ = writeln!(std::io::stderr(), "error: {line}");
}

/// Why a worker cannot be tied to its supervisor.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The supervisor ended before the worker was up.
    #[error("supervisor {expected} is gone, the parent is {parent}; nothing to work for")]
    Gone {
        /// Process id of the supervisor.
        expected: i32,
        /// Process id of the parent.
        parent: i32,
    },
    /// Not a process id.
    #[error("CADRE_PARENT_PID is {text:?}, not a process id; leave it to the supervisor")]
    Malformed {
        /// Its value.
        text: String,
    },
    /// Signals cannot be heard.
    #[error("SIGTERM cannot be handled: {source}; raise the limits on threads and open files")]
    Signals {
        /// What the system said.
        source: std::io::Error,
    },
    /// The kernel said no.
    #[error("the kernel does not tie this process to its parent: {source}")]
    Refused {
        /// Error of the system.
        source: std::io::Error,
    },
}
