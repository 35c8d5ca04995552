//! Backward on the GPU: a plan made once, run for every layer.
//!
//! In: bundles; then tensors. Out: dQ, and dK and dV once per bundle, in the order of a stream. The plan holds its lists in
//! device memory, and the f32 sums of dQ in a [`Scratch`] that may be shared.
//!
//! It allocates nothing while it runs, unless its scratch was released, and does not wait. Invariant: as in
//! [`super::forward`]; and the sums of dQ are zero between runs.

// Launches: what kernels read and write is the checks' promise.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use half::bf16;

use super::batch::Batch;
use super::check::{Refusal, disjoint, same_gpu, short, task as check_task, tensor};
use super::driver::Gpu;
use super::error::Error;
use super::event::Event;
use super::lists;
use super::memory::{Buffer, Stream};
use super::modules::Kernel;
use super::plan::{BackwardBundle, Shape, TensorArgument, bundle, reach, task};
use super::scratch::{Held, Scratch};
use super::slice::{Slice, SliceMut};
use super::tables::{BackwardParameters, BackwardTile, Bundle, FinishParameters, QueryTile, Task};
use super::tiles::BACKWARD_ROWS;

/// Tensors of a backward launch.
#[derive(Debug)]
pub struct BackwardTensors<'a> {
    /// `[q rows, query heads, dim]`, aligned to 16 bytes as dO, K and V are.
    pub q: Slice<'a, bf16>,
    /// dO, `[q rows, query heads, dim]`.
    pub dout: Slice<'a, bf16>,
    /// `[kv rows, KV heads, dim]`.
    pub k: Slice<'a, bf16>,
    /// `[kv rows, KV heads, dim]`.
    pub v: Slice<'a, bf16>,
    /// LSE of the forward pass, `[q rows, query heads]`; −∞ gives a row no gradient.
    pub lse: Slice<'a, f32>,
    /// Δ = rowsum(dO∘O), `[q rows, query heads]`.
    pub delta: Slice<'a, f32>,
    /// dQ, `[q rows, query heads, dim]`; rows of no bundle are left alone.
    pub dq: QueryGradients<'a>,
    /// `[dkv rows, KV heads, dim]`; rows of no bundle are left alone.
    pub dk: SliceMut<'a, f32>,
    /// `[dkv rows, KV heads, dim]`; rows of no bundle are left alone.
    pub dv: SliceMut<'a, f32>,
}

/// Where dQ goes.
#[derive(Debug)]
pub enum QueryGradients<'a> {
    /// In f32, as summed.
    F32(SliceMut<'a, f32>),
    /// Rounded to bf16.
    Bf16(SliceMut<'a, bf16>),
}

/// In which order dQ is summed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Order {
    /// Key tiles ascending: the same bits in every launch.
    Fixed,
    /// In the order in which key tiles finish; bits may differ from run to run.
    Arrival,
}

/// Maximum launches among which the key tiles of a batch are divided.
const MOST_LAUNCHES: u32 = 1 << 10;

/// Bundles on a GPU, ready to run.
#[derive(Debug)]
pub struct BackwardPlan {
    gpu: Gpu,
    shape: Shape,
    q_rows: usize,
    kv_rows: usize,
    dkv_rows: usize,
    tasks: Buffer<Task>,
    launches: Vec<(Buffer<Bundle>, Buffer<BackwardTile>)>,
    finish: Buffer<QueryTile>,
    next: Buffer<u32>,
    turns: Option<Buffer<u32>>,
    /// Recorded when the lists are on the GPU.
    made: Arc<Event>,
    scratch: Scratch,
    /// Elements of the f32 sums of dQ.
    sums: usize,
    batch: Batch,
}

/// The kernel that a shape needs.
fn kernel(gpu: &Gpu, shape: &Shape) -> Kernel {
    gpu.kernel(shape.kernel(gpu.family().backward()))
}

impl BackwardPlan {
    /// Checks `bundles`, makes the lists of `launches` launches that share out the key tiles of every bundle, and copies
    /// them to the GPU of `stream`.
    ///
    /// # Errors
    ///
    /// The first bundle that the kernels cannot do, too many launches, or memory.
    pub fn new(
        stream: &Stream,
        shape: Shape,
        bundles: &[BackwardBundle],
        order: Order,
        launches: u32,
    ) -> Result<Self, Error> {
        let scratch = Scratch::new(stream.gpu())?;
        Self::with(stream, shape, bundles, (order, launches), &scratch)
    }

