//! Backward stages of the model.
//!
//! In: the gradient of the residual stream that `head` left in the activations; dQ, dK, dV of core
//! attention. Out: dO and Δ per layer; gradients added to the caller's buffer.
//!
//! Normed rows and SwiGLU's output are computed again rather than kept.
//!
//! Invariant: gradients are added in the order in which the stages are called.

use cadre_kernels::matmul::Accumulate;

use super::math::{delta, norm_again, norm_gradient, swiglu_gradient};
use super::rope::Turn;
use super::stages::{Activations, Model, Scratch, fit, linear_input, linear_weights};
use crate::trainer::attention::Gradients;

impl Model {
    /// Goes back through the layer's part after attention; returns dO and Δ.
    pub fn after_attention_gradient(
        &mut self,
        parameters: &[f32],
        gradients: &mut [f32],
        kept: &mut Activations,
        layer: usize,
    ) -> (Vec<f32>, Vec<f32>) {
        let (threads, count) = (self.threads, kept.positions().len());
        let inner = self.config.feed_forward;
        let at = self.parameters.layers[layer].clone();
        let Activations { stream: dx, layers, .. } = kept;
        let it = &mut layers[layer];
        let Scratch { normed, dnormed, wide } = &mut self.scratch;

        let feed = fit(wide, count * inner);
        let down = &parameters[at.down.clone()];
        linear_input(threads, feed, dx, down, Accumulate::Replace, count);
        swiglu_gradient(threads, inner, &mut it.gate_up, feed);
        linear_weights(threads, &mut gradients[at.down], dx, feed, count);

        let (normed, dnormed) = (fit(normed, dx.len()), fit(dnormed, dx.len()));
        let gain = &parameters[at.feed_norm.clone()];
        norm_again(threads, &it.middle, gain, &it.middle_factors, normed);
        let dgate_up = &it.gate_up;
        linear_weights(threads, &mut gradients[at.gate_up.clone()], dgate_up, normed, count);
        let gate_up = &parameters[at.gate_up];
        linear_input(threads, dnormed, dgate_up, gate_up, Accumulate::Replace, count);
        let forward = (&it.middle[..], gain, &it.middle_factors[..]);
        norm_gradient(threads, forward, dnormed, dx, &mut gradients[at.feed_norm]);

        let mut dout = vec![0.0; it.out.len()];
        let o = &parameters[at.o.clone()];
        linear_input(threads, &mut dout, dx, o, Accumulate::Replace, count);
        linear_weights(threads, &mut gradients[at.o], dx, &it.out, count);
        let delta = delta(threads, self.config.head_dim, &dout, &it.out);
        it.out = Vec::new();
        (dout, delta)
    }

    /// Goes back through the layer's part before attention.
    pub fn before_attention_gradient(
        &mut self,
        parameters: &[f32],
        gradients: &mut [f32],
        kept: &mut Activations,
        layer: usize,
        attention: Gradients,
    ) {
        let (threads, count) = (self.threads, kept.positions().len());
        let at = self.parameters.layers[layer].clone();
        let Gradients { mut dq, mut dk, dv } = attention;
        let (query, kv) = (self.config.query_width(), self.config.kv_width());
        self.rotation.turn(threads, &mut dq, query, kept.positions(), Turn::Back);
        self.rotation.turn(threads, &mut dk, kv, kept.positions(), Turn::Back);

        let Activations { stream: dx, layers, .. } = kept;
        let it = &mut layers[layer];
        let Scratch { normed, dnormed, .. } = &mut self.scratch;
        let (normed, dnormed) = (fit(normed, dx.len()), fit(dnormed, dx.len()));
        let gain = &parameters[at.attention_norm.clone()];
        norm_again(threads, &it.x, gain, &it.factors, normed);
        let mut accumulate = Accumulate::Replace;
        for (gradient, range) in [(&dq, at.q), (&dk, at.k), (&dv, at.v)] {
            linear_weights(threads, &mut gradients[range.clone()], gradient, normed, count);
            linear_input(threads, dnormed, gradient, &parameters[range], accumulate, count);
            accumulate = Accumulate::Add;
        }
        let forward = (&it.x[..], gain, &it.factors[..]);
        norm_gradient(threads, forward, dnormed, dx, &mut gradients[at.attention_norm]);
    }

    /// Ends the backward pass: the gradient of the embedding.
    pub fn embed_gradient(&mut self, gradients: &mut [f32], kept: &mut Activations) {
        let width = self.config.width;
        let rows = kept.rows.take().expect("embed comes first");
        let table = &mut gradients[self.parameters.embedding.clone()];
        for (&id, dx) in rows.ids.iter().zip(kept.stream.chunks_exact(width)) {
            let row = &mut table[usize::from(id) * width..][..width];
            for (sum, dx) in row.iter_mut().zip(dx) {
                *sum += dx;
            }
        }
    }
}
