//! `cadre launch`: becomes a launcher of trainers that ends with its supervisor.
//!
//! In: a program and its arguments. Out: that program in this process, or why not. Its trainers are tied to it as it is tied
//! to the supervisor, so that a supervisor that is killed leaves none behind.

use std::ffi::OsString;
use std::io::Error as IoError;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use cadre_crds::contract::CADRE_PARENT_PID;
use cadre_worker::process::{self, arm_parent_death};

/// Returns only if the program cannot be started.
pub(crate) fn launch(words: &[OsString]) -> Error {
    if let Err(error) = arm_parent_death() {
        return Error::Parent(error);
    }
    let (program, arguments) = words.split_first().expect("clap wants a program");
    // The kernel's promise outlives the exec, and so does the process id.
    let own = std::process::id().to_string();
    let source = Command::new(program).args(arguments).env(CADRE_PARENT_PID, own).exec();
    Error::Start { program: program.display().to_string(), source }
}

/// Why a launcher does not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The launcher cannot be made to end with the supervisor.
    #[error(transparent)]
    Parent(process::Error),
    /// The program cannot be executed.
    #[error("{program} does not start: {source}; correct the container's command")]
    Start {
        /// Path of the program.
        program: String,
        /// Error of the system.
        source: IoError,
    },
}
