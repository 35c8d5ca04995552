//! One training step: forward and backward over all nano-batches, all-reduce, update.
//!
//! In: this trainer's rows of every nano-batch. Out: the loss of all trainers, new parameters.
//!
//! ```text
//! phases   F l0n0  F l0n1  F l1n0  …  F Ln1 | B Ln0  B Ln1  …  B l0n1 | F l0n2 …
//! in the order of the step's turns: all nano-batches go forward and backward, a few at a time where gradients are accumulated
//! layers without core attention have no phase: they run behind the layer before them, in both directions
//! submit(i) comes after wait(i - 2), so while phase i - 1 is computed elsewhere,
//! the linear work between phases i - 2 and i is done here
//! ```
//!
//! Does not make checkpoints and does not talk to the conductor.
//!
//! Invariant: stages, sums and updates come in one fixed order, whatever arrives first. Activations are held of the nano-batches
//! that have gone forward and not backward, and of no others.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cadre_worker::session::{Direction, PhaseAt, PhaseOrder};

use super::attention::{At, Attention, AttentionError, IN_FLIGHT};
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
    /// Gradients of all parameters, and the loss as the last element: one all-reduce sums both.
    gradients: Vec<f32>,
    /// Activations of the nano-batches that are between forward and backward.
    kept: BTreeMap<usize, Activations>,
    /// Memory for others.
    spare: Vec<Activations>,
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

/// Drops all spans.
impl Track for () {
    fn span(&mut self, _: &'static str, _: Instant, _: Instant) {}
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
        Self { model, parameters, optimizer, gradients, kept: BTreeMap::new(), spare: Vec::new() }
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

    /// Does step number `step`, counted from 0, whose phases come in `order`: every nano-batch forward and backward, through all
    /// layers.
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
        (step, order): (u64, &PhaseOrder),
        batch: Vec<Rows>,
        targets: u64,
        attention: &mut dyn Attention,
        ring: &mut Ring,
        track: &mut dyn Track,
    ) -> Result<StepResult, StepError> {
        let depth = IN_FLIGHT.min(order.together());
        let phases: Vec<_> = order.iter().collect();
        self.model.begin(&self.parameters)?;
        let mut pass = Pass {
            trainer: self,
            attention,
            track,
            losses: vec![0.0; batch.len()],
            rows: batch.into_iter().map(Some).collect(),
            weight: 1.0 / targets.max(1) as f32,
            wait: Duration::ZERO,
        };
        for next in 0..phases.len() + depth {
            if let Some(done) = next.checked_sub(depth) {
                pass.finish(step, phases[done])?;
            }
            if let Some(phase) = phases.get(next) {
                pass.start(*phase)?;
            }
        }
        let (wait, local) = (pass.wait, pass.losses.iter().sum::<f64>());
        self.model.end(&mut self.gradients)?;
        self.finish_step(step, local / targets.max(1) as f64, ring, wait, track)
    }

    /// Loss of `rows`, summed over their targets, in nats: forward alone, and nothing is learnt of it. `attention` has begun a
    /// step of one nano-batch with their documents.
    ///
    /// # Errors
    ///
    /// [`StepError`]; a loss that is not finite is none.
    pub fn forward(
        &mut self,
        rows: Rows,
        attention: &mut dyn Attention,
        kept: &mut Activations,
    ) -> Result<f64, StepError> {
        let Self { model, parameters, .. } = self;
        model.embed(parameters, rows, kept);
        through(model, parameters, kept, attention)?;
        Ok(model.loss(parameters, kept)?.nats)
    }

    /// Gives the model its parameters, for [`Self::forward`]; a step does so itself.
    ///
    /// # Errors
    ///
    /// The GPU's.
    pub fn begin(&mut self) -> Result<(), StepError> {
        Ok(self.model.begin(&self.parameters)?)
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

const UNDER_WAY: &str = "a phase that is finished was started";

/// The stages of a step between its phases.
struct Pass<'a> {
    trainer: &'a mut Trainer,
    attention: &'a mut dyn Attention,
    track: &'a mut dyn Track,
    rows: Vec<Option<Rows>>,
    /// Weight of one target in the loss.
    weight: f32,
    /// Summed over the targets of each nano-batch, in nats.
    losses: Vec<f64>,
    wait: Duration,
}

impl Pass<'_> {
    fn start(&mut self, PhaseAt { layer, nano, direction }: PhaseAt) -> Result<(), StepError> {
        let begin = Instant::now();
        let Trainer { model, parameters, gradients, kept, spare, .. } = &mut *self.trainer;
        let kept = kept.entry(nano).or_insert_with(|| spare.pop().unwrap_or_default());
        match direction {
            Direction::Forward => {
                if layer == 0 {
                    let rows = self.rows[nano].take().expect("a nano-batch starts once");
                    model.embed(parameters, rows, kept);
                    for it in model.stack().before() {
                        model.pass_by(parameters, kept, it)?;
                    }
                }
                let own = model.stack().layer_of(layer);
                let qkv = model.before_attention(parameters, kept, own)?;
                self.track.span("linear", begin, Instant::now());
                self.attention.submit_forward(At { layer, nano }, qkv)?;
            }
            Direction::Backward => {
                for it in model.stack().behind(layer).rev() {
                    model.pass_by_gradient(parameters, gradients, kept, it)?;
                }
                let own = model.stack().layer_of(layer);
                let (dout, out) =
                    model.after_attention_gradient(parameters, gradients, kept, own)?;
                self.track.span("linear", begin, Instant::now());
                self.attention.submit_backward(At { layer, nano }, [dout, out])?;
            }
        }
        Ok(())
    }

