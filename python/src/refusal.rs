//! Errors as Python's exceptions.
//!
//! In: errors, mostly the session's. Out: `RefusedError`, a `ValueError`, for what the caller can correct, so that another attempt
//! would fail in the same way; `RuntimeError` for an end of the job.

use cadre_worker::session::Error;
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

create_exception!(cadre._native, RefusedError, PyValueError, "What the caller can correct.");

/// What happens to results that are not finite.
#[derive(Clone, Copy)]
pub(crate) enum NotFinite {
    /// The caller gets them, and what is said of them.
    Report,
    /// The job ends.
    End,
}

impl NotFinite {
    /// What Python says: `report` or `end`.
    pub(crate) fn read(word: &str) -> PyResult<Self> {
        match word {
            "report" => Ok(Self::Report),
            "end" => Ok(Self::End),
            other => Err(refused(format!("on_nonfinite is {other:?}; say \"report\" or \"end\""))),
        }
    }
}

/// The session's own words; of a kind that says whether the caller can correct it.
pub(crate) fn told(error: Error) -> PyErr {
    match error {
        Error::Rows { .. }
        | Error::Lent { .. }
        | Error::Layers { .. }
        | Error::Wire { .. }
        | Error::Seed { .. }
        | Error::Turns { .. } => refused(error),
        Error::OutOfTurn { .. }
        | Error::NotFinite { .. }
        | Error::Device { .. }
        | Error::Thread { .. }
        | Error::Ended { .. } => failed(error),
    }
}

pub(crate) fn refused(error: impl std::fmt::Display) -> PyErr {
    RefusedError::new_err(error.to_string())
}

pub(crate) fn failed(error: impl std::fmt::Display) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

/// A result with the rank in its refusal, whose call it is, unless the refusal names it.
pub(crate) fn of_rank<T>(rank: u16, result: PyResult<T>) -> PyResult<T> {
    result.map_err(|error| {
        Python::attach(|py| {
            let (words, named) = (error.value(py).to_string(), format!("rank {rank}"));
            let is_ours = error.is_instance_of::<RefusedError>(py) && !words.contains(&named);
            if is_ours { refused(format!("{named}: {words}")) } else { error }
        })
    })
}
