//! Times of one kernel in one form: runs that wait behind a gate, so that no work of the host is between them.
//!
//! In: a GPU, heads, rows, an order of dQ, a number of blocks. Out: seconds of single runs by the GPU's clock, once with what the
//! L2 still holds of the run before (warm), once behind a write of more than it (cold). Inputs are random, outputs poisoned.
//!
//! The host puts everything on the stream while a gate holds it, then opens it: events stand between runs alone.

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::time::Duration;

use cadre_kernels::device::{
    BackwardBundle, BackwardPlan, BackwardTensors, Buffer, Event, ForwardPlan, ForwardTask,
    ForwardTensors, Gate, Gpu, Keys, Order, QueryGradients, Shape, Stream, TaskRows,
};
use cadre_kernels::{Heads, Mask};
use half::bf16;
use serde_json::{Value, json};

use crate::case::{Random, wait};
use crate::lines::Lines;
use crate::smoke::Direction;
use crate::{Options, Trouble};

/// More than the L2 of any GPU that the kernels are for.
const FLUSH_BYTES: usize = 128 << 20;

/// One causal document on the GPU, forward and backward. Who makes one drops it only when all runs are over.
pub(crate) struct Bed {
    pub(crate) heads: Heads,
    pub(crate) rows: u32,
    stream: Stream,
    q: Buffer<bf16>,
    dout: Buffer<bf16>,
    k: Buffer<bf16>,
    v: Buffer<bf16>,
    out: Buffer<bf16>,
    lse: Buffer<f32>,
    delta: Buffer<f32>,
    gradients: [Buffer<f32>; 3],
    flush: Buffer<u32>,
    /// Whether the last runs waited on the stream until all were there.
    pub(crate) without_host: bool,
}

/// Which kernel, and how it is launched.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Pass {
    Forward,
    Backward(Order),
}

impl Pass {
    pub(crate) fn kernel(self, dim: usize) -> String {
        let direction = if self == Self::Forward { "forward" } else { "backward" };
        format!("cadre_{direction}_{dim}")
    }
}

impl Bed {
    pub(crate) fn new(gpu: &Gpu, heads: Heads, rows: u32, seed: u64) -> Result<Self, Trouble> {
        let stream = Stream::new(gpu)?;
        let mut random = Random::new(seed);
        let mut tensor = |heads: usize, dim: usize, what: &str| {
            // Drawing a random number for each element would take long: draw some and repeat them.
            let count = rows as usize * heads * dim;
            let some = random.numbers(count.min((1 << 20) + 64 * 7));
            let all: Vec<bf16> = some.iter().copied().cycle().take(count).collect();
            Buffer::of(&stream, &all, what)
        };
        let (q, dout) =
            (tensor(heads.query, heads.dim, "Q")?, tensor(heads.query, heads.dim, "dO")?);
        let (k, v) = (tensor(heads.kv, heads.dim, "K")?, tensor(heads.kv, heads.dim, "V")?);
        let sums = rows as usize * heads.query;
        let mut delta = Buffer::new(gpu, sums, "Δ")?;
        // Any Δ takes as long.
        delta.clear(&stream, sums)?;
        let gradients = [
            Buffer::new(gpu, q.len(), "dQ")?,
            Buffer::new(gpu, k.len(), "dK")?,
            Buffer::new(gpu, v.len(), "dV")?,
        ];
        Ok(Self {
            heads,
            rows,
            out: Buffer::new(gpu, q.len(), "O")?,
            lse: Buffer::new(gpu, sums, "LSE")?,
            flush: Buffer::new(gpu, FLUSH_BYTES / 4, "what fills the L2")?,
            stream,
            q,
            dout,
            k,
            v,
            delta,
            gradients,
            without_host: false,
        })
    }

    fn parts(&self) -> (Keys, Range<u32>) {
        (Keys { document_rows: self.rows, keys: 0..self.rows, kv_row: 0 }, 0..self.rows)
    }

