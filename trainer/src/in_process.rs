//! Core attention of a single trainer on its own processor, without pool or exchange.
//!
//! In: the layers of the model, the documents of each nano-batch, all of them whole on this trainer. Out: what
//! [`Attention`] promises.
//!
//! For tests and benches; a job with one trainer and no pool goes through the session as any other.
//!
//! Invariant: one task, and one bundle, per document or chunk: the bits are those of any plan (of dK and dV: of
//! a plan that cuts nothing).

use std::collections::BTreeMap;

use cadre_kernels::{Pieces, PiecesBackward, Rows, Threads, delta};

use cadre_worker::session::{self, Factor, Layers};

use super::attention::{At, Attention, AttentionError, Gradients, sink, sunk};

/// Attention in this process. A phase is computed when its results are waited for.
#[derive(Debug)]
pub struct InProcess {
    layers: Layers,
    threads: Threads,
    /// Rows of the documents of each nano-batch.
    documents: Vec<Vec<u32>>,
    phases: BTreeMap<At, Phase>,
}

#[derive(Debug, Default)]
struct Phase {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    lse: Vec<f32>,
    sinks: Vec<f32>,
    /// dO and O, once they are there.
    backward: Option<[Vec<f32>; 2]>,
}

impl InProcess {
    /// Attention of `layers`; [`Self::begin`] comes before every step.
    pub fn new(layers: Layers, threads: Threads) -> Self {
        Self { layers, threads, documents: Vec::new(), phases: BTreeMap::new() }
    }

    /// Begins a step; `documents` are the lengths of the documents of each nano-batch. Drops what
    /// is left of the last step.
    pub fn begin(&mut self, documents: Vec<Vec<u32>>) {
        self.documents = documents;
        self.phases.clear();
    }

    /// Lengths of the pieces within which a layer attends: the documents of a nano-batch, or their chunks.
    fn rows(&self, At { layer, nano }: At) -> Vec<u32> {
        let kind = self.layers.kind_of(layer);
        self.documents[nano].iter().flat_map(|&rows| kind.pieces(rows)).collect()
    }

    /// Pieces of these lengths, with the heads, mask and scores of the layer.
    fn pieces<'a>(&self, layer: usize, rows: &'a [u32]) -> Pieces<'a> {
        let (kind, threads) = (self.layers.kind_of(layer), self.threads);
        let (heads, mask) = (session::kernel_heads(kind.heads), session::kernel_mask(kind.mask));
        let (scale, softcap) = (kind.scale_of(), kind.softcap.map(Factor::get));
        Pieces { heads, mask, scale, softcap, rows, threads }
    }

    fn phase(&mut self, at: At) -> Result<&mut Phase, AttentionError> {
        self.phases.get_mut(&at).ok_or_else(|| at.cannot_be(UNKNOWN))
    }
}

const UNKNOWN: &str = "used: it was not submitted";

fn failed(error: cadre_kernels::Error) -> AttentionError {
    AttentionError::Failed(Box::new(error))
}

impl Attention for InProcess {
    fn submit_forward(&mut self, at: At, [q, k, v]: [Vec<f32>; 3]) -> Result<(), AttentionError> {
        self.phases.insert(at, Phase { q, k, v, ..Phase::default() });
        Ok(())
    }

    fn wait_forward(&mut self, at: At, sinks: &[f32]) -> Result<Vec<f32>, AttentionError> {
        let rows = self.rows(at);
        let pieces = self.pieces(at.layer, &rows);
        let phase = self.phase(at)?;
        phase.sinks = sinks.to_vec();
        let Phase { q, k, v, lse, .. } = phase;
        let mut out = vec![0.0; q.len()];
        lse.resize(q.len() / pieces.heads.dim, 0.0);
        pieces.forward([&*q, k, v].map(|it| Rows::F32(it)), &mut out, lse).map_err(failed)?;
        sink(&mut out, lse, sinks);
        Ok(out)
    }

    fn submit_backward(&mut self, at: At, rows: [Vec<f32>; 2]) -> Result<(), AttentionError> {
        self.phase(at)?.backward = Some(rows);
        Ok(())
    }

    fn wait_backward(&mut self, at: At) -> Result<Gradients, AttentionError> {
        let counts = self.rows(at);
        let pieces = self.pieces(at.layer, &counts);
        let (dim, threads) = (pieces.heads.dim, self.threads);
        let phase = self.phases.remove(&at).ok_or_else(|| at.cannot_be(UNKNOWN))?;
        let Phase { q, k, v, lse, sinks, backward: rows } = phase;
        let [dout, out] = rows.ok_or_else(|| at.cannot_be(UNKNOWN))?;
        let delta = delta(threads, dim, &dout, &out);
        let dsinks = sunk((threads, dim), (&dout, &out), &lse, &sinks);
        let [dq, dk, dv] = [&q, &k, &v].map(|it| vec![0.0; it.len()]);
        let mut gradients = Gradients { dq, dk, dv, dsinks };
        let Gradients { dq, dk, dv, dsinks: _ } = &mut gradients;
        let qkv = [&q, &k, &v].map(|it| Rows::F32(it));
        let from = PiecesBackward { qkv, dout: Rows::F32(&dout), lse: &lse, delta: &delta };
        pieces.backward(from, [dq, dk, dv]).map_err(failed)?;
        Ok(gradients)
    }
}
