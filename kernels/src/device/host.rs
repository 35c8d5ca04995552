//! The GPU for rows of the host: packs tasks, copies them in, launches, copies results out.
//!
//! In: the tasks and bundles of [`crate::forward`] and [`crate::backward`], bf16. Out: the same slices, written. Keys that
//! several tasks hand in (slices that begin at one address) travel once.
//!
//! It waits for each launch. When memory is short it halves the batch, down to one task. Invariant: a launch that fails leaves no
//! usable result, and the caller gets the error.

use half::bf16;

use super::backward::{BackwardPlan, BackwardTensors, Order, QueryGradients};
use super::check::{self, Refusal};
use super::driver::Gpu;
use super::error::Error;
use super::family::Family;
use super::forward::{ForwardPlan, ForwardTensors};
use super::memory::{Buffer, Stream};
use super::plan::{BackwardBundle, ForwardTask, Keys, Shape, TaskRows};
use super::scratch::Scratch;
use crate::{Backward, Forward, Heads, Rows, RowsMut, key_tiles};

/// A stream with the memory that its launches use again and again.
#[derive(Debug)]
pub struct HostRows {
    stream: Stream,
    order: Order,
    scratch: Scratch,
    q: Buffer<bf16>,
    k: Buffer<bf16>,
    v: Buffer<bf16>,
    dout: Buffer<bf16>,
    out: Buffer<bf16>,
    lse: Buffer<f32>,
    delta: Buffer<f32>,
    dq: Buffer<f32>,
    dk: Buffer<f32>,
    dv: Buffer<f32>,
}

