//! Open files of a process: enough for the links of its job, or a refusal that says how many are needed.
//!
//! In: the number of peers. Out: a raised soft limit. The hard limit is the machine's and stays.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::provider::Error;

/// Files beside the links with peers: strangers at the door, the control service, checkpoints, libraries.
const OTHER_FILES: u64 = 1024;
/// With one peer: one link each way, and while it opens one again its old one.
const FILES_OF_A_PEER: u64 = 3;

/// Lets this process have links with `peers` peers at a time, and as many files beside them as the machine allows.
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
        // If the limit cannot be raised, the check below reports it.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    }
    let allowed = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    if allowed < needed { Err(Error::Files { peers, needed, allowed }) } else { Ok(()) }
}
