//! Forward stages of the model, and what they keep for the way back.
//!
//! In: parameters, a trainer's [`Rows`], O of core attention. Out: rotated Q, K, V per layer, at the end
//! the loss together with the gradient of the head.
//!
//! The backward stages are in `gradient`.
//!
//! Invariant: the stages of a nano-batch run in the order embed, (before, after) per layer (without core attention: pass by),
//! head, then the gradients backwards; nano-batches share nothing but the gradient buffer.

use std::collections::BTreeMap;
use std::ops::Range;

use cadre_kernels::matmul::Accumulate;
use cadre_kernels::{Linear, LinearRows, Threads, device};

use super::config::{AttentionParameters, Config, Parameters, widths};
use super::math::{blocks, cross_entropy, norm, norm_gradient, share, swiglu};
use super::rope::{Rotation, Turn};
use super::stack::Stack;
use crate::loader::Rows;

/// The stages of one model; parameters and gradients are the caller's.
#[derive(Debug)]
pub struct Model {
    pub(super) config: Config,
    pub(super) stack: Stack,
    pub(super) parameters: Parameters,
    /// By head dim.
    pub(super) rotations: BTreeMap<usize, Rotation>,
    pub(super) threads: Threads,
    pub(super) linear: Linear,
    pub(super) scratch: Scratch,
}

/// Buffers that live within one stage.
#[derive(Clone, Debug, Default)]
pub(super) struct Scratch {
    /// `[rows, width]`: normed rows.
    pub(super) normed: Vec<f32>,
    /// `[rows, width]`: gradient of the normed rows.
    pub(super) dnormed: Vec<f32>,
    /// `[rows, feed forward]`, or logits.
    pub(super) wide: Vec<f32>,
}

/// What a nano-batch keeps from its forward to its backward stages; reused from step to step.
#[derive(Clone, Debug, Default)]
pub struct Activations {
    pub(super) rows: Option<Rows>,
    /// The residual stream `[rows, width]`; on the way back its gradient.
    pub(super) stream: Vec<f32>,
    pub(super) layers: Vec<Kept>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Kept {
    /// Input of the layer, and the factors of its norm.
    pub(super) x: Vec<f32>,
    pub(super) factors: Vec<f32>,
    /// O.
    pub(super) out: Vec<f32>,
    /// Residual stream after attention, and the factors of its norm.
    pub(super) middle: Vec<f32>,
    pub(super) middle_factors: Vec<f32>,
    /// Gate and up, `[rows, 2 · feed forward]`.
    pub(super) gate_up: Vec<f32>,
}

impl Activations {
    pub(super) fn positions(&self) -> &[u32] {
        &self.rows.as_ref().expect("embed comes first").positions
    }
}

/// Summed over the rows that have a target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Loss {
    /// In nats.
    pub nats: f64,
}

impl Model {
    /// A model whose documents have at most `positions` rows, with these layers.
    ///
    /// # Panics
    ///
    /// The sizes are those of another number of layers.
    pub fn new(config: Config, stack: Stack, positions: u32, threads: Threads) -> Self {
        assert_eq!(stack.layers(), config.layers, "layers of another model");
        let parameters = Parameters::new(&config, &stack);
        let dims = stack.core().kinds().iter().map(|it| usize::from(it.heads.dim));
        let rotations = dims.map(|dim| (dim, Rotation::new(dim, positions))).collect();
        let (linear, scratch) = (Linear::cpu(threads), Scratch::default());
        Self { config, stack, parameters, rotations, threads, linear, scratch }
    }

    /// The same model, with `linear` for its linear layers; `linear` was made with
    /// [`Parameters::weights`].
    #[must_use]
    pub fn with_linear(self, linear: Linear) -> Self {
        Self { linear, ..self }
    }

    /// Begins a step: its stages get these parameters and no others.
    ///
    /// # Errors
    ///
    /// The GPU's, as those of all stages.
    pub fn begin(&mut self, parameters: &[f32]) -> Result<(), device::Error> {
        self.linear.begin(parameters)
    }

    /// Ends a step: what the stages have not added to `gradients` yet is there now.
    pub fn end(&mut self, gradients: &mut [f32]) -> Result<(), device::Error> {
        self.linear.end(gradients)
    }

    /// Its sizes.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Its layers.
    pub fn stack(&self) -> &Stack {
        &self.stack
    }

