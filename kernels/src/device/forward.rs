//! Forward on the GPU: a plan made once, run for every layer.
//!
//! In: tasks; then tensors of bf16. Out: O and LSE, in the order of a stream. The plan holds its lists in device memory, and
//! parts of segments in a [`Scratch`] that may be shared; making it costs the host a few microseconds a task, running it two or three calls.
//!
//! It allocates nothing while it runs, unless its scratch was released, and does not wait. Runs may be put on any stream; each comes
//! behind the lists and behind the run before, but for what is recorded, whose order is the caller's. Invariant: tasks were checked when the plan was made, tensors are
//! when it runs; what passes is inside every tensor.

// Launches: what kernels read and write is the checks' promise.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use half::bf16;

use super::batch::Batch;
use super::check::{disjoint, same_gpu, short, task as check_task, tensor};
use super::driver::Gpu;
use super::error::Error;
use super::event::Event;
use super::lists;
use super::memory::{Buffer, Stream};
use super::modules::Kernel;
use super::plan::{ForwardTask, Shape, TensorArgument, reach, task};
use super::scratch::{Held, Scratch};
use super::slice::{Slice, SliceMut};
use super::tables::{
    ForwardParameters, ForwardTile, MergeParameters, MergeTile, QueryTile, SinkParameters, Task,
};

/// Tensors of a forward launch.
#[derive(Debug)]
pub struct ForwardTensors<'a> {
    /// `[q rows, query heads, dim]`, aligned to 16 bytes as K and V are.
    pub q: Slice<'a, bf16>,
    /// `[kv rows, KV heads, dim]`.
    pub k: Slice<'a, bf16>,
    /// `[kv rows, KV heads, dim]`.
    pub v: Slice<'a, bf16>,
    /// O, `[q rows, query heads, dim]`; rows of no task are left alone.
    pub out: SliceMut<'a, bf16>,
    /// Natural log, `[q rows, query heads]`; rows of no task are left alone.
    pub lse: SliceMut<'a, f32>,
}

/// Tasks on a GPU, ready to run.
#[derive(Debug)]
pub struct ForwardPlan {
    gpu: Gpu,
    shape: Shape,
    q_rows: usize,
    kv_rows: usize,
    table: Vec<Task>,
    tasks: Buffer<Task>,
    tiles: Buffer<ForwardTile>,
    merges: Buffer<MergeTile>,
    next: Buffer<u32>,
    /// The lists are on the GPU.
    made: Arc<Event>,
    scratch: Scratch,
    /// Numbers of parts of O, and of LSE.
    parts: [usize; 2],
    /// Tiles of rows that sinks are applied to; none without sinks.
    sink_tiles: Option<Buffer<QueryTile>>,
    /// Pairs of query and key in the multiplied tiles, over all heads.
    tile_pairs: u64,
    batch: Batch,
}

/// The kernel that a shape needs.
fn kernel(gpu: &Gpu, shape: &Shape) -> Kernel {
    gpu.kernel(shape.kernel(gpu.family().forward()))
}

