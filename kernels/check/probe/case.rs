//! Documents of every kind of edge, in one launch, with their results by the GPU and by f64.
//!
//! In: heads, a softcap, a seed. Out: a [`Case`]; its results forward and backward as flat rows `[rows, heads, numbers]`, and
//! what they should be. Outputs are NaN before a launch. Waits have an end: a launch that does not is [`Trouble::Hangs`].

use std::ops::Range;
use std::time::{Duration, Instant};

use cadre_kernels::device::{
    BackwardBundle, BackwardPlan, BackwardTensors, Buffer, Event, ForwardPlan, ForwardTask,
    ForwardTensors, Gpu, Keys, Order, QueryGradients, Shape, Stream, TaskRows,
};
use cadre_kernels::reference::{self, Document};
use cadre_kernels::{Heads, Mask};
use half::bf16;

use crate::Trouble;

/// Rows of a document that a launch holds, and where they lie.
pub(crate) struct Held {
    pub(crate) mask: Mask,
    pub(crate) document_rows: u32,
    pub(crate) rows: Range<u32>,
    pub(crate) keys: Range<u32>,
    pub(crate) q_row: usize,
    pub(crate) kv_row: usize,
}

/// A launch's inputs.
pub(crate) struct Case {
    pub(crate) heads: Heads,
    pub(crate) softcap: Option<f32>,
    pub(crate) segment: Option<u32>,
    pub(crate) documents: Vec<Held>,
    pub(crate) q: Vec<bf16>,
    pub(crate) dout: Vec<bf16>,
    pub(crate) k: Vec<bf16>,
    pub(crate) v: Vec<bf16>,
}

/// Rows of results, `[rows, heads, numbers]`.
pub(crate) struct Table<T> {
    pub(crate) what: &'static str,
    pub(crate) heads: usize,
    pub(crate) numbers: usize,
    pub(crate) values: Vec<T>,
}

/// What a backward pass writes dQ as.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Written {
    F32,
    Bf16,
}

/// Numbers by seed.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }

    /// About normal, of deviation 1.15.
    pub(crate) fn numbers(&mut self, count: usize) -> Vec<bf16> {
        let sum = |it: &mut Self| (0..4).map(|_| it.below(2001) as f32 / 1000.0 - 1.0).sum::<f32>();
        (0..count).map(|_| bf16::from_f32(sum(self))).collect()
    }
}

/// Waits at most `patience` for the work that is on `stream` now.
pub(crate) fn wait(stream: &Stream, patience: Duration) -> Result<(), Trouble> {
    let (event, end) = (Event::record(stream)?, Instant::now() + patience);
    while !event.is_over()? {
        if Instant::now() > end {
            // The kernel may still use the event, so it is leaked.
            std::mem::forget(event);
            return Err(Trouble::Hangs);
        }
        std::thread::yield_now();
    }
    Ok(())
}

fn wide(rows: &[bf16]) -> Vec<f32> {
    rows.iter().map(|it| it.to_f32()).collect()
}

impl Case {
    /// Every mask and edge; `tiny` without the longer document.
    pub(crate) fn new(heads: Heads, softcap: Option<f32>, seed: u64, tiny: bool) -> Self {
        let mut documents = vec![
            (Mask::Causal, 0..150, 150),
            (Mask::Causal, 131..200, 200),
            (Mask::Full, 3..40, 129),
            (Mask::Window { left: 70 }, 0..300, 300),
            (Mask::Causal, 7..8, 9),
        ];
        if !tiny {
            documents.push((Mask::Causal, 0..700, 700));
        }
        let mut held = Vec::new();
        let (mut q_row, mut kv_row) = (0, 0);
        for (mask, rows, document_rows) in documents {
            let keys = mask.keys_of(&rows, document_rows);
            let (queries, count) = (rows.len(), keys.len());
            held.push(Held { mask, document_rows, rows, keys, q_row, kv_row });
            (q_row, kv_row) = (q_row + queries, kv_row + count);
        }
        let mut random = Random::new(seed ^ (heads.dim as u64) << 32);
        let [q, dout] = [0; 2].map(|_| random.numbers(q_row * heads.query * heads.dim));
        let [k, v] = [0; 2].map(|_| random.numbers(kv_row * heads.kv * heads.dim));
        Self { heads, softcap, segment: None, documents: held, q, dout, k, v }
    }

