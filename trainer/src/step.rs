//! One training step: forward and backward over all nano-batches, all-reduce, update.
//!
//! In: this trainer's rows of every nano-batch. Out: the loss of all trainers, new parameters.
//!
//! ```text
//! phases   F l0n0  F l0n1  F l1n0  …  F Ln1 | B Ln0  B Ln1  …  B l0n1
//! submit(i) comes after wait(i - 2), so while phase i - 1 is computed elsewhere,
//! the linear work between phases i - 2 and i is done here
//! ```
//!
//! Does not make checkpoints and does not talk to the conductor.
//!
//! Invariant: stages, sums and updates come in one fixed order, whatever arrives first.

use std::time::{Duration, Instant};

use super::attention::{Attention, AttentionError, IN_FLIGHT};
use super::loader::Rows;
use super::model::{Activations, Model};
use super::optimizer::{AdamW, Update};
use super::ring::{Ring, RingError};

/// A rank's copy of the model, and what a step needs beside it.
#[derive(Debug)]
pub struct Trainer {
    model: Model,
    parameters: Vec<f32>,
    optimizer: AdamW,
    /// As long as the parameters, and one more for the loss: one all-reduce sums both.
    gradients: Vec<f32>,
    kept: Vec<Activations>,
}

/// What a step gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepResult {
    /// Mean over all targets of all trainers and nano-batches, in nats; the same on every trainer.
    pub loss: f32,
    /// Norm of the gradient and learning rate.
    pub update: Update,
    /// Time in waits for core attention (in it: what an in-place server computed there).
    pub wait: Duration,
    /// Time in the all-reduce.
    pub reduce: Duration,
}

