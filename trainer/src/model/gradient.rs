//! Backward stages of the model.
//!
//! In: the gradient of the residual stream that `head` left in the activations; dQ, dK, dV of core
//! attention. Out: dO and O per layer; gradients added to the caller's buffer.
//!
//! Normed rows and SwiGLU's output are computed again rather than kept.
//!
//! Invariant: gradients are added in the order in which the stages are called.

use cadre_kernels::{LinearRows, device};

use super::config::AttentionParameters;
use super::math::{norm_again, norm_gradient, swiglu_gradient};
use super::rope::Turn;
use super::stages::{Activations, Model, Scratch, fit};
use crate::attention::Gradients;

impl Model {
    /// Goes back through the layer's part after attention; returns dO, and O, which it kept.
    pub fn after_attention_gradient(
        &mut self,
        parameters: &[f32],
        gradients: &mut [f32],
        kept: &mut Activations,
        layer: usize,
    ) -> Result<(Vec<f32>, Vec<f32>), device::Error> {
        self.pass_by_gradient(parameters, gradients, kept, layer)?;
        let count = kept.positions().len();
        let AttentionParameters { o, .. } = self.parameters.attention(layer);
        let Activations { stream: dx, layers, .. } = kept;
        let it = &mut layers[layer];
        let mut dout = vec![0.0; it.out.len()];
        let rows = LinearRows::new(&it.out, count);
        self.linear.gradients((parameters, gradients), rows, &[(o, &dx[..])], &mut dout)?;
        Ok((dout, std::mem::take(&mut it.out)))
    }

    /// Goes back through the part that every layer has. A layer without core attention has no other part.
    pub fn pass_by_gradient(
        &mut self,
        parameters: &[f32],
        gradients: &mut [f32],
        kept: &mut Activations,
        layer: usize,
    ) -> Result<(), device::Error> {
        let (threads, count) = (self.threads, kept.positions().len());
        let inner = self.config.feed_forward;
        let at = self.parameters.layers[layer].clone();
        let Activations { stream: dx, layers, .. } = kept;
        let it = &mut layers[layer];
        let Self { linear, scratch, .. } = self;
        let Scratch { normed, dnormed, wide } = scratch;

        let feed = fit(wide, count * inner);
        linear.rows_gradient(parameters, LinearRows::new(dx, count), &at.down, feed)?;
        swiglu_gradient(threads, inner, &mut it.gate_up, feed);
        linear.weight_gradient(gradients, dx, LinearRows::new(feed, count), &at.down)?;

        let (normed, dnormed) = (fit(normed, dx.len()), fit(dnormed, dx.len()));
        let gain = &parameters[at.feed_norm.clone()];
        norm_again(threads, &it.middle, gain, &it.middle_factors, normed);
        let inputs = [(&at.gate_up, &it.gate_up[..])];
        linear.gradients(
            (parameters, gradients),
            LinearRows::new(normed, count),
            &inputs,
            dnormed,
        )?;
        let forward = (&it.middle[..], gain, &it.middle_factors[..]);
        norm_gradient(threads, forward, dnormed, dx, &mut gradients[at.feed_norm]);
        Ok(())
    }

    /// Goes back through the layer's part before attention, and adds the gradient of its sinks.
    pub fn before_attention_gradient(
        &mut self,
        parameters: &[f32],
        gradients: &mut [f32],
        kept: &mut Activations,
        layer: usize,
        attention: Gradients,
    ) -> Result<(), device::Error> {
        let (threads, count) = (self.threads, kept.positions().len());
        let at = self.parameters.attention(layer).clone();
        let Gradients { mut dq, mut dk, dv, dsinks } = attention;
        for (sum, of) in gradients[at.sinks].iter_mut().zip(dsinks) {
            *sum += of;
        }
        self.rotate(layer, [&mut dq, &mut dk], kept, Turn::Back);

        let Activations { stream: dx, layers, .. } = kept;
        let it = &mut layers[layer];
        let Scratch { normed, dnormed, .. } = &mut self.scratch;
        let (normed, dnormed) = (fit(normed, dx.len()), fit(dnormed, dx.len()));
        let gain = &parameters[at.norm.clone()];
        norm_again(threads, &it.x, gain, &it.factors, normed);
        let inputs = [(&at.q, &dq[..]), (&at.k, &dk[..]), (&at.v, &dv[..])];
        let normed = LinearRows::new(normed, count);
        self.linear.gradients((parameters, gradients), normed, &inputs, dnormed)?;
        let forward = (&it.x[..], gain, &it.factors[..]);
        norm_gradient(threads, forward, dnormed, dx, &mut gradients[at.norm]);
        Ok(())
    }

    /// Ends the backward pass: the gradient of the embedding.
    pub fn embed_gradient(&mut self, gradients: &mut [f32], kept: &mut Activations) {
        let width = self.config.width;
        let rows = kept.rows.take().expect("embed comes first");
        let table = &mut gradients[self.parameters.embedding.clone()];
        for (&id, dx) in rows.ids.iter().zip(kept.stream.chunks_exact(width)) {
            let row = &mut table[id as usize * width..][..width];
            for (sum, dx) in row.iter_mut().zip(dx) {
                *sum += dx;
            }
        }
    }
}
