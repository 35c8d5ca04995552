//! Core attention, `softmax(QKᵀ)V`, forward and backward, behind one safe face.
//!
//! In: batches of [`Forward`] tasks or [`Backward`] bundles over rows that the caller holds. Out: O and
//! LSE, or dQ, dK and dV, written into the caller's slices. Beside them what a trainer shares with them:
//! [`Linear`] layers, [`matmul`], [`math`] and the wire types of [`wire`]; and an f64 [`reference`](mod@reference) for tests.
//!
//! [`forward`] and [`backward`] compute on the CPU; an [`Engine`] chooses between it and the GPU kernels of
//! [`device`].
//!
//! It moves no data between processes, plans nothing and keeps no state between launches.
//!
//! Invariant: a row of O, LSE and dQ has the same bits whatever else is in the launch, however the rows
//! of its document were cut into tasks, and whatever the number of threads, the split of key tiles over
//! launches, the vector width of the processor and the addresses. So have dK and dV of one bundle.

mod attention;
mod check;
mod cpu;
pub mod cubins;
mod delta;
pub mod device;
mod engine;
mod linear;
pub mod math;
pub mod matmul;
mod pieces;
pub mod reference;
mod sink;
mod threads;
pub mod wire;

pub use attention::{Backward, BackwardRows, Forward, Heads, Mask, Rows, RowsMut};
pub use attention::{TILE, backward_cost, forward_cost, key_tiles};
pub use check::{Error, is_gpu_head_dim, is_head_dim};
pub use delta::delta;
pub use engine::{Choice, Engine, EngineError, WhichGpu, numerics_of_cpu};
pub use linear::{Linear, LinearRows};
pub use pieces::{Pieces, PiecesBackward};
pub use sink::{apply_sinks, sink_gradient};
pub use threads::Threads;

/// Computes O and LSE of all tasks in one launch.
///
/// Each task's rows attend to the keys that [`Mask`] keeps. O of a row without keys is 0, its LSE −∞.
/// An empty batch, and a task without rows, do nothing.
///
/// # Errors
///
/// The first task that is malformed, before anything is computed. NaN in the rows is not an error: it
/// comes out as NaN.
pub fn forward(tasks: &mut [Forward<'_>], threads: Threads) -> Result<(), Error> {
    for (task, it) in tasks.iter().enumerate() {
        check::forward(task, it)?;
    }
    cpu::forward(tasks, threads);
    Ok(())
}

/// Computes dQ, dK and dV of all bundles in one launch.
///
/// A launch does the key tiles [`Backward::key_tiles`] of a bundle and all of its query rows. Launches
/// that share a bundle run one after the other, tiles ascending: dQ adds up over them in that order.
///
/// # Errors
///
/// The first bundle that is malformed, before anything is computed. NaN in the rows is not an error.
pub fn backward(bundles: &mut [Backward<'_>], threads: Threads) -> Result<(), Error> {
    for (bundle, it) in bundles.iter().enumerate() {
        check::backward(bundle, it)?;
    }
    cpu::backward(bundles, threads);
    Ok(())
}

/// Names what the bits depend on: build, engine and arithmetic.
///
/// Two processes with the same id compute the same bits from the same rows. The vector width is not
/// part of it: every width does the same operations in the same order.
pub fn numerics_id() -> String {
    format!("cadre-kernels {} cpu {}", env!("CARGO_PKG_VERSION"), cpu::arithmetic())
}

/// Instruction set chosen at run time; says nothing about the bits.
pub fn instruction_set() -> &'static str {
    cpu::instruction_set()
}

/// Names this machine's CPU with this number of threads, as calibrations do.
pub fn processor(threads: Threads) -> String {
    format!("cpu-{}-{}", instruction_set(), threads.0)
}