    /// As [`Self::new`], with a scratch that several plans share; their runs come one after the
    /// other.
    ///
    /// # Errors
    ///
    /// As [`Self::new`].
    pub fn with(
        stream: &Stream,
        shape: Shape,
        bundles: &[BackwardBundle],
        (order, launches): (Order, u32),
        scratch: &Scratch,
    ) -> Result<Self, Error> {
        shape.check(stream.gpu().family())?;
        scratch.is_on(stream.gpu())?;
        if launches > MOST_LAUNCHES {
            return Err(Refusal::Launches { launches, most: MOST_LAUNCHES }.into());
        }
        let (mut tasks, mut table) = (Vec::new(), Vec::new());
        for (index, it) in bundles.iter().enumerate() {
            let mut previous_end = 0;
            table.push(bundle(it, tasks.len()));
            for (part, rows) in it.parts.iter().enumerate() {
                check_task(index, it.mask, rows, &it.keys)?;
                let start = rows.rows.start;
                if start < previous_end {
                    let refused = crate::Error::Parts { task: index, part, start, previous_end };
                    return Err(Refusal::Shape(refused).into());
                }
                previous_end = rows.rows.end;
                tasks.push(task(it.mask, rows, &it.keys, index));
            }
            short("dk", u64::from(it.dkv_row) + it.keys.keys.len() as u64)?;
        }
        let rows = || bundles.iter().flat_map(|it| &it.parts).map(|it| (it.q_row, it.rows.len()));
        let gradients = || bundles.iter().map(|it| (it.dkv_row, it.keys.keys.len()));
        disjoint("part", rows())?;
        disjoint("bundle", gradients())?;
        let heads = shape.heads;
        let sum_tiles = lists::place_sums(&mut tasks) * heads.query;
        let gpu = stream.gpu();
        let keys = kernel(gpu, &shape).launch.keys;
        let launches = launches.max(1) as i32;
        let mut lists = lists::backward(&tasks, &table, (heads, keys), order, launches);
        lists.retain(|it| !it.tiles.is_empty());
        lists.iter().try_for_each(|it| short("the tile list", it.tiles.len() as u64))?;
        let finish = lists::finish(&tasks);
        let ((buffers, finish, tasks), made) = scratch.upload(stream, |upload| {
            let mut buffers = Vec::new();
            for it in &lists {
                let bundles = upload.list(&it.bundles, "bundles")?;
                buffers.push((bundles, upload.list(&it.tiles, "the tile list")?));
            }
            let finish = upload.list(&finish, "tiles of dQ")?;
            Ok((buffers, finish, upload.list(&tasks, "tasks")?))
        })?;
        let numbers = sum_tiles * BACKWARD_ROWS as usize * heads.dim;
        scratch.reserve_sums(numbers)?;
        let turns = match order {
            Order::Fixed => Some(Buffer::new(gpu, 2 * sum_tiles, "turns of dQ")?),
            Order::Arrival => None,
        };
        Ok(Self {
            gpu: gpu.clone(),
            shape,
            q_rows: reach(rows()),
            kv_rows: reach(bundles.iter().map(|it| (it.keys.kv_row, it.keys.keys.len()))),
            dkv_rows: reach(gradients()),
            finish,
            tasks,
            launches: buffers,
            next: Buffer::new(gpu, 1, "a counter")?,
            turns,
            made,
            scratch: scratch.clone(),
            sums: numbers,
            batch: Batch::new((bundles.len(), "bundles"), rows().map(|it| it.1).sum(), heads),
        })
    }

    /// Bytes of device memory that the plan's lists take.
    pub fn list_bytes(&self) -> u64 {
        let launches =
            self.launches.iter().map(|(bundles, tiles)| bundles.len_bytes() + tiles.len_bytes());
        let turns = self.turns.as_ref().map_or(0, Buffer::len_bytes);
        self.tasks.len_bytes() + self.finish.len_bytes() + turns + launches.sum::<u64>()
    }

    /// Enqueues the launches on `stream`, which is of the plan's GPU. They begin after all earlier runs of the plan, on any
    /// stream.
    ///
    /// # Errors
    ///
    /// A tensor that does not fit, a stream of another GPU, or the driver's.
    pub fn run(&mut self, stream: &Stream, tensors: BackwardTensors<'_>) -> Result<(), Error> {
        same_gpu("the plan", self.gpu.device(), stream.gpu().device())?;
        let scratch = self.scratch.clone();
        scratch.run(stream, |held| self.put(held, tensors))
    }

