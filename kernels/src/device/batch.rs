//! Launches of a plan, and the description of the plan in their errors.
//!
//! In: kernels of a plan with their arguments. Out: launches on the caller's stream; what goes wrong with one, now or later, names the
//! kernel, how many tasks or bundles the plan has, their rows and their heads.
//!
//! It knows no tensors: that arguments are right is the plan's promise.

// Launches: what kernels read and write is the plan's promise.
#![allow(unsafe_code)]

use std::ffi::c_void;

use super::error::Error;
use super::memory::Stream;
use super::modules::Kernel;
use crate::Heads;

/// The description of a plan's work in errors.
#[derive(Debug)]
pub(super) struct Batch(String);

impl Batch {
    /// Describes `count` tasks or bundles that have `rows` query rows in all.
    pub(super) fn new((count, what): (usize, &str), rows: usize, heads: Heads) -> Self {
        let Heads { query, kv, dim } = heads;
        Self(format!("{count} {what} with {rows} rows, heads {query}:{kv} of {dim}"))
    }

    /// Enqueues a launch of `blocks` blocks on a stream of the plan's GPU.
    ///
    /// # Safety
    ///
    /// As [`Kernel::launch`].
    pub(super) unsafe fn launch(
        &self,
        stream: &Stream,
        (kernel, blocks): (Kernel, u32),
        arguments: &mut [*mut c_void],
    ) -> Result<(), Error> {
        stream.gpu().bind()?;
        let what = || format!("{} of {}", kernel.name, self.0);
        stream.runs(what());
        // SAFETY: the caller's promise.
        unsafe { kernel.launch(blocks, stream.handle(), arguments, || format!(", {}", what())) }
    }
}
