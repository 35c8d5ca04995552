//! Forward attention with an online softmax over key tiles.
//!
//! In: checked tasks. Out: O and LSE. A unit of work is some rows of a task under one KV head. Its
//! rows, times the query heads that share the KV head, are the lanes of every vector, so scores
//! are held as `[keys, lanes]` and no operation mixes lanes.
//!
//! Invariant: per row, keys are taken in tiles of [`KEYS`] counted from the document's start. A key
//! that is masked or not held adds exactly 0. That is all a row's bits depend on.
//!
//! Numerics: scores in units of log 2, sums in f32; O and LSE are within 1e-5 of f64 for scores of usual
//! size. Scratch: `8·KEYS·dim + WAVE·(12·dim + 16)` bytes a thread, 0.4 MiB for dim 64.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::f32::consts::LN_2;
use std::ops::Range;

use super::block::{Into, Left, PANEL, Panels, Shape, Target, WIDTH, panelled};
use super::engine::Engine;
use super::shared::Shared;
use super::softmax::{Kept, Running, Scale};
use super::stage::{Source, round_up};
use crate::{Forward, Heads, Mask, Rows, RowsMut, Threads, math, wire};

/// Keys of a softmax step.
const KEYS: u32 = 64;
/// Lanes of a product.
const LANES: usize = PANEL;
/// Maximum lanes that use one staged key tile.
const WAVE: usize = 16 * LANES;
/// Units per thread below which a launch is cut more finely.
const UNITS: usize = 8;
/// Keys after which the running softmax is closed and merged; a multiple of [`KEYS`].
pub(super) const SEGMENT: u32 = 1 << 16;

