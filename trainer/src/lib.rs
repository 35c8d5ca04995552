//! The reference trainer: a Llama-style model on bytes of real text, data parallel, packed documents.
//!
//! In: a folder of documents, a model preset, a seed. Out: losses, checkpoints, a sample of text.
//! Core attention is not computed here: it goes through [`Attention`].
//!
//! Invariant: a step's bits depend on the seed, the model, the number of trainers and the bits of the
//! attention, never on the number of threads or on what arrives first.

mod attention;
pub mod checkpoint;
pub mod corpus;
mod in_process;
pub mod loader;
pub mod model;
pub mod optimizer;
mod pool;
mod process;
pub mod ring;
pub mod sample;
pub mod step;
#[cfg(test)]
mod tests;
pub mod turns;
mod validation;

pub use attention::{At, Attention, AttentionError, Gradients, IN_FLIGHT};
pub use in_process::InProcess;
pub use pool::Pool;
pub use process::{TrainArgs, trainer_main};
