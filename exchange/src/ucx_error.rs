//! The errors of UCX, as the whole crate and its callers see them.
//!
//! Nothing is done here; [`crate::ucx`] returns these errors.

use cadre_ucx_sys::Absent;

/// Why UCX does not do something.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum UcxError {
    /// The machine has no usable UCX library.
    #[error(transparent)]
    Absent(#[from] Absent),
    /// `CADRE_UCX_OVER` names transports that do not exist.
    #[error(
        "CADRE_UCX_OVER is {said:?}: unset it; in tests it may be shm or tcp, over which UCX emulates reads"
    )]
    Over {
        /// What it says.
        said: String,
    },
    /// The machine has no device for the requested transports.
    #[error(
        "this machine has no device that UCX can use for RDMA ({asked}): run where there is one, or without --exchange ucx"
    )]
    NoDevice {
        /// What was asked for.
        asked: &'static str,
    },
    /// The job demands that all rows are encrypted, and UCX encrypts nothing.
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
