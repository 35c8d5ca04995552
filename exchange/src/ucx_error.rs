//! Why UCX does not do something, as all of the crate and its callers are told.
//!
//! In and out: nothing is done here; [`crate::ucx`] gives these.

use cadre_ucx_sys::Absent;

/// Why UCX does not do something.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum UcxError {
    /// There is none.
    #[error(transparent)]
    Absent(#[from] Absent),
    /// Nobody knows such transports.
    #[error(
        "CADRE_UCX_OVER is {said:?}: unset it; in tests it may be shm or tcp, over which UCX emulates reads"
    )]
    Over {
        /// What it says.
        said: String,
    },
    /// The machine has nothing that it could use.
    #[error(
        "this machine has no device that UCX can use for RDMA ({asked}): run where there is one, or without --exchange ucx"
    )]
    NoDevice {
        /// What was asked for.
        asked: &'static str,
    },
    /// All is to be encrypted, and it encrypts nothing.
    #[error(
        "UCX sends rows in the clear, and spec.attention.encryption of this job is Required: say Tcp there, or --exchange auto"
    )]
    InTheClear,
    /// A call failed.
    #[error("UCX cannot {what}: {why}")]
    Call {
        /// What it should do.
        what: &'static str,
        /// What it says.
        why: String,
    },
}