    pub(crate) fn shape(&self) -> Shape {
        let mut shape = Shape::new(self.heads, (self.heads.dim as f32).powf(-0.5));
        shape.softcap = self.softcap;
        if let Some(segment) = self.segment {
            shape.segment = segment;
        }
        shape
    }

    pub(crate) fn q_rows(&self) -> usize {
        self.q.len() / self.heads.query / self.heads.dim
    }

    fn keys(it: &Held) -> Keys {
        let kv_row = it.kv_row as u32;
        Keys { document_rows: it.document_rows, keys: it.keys.clone(), kv_row }
    }

    fn rows(it: &Held) -> TaskRows {
        TaskRows { rows: it.rows.clone(), q_row: it.q_row as u32 }
    }

    fn table<T>(&self, what: &'static str, values: Vec<T>) -> Table<T> {
        let (heads, numbers) = match what {
            "LSE" => (self.heads.query, 1),
            "dK" | "dV" => (self.heads.kv, self.heads.dim),
            _ => (self.heads.query, self.heads.dim),
        };
        Table { what, heads, numbers, values }
    }

    /// O and LSE; with `sinks`, a number a query head, of a softmax that has them as keys without a value.
    pub(crate) fn forward(
        &self,
        gpu: &Gpu,
        sinks: &[f32],
        patience: Duration,
    ) -> Result<[Table<f32>; 2], Trouble> {
        let stream = Stream::new(gpu)?;
        let of = |rows: &[bf16], what| Buffer::of(&stream, rows, what);
        let (q, k, v) = (of(&self.q, "Q")?, of(&self.k, "K")?, of(&self.v, "V")?);
        let mut out = Buffer::of(&stream, &vec![bf16::NAN; self.q.len()], "O")?;
        let numbers = self.q_rows() * self.heads.query;
        let mut lse = Buffer::of(&stream, &vec![f32::NAN; numbers], "LSE")?;
        let task =
            |it: &Held| ForwardTask { mask: it.mask, keys: Self::keys(it), rows: Self::rows(it) };
        let tasks: Vec<_> = self.documents.iter().map(task).collect();
        let mut plan = ForwardPlan::new(&stream, self.shape(), &tasks)?;
        let (rows, sums) = (out.slice_mut(), lse.slice_mut());
        let [of_q, of_k, of_v] = [&q, &k, &v].map(Buffer::slice);
        plan.run(&stream, ForwardTensors { q: of_q, k: of_k, v: of_v, out: rows, lse: sums })?;
        let sinks = Buffer::of(&stream, sinks, "sinks")?;
        if !sinks.is_empty() {
            plan.sink(&stream, sinks.slice(), (out.slice_mut(), lse.slice_mut()))?;
        }
        if let Err(trouble) = wait(&stream, patience) {
            std::mem::forget((q, k, v, out, lse, plan, sinks, stream));
            return Err(trouble);
        }
        let mut rows = vec![bf16::NAN; self.q.len()];
        out.read(&stream, 0, &mut rows)?;
        let mut sums = vec![f32::NAN; numbers];
        lse.read(&stream, 0, &mut sums)?;
        Ok([self.table("O", wide(&rows)), self.table("LSE", sums)])
    }