impl ForwardPlan {
    /// Checks `tasks`, makes the tile list and copies it to the GPU of `stream`.
    ///
    /// # Errors
    ///
    /// The first task that the kernels cannot do, or memory.
    pub fn new(stream: &Stream, shape: Shape, tasks: &[ForwardTask]) -> Result<Self, Error> {
        Self::with(stream, shape, tasks, &Scratch::new(stream.gpu())?)
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
        tasks: &[ForwardTask],
        scratch: &Scratch,
    ) -> Result<Self, Error> {
        shape.check(stream.gpu().family())?;
        scratch.is_on(stream.gpu())?;
        for (index, it) in tasks.iter().enumerate() {
            check_task(index, it.mask, &it.rows, &it.keys)?;
        }
        let rows = || tasks.iter().map(|it| (it.rows.q_row, it.rows.rows.len()));
        disjoint("task", rows())?;
        let table: Vec<Task> =
            tasks.iter().map(|it| task(it.mask, &it.rows, &it.keys, 0)).collect();
        let (heads, segment) = (shape.heads, shape.segment as i32);
        let launch = kernel(stream.gpu(), &shape).launch;
        let tile = (launch.rows, launch.keys);
        let list = lists::forward(&table, heads.query as i32, tile, segment);
        short("the tile list", list.tiles.len() as u64)?;
        let slot = launch.rows as usize;
        let steps = lists::forward_steps(&list, &table, tile, segment);
        let gpu = stream.gpu();
        let parts = [list.slots * slot * heads.dim, list.slots * slot];
        scratch.reserve_parts(parts)?;
        let ((tasks_of, tiles, merges), made) = scratch.upload(stream, |upload| {
            let tasks = upload.list(&table, "tasks")?;
            let tiles = upload.list(&list.tiles, "the tile list")?;
            Ok((tasks, tiles, upload.list(&list.merges, "the merge list")?))
        })?;
        Ok(Self {
            gpu: gpu.clone(),
            shape,
            q_rows: reach(rows()),
            kv_rows: reach(tasks.iter().map(|it| (it.keys.kv_row, it.keys.keys.len()))),
            tasks: tasks_of,
            tiles,
            merges,
            next: Buffer::new(gpu, 1, "a counter")?,
            made,
            scratch: scratch.clone(),
            parts,
            sink_tiles: None,
            table,
            tile_pairs: steps * slot as u64 * launch.keys as u64,
            batch: Batch::new((tasks.len(), "tasks"), rows().map(|it| it.1).sum(), heads),
        })
    }

    /// Pairs of query and key in the multiplied tiles, over all heads. It is at least the number that the masks keep.
    pub fn tile_pairs(&self) -> u64 {
        self.tile_pairs
    }

    /// Bytes of device memory that the plan's lists take.
    pub fn list_bytes(&self) -> u64 {
        let sinks = self.sink_tiles.as_ref().map_or(0, Buffer::len_bytes);
        self.tasks.len_bytes() + self.tiles.len_bytes() + self.merges.len_bytes() + sinks
    }

    /// Enqueues the launch on `stream`, which is of the plan's GPU. It begins after all earlier runs of the plan, on any stream.
    ///
    /// # Errors
    ///
    /// A tensor that does not fit, a stream of another GPU, or the driver's.
    pub fn run(&mut self, stream: &Stream, tensors: ForwardTensors<'_>) -> Result<(), Error> {
        same_gpu("the plan", self.gpu.device(), stream.gpu().device())?;
        let scratch = self.scratch.clone();
        scratch.run(stream, |held| self.put(held, tensors))
    }

    fn put(&mut self, held: &mut Held<'_>, tensors: ForwardTensors<'_>) -> Result<(), Error> {
        let stream = held.stream();
        let ForwardTensors { q, k, v, out, lse } = tensors;
        let heads = self.shape.heads;
        let (queries, keys) = (self.q_rows * heads.query, self.kv_rows * heads.kv);
        tensor("q", q.place(), queries * heads.dim, 16)?;
        tensor("k", k.place(), keys * heads.dim, 16)?;
        tensor("v", v.place(), keys * heads.dim, 16)?;
        tensor("out", out.place(), queries * heads.dim, 16)?;
        tensor("lse", lse.place(), queries, 4)?;
        if self.tiles.is_empty() {
            return Ok(());
        }
        let kernel = kernel(&self.gpu, &self.shape);
        let (rows, box_keys) = (kernel.launch.rows, kernel.launch.keys);
        let family = self.gpu.family();
        let (query, kv) = ((heads.query, heads.dim), (heads.kv, heads.dim));
        let mut q = TensorArgument::new(family, q.place(), query, rows)?;
        let mut k = TensorArgument::new(family, k.place(), kv, box_keys)?;
        let mut v = TensorArgument::new(family, v.place(), kv, box_keys)?;
        let tasks = self.tasks.slice().place().0;
        let [part_o, part_lse] = held.parts(self.parts)?;
        held.behind(&self.made)?;
        let (o, lse) = (out.place().0, lse.place().0);
        let mut parameters = ForwardParameters {
            tasks,
            tiles: self.tiles.slice().place().0,
            tile_count: self.tiles.len() as i32,
            next: self.next.slice().place().0,
            heads: heads.query as i32,
            group: (heads.query / heads.kv) as i32,
            segment_rows: self.shape.segment as i32,
            scale_log2: self.shape.scale_log2().to_bits(),
            o,
            lse,
            part_o,
            part_lse,
            inner_scale: self.shape.inner_scale().to_bits(),
        };
        self.next.clear(stream, 1)?;
        let mut arguments =
            [(&raw mut parameters).cast::<c_void>(), q.pointer(), k.pointer(), v.pointer()];
        let at_once = self.gpu.processors() * kernel.resident;
        let blocks = self.shape.blocks(at_once, self.tiles.len());
        // SAFETY: parameters as the kernel's head says; lists and rows were checked against the tensors, and buffers that are
        // freed wait for the launch.
        unsafe { self.batch.launch(stream, (kernel, blocks), &mut arguments) }?;
        if self.merges.is_empty() {
            return Ok(());
        }
        let mut parameters = MergeParameters {
            tasks,
            tiles: self.merges.slice().place().0,
            tile_count: self.merges.len() as i32,
            heads: heads.query as i32,
            dim: heads.dim as i32,
            part_o,
            part_lse,
            o,
            lse,
        };
        let mut arguments = [(&raw mut parameters).cast::<c_void>()];
        // Eight warps a block, a row a warp: some blocks a processor keep memory busy.
        let blocks = self.shape.blocks(self.gpu.processors() * 4, self.merges.len() * 16);
        // SAFETY: parameters as the kernel's head says; lists and rows were checked against the tensors, and buffers that are
        // freed wait for the launch.
        unsafe {
            self.batch.launch(stream, (self.gpu.kernel("cadre_merge"), blocks), &mut arguments)
        }
    }