/// Told when something was done: `linear`, `wait`, `reduce` or `update`.
pub trait Track {
    /// `name` was done from `begin` to `end`.
    fn span(&mut self, name: &'static str, begin: Instant, end: Instant);
}

/// Nobody listens.
impl Track for () {
    fn span(&mut self, _: &'static str, _: Instant, _: Instant) {}
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Direction {
    Forward,
    Backward,
}

impl Trainer {
    /// # Panics
    ///
    /// When the parameters or the optimizer's moments are not of this model.
    pub fn new(model: Model, parameters: Vec<f32>, optimizer: AdamW) -> Self {
        let length = model.parameters().len();
        assert_eq!(parameters.len(), length, "parameters of another model");
        assert_eq!(optimizer.moments().0.len(), length, "moments of another model");
        let gradients = vec![0.0; length + 1];
        Self { model, parameters, optimizer, gradients, kept: Vec::new() }
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The parameters, flat.
    pub fn parameters(&self) -> &[f32] {
        &self.parameters
    }

    /// The optimizer with its moments.
    pub fn optimizer(&self) -> &AdamW {
        &self.optimizer
    }

    /// Does step number `step`, counted from 0.
    ///
    /// `batch` has this trainer's rows of each nano-batch, `targets` counts those of all trainers and
    /// nano-batches.
    ///
    /// # Errors
    ///
    /// After an error the parameters are still those before the step, but another step is not
    /// possible: the gradients hold a part of this one.
    pub fn step(
        &mut self,
        step: u64,
        batch: Vec<Rows>,
        targets: u64,
        attention: &mut dyn Attention,
        ring: &mut Ring,
        track: &mut dyn Track,
    ) -> Result<StepResult, StepError> {
        let nano_batches = batch.len();
        self.kept.resize_with(nano_batches, Activations::default);
        let (layers, depth) = (self.model.config().layers, IN_FLIGHT.min(nano_batches));
        let phases = 2 * layers * nano_batches;
        self.model.begin(&self.parameters)?;
        let mut pass = Pass {
            trainer: self,
            attention,
            track,
            rows: batch.into_iter().map(Some).collect(),
            weight: 1.0 / targets.max(1) as f32,
            losses: vec![0.0; nano_batches],
            wait: Duration::ZERO,
        };
        let place = |phase: usize| {
            let (pass, nano) = (phase / nano_batches, phase % nano_batches);
            match pass.checked_sub(layers) {
                None => (Direction::Forward, pass, nano),
                Some(back) => (Direction::Backward, layers - 1 - back, nano),
            }
        };
        for phase in 0..phases + depth {
            if let Some(done) = phase.checked_sub(depth) {
                pass.finish(step, place(done))?;
            }
            if phase < phases {
                pass.start(place(phase))?;
            }
        }
        let (wait, local) = (pass.wait, pass.losses.iter().sum::<f64>());
        self.model.end(&mut self.gradients)?;
        self.finish_step(step, local / targets.max(1) as f64, ring, wait, track)
    }

    fn finish_step(
        &mut self,
        step: u64,
        local: f64,
        ring: &mut Ring,
        wait: Duration,
        track: &mut dyn Track,
    ) -> Result<StepResult, StepError> {
        let begin = Instant::now();
        let last = self.gradients.len() - 1;
        self.gradients[last] = local as f32;
        ring.all_reduce(&mut self.gradients)?;
        let reduced = Instant::now();
        track.span("reduce", begin, reduced);
        let (gradients, loss) = self.gradients.split_at_mut(last);
        let loss = std::mem::take(&mut loss[0]);
        if !loss.is_finite() {
            return Err(StepError::NotFinite { step, what: "loss", value: loss });
        }
        let (threads, layout) = (self.model.threads(), self.model.parameters());
        let update = self.optimizer.update(step, layout, &mut self.parameters, gradients, threads);
        track.span("update", reduced, Instant::now());
        if !update.norm.is_finite() {
            return Err(StepError::NotFinite { step, what: "gradient norm", value: update.norm });
        }
        Ok(StepResult { loss, update, wait, reduce: reduced - begin })
    }
}

/// The stages of a step between its phases.
struct Pass<'a> {
    trainer: &'a mut Trainer,
    attention: &'a mut dyn Attention,
    track: &'a mut dyn Track,
    rows: Vec<Option<Rows>>,
    /// Of a target in the loss.
    weight: f32,
    /// Summed over the targets of each nano-batch, in nats.
    losses: Vec<f64>,
    wait: Duration,
}

impl Pass<'_> {
    fn start(
        &mut self,
        (direction, layer, nano): (Direction, usize, usize),
    ) -> Result<(), StepError> {
        let begin = Instant::now();
        let Trainer { model, parameters, gradients, kept, .. } = &mut *self.trainer;
        let kept = &mut kept[nano];
        match direction {
            Direction::Forward => {
                if layer == 0 {
                    let rows = self.rows[nano].take().expect("a nano-batch starts once");
                    model.embed(parameters, rows, kept);
                }
                let [q, k, v] = model.before_attention(parameters, kept, layer)?;
                self.track.span("linear", begin, Instant::now());
                self.attention.submit_forward(layer, nano, q, k, v)?;
            }
            Direction::Backward => {
                let (dout, out) =
                    model.after_attention_gradient(parameters, gradients, kept, layer)?;
                self.track.span("linear", begin, Instant::now());
                self.attention.submit_backward(layer, nano, dout, out)?;
            }
        }
        Ok(())
    }

    fn finish(
        &mut self,
        step: u64,
        (direction, layer, nano): (Direction, usize, usize),
    ) -> Result<(), StepError> {
        match direction {
            Direction::Forward => {
                let out = self.waited(|attention| attention.wait_forward(layer, nano))?;
                let begin = Instant::now();
                let Trainer { model, parameters, gradients, kept, .. } = &mut *self.trainer;
                let kept = &mut kept[nano];
                model.after_attention(parameters, kept, layer, out)?;
                if layer + 1 == model.config().layers {
                    let loss = model.head(parameters, gradients, kept, self.weight)?;
                    if !loss.nats.is_finite() {
                        let value = loss.nats as f32;
                        return Err(StepError::NotFinite { step, what: "loss", value });
                    }
                    self.losses[nano] = loss.nats;
                }
                self.track.span("linear", begin, Instant::now());
            }
            Direction::Backward => {
                let attention = self.waited(|attention| attention.wait_backward(layer, nano))?;
                let begin = Instant::now();
                let Trainer { model, parameters, gradients, kept, .. } = &mut *self.trainer;
                let kept = &mut kept[nano];
                model.before_attention_gradient(parameters, gradients, kept, layer, attention)?;
                if layer == 0 {
                    model.embed_gradient(gradients, kept);
                }
                self.track.span("linear", begin, Instant::now());
            }
        }
        Ok(())
    }

    fn waited<T>(
        &mut self,
        wait: impl FnOnce(&mut dyn Attention) -> Result<T, AttentionError>,
    ) -> Result<T, AttentionError> {
        let begin = Instant::now();
        let result = wait(self.attention);
        let end = Instant::now();
        self.wait += end - begin;
        self.track.span("wait", begin, end);
        result
    }
}

/// Why a step has no result.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// Core attention failed.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// A call of the session was refused.
    #[error(transparent)]
    Session(#[from] cadre_worker::session::Error),
    /// Linear layers failed on the GPU.
    #[error("linear layers: {0}")]
    Linear(#[from] cadre_kernels::device::Error),
    /// The other trainers could not be reached.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// Training went astray.
    #[error("the {what} of step {step} is {value}; lower --lr, or resume from a checkpoint")]
    NotFinite {
        /// The step.
        step: u64,
        /// `loss` or `gradient norm`.
        what: &'static str,
        /// NaN or an infinity.
        value: f32,
    },
}