    /// Sinks of a layer, one of each query head; none if it has none.
    pub fn sinks<'a>(&self, parameters: &'a [f32], layer: usize) -> &'a [f32] {
        &parameters[self.parameters.attention(layer).sinks.clone()]
    }

    /// Ranges of the model's tensors in the flat buffer.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Threads of its stages.
    pub fn threads(&self) -> Threads {
        self.threads
    }

    /// Turns Q, or its gradient, and K, or its own, of a layer.
    pub(super) fn rotate(
        &self,
        layer: usize,
        [q, k]: [&mut [f32]; 2],
        kept: &Activations,
        turn: Turn,
    ) {
        let heads = self.stack.kind_of(layer).expect("a layer with core attention").heads;
        let rotation = &self.rotations[&usize::from(heads.dim)];
        for (rows, width) in [q, k].into_iter().zip(widths(heads)) {
            rotation.turn(self.threads, rows, width, kept.positions(), turn);
        }
    }

    /// Starts the forward pass of `rows`.
    pub fn embed(&mut self, parameters: &[f32], rows: Rows, kept: &mut Activations) {
        let width = self.config.width;
        let table = &parameters[self.parameters.embedding.clone()];
        let positions = rows.positions.iter().max().map_or(0, |it| it + 1);
        self.rotations.values_mut().for_each(|it| it.reach(positions));
        fit(&mut kept.stream, rows.ids.len() * width);
        share(self.threads, blocks(&mut kept.stream, width, &rows.ids), |(stream, ids)| {
            for (row, &id) in stream.chunks_exact_mut(width).zip(ids) {
                row.copy_from_slice(&table[id as usize * width..][..width]);
            }
        });
        kept.rows = Some(rows);
        kept.layers.resize_with(self.config.layers, Kept::default);
    }

    /// Rotated Q, rotated K, and V of `layer`.
    pub fn before_attention(
        &mut self,
        parameters: &[f32],
        kept: &mut Activations,
        layer: usize,
    ) -> Result<[Vec<f32>; 3], device::Error> {
        let (threads, count) = (self.threads, kept.positions().len());
        let at = self.parameters.attention(layer);
        let it = &mut kept.layers[layer];
        std::mem::swap(&mut it.x, &mut kept.stream);
        fit(&mut it.factors, count);
        let normed = fit(&mut self.scratch.normed, it.x.len());
        let gain = &parameters[at.norm.clone()];
        norm(threads, &it.x, gain, normed, &mut it.factors);

        let zeroed = |width: usize| vec![0.0; count * width];
        let [query, kv] = [&at.q, &at.k].map(|it| it.len() / self.config.width);
        let [mut q, mut k, mut v] = [query, kv, kv].map(zeroed);
        let mut outputs: [(&Range<usize>, &mut [f32]); 3] =
            [(&at.q, &mut q), (&at.k, &mut k), (&at.v, &mut v)];
        let normed = LinearRows::new(normed, count);
        self.linear.apply(parameters, normed, &mut outputs, Accumulate::Replace)?;
        self.rotate(layer, [&mut q, &mut k], kept, Turn::Forward);
        Ok([q, k, v])
    }

    /// Takes O of `layer` and does the rest of the layer.
    pub fn after_attention(
        &mut self,
        parameters: &[f32],
        kept: &mut Activations,
        layer: usize,
        out: Vec<f32>,
    ) -> Result<(), device::Error> {
        let count = kept.positions().len();
        let AttentionParameters { o, .. } = self.parameters.attention(layer);
        let it = &mut kept.layers[layer];
        it.middle.clone_from(&it.x);
        let rows = LinearRows::new(&out, count);
        self.linear.apply(parameters, rows, &mut [(o, &mut it.middle)], Accumulate::Add)?;
        it.out = out;
        self.feed(parameters, kept, layer)
    }

    /// Does all of `layer`, which has no core attention.
    pub fn pass_by(
        &mut self,
        parameters: &[f32],
        kept: &mut Activations,
        layer: usize,
    ) -> Result<(), device::Error> {
        std::mem::swap(&mut kept.layers[layer].middle, &mut kept.stream);
        self.feed(parameters, kept, layer)
    }

    /// The part of a layer that every layer has: from its middle to the residual stream.
    fn feed(
        &mut self,
        parameters: &[f32],
        kept: &mut Activations,
        layer: usize,
    ) -> Result<(), device::Error> {
        let (threads, count) = (self.threads, kept.positions().len());
        let at = &self.parameters.layers[layer];
        let Activations { stream, layers, .. } = kept;
        let it = &mut layers[layer];
        let linear = &mut self.linear;
        fit(&mut it.middle_factors, count);
        let normed = fit(&mut self.scratch.normed, it.middle.len());
        let gain = &parameters[at.feed_norm.clone()];
        norm(threads, &it.middle, gain, normed, &mut it.middle_factors);
        let inner = self.config.feed_forward;
        let gate_up = fit(&mut it.gate_up, count * 2 * inner);
        let mut both: [(&Range<usize>, &mut [f32]); 1] = [(&at.gate_up, &mut *gate_up)];
        linear.apply(parameters, LinearRows::new(normed, count), &mut both, Accumulate::Replace)?;
        let wide = fit(&mut self.scratch.wide, count * inner);
        swiglu(threads, inner, gate_up, wide);
        stream.clone_from(&it.middle);
        linear.apply(
            parameters,
            LinearRows::new(wide, count),
            &mut [(&at.down, stream)],
            Accumulate::Add,
        )
    }

    /// The loss, and at once its gradient times `weight`: of the head into `gradients`, of the residual
    /// stream into `kept`.
    pub fn head(
        &mut self,
        parameters: &[f32],
        gradients: &mut [f32],
        kept: &mut Activations,
        weight: f32,
    ) -> Result<Loss, device::Error> {
        let threads = self.threads;
        let (loss, factors) = self.cross_entropy(parameters, kept, weight)?;
        let stream = &mut kept.stream;
        let count = factors.len();
        let Scratch { normed, dnormed, wide } = &mut self.scratch;
        let (gain, head) = (self.parameters.norm.clone(), self.parameters.head.clone());
        let dnormed = fit(dnormed, stream.len());
        let inputs = [(&head, &wide[..])];
        self.linear.gradients(
            (parameters, gradients),
            LinearRows::new(normed, count),
            &inputs,
            dnormed,
        )?;
        let x = std::mem::take(stream);
        *stream = vec![0.0; x.len()];
        let forward = (&x[..], &parameters[gain.clone()], &factors[..]);
        norm_gradient(threads, forward, dnormed, stream, &mut gradients[gain]);
        Ok(loss)
    }

    /// The loss without any gradient: for documents that are held out.
    pub fn loss(&mut self, parameters: &[f32], kept: &Activations) -> Result<Loss, device::Error> {
        self.cross_entropy(parameters, kept, 0.0).map(|it| it.0)
    }

    /// The loss, and the factors of the last norm; leaves normed rows and the gradient of the logits times `weight`.
    fn cross_entropy(
        &mut self,
        parameters: &[f32],
        kept: &Activations,
        weight: f32,
    ) -> Result<(Loss, Vec<f32>), device::Error> {
        let threads = self.threads;
        let Activations { rows, stream, .. } = kept;
        let targets = &rows.as_ref().expect("embed comes first").targets;
        let (count, vocabulary) = (targets.len(), self.config.vocabulary);
        let Scratch { normed, dnormed: _, wide } = &mut self.scratch;
        let (gain, head) = (self.parameters.norm.clone(), self.parameters.head.clone());
        let mut factors = vec![0.0; count];
        let normed = fit(normed, stream.len());
        norm(threads, stream, &parameters[gain], normed, &mut factors);
        let logits = fit(wide, count * vocabulary);
        let mut outputs: [(&Range<usize>, &mut [f32]); 1] = [(&head, &mut *logits)];
        let normed = LinearRows::new(normed, count);
        self.linear.apply(parameters, normed, &mut outputs, Accumulate::Replace)?;
        let nats = cross_entropy(threads, vocabulary, logits, targets, weight);
        Ok((Loss { nats }, factors))
    }

    /// Logits of the last row only, without any gradient: for samples.
    pub fn last_logits(
        &mut self,
        parameters: &[f32],
        kept: &Activations,
    ) -> Result<Vec<f32>, device::Error> {
        let width = self.config.width;
        let last = &kept.stream[kept.stream.len() - width..];
        let (mut normed, mut factor) = (vec![0.0; width], [0.0]);
        let gain = &parameters[self.parameters.norm.clone()];
        norm(Threads::ONE, last, gain, &mut normed, &mut factor);
        let mut logits = vec![0.0; self.config.vocabulary];
        let rows = LinearRows::new(&normed, 1);
        let mut outputs: [(&Range<usize>, &mut [f32]); 1] =
            [(&self.parameters.head, &mut logits[..])];
        self.linear.apply(parameters, rows, &mut outputs, Accumulate::Replace)?;
        Ok(logits)
    }
}

/// Gives `buffer` that length; what it holds is the caller's to overwrite.
pub(super) fn fit(buffer: &mut Vec<f32>, length: usize) -> &mut [f32] {
    buffer.resize(length, 0.0);
    buffer
}