impl HostRows {
    /// A stream of its own on `gpu`; dQ is summed in `order`.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn new(gpu: &Gpu, order: Order) -> Result<Self, Error> {
        Ok(Self {
            stream: Stream::new(gpu)?,
            order,
            scratch: Scratch::new(gpu)?,
            q: Buffer::new(gpu, 0, "Q")?,
            k: Buffer::new(gpu, 0, "K")?,
            v: Buffer::new(gpu, 0, "V")?,
            dout: Buffer::new(gpu, 0, "dO")?,
            out: Buffer::new(gpu, 0, "O")?,
            lse: Buffer::new(gpu, 0, "LSE")?,
            delta: Buffer::new(gpu, 0, "Δ")?,
            dq: Buffer::new(gpu, 0, "dQ")?,
            dk: Buffer::new(gpu, 0, "dK")?,
            dv: Buffer::new(gpu, 0, "dV")?,
        })
    }

    /// The stream of this memory, with its GPU.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// As [`crate::forward`].
    ///
    /// # Errors
    ///
    /// The first task that the GPU kernels cannot do, before anything is computed; or the GPU's.
    pub fn forward(&mut self, tasks: &mut [Forward<'_>]) -> Result<(), Error> {
        for (task, it) in tasks.iter().enumerate() {
            fits_forward(self.stream.gpu().family(), task, it)?;
        }
        let mut all: Vec<&mut Forward<'_>> = tasks.iter_mut().collect();
        all.sort_by_key(|it| kind(it.heads, it.scale, it.softcap));
        for batch in all.chunk_by_mut(|a, b| {
            kind(a.heads, a.scale, a.softcap) == kind(b.heads, b.scale, b.softcap)
        }) {
            halve(batch, &mut |batch| {
                let done = self.forward_batch(batch);
                self.release_if_short(done)
            })?;
        }
        Ok(())
    }

    /// As [`crate::backward`], for all key tiles of each bundle.
    ///
    /// # Errors
    ///
    /// The first bundle that the GPU kernels cannot do, before anything is computed; or the GPU's.
    pub fn backward(&mut self, bundles: &mut [Backward<'_>]) -> Result<(), Error> {
        for (bundle, it) in bundles.iter().enumerate() {
            fits_backward(self.stream.gpu().family(), bundle, it)?;
        }
        let mut all: Vec<&mut Backward<'_>> = bundles.iter_mut().collect();
        all.sort_by_key(|it| kind(it.heads, it.scale, it.softcap));
        for batch in all.chunk_by_mut(|a, b| {
            kind(a.heads, a.scale, a.softcap) == kind(b.heads, b.scale, b.softcap)
        }) {
            halve(batch, &mut |batch| {
                let done = self.backward_batch(batch);
                self.release_if_short(done)
            })?;
        }
        Ok(())
    }

    /// Frees the memory of a batch that was too large, so that half of the batch fits.
    fn release_if_short(&mut self, done: Result<(), Error>) -> Result<(), Error> {
        if done.as_ref().is_err_and(Error::is_out_of_memory) {
            self.scratch.release()?;
            let gpu = self.stream.gpu().clone();
            for rows in [&mut self.q, &mut self.k, &mut self.v, &mut self.dout, &mut self.out] {
                *rows = Buffer::new(&gpu, 0, "rows")?;
            }
            for numbers in
                [&mut self.lse, &mut self.delta, &mut self.dq, &mut self.dk, &mut self.dv]
            {
                *numbers = Buffer::new(&gpu, 0, "numbers")?;
            }
        }
        done
    }

    fn forward_batch(&mut self, batch: &mut [&mut Forward<'_>]) -> Result<(), Error> {
        let Some(first) = batch.first() else { return Ok(()) };
        let (heads, shape) = (first.heads, shape(first.heads, first.scale, first.softcap));
        let (query, key) = (heads.query * heads.dim, heads.kv * heads.dim);
        let (mut q_rows, mut held) = (0, Held::default());
        let mut tasks = Vec::new();
        for it in batch.iter() {
            let (k, v) = (numbers(&it.k), numbers(&it.v));
            let keys = held.place(it.document_rows, it.keys.clone(), k, v, heads);
            let rows = TaskRows { rows: it.rows.clone(), q_row: q_rows };
            q_rows += it.rows.len() as u32;
            tasks.push(ForwardTask { mask: it.mask, keys, rows });
        }
        let mut plan = ForwardPlan::with(&self.stream, shape, &tasks, &self.scratch)?;
        let (queries, stream) = (q_rows as usize, &self.stream);
        self.q.reserve(queries * query, "Q")?;
        self.out.reserve(queries * query, "O")?;
        self.lse.reserve(queries * heads.query, "LSE")?;
        held.write(stream, (&mut self.k, &mut self.v), key)?;
        for (it, task) in batch.iter().zip(&tasks) {
            self.q.write(stream, task.rows.q_row as usize * query, numbers(&it.q))?;
        }
        let (q, k, v) = (self.q.slice(), self.k.slice(), self.v.slice());
        let (out, lse) = (self.out.slice_mut(), self.lse.slice_mut());
        plan.run(stream, ForwardTensors { q, k, v, out, lse })?;
        for (it, task) in batch.iter_mut().zip(&tasks) {
            let row = task.rows.q_row as usize;
            if let RowsMut::Bf16(out) = &mut it.out {
                self.out.read(stream, row * query, out)?;
            }
            self.lse.read(stream, row * heads.query, it.lse)?;
        }
        Ok(())
    }

    fn backward_batch(&mut self, batch: &mut [&mut Backward<'_>]) -> Result<(), Error> {
        let Some(first) = batch.first() else { return Ok(()) };
        let (heads, shape) = (first.heads, shape(first.heads, first.scale, first.softcap));
        let (query, key) = (heads.query * heads.dim, heads.kv * heads.dim);
        let (mut q_rows, mut dkv_rows, mut held) = (0_u32, 0_u32, Held::default());
        let mut bundles = Vec::new();
        for it in batch.iter() {
            let (k, v) = (numbers(&it.k), numbers(&it.v));
            let keys = held.place(it.document_rows, it.keys.clone(), k, v, heads);
            let mut parts = Vec::new();
            for part in &it.parts {
                parts.push(TaskRows { rows: part.rows.clone(), q_row: q_rows });
                q_rows += part.rows.len() as u32;
            }
            bundles.push(BackwardBundle { mask: it.mask, keys, dkv_row: dkv_rows, parts });
            dkv_rows += it.keys.len() as u32;
        }
        let cut = (self.order, 1);
        let mut plan = BackwardPlan::with(&self.stream, shape, &bundles, cut, &self.scratch)?;
        let (queries, gradients) = (q_rows as usize, dkv_rows as usize * key);
        let stream = &self.stream;
        for (buffer, what) in [(&mut self.q, "Q"), (&mut self.dout, "dO")] {
            buffer.reserve(queries * query, what)?;
        }
        for (buffer, len, what) in [
            (&mut self.lse, queries * heads.query, "LSE"),
            (&mut self.delta, queries * heads.query, "Δ"),
            (&mut self.dq, queries * query, "dQ"),
            (&mut self.dk, gradients, "dK"),
            (&mut self.dv, gradients, "dV"),
        ] {
            buffer.reserve(len, what)?;
        }
        held.write(stream, (&mut self.k, &mut self.v), key)?;
        for (it, bundle) in batch.iter().zip(&bundles) {
            for (part, rows) in it.parts.iter().zip(&bundle.parts) {
                let row = rows.q_row as usize;
                self.q.write(stream, row * query, numbers(&part.q))?;
                self.dout.write(stream, row * query, numbers(&part.dout))?;
                self.lse.write(stream, row * heads.query, part.lse)?;
                self.delta.write(stream, row * heads.query, part.delta)?;
            }
        }
        let tensors = BackwardTensors {
            q: self.q.slice(),
            dout: self.dout.slice(),
            k: self.k.slice(),
            v: self.v.slice(),
            lse: self.lse.slice(),
            delta: self.delta.slice(),
            dq: QueryGradients::F32(self.dq.slice_mut()),
            dk: self.dk.slice_mut(),
            dv: self.dv.slice_mut(),
        };
        plan.run(stream, tensors)?;
        for (it, bundle) in batch.iter_mut().zip(&bundles) {
            for (part, rows) in it.parts.iter_mut().zip(&bundle.parts) {
                self.dq.read(stream, rows.q_row as usize * query, part.dq)?;
            }
            self.dk.read(stream, bundle.dkv_row as usize * key, it.dk)?;
            self.dv.read(stream, bundle.dkv_row as usize * key, it.dv)?;
        }
        Ok(())
    }
}

/// The properties that all tasks of a batch share.
fn kind(heads: Heads, scale: f32, softcap: Option<f32>) -> ([usize; 3], u32, Option<u32>) {
    ([heads.query, heads.kv, heads.dim], scale.to_bits(), softcap.map(f32::to_bits))
}

fn shape(heads: Heads, scale: f32, softcap: Option<f32>) -> Shape {
    Shape { softcap, ..Shape::new(heads, scale) }
}

/// Runs a batch. While memory is short, it runs the batch in halves.
fn halve<T>(
    batch: &mut [T],
    run: &mut impl FnMut(&mut [T]) -> Result<(), Error>,
) -> Result<(), Error> {
    match run(batch) {
        Err(error) if error.is_out_of_memory() && batch.len() > 1 => {
            let (first, second) = batch.split_at_mut(batch.len() / 2);
            halve(first, run)?;
            halve(second, run)
        }
        done => done,
    }
}

/// Keys and values of a batch, each slice once.
#[derive(Default)]
struct Held<'a> {
    /// Position in K and V of the first row, keys, values. Slices that begin at the same addresses are stored once, as the
    /// longest.
    slices: Vec<(u32, &'a [bf16], &'a [bf16])>,
    /// Rows of all slices.
    rows: u32,
}

impl<'a> Held<'a> {
    fn place(
        &mut self,
        document_rows: u32,
        keys: std::ops::Range<u32>,
        k: &'a [bf16],
        v: &'a [bf16],
        heads: Heads,
    ) -> Keys {
        let width = heads.kv * heads.dim;
        let same = |it: &(u32, &[bf16], &[bf16])| {
            !k.is_empty() && it.1.as_ptr() == k.as_ptr() && it.2.as_ptr() == v.as_ptr()
        };
        // Only the last slice can grow. A longer slice for an earlier one is stored again.
        let last = self.slices.len().wrapping_sub(1);
        let found = self.slices.iter_mut().enumerate().find(|(_, it)| same(it));
        let kv_row = match found {
            Some((_, it)) if it.1.len() >= k.len() => it.0,
            Some((index, it)) if index == last => {
                (it.1, it.2) = (k, v);
                self.rows = it.0 + (k.len() / width) as u32;
                it.0
            }
            Some(_) | None => {
                let row = self.rows;
                self.slices.push((row, k, v));
                self.rows += (k.len() / width) as u32;
                row
            }
        };
        Keys { document_rows, keys, kv_row }
    }

    fn write(
        &self,
        stream: &Stream,
        (k, v): (&mut Buffer<bf16>, &mut Buffer<bf16>),
        width: usize,
    ) -> Result<(), Error> {
        k.reserve(self.rows as usize * width, "K")?;
        v.reserve(self.rows as usize * width, "V")?;
        for &(row, keys, values) in &self.slices {
            k.write(stream, row as usize * width, keys)?;
            v.write(stream, row as usize * width, values)?;
        }
        Ok(())
    }
}

/// The elements of rows that were checked to be bf16.
fn numbers<'a>(rows: &Rows<'a>) -> &'a [bf16] {
    match rows {
        Rows::Bf16(it) => it,
        Rows::F32(_) => &[],
    }
}

