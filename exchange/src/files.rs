//! Raises the limit of open files, so that a process can have the links of its job. If that is impossible, the error says how
//! many are needed.
//!
//! In: the number of peers. Out: a raised soft limit. The hard limit is the machine's and is not changed.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::provider::Error;

/// Files that a process needs beside its links: unauthenticated connections, the control service, checkpoints, libraries.
const OTHER_FILES: u64 = 1024;
/// Links with one peer: one in each direction, and an old one while a new one opens.
const FILES_OF_A_PEER: u64 = 3;

/// Raises the limit of open files so far that `peers` peers can be linked at a time, beside the process's other files.
///
/// # Errors
///
/// [`Error::Files`] when the machine does not allow enough.
pub fn allow_links(peers: u64) -> Result<(), Error> {
    let needed = OTHER_FILES + FILES_OF_A_PEER * peers;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    // None is no limit.
    let allowed = maximum.unwrap_or(u64::MAX);
    if current.is_some_and(|it| it < allowed) {
        // A failure is not handled here: the check below reports it.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    }
    let allowed = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    if allowed < needed { Err(Error::Files { peers, needed, allowed }) } else { Ok(()) }
}