    fn finish(
        &mut self,
        step: u64,
        PhaseAt { layer, nano, direction }: PhaseAt,
    ) -> Result<(), StepError> {
        match direction {
            Direction::Forward => {
                let Trainer { model, parameters, .. } = &*self.trainer;
                let own = model.stack().layer_of(layer);
                // A copy: the wait is of all of this.
                let sinks = model.sinks(parameters, own).to_vec();
                let out = self.waited(|it| it.wait_forward(At { layer, nano }, &sinks))?;
                let begin = Instant::now();
                let Trainer { model, parameters, gradients, kept, .. } = &mut *self.trainer;
                let kept = kept.get_mut(&nano).expect(UNDER_WAY);
                model.after_attention(parameters, kept, own, out)?;
                for it in model.stack().behind(layer) {
                    model.pass_by(parameters, kept, it)?;
                }
                if layer + 1 == usize::from(model.stack().core().count()) {
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
                let attention = self.waited(|it| it.wait_backward(At { layer, nano }))?;
                let begin = Instant::now();
                let Trainer { model, parameters, gradients, kept, spare, .. } = &mut *self.trainer;
                let own = model.stack().layer_of(layer);
                let of = kept.get_mut(&nano).expect(UNDER_WAY);
                model.before_attention_gradient(parameters, gradients, of, own, attention)?;
                if layer == 0 {
                    for it in model.stack().before().rev() {
                        model.pass_by_gradient(parameters, gradients, of, it)?;
                    }
                    model.embed_gradient(gradients, of);
                    spare.extend(kept.remove(&nano));
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
    /// The other trainers cannot be reached.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// Training went astray.
    #[error("the {what} of step {step} is {value}; lower --lr, or resume from a checkpoint")]
    NotFinite {
        /// The step.
        step: u64,
        /// `loss`, `gradient norm` or `validation loss`.
        what: &'static str,
        /// NaN or an infinity.
        value: f32,
    },
}

/// Takes embedded rows of nano-batch 0 through all layers, one after the other.
pub(crate) fn through(
    model: &mut Model,
    parameters: &[f32],
    kept: &mut Activations,
    attention: &mut dyn Attention,
) -> Result<(), StepError> {
    let mut at = At { layer: 0, nano: 0 };
    for layer in 0..model.stack().layers() {
        if model.stack().kind_of(layer).is_none() {
            model.pass_by(parameters, kept, layer)?;
            continue;
        }
        attention.submit_forward(at, model.before_attention(parameters, kept, layer)?)?;
        let out = attention.wait_forward(at, model.sinks(parameters, layer))?;
        model.after_attention(parameters, kept, layer, out)?;
        at.layer += 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::ring::Ring;
    use crate::tests::{accumulated, batch, in_process, loader, trainer};

    /// Each of four nano-batches by itself, two at a time, or all together: gradients are sums of the same numbers, and
    /// activations are held of those alone that are under way.
    #[test]
    fn accumulating_holds_one_micro_batch_and_learns_the_same() {
        let loader = loader(4);
        let run = |times: u16, nanos: u16| {
            let mut trainer = trainer();
            let order = accumulated(&trainer, times, nanos);
            let mut attention = in_process(trainer.model());
            let mut losses = Vec::new();
            for step in 0..3 {
                let (rows, targets, documents) = batch(&loader, step);
                attention.begin(documents);
                let ring = &mut Ring::alone();
                let result =
                    trainer.step((step, &order), rows, targets, &mut attention, ring, &mut ());
                losses.push(result.unwrap().loss);
            }
            assert!(trainer.kept.is_empty());
            assert_eq!(trainer.spare.len(), usize::from(nanos), "{times} times {nanos}");
            losses
        };
        let together = run(1, 4);
        for (times, nanos) in [(4, 1), (2, 2)] {
            let losses = run(times, nanos);
            assert_eq!(losses[0].to_bits(), together[0].to_bits());
            for (loss, expected) in losses.iter().zip(&together) {
                assert!((loss - expected).abs() < 1e-4, "{loss} {expected}");
            }
        }
    }
}
