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

use cadre_kernels::{
    Backward, BackwardRows, Forward, Heads, Mask, Rows, RowsMut, Threads, backward, delta, forward,
    key_tiles,
};

use cadre_worker::session::{Factor, Layers};

use super::attention::{Attention, AttentionError, Gradients, sink, sunk};

/// Computes phases when they are waited for.
#[derive(Debug)]
pub struct InProcess {
    heads: Heads,
    layers: Layers,
    threads: Threads,
    /// Rows of the documents of each nano-batch.
    documents: Vec<Vec<u32>>,
    /// By (layer, nano-batch).
    phases: BTreeMap<(usize, usize), Phase>,
}

#[derive(Debug, Default)]
struct Phase {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    lse: Vec<f32>,
    sinks: Vec<f32>,
    /// dO and O, once they are there.
    backward: Option<(Vec<f32>, Vec<f32>)>,
}

impl InProcess {
    /// Attention of `heads` in every one of `layers`; [`Self::begin`] comes before every step.
    pub fn new(heads: Heads, layers: Layers, threads: Threads) -> Self {
        Self { heads, layers, threads, documents: Vec::new(), phases: BTreeMap::new() }
    }

    /// Begins a step whose nano-batches hold these documents; drops what is left of the last one.
    pub fn begin(&mut self, documents: Vec<Vec<u32>>) {
        self.documents = documents;
        self.phases.clear();
    }

    /// Mask, scale and softcap of a layer.
    fn scores(&self, layer: usize) -> (Mask, f32, Option<f32>) {
        let kind = self.layers.kind_of(layer);
        let softcap = kind.softcap.map(Factor::get);
        (cadre_worker::launch::mask(kind.mask), kind.scale_of(self.heads.dim), softcap)
    }

    /// Rows that attention of a layer does not leave: of each document of a nano-batch, or of its chunks.
    fn pieces(&self, layer: usize, nano: usize) -> Vec<u32> {
        let kind = self.layers.kind_of(layer);
        self.documents[nano].iter().flat_map(|&rows| kind.pieces(rows)).collect()
    }

    fn phase(&mut self, layer: usize, nano: usize) -> Result<&mut Phase, AttentionError> {
        self.phases.get_mut(&(layer, nano)).ok_or_else(|| unknown(layer, nano))
    }
}

fn unknown(layer: usize, nano: usize) -> AttentionError {
    AttentionError::Order { layer, nano, what: "used: it was not submitted".into() }
}

fn failed(error: cadre_kernels::Error) -> AttentionError {
    AttentionError::Failed(Box::new(error))
}

impl Attention for InProcess {
    fn submit_forward(
        &mut self,
        layer: usize,
        nano: usize,
        q: Vec<f32>,
        k: Vec<f32>,
        v: Vec<f32>,
    ) -> Result<(), AttentionError> {
        self.phases.insert((layer, nano), Phase { q, k, v, ..Phase::default() });
        Ok(())
    }

    fn wait_forward(
        &mut self,
        layer: usize,
        nano: usize,
        sinks: &[f32],
    ) -> Result<Vec<f32>, AttentionError> {
        let (heads, threads) = (self.heads, self.threads);
        let ((mask, scale, softcap), pieces) = (self.scores(layer), self.pieces(layer, nano));
        let phase = self.phase(layer, nano)?;
        phase.sinks = sinks.to_vec();
        let Phase { q, k, v, lse, .. } = phase;
        let mut out = vec![0.0; q.len()];
        lse.resize(q.len() / heads.dim, 0.0);
        let (mut q, mut k, mut v) = (&q[..], &k[..], &v[..]);
        let (mut rest, mut left) = (&mut out[..], &mut lse[..]);
        let mut tasks = Vec::with_capacity(pieces.len());
        for rows in pieces {
            let (query, kv) = (rows as usize * heads.query, rows as usize * heads.kv * heads.dim);
            tasks.push(Forward {
                heads,
                mask,
                scale,
                softcap,
                document_rows: rows,
                rows: 0..rows,
                keys: 0..rows,
                q: Rows::F32(take(&mut q, query * heads.dim)),
                k: Rows::F32(take(&mut k, kv)),
                v: Rows::F32(take(&mut v, kv)),
                out: RowsMut::F32(rest.split_off_mut(..query * heads.dim).expect(DOCUMENTS)),
                lse: left.split_off_mut(..query).expect(DOCUMENTS),
            });
        }
        forward(&mut tasks, threads).map_err(failed)?;
        drop(tasks);
        sink(&mut out, lse, sinks);
        Ok(out)
    }

    fn submit_backward(
        &mut self,
        layer: usize,
        nano: usize,
        dout: Vec<f32>,
        out: Vec<f32>,
    ) -> Result<(), AttentionError> {
        self.phase(layer, nano)?.backward = Some((dout, out));
        Ok(())
    }

    fn wait_backward(&mut self, layer: usize, nano: usize) -> Result<Gradients, AttentionError> {
        let (heads, threads) = (self.heads, self.threads);
        let ((mask, scale, softcap), pieces) = (self.scores(layer), self.pieces(layer, nano));
        let phase = self.phases.remove(&(layer, nano)).ok_or_else(|| unknown(layer, nano))?;
        let Phase { q, k, v, lse, sinks, backward: rows } = phase;
        let (dout, out) = rows.ok_or_else(|| unknown(layer, nano))?;
        let delta = delta(threads, heads.dim, &dout, &out);
        let dsinks = sunk((threads, heads.dim), (&dout, &out), &lse, &sinks);
        let [dq, dk, dv] = [&q, &k, &v].map(|it| vec![0.0; it.len()]);
        let mut gradients = Gradients { dq, dk, dv, dsinks };
        let (mut q, mut k, mut v) = (&q[..], &k[..], &v[..]);
        let (mut dout, mut delta, mut lse) = (&dout[..], &delta[..], &lse[..]);
        let Gradients { dq, dk, dv, dsinks: _ } = &mut gradients;
        let (mut dq, mut dk, mut dv) = (&mut dq[..], &mut dk[..], &mut dv[..]);
        let mut bundles = Vec::with_capacity(pieces.len());
        for rows in pieces {
            let (query, kv) = (rows as usize * heads.query, rows as usize * heads.kv * heads.dim);
            bundles.push(Backward {
                heads,
                mask,
                scale,
                softcap,
                document_rows: rows,
                keys: 0..rows,
                k: Rows::F32(take(&mut k, kv)),
                v: Rows::F32(take(&mut v, kv)),
                parts: vec![BackwardRows {
                    rows: 0..rows,
                    q: Rows::F32(take(&mut q, query * heads.dim)),
                    dout: Rows::F32(take(&mut dout, query * heads.dim)),
                    lse: take(&mut lse, query),
                    delta: take(&mut delta, query),
                    dq: dq.split_off_mut(..query * heads.dim).expect(DOCUMENTS),
                }],
                dk: dk.split_off_mut(..kv).expect(DOCUMENTS),
                dv: dv.split_off_mut(..kv).expect(DOCUMENTS),
                key_tiles: 0..key_tiles(&(0..rows)),
            });
        }
        backward(&mut bundles, threads).map_err(failed)?;
        Ok(gradients)
    }
}

/// Splits the first `count` off.
fn take<'a>(rows: &mut &'a [f32], count: usize) -> &'a [f32] {
    rows.split_off(..count).expect(DOCUMENTS)
}

const DOCUMENTS: &str = "the documents have the rows of the nano-batch";
