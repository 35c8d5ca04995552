//! Steps of a training job on machines that one does not have.
//!
//! In: lengths of documents, a model, a machine. Out: how long a step takes, and why. The plans are those of the real
//! planner; what computes and what travels is simulated event by event, in whole nanoseconds.
//!
//! Nothing here does IO, reads a clock or starts a thread: the same input gives the same table everywhere.

mod sampler;

pub use sampler::{LengthSet, SampleError, Sampler};