fn bf16_only(task: usize, field: &'static str, rows: &Rows<'_>) -> Result<(), Refusal> {
    match rows {
        Rows::Bf16(_) => Ok(()),
        Rows::F32(_) => Err(Refusal::Dtype { task, field }),
    }
}

/// Whether the GPU kernels can do a task.
pub(crate) fn fits_forward(family: Family, task: usize, it: &Forward<'_>) -> Result<(), Refusal> {
    crate::check::forward(task, it)?;
    check::common(family, it.heads, it.scale, it.softcap)?;
    for (field, rows) in [("q", &it.q), ("k", &it.k), ("v", &it.v)] {
        bf16_only(task, field, rows)?;
    }
    match it.out {
        RowsMut::Bf16(_) => Ok(()),
        RowsMut::F32(_) => Err(Refusal::Dtype { task, field: "out" }),
    }
}

/// Whether the GPU kernels can do a bundle.
pub(crate) fn fits_backward(
    family: Family,
    bundle: usize,
    it: &Backward<'_>,
) -> Result<(), Refusal> {
    crate::check::backward(bundle, it)?;
    check::common(family, it.heads, it.scale, it.softcap)?;
    for (field, rows) in [("k", &it.k), ("v", &it.v)] {
        bf16_only(bundle, field, rows)?;
    }
    for part in &it.parts {
        bf16_only(bundle, "q", &part.q)?;
        bf16_only(bundle, "dout", &part.dout)?;
    }
    let all = key_tiles(&it.keys);
    if it.key_tiles != (0..all) {
        return Err(Refusal::KeyTiles { bundle, tiles: it.key_tiles.clone(), all });
    }
    Ok(())
}