    fn put(&mut self, held: &mut Held<'_>, tensors: BackwardTensors<'_>) -> Result<(), Error> {
        let stream = held.stream();
        let BackwardTensors { q, dout, k, v, lse, delta, dq, dk, dv } = tensors;
        let heads = self.shape.heads;
        let (queries, keys) = (self.q_rows * heads.query, self.kv_rows * heads.kv);
        let gradients = self.dkv_rows * heads.kv * heads.dim;
        tensor("q", q.place(), queries * heads.dim, 16)?;
        tensor("dout", dout.place(), queries * heads.dim, 16)?;
        tensor("k", k.place(), keys * heads.dim, 16)?;
        tensor("v", v.place(), keys * heads.dim, 16)?;
        tensor("lse", lse.place(), queries, 4)?;
        tensor("delta", delta.place(), queries, 4)?;
        tensor("dk", dk.place(), gradients, 16)?;
        tensor("dv", dv.place(), gradients, 16)?;
        let (dq, dq_bf16) = match &dq {
            QueryGradients::F32(it) => (it.place(), (0, 0)),
            QueryGradients::Bf16(it) => ((0, 0), it.place()),
        };
        tensor("dq", if dq.0 == 0 { dq_bf16 } else { dq }, queries * heads.dim, 16)?;
        let kernel = kernel(&self.gpu, &self.shape);
        let (box_rows, box_keys) = (kernel.launch.rows, kernel.launch.keys);
        let family = self.gpu.family();
        let (query, kv) = ((heads.query, heads.dim), (heads.kv, heads.dim));
        let mut q = TensorArgument::new(family, q.place(), query, box_rows)?;
        let mut dout = TensorArgument::new(family, dout.place(), query, box_rows)?;
        let mut k = TensorArgument::new(family, k.place(), kv, box_keys)?;
        let mut v = TensorArgument::new(family, v.place(), kv, box_keys)?;
        let (tasks, sums) = (self.tasks.slice().place().0, held.sums(self.sums)?);
        held.behind(&self.made)?;
        for (bundles, tiles) in &self.launches {
            self.next.clear(stream, 1)?;
            if let Some(turns) = &mut self.turns {
                turns.clear(stream, turns.len())?;
            }
            let mut parameters = BackwardParameters {
                tasks,
                bundles: bundles.slice().place().0,
                tiles: tiles.slice().place().0,
                tile_count: tiles.len() as i32,
                next: self.next.slice().place().0,
                turns: self.turns.as_ref().map_or(0, |it| it.slice().place().0),
                heads: heads.query as i32,
                group: (heads.query / heads.kv) as i32,
                kv_heads: heads.kv as i32,
                scale: self.shape.scale.to_bits(),
                scale_log2: self.shape.scale_log2().to_bits(),
                inner_scale: self.shape.inner_scale().to_bits(),
                lse: lse.place().0,
                delta: delta.place().0,
                dq: sums,
                dk: dk.place().0,
                dv: dv.place().0,
            };
            let mut arguments = [
                (&raw mut parameters).cast::<c_void>(),
                q.pointer(),
                dout.pointer(),
                k.pointer(),
                v.pointer(),
            ];
            let at_once = self.gpu.processors() * kernel.resident;
            let blocks = self.shape.blocks(at_once, tiles.len());
            // SAFETY: parameters as the kernel's head says; lists and rows were checked against the tensors, and buffers that are
            // freed wait for the launch.
            unsafe { self.batch.launch(stream, (kernel, blocks), &mut arguments) }?;
        }
        if self.finish.is_empty() {
            held.sums_are_zero();
            return Ok(());
        }
        let mut parameters = FinishParameters {
            tasks,
            tiles: self.finish.slice().place().0,
            tile_count: self.finish.len() as i32,
            heads: heads.query as i32,
            dim: heads.dim as i32,
            scale: self.shape.scale.to_bits(),
            sums,
            dq: dq.0,
            dq_bf16: dq_bf16.0,
        };
        let mut arguments = [(&raw mut parameters).cast::<c_void>()];
        let blocks = self.shape.blocks(self.gpu.processors() * 8, self.finish.len() * heads.query);
        // SAFETY: parameters as the kernel's head says; lists and rows were checked against the tensors, and buffers that are
        // freed wait for the launch.
        unsafe {
            self.batch.launch(stream, (self.gpu.kernel("cadre_finish_dq"), blocks), &mut arguments)
        }?;
        held.sums_are_zero();
        Ok(())
    }
}
