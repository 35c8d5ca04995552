//! Why a checkpoint was not written or read: its path, what is wrong, and what to do.

use std::io;
use std::path::PathBuf;

use super::FORMAT;

/// Why a checkpoint was not written or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The system refused to write, as when the disk is full.
    #[error("cannot write checkpoint {}: {source}; check the space and permissions", path.display())]
    Write {
        /// The checkpoint.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The system refused to read.
    #[error("cannot read checkpoint {}: {source}; check the path and permissions", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The checkpoint is damaged, or this program did not write it.
    #[error("checkpoint {} is damaged: {why}; remove its folder to resume from an older one", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        why: String,
    },
    /// Another version of the program wrote the checkpoint.
    #[error(
        "checkpoint {} has format {format}, this build knows {FORMAT}; resume with the build that wrote it, or choose another --out",
        path.display()
    )]
    Format {
        /// The file.
        path: PathBuf,
        /// Its format.
        format: u32,
    },
    /// The checkpoint belongs to another run.
    #[error("checkpoint {} has another {field}: {found}, the job has {wanted}; resume with the same, or choose another --out", path.display())]
    Foreign {
        /// The checkpoint.
        path: PathBuf,
        /// What differs.
        field: &'static str,
        /// In the checkpoint.
        found: String,
        /// In the job.
        wanted: String,
    },
}