    /// dQ, dK and dV for LSE and Δ of the reference, so that a forward pass that is wrong is not in the way.
    pub(crate) fn backward(
        &self,
        gpu: &Gpu,
        (order, written): (Order, Written),
        (lse, delta): (&[f64], &[f64]),
        patience: Duration,
    ) -> Result<[Table<f32>; 3], Trouble> {
        let stream = Stream::new(gpu)?;
        let of = |rows: &[bf16], what| Buffer::of(&stream, rows, what);
        let [q, dout] = [of(&self.q, "Q")?, of(&self.dout, "dO")?];
        let [k, v] = [of(&self.k, "K")?, of(&self.v, "V")?];
        let narrow = |it: &[f64]| it.iter().map(|it| *it as f32).collect::<Vec<_>>();
        let lse = Buffer::of(&stream, &narrow(lse), "LSE")?;
        let delta = Buffer::of(&stream, &narrow(delta), "Δ")?;
        let poison = |count, what| Buffer::of(&stream, &vec![f32::NAN; count], what);
        // One of the two buffers is empty.
        let (wide_numbers, narrow_numbers) = match written {
            Written::F32 => (self.q.len(), 0),
            Written::Bf16 => (0, self.q.len()),
        };
        let mut dq = poison(wide_numbers, "dQ")?;
        let mut dq_bf16 = Buffer::of(&stream, &vec![bf16::NAN; narrow_numbers], "dQ in bf16")?;
        let (mut dk, mut dv) = (poison(self.k.len(), "dK")?, poison(self.v.len(), "dV")?);
        // Rows of one document that share its keys are parts of one bundle.
        let same = |a: &Held, b: &Held| a.kv_row == b.kv_row;
        let bundle = |parts: &[Held]| BackwardBundle {
            mask: parts[0].mask,
            keys: Self::keys(&parts[0]),
            dkv_row: parts[0].kv_row as u32,
            parts: parts.iter().map(Self::rows).collect(),
        };
        let bundles: Vec<_> = self.documents.chunk_by(same).map(bundle).collect();
        let mut plan = BackwardPlan::new(&stream, self.shape(), &bundles, order, 1)?;
        {
            let [q, dout, k, v] = [&q, &dout, &k, &v].map(Buffer::slice);
            let [lse, delta] = [&lse, &delta].map(Buffer::slice);
            let [dk, dv] = [&mut dk, &mut dv].map(Buffer::slice_mut);
            let dq = match written {
                Written::F32 => QueryGradients::F32(dq.slice_mut()),
                Written::Bf16 => QueryGradients::Bf16(dq_bf16.slice_mut()),
            };
            plan.run(&stream, BackwardTensors { q, dout, k, v, lse, delta, dq, dk, dv })?;
        }
        if let Err(trouble) = wait(&stream, patience) {
            std::mem::forget((q, dout, k, v, lse, delta, dq, dq_bf16, dk, dv, plan, stream));
            return Err(trouble);
        }
        let read = |it: &Buffer<f32>| {
            let mut numbers = vec![f32::NAN; it.len()];
            it.read(&stream, 0, &mut numbers).map(|()| numbers)
        };
        let mut rounded = vec![bf16::NAN; narrow_numbers];
        dq_bf16.read(&stream, 0, &mut rounded)?;
        let dq = match written {
            Written::F32 => read(&dq)?,
            Written::Bf16 => wide(&rounded),
        };
        let (dk, dv) = (read(&dk)?, read(&dv)?);
        Ok([self.table("dQ", dq), self.table("dK", dk), self.table("dV", dv)])
    }

    /// What forward should give: O and LSE.
    pub(crate) fn right_forward(&self, sinks: &[f32]) -> [Table<f64>; 2] {
        let mut all = [Vec::new(), Vec::new()];
        for it in &self.documents {
            let right = self.with(it, |document| reference::forward_with_sinks(document, sinks));
            all[0].extend(right.out);
            all[1].extend(right.lse);
        }
        let [out, lse] = all;
        [self.table("O", out), self.table("LSE", lse)]
    }

    /// What backward should give: dQ, dK, dV; and Δ.
    pub(crate) fn right_backward(&self) -> ([Table<f64>; 3], Vec<f64>) {
        let mut all = [Vec::new(), Vec::new(), Vec::new()];
        let mut deltas = Vec::new();
        for it in &self.documents {
            let width = self.heads.query * self.heads.dim;
            let dout = wide(&self.dout[it.q_row * width..][..it.rows.len() * width]);
            let right = self.with(it, |document| reference::backward(document, &dout));
            let parts = [right.dq, right.dk, right.dv];
            all.iter_mut().zip(parts).for_each(|(to, from)| to.extend(from));
            deltas.extend(right.delta);
        }
        let [dq, dk, dv] = all;
        ([self.table("dQ", dq), self.table("dK", dk), self.table("dV", dv)], deltas)
    }

    fn with<T>(&self, it: &Held, run: impl FnOnce(&Document<'_>) -> T) -> T {
        let Heads { query, kv, dim } = self.heads;
        let q = wide(&self.q[it.q_row * query * dim..][..it.rows.len() * query * dim]);
        let keys = it.kv_row * kv * dim..(it.kv_row + it.keys.len()) * kv * dim;
        let (k, v) = (wide(&self.k[keys.clone()]), wide(&self.v[keys]));
        run(&Document {
            heads: self.heads,
            mask: it.mask,
            scale: (dim as f32).powf(-0.5),
            softcap: self.softcap,
            document_rows: it.document_rows,
            rows: it.rows.clone(),
            keys: it.keys.clone(),
            q: &q,
            k: &k,
            v: &v,
        })
    }
}
