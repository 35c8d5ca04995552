//! The seam between a trainer's linear work and its core attention.
//!
//! In: rows of Q, K, V (backward: dO and O) of one phase. Out: rows of O (backward: dQ, dK, dV) of the
//! same phase.
//! Says nothing of where the attention is computed: [`super::Pool`] and [`super::InProcess`] both
//! implement [`Attention`].
//!
//! Invariant: phases are submitted and waited for in the order of a step's turns, with at most
//! [`IN_FLIGHT`] submitted and not yet waited for.

use cadre_kernels::{RowsMut, Threads, apply_sinks, delta, sink_gradient};

/// Phases that a trainer may have submitted without having waited for them.
pub const IN_FLIGHT: usize = 2;

/// A phase of a step, without its direction.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct At {
    /// Among the layers with core attention.
    pub layer: usize,
    /// Nano-batch of the step.
    pub nano: usize,
}

impl At {
    /// The error of a call for this phase that comes out of order.
    pub(crate) fn cannot_be(self, what: &str) -> AttentionError {
        let Self { layer, nano } = self;
        AttentionError::Order { layer, nano, what: what.into() }
    }
}

/// Core attention of one trainer, phase by phase.
///
/// Layers are counted among those with core attention. All rows are those of this trainer's stretch of the packed stream of one nano-batch, row-major
/// `[rows, heads, dim]`, f32. `tokens` is the same for all nano-batches.
///
/// # Flow
///
/// A step submits and waits in phase order; the first backward phase may be submitted while the last
/// forward phase of another nano-batch is still in flight. The implementation keeps Q, K, V and LSE
/// of a phase from its forward to its backward.
///
/// # Errors
///
/// Any error ends the step: nothing of it may be submitted or waited for again.
pub trait Attention {
    /// Starts the forward phase `at`. Waits for no result, but may copy the rows and wait
    /// for room in a queue.
    ///
    /// `qkv` are Q `[tokens, query heads, dim]`, K and V `[tokens, KV heads, dim]`, all rotated.
    fn submit_forward(&mut self, at: At, qkv: [Vec<f32>; 3]) -> Result<(), AttentionError>;

    /// Returns O `[tokens, query heads, dim]` with the layer's `sinks`: one of each query head, or none. They are applied here,
    /// to finished rows, and kept for the backward. Blocks; an in-place server computes in here.
    fn wait_forward(&mut self, at: At, sinks: &[f32]) -> Result<Vec<f32>, AttentionError>;

    /// Starts the backward phase `at`. Waits as [`Self::submit_forward`] does.
    ///
    /// `rows` are the gradient of O, and O as the forward gave it, `[tokens, query heads, dim]`.
    fn submit_backward(&mut self, at: At, rows: [Vec<f32>; 2]) -> Result<(), AttentionError>;

    /// Returns the gradients of the rotated Q, K and V, and of the sinks. Blocks as [`Self::wait_forward`] does.
    fn wait_backward(&mut self, at: At) -> Result<Gradients, AttentionError>;
}

/// Results of a backward phase.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gradients {
    /// `[tokens, query heads, dim]`.
    pub dq: Vec<f32>,
    /// `[tokens, KV heads, dim]`, parts of all bundles summed.
    pub dk: Vec<f32>,
    /// `[tokens, KV heads, dim]`, parts of all bundles summed.
    pub dv: Vec<f32>,
    /// Gradient of the sinks, over the rows of this trainer in order; empty without sinks.
    pub dsinks: Vec<f32>,
}

/// Applies `sinks` to finished rows of O and LSE. Without sinks it changes nothing.
pub(crate) fn sink(out: &mut [f32], lse: &mut [f32], sinks: &[f32]) {
    if !sinks.is_empty() {
        apply_sinks(&mut RowsMut::F32(out), lse, sinks);
    }
}

/// The gradient of `sinks`, of what [`sink`] left in O and LSE.
pub(crate) fn sunk(
    (threads, dim): (Threads, usize),
    (dout, out): (&[f32], &[f32]),
    lse: &[f32],
    sinks: &[f32],
) -> Vec<f32> {
    if sinks.is_empty() {
        return Vec::new();
    }
    sink_gradient(lse, &delta(threads, dim, dout, out), sinks)
}

/// Why a phase has no result.
#[derive(Debug, thiserror::Error)]
pub enum AttentionError {
    /// A phase came out of order, or with rows of another shape: a bug of the caller.
    #[error("attention of layer {layer}, nano-batch {nano} cannot be {what}")]
    Order {
        /// Layer of the phase.
        layer: usize,
        /// Nano-batch of the phase.
        nano: usize,
        /// The call, and why it is refused.
        what: String,
    },
    /// The session or kernel that computes the attention ended, with its own reason.
    #[error(transparent)]
    Failed(#[from] Box<dyn std::error::Error + Send + Sync>),
}
