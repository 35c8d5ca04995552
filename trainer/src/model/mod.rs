//! The model: a Llama-style decoder on bytes, by hand, forward and backward.
//!
//! In: parameters in one flat buffer, rows of the loader, O (backward: dQ, dK, dV) of core attention.
//! Out: Q, K, V (backward: dO, O), the loss, gradients in a buffer of the parameters' layout.
//!
//! ```text
//! embed ─► before attention ─► [core attention] ─► after attention ─► … ─► head ─► loss
//!          norm, QKV, RoPE      elsewhere           O, norm, SwiGLU        norm, logits
//! ```
//!
//! A layer without core attention is its norm and SwiGLU alone: `pass_by` in place of the two stages around attention.
//!
//! Each stage is a plain call, so a step may do other work between the stages of a nano-batch. Core
//! attention itself is not here.
//!
//! Invariant: the bits of every stage depend on its inputs alone, not on the number of threads.

mod config;
mod design;
mod gradient;
mod math;
mod pattern;
mod rope;
mod stack;
mod stages;
#[cfg(test)]
mod tests;

pub use config::{Config, Matrix, Parameters, UnknownModel};
pub use design::{Design, DesignError, Sizes};
pub(super) use math::{share, trigonometry};
pub use pattern::{Pattern, PatternError, Scores};
pub use stack::{Stack, StackError};
pub use stages::{Activations, Loss, Model};