    fn shape(&self, blocks: Option<u32>) -> Shape {
        let mut shape = Shape::new(self.heads, (self.heads.dim as f32).powf(-0.5));
        shape.blocks = blocks;
        shape
    }

    /// A run on the bed's stream, planned already.
    fn runner(
        &mut self,
        pass: Pass,
        blocks: Option<u32>,
        patience: Duration,
    ) -> Result<impl FnMut(&Stream) -> Result<(), Trouble> + use<'_>, Trouble> {
        let (keys, rows) = self.parts();
        let shape = self.shape(blocks);
        let rows = TaskRows { rows, q_row: 0 };
        let (mut forward, mut backward) = (None, None);
        match pass {
            Pass::Forward => {
                let task = ForwardTask { mask: Mask::Causal, keys, rows };
                forward = Some(ForwardPlan::new(&self.stream, shape, &[task])?);
            }
            Pass::Backward(order) => {
                let (mask, parts) = (Mask::Causal, vec![rows]);
                let bundle = BackwardBundle { mask, keys, dkv_row: 0, parts };
                let plan = BackwardPlan::new(&self.stream, shape, &[bundle], order, 1)?;
                backward = Some(plan);
            }
        }
        // Lists and inputs are there before another stream reads them.
        wait(&self.stream, patience)?;
        let Self { q, dout, k, v, out, lse, delta, gradients: [dq, dk, dv], .. } = self;
        Ok(move |stream: &Stream| {
            if let Some(plan) = &mut forward {
                let (out, lse) = (out.slice_mut(), lse.slice_mut());
                let tensors = ForwardTensors { q: q.slice(), k: k.slice(), v: v.slice(), out, lse };
                plan.run(stream, tensors)?;
            }
            if let Some(plan) = &mut backward {
                let [q, dout, k, v] = [&*q, dout, k, v].map(Buffer::slice);
                let (lse, delta, dq) = (lse.slice(), delta.slice(), dq.slice_mut());
                let (dq, dk, dv) = (QueryGradients::F32(dq), dk.slice_mut(), dv.slice_mut());
                plan.run(stream, BackwardTensors { q, dout, k, v, lse, delta, dq, dk, dv })?;
            }
            Ok(())
        })
    }

    /// One run without a timer.
    pub(crate) fn once(&mut self, gpu: &Gpu, pass: Pass, options: &Options) -> Result<(), Trouble> {
        let stream = ManuallyDrop::new(Stream::new(gpu)?);
        let mut run = ManuallyDrop::new(self.runner(pass, None, options.patience)?);
        run(&stream)?;
        wait(&stream, options.patience)?;
        drop((ManuallyDrop::into_inner(run), ManuallyDrop::into_inner(stream)));
        Ok(())
    }

    /// Seconds of `runs` runs, warm and cold. A backward pass wants a forward pass before.
    pub(crate) fn times(
        &mut self,
        gpu: &Gpu,
        (pass, blocks): (Pass, Option<u32>),
        runs: usize,
        options: &Options,
    ) -> Result<[Vec<f64>; 2], Trouble> {
        // What a launch that does not end uses is not given back: that would wait for it.
        let stream = ManuallyDrop::new(Stream::new(gpu)?);
        let mut flush = Buffer::new(gpu, 0, "what fills the L2")?;
        std::mem::swap(&mut flush, &mut self.flush);
        let mut without_host = true;
        let done = (|| {
            let mut run = ManuallyDrop::new(self.runner(pass, blocks, options.patience)?);
            // The first launch loads the kernel, so it is not timed.
            run(&stream)?;
            wait(&stream, options.patience)?;
            if options.profile {
                run(&stream)?;
                wait(&stream, options.patience)?;
                return Ok([Vec::new(), Vec::new()]);
            }
            let mut times = [Vec::new(), Vec::new()];
            for (cold, times) in times.iter_mut().enumerate() {
                // Some drivers have no streams that wait for a word of the host. Then times include
                // the host's work between runs, and the row says so (`without_host`).
                let held = Gate::new(gpu).and_then(|(gate, opener)| {
                    gate.hold(&stream)?;
                    Ok((ManuallyDrop::new(gate), opener))
                });
                let (gate, opener) = held.ok().unzip();
                without_host &= gate.is_some();
                let mut events = Vec::new();
                for _ in 0..runs {
                    if cold == 1 {
                        let len = flush.len();
                        flush.clear(&stream, len)?;
                    }
                    let begin = Event::timed(&stream)?;
                    run(&stream)?;
                    events.push((begin, Event::timed(&stream)?));
                }
                if let Some(opener) = opener {
                    opener.open(Gate::DONE);
                }
                wait(&stream, options.patience)?;
                drop(gate.map(ManuallyDrop::into_inner));
                for (begin, end) in events {
                    times.push(end.seconds_since(&begin)?);
                }
            }
            drop(ManuallyDrop::into_inner(run));
            Ok(times)
        })();
        (self.flush, self.without_host) = (flush, without_host);
        if done.is_ok() {
            drop(ManuallyDrop::into_inner(stream));
        }
        done
    }

    /// What the masks keep, of all heads; 4 operations a number forward, 10 backward.
    pub(crate) fn operations(&self, pass: Pass) -> f64 {
        let rows = f64::from(self.rows);
        let pairs = rows * (rows + 1.0) / 2.0 * self.heads.query as f64;
        pairs * self.heads.dim as f64 * if pass == Pass::Forward { 4.0 } else { 10.0 }
    }
}

