//! The CPU engine: f32 arithmetic on own vector code, the same bits at every vector width.
//!
//! In: tasks, bundles and products that were checked. Out: their results.
//!
//! ```text
//! forward, backward, product   who computes what, in which order     safe but for output pieces
//!   engine                     the procedures of one instruction set
//!     block, softmax           inner loops, generic over the vector
//!       lanes                  vectors
//!   stage, shared              rows in, results out
//! ```

mod backward;
mod block;
mod engine;
mod forward;
mod lanes;
mod product;
mod shared;
mod softmax;
mod stage;
#[cfg(test)]
mod tests;

use engine::Engine;

use crate::matmul::{Accumulate, Matrix};
use crate::{Backward, Forward, Threads};

/// See [`crate::forward`].
pub(crate) fn forward(tasks: &mut [Forward<'_>], threads: Threads) {
    forward::run(Engine::best(), tasks, threads, forward::SEGMENT);
}

/// See [`crate::backward`].
pub(crate) fn backward(bundles: &mut [Backward<'_>], threads: Threads) {
    backward::run(Engine::best(), bundles, threads, backward::SPACE);
}

/// See [`crate::matmul::matmul`].
pub(crate) fn matmul(
    c: &mut [f32],
    a: Matrix<'_>,
    b: Matrix<'_>,
    accumulate: Accumulate,
    threads: Threads,
) {
    product::run(Engine::best(), c, (a, b), accumulate, threads);
}

/// What the bits depend on beside the build.
pub(crate) fn arithmetic() -> &'static str {
    Engine::best().arithmetic
}

/// The instruction set in use.
pub(crate) fn instruction_set() -> &'static str {
    Engine::best().name
}