    /// Makes the list that [`Self::sink`] needs. A recorded run cannot allocate, so the caller makes it first.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn prepare_sinks(&mut self, stream: &Stream) -> Result<(), Error> {
        if self.sink_tiles.is_none() {
            let tiles = lists::finish(&self.table);
            let (tiles, made) =
                self.scratch.upload(stream, |upload| upload.list(&tiles, "the list of sinks"))?;
            (self.sink_tiles, self.made) = (Some(tiles), made);
        }
        Ok(())
    }

    /// Applies sinks to what a run of this plan has written to O and LSE, behind it on `stream`: one number a query head, which
    /// takes part in the sums of the softmax as a key without a value would; −∞ is none. Backward then takes this LSE, and Δ
    /// of this O; the gradient of the sinks is [`crate::sink_gradient`].
    ///
    /// The first call makes a list on the GPU, unless [`Self::prepare_sinks`] has. Without sinks nothing of this is there.
    ///
    /// # Errors
    ///
    /// A tensor that does not fit, a stream of another GPU, or the driver's.
    pub fn sink(
        &mut self,
        stream: &Stream,
        sinks: Slice<'_, f32>,
        (out, lse): (SliceMut<'_, bf16>, SliceMut<'_, f32>),
    ) -> Result<(), Error> {
        let heads = self.shape.heads;
        let queries = self.q_rows * heads.query;
        same_gpu("the plan", self.gpu.device(), stream.gpu().device())?;
        tensor("sinks", sinks.place(), heads.query, 4)?;
        tensor("out", out.place(), queries * heads.dim, 16)?;
        tensor("lse", lse.place(), queries, 4)?;
        if self.tiles.is_empty() {
            return Ok(());
        }
        self.prepare_sinks(stream)?;
        let tiles = self.sink_tiles.as_ref().expect("it was just made");
        let mut parameters = SinkParameters {
            tasks: self.tasks.slice().place().0,
            tiles: tiles.slice().place().0,
            tile_count: tiles.len() as i32,
            heads: heads.query as i32,
            dim: heads.dim as i32,
            sinks: sinks.place().0,
            o: out.place().0,
            lse: lse.place().0,
        };
        let mut arguments = [(&raw mut parameters).cast::<c_void>()];
        let blocks = self.shape.blocks(self.gpu.processors() * 4, tiles.len() * 8 * heads.query);
        // Behind the run, whatever the streams: it reads and writes what that wrote.
        self.scratch.run(stream, |held| {
            held.behind(&self.made)?;
            // SAFETY: parameters as the kernel's head says; lists and rows were checked against the tensors, and buffers that are
            // freed wait for the launch.
            unsafe {
                self.batch.launch(stream, (self.gpu.kernel("cadre_sink"), blocks), &mut arguments)
            }
        })
    }
}