/// A row of times: median, spread between the quarters, what was run.
pub(crate) fn row(
    bed: &Bed,
    form: &str,
    pass: Pass,
    blocks: u32,
    l2: &str,
    times: &[f64],
) -> Value {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |share: usize| sorted.get(sorted.len() * share / 4).copied().unwrap_or(f64::NAN);
    let Heads { query, kv, dim } = bed.heads;
    let (direction, order) = match pass {
        Pass::Forward => ("forward", ""),
        Pass::Backward(Order::Fixed) => ("backward", "fixed"),
        Pass::Backward(Order::Arrival) => ("backward", "arrival"),
    };
    let seconds = at(2).max(1e-12);
    json!({
        "case": format!("{query}:{kv} d{dim}, causal {} rows", bed.rows),
        "direction": direction,
        "order": order,
        "form": form,
        "blocks": blocks,
        "l2": l2,
        "seconds": seconds,
        "spread": (at(3) - at(1)) / seconds,
        "runs": times.len(),
        "without_host": bed.without_host,
        "tflops": bed.operations(pass) / seconds / 1e12,
    })
}

/// Times a kernel of head dim 128 once.
pub(crate) fn smoke(
    gpu: &Gpu,
    options: &Options,
    direction: Direction,
    lines: &mut Lines,
) -> Result<(), Trouble> {
    let (heads, rows, runs) = if options.tiny {
        (Heads { query: 2, kv: 1, dim: 128 }, 256, 1)
    } else {
        (Heads { query: 64, kv: 8, dim: 128 }, 16_384, 5)
    };
    let mut bed = ManuallyDrop::new(Bed::new(gpu, heads, rows, options.seed)?);
    let passes = match direction {
        Direction::Forward => vec![Pass::Forward],
        Direction::Backward => {
            // A backward pass wants LSE.
            bed.once(gpu, Pass::Forward, options)?;
            vec![Pass::Backward(Order::Arrival), Pass::Backward(Order::Fixed)]
        }
    };
    for pass in passes {
        let times = bed.times(gpu, (pass, None), runs, options)?;
        for (l2, times) in ["warm", "cold"].into_iter().zip(&times).filter(|it| !it.1.is_empty()) {
            lines.row("forms", &row(&bed, "as built", pass, gpu.processors(), l2, times));
        }
    }
    drop(ManuallyDrop::into_inner(bed));
    Ok(())
}