/// Runs a launch.
pub(super) fn run(engine: Engine, tasks: &mut [Forward<'_>], threads: Threads, segment: u32) {
    let tasks: Vec<Task<'_>> = tasks.iter_mut().map(Task::new).collect();
    // A unit has the rows of a whole wave, or fewer where threads would find too few units.
    let mut wave = WAVE;
    let mut units = units_of(&tasks, wave);
    while wave > LANES && units.len() < UNITS * threads.0.get() {
        wave /= 2;
        units = units_of(&tasks, wave);
    }
    units.sort_by_key(|unit| std::cmp::Reverse(unit.cost));
    threads.run(units.len(), |index| {
        let Unit { task, head, rows, .. } = &units[index];
        SCRATCH.with_borrow_mut(|scratch| task.run(engine, scratch, *head, rows, segment));
    });
}

/// Rows of a task under one KV head.
struct Unit<'a, 'b> {
    task: &'a Task<'b>,
    head: usize,
    rows: Range<u32>,
    /// Maximum pairs of query and key.
    cost: usize,
}

/// Cuts tasks into units of at most `lanes` lanes, or one row.
fn units_of<'a, 'b>(tasks: &'a [Task<'b>], lanes: usize) -> Vec<Unit<'a, 'b>> {
    let mut units = Vec::new();
    for task in tasks {
        let step = (lanes / (task.heads.query / task.heads.kv)).max(1) as u32;
        for start in task.rows.clone().step_by(step as usize) {
            let rows = start..task.rows.end.min(start + step);
            let cost = task.mask.keys_of(&rows, task.document_rows).len() * rows.len();
            let unit = |head| Unit { task, head, rows: rows.clone(), cost };
            units.extend((0..task.heads.kv).map(unit));
        }
    }
    units
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Buffers of a thread, kept from launch to launch.
#[derive(Default)]
struct Scratch {
    k: Vec<f32>,
    v: Vec<f32>,
    rows: Vec<f32>,
    scores: Vec<f32>,
    blocks: Vec<Block>,
}

/// Up to [`LANES`] lanes and their state.
struct Block {
    /// First lane, counted over the rows and heads of the unit.
    first: usize,
    lanes: usize,
    /// Keys that each lane attends to; `keys` is their union.
    kept: Vec<Range<u32>>,
    keys: Range<u32>,
    /// `[dim, LANES]`.
    q: Vec<f32>,
    /// `[dim, LANES]`, not yet divided by the sum.
    out: Vec<f32>,
    running: Running,
    /// Closed segments, merged.
    merged: Option<Merged>,
}

/// O and LSE of the segments so far.
struct Merged {
    /// `[dim, LANES]`.
    out: Vec<f32>,
    lse: Vec<f32>,
}

enum Out<'a> {
    F32(Shared<'a, f32>),
    Bf16(Shared<'a, half::bf16>),
}

struct Task<'a> {
    heads: Heads,
    mask: Mask,
    scale: Scale,
    document_rows: u32,
    rows: Range<u32>,
    keys: Range<u32>,
    q: Rows<'a>,
    k: Rows<'a>,
    v: Rows<'a>,
    out: Out<'a>,
    lse: Shared<'a, f32>,
}

impl<'a> Task<'a> {
    fn new(task: &'a mut Forward<'_>) -> Self {
        let Forward { heads, mask, scale, softcap, document_rows, rows, keys, q, k, v, out, lse } =
            task;
        let out = match out {
            RowsMut::F32(rows) => Out::F32(Shared::new(rows)),
            RowsMut::Bf16(rows) => Out::Bf16(Shared::new(rows)),
        };
        let (heads, mask, document_rows) = (*heads, *mask, *document_rows);
        let scale = Scale::new(*scale, *softcap);
        let (rows, keys, lse) = (rows.clone(), keys.clone(), Shared::new(lse));
        Self { heads, mask, scale, document_rows, rows, keys, q: *q, k: *k, v: *v, out, lse }
    }

    /// Computes the rows `rows` under KV head `head`.
    fn run(
        &self,
        engine: Engine,
        scratch: &mut Scratch,
        head: usize,
        rows: &Range<u32>,
        segment: u32,
    ) {
        let lanes = rows.len() * self.heads.query / self.heads.kv;
        for first in (0..lanes).step_by(WAVE) {
            let end = lanes.min(first + WAVE);
            let mut blocks = std::mem::take(&mut scratch.blocks);
            let count = (end - first).div_ceil(LANES);
            blocks.resize_with(blocks.len().max(count), Block::empty);
            for (index, block) in blocks[..count].iter_mut().enumerate() {
                let first = first + index * LANES;
                self.open(engine, block, scratch, (head, rows), first..end.min(first + LANES));
            }
            self.sweep(engine, scratch, head, &mut blocks[..count], segment);
            for block in &mut blocks[..count] {
                block.close();
                self.write(engine, block, &mut scratch.rows, head, rows);
            }
            scratch.blocks = blocks;
        }
    }

    /// Stages Q of the lanes and starts their softmax.
    fn open(
        &self,
        engine: Engine,
        block: &mut Block,
        scratch: &mut Scratch,
        (head, rows): (usize, &Range<u32>),
        lanes: Range<usize>,
    ) {
        let Heads { query, kv, dim } = self.heads;
        let group = query / kv;
        block.reset(lanes.start, lanes.len(), dim);
        scratch.rows.resize(LANES * dim, 0.0);
        let staged = &mut scratch.rows[..lanes.len() * dim];
        for (lane, to) in lanes.clone().zip(staged.chunks_exact_mut(dim)) {
            let offset = self.row(rows, head, lane) * dim;
            Source { rows: self.q, offset, distance: 0, dim }.copy_rows(1, 1.0, to);
            let kept = self.mask.keys(rows.start + (lane / group) as u32, self.document_rows);
            let (start, end) = (kept.start.max(self.keys.start), kept.end.min(self.keys.end));
            block.kept.push(start..end.max(start));
        }
        (engine.transpose)(staged, dim, (lanes.len(), dim), &mut block.q, LANES);
        let start = block.kept.iter().map(|it| it.start).min().unwrap_or(0);
        block.keys = start..block.kept.iter().map(|it| it.end).max().unwrap_or(0).max(start);
    }

    /// Runs the blocks over all keys that they keep, tile by tile.
    fn sweep(
        &self,
        engine: Engine,
        scratch: &mut Scratch,
        head: usize,
        blocks: &mut [Block],
        segment: u32,
    ) {
        let Heads { kv, dim, .. } = self.heads;
        let Scratch { k, v, scores, .. } = scratch;
        k.resize(panelled(KEYS as usize, dim), 0.0);
        v.resize(panelled(KEYS as usize, dim), 0.0);
        scores.resize(KEYS as usize * LANES, 0.0);
        let start = blocks.iter().map(|it| it.keys.start).min().unwrap_or(0);
        let end = blocks.iter().map(|it| it.keys.end).max().unwrap_or(0);
        for tile in start / KEYS..end.div_ceil(KEYS) {
            let keys = start.max(tile * KEYS)..end.min((tile + 1) * KEYS);
            let offset = ((keys.start - self.keys.start) as usize * kv + head) * dim;
            let source = |rows| Source { rows, offset, distance: kv * dim, dim };
            let held = (keys.len(), round_up(keys.len(), 4));
            source(self.k).copy(engine, held, self.scale.staged, k, KEYS as usize);
            source(self.v).copy(engine, held, 1.0, v, KEYS as usize);
            for block in &mut *blocks {
                if (tile * KEYS).is_multiple_of(segment) && tile * KEYS > start {
                    block.close();
                }
                block.step(engine, &keys, (k, v), scores, (dim, self.scale.cap));
            }
        }
    }

    /// Writes O and LSE of a closed block.
    fn write(
        &self,
        engine: Engine,
        block: &Block,
        row: &mut [f32],
        head: usize,
        rows: &Range<u32>,
    ) {
        let Heads { dim, .. } = self.heads;
        let Some(Merged { out, lse }) = &block.merged else {
            unreachable!("a closed block has merged its last segment")
        };
        let staged = &mut row[..LANES * dim];
        (engine.transpose)(out, LANES, (dim, LANES), staged, dim);
        for lane in 0..block.lanes {
            let at = self.row(rows, head, block.first + lane);
            let row = &staged[lane * dim..][..dim];
            // SAFETY: a row of O and of LSE belongs to one task, head and query tile: this unit.
            unsafe {
                match &self.out {
                    Out::F32(out) => out.piece(at * dim, dim).copy_from_slice(row),
                    Out::Bf16(out) => wire::to_bf16(out.piece(at * dim, dim), row),
                }
                self.lse.piece(at, 1)[0] = lse[lane];
            }
        }
    }

    /// Row of lane `lane` in Q, O and LSE, counted over rows and heads.
    fn row(&self, rows: &Range<u32>, head: usize, lane: usize) -> usize {
        let Heads { query, kv, .. } = self.heads;
        let group = query / kv;
        ((rows.start - self.rows.start) as usize + lane / group) * query
            + head * group
            + lane % group
    }
}

impl Block {
    fn empty() -> Self {
        let running =
            Running { largest: Vec::new(), sum: Vec::new(), correction: vec![0.0; LANES] };
        let (kept, q, out) = (Vec::new(), Vec::new(), Vec::new());
        Self { first: 0, lanes: 0, kept, keys: 0..0, q, out, running, merged: None }
    }

    fn reset(&mut self, first: usize, lanes: usize, dim: usize) {
        (self.first, self.lanes, self.merged) = (first, lanes, None);
        self.kept.clear();
        self.q.clear();
        self.q.resize(dim * LANES, 0.0);
        self.restart();
        self.out.clear();
        self.out.resize(dim * LANES, 0.0);
    }

    fn restart(&mut self) {
        self.running.largest.clear();
        self.running.largest.resize(LANES, f32::NEG_INFINITY);
        self.running.sum.clear();
        self.running.sum.resize(LANES, 0.0);
    }

    /// One step of the online softmax: the staged keys `keys`.
    fn step(
        &mut self,
        engine: Engine,
        keys: &Range<u32>,
        (k, v): (&[f32], &[f32]),
        scores: &mut [f32],
        (dim, cap): (usize, Option<f32>),
    ) {
        let count = self.keys.end.min(keys.end).saturating_sub(keys.start) as usize;
        if count == 0 || self.keys.start >= keys.end {
            return;
        }
        let (all_keys, lanes) = (KEYS as usize, round_up(self.lanes, WIDTH));
        let shape = Shape { m: round_up(count, 4), n: lanes, k: dim };
        let left = Left::Rows(Panels::new(k, all_keys));
        let to = Target::panels(scores, all_keys);
        (engine.product)(shape, to, left, Panels::new(&self.q, dim), Into::Replace);
        if let Some(cap) = cap {
            (engine.cap)(scores, LANES, (count, lanes), cap);
        }

        let end = keys.start + count as u32;
        let (mut low, mut high) = ([0.0; LANES], [0.0; LANES]);
        let mut all = true;
        for (lane, kept) in self.kept.iter().enumerate() {
            all &= kept.start <= keys.start && kept.end >= end;
            low[lane] = kept.start.saturating_sub(keys.start).min(KEYS) as f32;
            high[lane] = kept.end.saturating_sub(keys.start).min(KEYS) as f32;
        }
        let kept = (!all).then_some(Kept { low: &low, high: &high });
        (engine.online)(scores, LANES, (count, lanes), kept, &mut self.running);

        let shape = Shape { m: dim, n: lanes, k: count };
        let left = Left::Columns(Panels::new(v, all_keys));
        let into = Into::Scale(&self.running.correction);
        let to = Target::panels(&mut self.out, dim);
        (engine.product)(shape, to, left, Panels::new(scores, all_keys), into);
    }

    /// Divides by the sums and merges with the segments before, in key order.
    fn close(&mut self) {
        let Running { largest, sum, .. } = &self.running;
        let mut lse = vec![f32::NEG_INFINITY; LANES];
        let mut factor = [0.0; LANES];
        for lane in 0..self.lanes {
            // Without keys the sum is 0 and the output stays 0; NaN goes through.
            if sum[lane] != 0.0 {
                lse[lane] = largest[lane] * LN_2 + math::ln(sum[lane]) + 0.0;
                factor[lane] = 1.0 / sum[lane];
            }
        }
        let mut before = [0.0; LANES];
        if let Some(merged) = &mut self.merged {
            for lane in 0..self.lanes {
                let (old, new) = (merged.lse[lane], lse[lane]);
                let base = if old > new { old } else { new };
                if base == f32::NEG_INFINITY {
                    continue;
                }
                let sum = math::exp(old - base) + math::exp(new - base);
                before[lane] = math::exp(old - base) / sum;
                factor[lane] *= math::exp(new - base) / sum;
                lse[lane] = base + math::ln(sum);
            }
        }
        let merged = self
            .merged
            .get_or_insert_with(|| Merged { out: vec![0.0; self.out.len()], lse: Vec::new() });
        let rows = merged.out.chunks_exact_mut(LANES).zip(self.out.chunks_exact_mut(LANES));
        for (merged, out) in rows {
            for lane in 0..LANES {
                // Adding +0 turns −0, which underflow in a masked sum may leave, into +0.
                merged[lane] = merged[lane] * before[lane] + out[lane] * factor[lane] + 0.0;
            }
            out.fill(0.0);
        }
        merged.lse = lse;
        self.restart();
    }
}
