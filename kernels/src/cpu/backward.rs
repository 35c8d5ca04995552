//! Backward attention: dQ, dK and dV from Q, K, V, dO, LSE and Δ.
//!
//! In: checked bundles. Out: their gradients. A unit of work is a key tile of a bundle under one KV
//! head; it goes over all query rows of the bundle that reach the tile, in row order.
//!
//! Invariant: dK and dV of a key are summed over blocks of query rows whose edges are counted from the
//! document's start, dQ of a row over key tiles, ascending: units take turns at a block of dQ. A pair
//! that is masked, or whose row or key is not held, adds exactly 0.
//!
//! Numerics: P comes from the same sums as in the forward pass. Gradients are within 2e-5 of f64,
//! relative to their largest. Scratch: `4·(7·TILE·dim + 2·BLOCK·TILE + 3·BLOCK·dim)` bytes a thread.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::f32::consts::LOG2_E;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::block::{Into, Left, Shape, WIDTH};
use super::engine::Engine;
use super::shared::Shared;
use super::softmax::{Kept, RowSums};
use super::stage::{Source, round_up, transpose};
use crate::attention::tile_keys;
use crate::{Backward, BackwardRows, Heads, Mask, Rows, TILE, Threads};

/// Pairs of query row and head that go through the products together.
const BLOCK: usize = 64;
/// Keys of a tile.
const KEYS: usize = TILE as usize;

/// Runs a launch.
pub(super) fn run(engine: Engine, bundles: &mut [Backward<'_>], threads: Threads) {
    let bundles: Vec<Bundle<'_>> = bundles.iter_mut().map(Bundle::new).collect();
    let mut queues: Vec<(&Bundle<'_>, usize)> =
        bundles.iter().flat_map(|it| (0..it.heads.kv).map(move |head| (it, head))).collect();
    queues.sort_by_key(|(bundle, _)| std::cmp::Reverse(bundle.cost));
    // Tiles of a queue stay ascending: a unit waits only for units that were taken before it.
    let units: Vec<(&Bundle<'_>, usize, u32)> = queues
        .into_iter()
        .flat_map(|(bundle, head)| bundle.tiles.clone().map(move |tile| (bundle, head, tile)))
        .collect();
    let failed = AtomicBool::new(false);
    threads.run(units.len(), |index| {
        let guard = Guard(&failed);
        let (bundle, head, tile) = units[index];
        SCRATCH.with_borrow_mut(|scratch| bundle.tile(engine, scratch, head, tile, &failed));
        std::mem::forget(guard);
    });
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Tells waiting units that one has panicked.
struct Guard<'a>(&'a AtomicBool);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Buffers of a thread, kept from launch to launch.
#[derive(Default)]
struct Scratch {
    /// K and V of the tile, `[KEYS, width]`.
    k: Vec<f32>,
    v: Vec<f32>,
    /// Scaled K and V of the tile, `[dim, KEYS]`.
    k_columns: Vec<f32>,
    v_columns: Vec<f32>,
    /// `[KEYS, width]`.
    dk: Vec<f32>,
    dv: Vec<f32>,
    /// `[pairs, width]`.
    q: Vec<f32>,
    dout: Vec<f32>,
    dq: Vec<f32>,
    /// `[pairs, KEYS]`.
    scores: Vec<f32>,
    dp: Vec<f32>,
    lse: Vec<f32>,
    delta: Vec<f32>,
    low: Vec<f32>,
    high: Vec<f32>,
}

struct Bundle<'a> {
    heads: Heads,
    mask: Mask,
    scale: f32,
    document_rows: u32,
    keys: Range<u32>,
    k: Rows<'a>,
    v: Rows<'a>,
    dk: Shared<'a, f32>,
    dv: Shared<'a, f32>,
    parts: Vec<Part<'a>>,
    blocks: Vec<RowBlock>,
    /// Tiles of this launch, counted from the document's start.
    tiles: Range<u32>,
    cost: u64,
}

struct Part<'a> {
    rows: Range<u32>,
    q: Rows<'a>,
    dout: Rows<'a>,
    lse: &'a [f32],
    delta: &'a [f32],
    dq: Shared<'a, f32>,
}

/// Query rows that go through the products together: those that the bundle has of so many rows of the
/// document.
struct RowBlock {
    /// Part and rows, ascending.
    pieces: Vec<(usize, Range<u32>)>,
    /// Held keys that any of the rows keeps.
    keys: Range<u32>,
    /// First tile of this launch that the rows reach.
    first_tile: u32,
    /// Of each KV head: the tile whose turn it is at dQ.
    turn: Vec<AtomicU32>,
}

impl<'a> Bundle<'a> {
    fn new(bundle: &'a mut Backward<'_>) -> Self {
        let cost = crate::backward_cost(bundle);
        let Backward { heads, mask, scale, document_rows, keys, k, v, parts, dk, dv, key_tiles } =
            bundle;
        let first = keys.start / TILE;
        if key_tiles.start == 0 {
            parts.iter_mut().for_each(|part| part.dq.fill(0.0));
        }
        let parts = parts
            .iter_mut()
            .map(|BackwardRows { rows, q, dout, lse, delta, dq }| {
                let dq = Shared::new(dq);
                Part { rows: rows.clone(), q: *q, dout: *dout, lse, delta, dq }
            })
            .collect();
        let mut bundle = Bundle {
            heads: *heads,
            mask: *mask,
            scale: *scale,
            document_rows: *document_rows,
            keys: keys.clone(),
            k: *k,
            v: *v,
            dk: Shared::new(dk),
            dv: Shared::new(dv),
            parts,
            blocks: Vec::new(),
            tiles: first + key_tiles.start..first + key_tiles.end,
            cost,
        };
        bundle.blocks = bundle.row_blocks();
        bundle
    }

    /// Cuts the query rows at edges counted from the document's start.
    fn row_blocks(&self) -> Vec<RowBlock> {
        let step = (BLOCK / (self.heads.query / self.heads.kv)).max(1) as u32;
        let mut blocks: Vec<(u32, RowBlock)> = Vec::new();
        for (index, part) in self.parts.iter().enumerate() {
            let mut start = part.rows.start;
            while start < part.rows.end {
                let number = start / step;
                let rows = start..part.rows.end.min((number + 1) * step);
                start = rows.end;
                let kept = self.mask.keys_of(&rows, self.document_rows);
                let keys = kept.start.max(self.keys.start)..kept.end.min(self.keys.end);
                match blocks.last_mut() {
                    Some((last, block)) if *last == number => {
                        block.keys.end = block.keys.end.max(keys.end);
                        block.pieces.push((index, rows));
                    }
                    _ => {
                        let turn = Vec::new();
                        let pieces = vec![(index, rows)];
                        blocks.push((number, RowBlock { pieces, keys, first_tile: 0, turn }));
                    }
                }
            }
        }
        for (_, block) in &mut blocks {
            block.first_tile = (block.keys.start / TILE).max(self.tiles.start);
            block.turn = (0..self.heads.kv).map(|_| AtomicU32::new(block.first_tile)).collect();
        }
        blocks.into_iter().map(|(_, block)| block).collect()
    }

    /// Computes tile `tile`, counted from the document's start, under KV head `head`.
    fn tile(
        &self,
        engine: Engine,
        scratch: &mut Scratch,
        head: usize,
        tile: u32,
        failed: &AtomicBool,
    ) {
        let Heads { kv, dim, .. } = self.heads;
        let keys = tile_keys(&self.keys, &{
            let first = self.keys.start / TILE;
            tile - first..tile - first + 1
        });
        let width = round_up(dim, WIDTH);
        let offset = ((keys.start - self.keys.start) as usize * kv + head) * dim;
        let source = |rows| Source { rows, offset, distance: kv * dim, dim };
        scratch.size(width, dim);
        let Scratch { k, v, k_columns, v_columns, .. } = scratch;
        source(self.k).copy(keys.len(), self.scale * LOG2_E, v, width);
        transpose(v, width, dim, k_columns, KEYS);
        source(self.v).copy(keys.len(), 1.0, v, width);
        transpose(v, width, dim, v_columns, KEYS);
        source(self.k).copy(keys.len(), 1.0, k, width);
        scratch.dk.fill(0.0);
        scratch.dv.fill(0.0);
        for block in &self.blocks {
            if block.keys.start < keys.end && block.keys.end > keys.start {
                self.block(engine, scratch, head, (tile, &keys), block, failed);
            }
        }
        for key in 0..keys.len() {
            let at = offset + key * kv * dim;
            // SAFETY: a row of dK and dV belongs to one head and key tile of one bundle: this unit.
            unsafe {
                self.dk.piece(at, dim).copy_from_slice(&scratch.dk[key * width..][..dim]);
                self.dv.piece(at, dim).copy_from_slice(&scratch.dv[key * width..][..dim]);
            }
        }
    }

    /// Adds what the rows of `block` give to the tile, and the tile to their dQ.
    fn block(
        &self,
        engine: Engine,
        scratch: &mut Scratch,
        head: usize,
        (tile, keys): (u32, &Range<u32>),
        block: &RowBlock,
        failed: &AtomicBool,
    ) {
        let dim = self.heads.dim;
        let width = round_up(dim, WIDTH);
        // Columns of the tile that any row keeps, whole vectors.
        let start = (block.keys.start.max(keys.start) - keys.start) as usize / WIDTH * WIDTH;
        let end = (block.keys.end.min(keys.end) - keys.start) as usize;
        let columns = round_up(end - start, WIDTH);
        let pairs = self.stage(scratch, head, block);
        let all = self.bounds(scratch, block, keys.start + start as u32, columns);
        let all = all && start + columns <= keys.len();

        let Scratch { k, k_columns, v_columns, dk, dv, q, dout, dq, scores, dp, .. } = scratch;
        let Engine { product, gradient, .. } = engine;
        let shape = Shape { m: round_up(pairs, 8), n: columns, k: dim };
        let by_row = Left::RowMajor(width);
        product(shape, (scores, KEYS), (q, by_row), (&k_columns[start..], KEYS), Into::Replace);
        product(shape, (dp, KEYS), (dout, by_row), (&v_columns[start..], KEYS), Into::Replace);
        let kept = (!all).then_some(Kept { low: &scratch.low, high: &scratch.high });
        let sums = RowSums { lse: &scratch.lse, delta: &scratch.delta, scale: self.scale };
        gradient((scores, dp), KEYS, (pairs, columns), kept, sums);

        let shape = Shape { m: columns, n: width, k: pairs };
        let by_column = Left::ColumnMajor(KEYS);
        let rows = start * width;
        product(shape, (&mut dv[rows..], width), (scores, by_column), (dout, width), Into::Add);
        product(shape, (&mut dk[rows..], width), (dp, by_column), (q, width), Into::Add);

        let turn = Turn::wait(&block.turn[head], tile, failed);
        self.dq_rows(head, block, |row, from| row_in(dq, row, width)[..dim].copy_from_slice(from));
        let shape = Shape { m: round_up(pairs, 8), n: width, k: columns };
        product(shape, (dq, width), (dp, Left::RowMajor(KEYS)), (&k[rows..], width), Into::Add);
        self.dq_rows(head, block, |row, to| to.copy_from_slice(&row_in(dq, row, width)[..dim]));
        turn.pass();
    }

    /// Stages Q, dO, LSE and Δ of a block; returns its pairs of row and head.
    fn stage(&self, scratch: &mut Scratch, head: usize, block: &RowBlock) -> usize {
        let Heads { query, kv, dim } = self.heads;
        let (group, width) = (query / kv, round_up(dim, WIDTH));
        let rows: usize = block.pieces.iter().map(|it| it.1.len()).sum();
        let pairs = rows * group;
        let padded = round_up(pairs, 8);
        for buffer in [&mut scratch.q, &mut scratch.dout, &mut scratch.dq] {
            grow(buffer, padded * width);
            buffer[pairs * width..padded * width].fill(0.0);
        }
        grow(&mut scratch.scores, padded * KEYS);
        grow(&mut scratch.dp, padded * KEYS);
        scratch.lse.clear();
        scratch.delta.clear();
        let mut pair = 0;
        for (part, rows) in &block.pieces {
            let part = &self.parts[*part];
            for row in rows.clone() {
                let at = (row - part.rows.start) as usize * query + head * group;
                for (to, rows) in [(&mut scratch.q, part.q), (&mut scratch.dout, part.dout)] {
                    let source = Source { rows, offset: at * dim, distance: dim, dim };
                    source.copy(group, 1.0, &mut to[pair * width..][..group * width], width);
                }
                for head in at..at + group {
                    let lse = part.lse[head];
                    let none = lse == f32::NEG_INFINITY;
                    scratch.lse.push(if none { f32::INFINITY } else { lse * LOG2_E });
                    scratch.delta.push(part.delta[head]);
                }
                pair += group;
            }
        }
        pairs
    }

    /// Sets the bounds of each pair in `columns` columns from key `start`; true where all are kept.
    fn bounds(&self, scratch: &mut Scratch, block: &RowBlock, start: u32, columns: usize) -> bool {
        let group = self.heads.query / self.heads.kv;
        let mut all = true;
        scratch.low.clear();
        scratch.high.clear();
        for row in block.pieces.iter().flat_map(|it| it.1.clone()) {
            let kept = self.mask.keys(row, self.document_rows);
            let inside =
                |key: u32| (key.min(self.keys.end).saturating_sub(start) as usize).min(columns);
            let (low, high) = (inside(kept.start), inside(kept.end));
            all &= low == 0 && high == columns;
            scratch.low.extend(std::iter::repeat_n(low as f32, group));
            scratch.high.extend(std::iter::repeat_n(high as f32, group));
        }
        all
    }

    /// Calls `with` with each pair of the block and its row of dQ, while this unit has the turn.
    fn dq_rows(&self, head: usize, block: &RowBlock, mut with: impl FnMut(usize, &mut [f32])) {
        let Heads { query, kv, dim } = self.heads;
        let group = query / kv;
        let mut pair = 0;
        for (part, rows) in &block.pieces {
            let part = &self.parts[*part];
            for row in rows.clone() {
                let at = (row - part.rows.start) as usize * query + head * group;
                for head in at..at + group {
                    // SAFETY: the rows of this block and head are written by the unit that has the turn.
                    with(pair, unsafe { part.dq.piece(head * dim, dim) });
                    pair += 1;
                }
            }
        }
    }
}

impl Scratch {
    /// Makes room for a tile.
    fn size(&mut self, width: usize, dim: usize) {
        for buffer in [&mut self.k, &mut self.v, &mut self.dk, &mut self.dv] {
            buffer.resize(KEYS * width, 0.0);
        }
        self.k_columns.resize(dim * KEYS, 0.0);
        self.v_columns.resize(dim * KEYS, 0.0);
    }
}

/// The right to add to a block of dQ.
struct Turn<'a> {
    turn: &'a AtomicU32,
    tile: u32,
}

impl<'a> Turn<'a> {
    /// Waits until the tiles before `tile` have added theirs; their units run on other threads.
    fn wait(turn: &'a AtomicU32, tile: u32, failed: &AtomicBool) -> Self {
        let mut spins = 0_u32;
        while turn.load(Ordering::Acquire) != tile {
            assert!(!failed.load(Ordering::Relaxed), "another thread of the launch has panicked");
            spins += 1;
            if spins < 1000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        Self { turn, tile }
    }

    fn pass(self) {
        self.turn.store(self.tile + 1, Ordering::Release);
    }
}

fn row_in(rows: &mut [f32], row: usize, width: usize) -> &mut [f32] {
    &mut rows[row * width..][..width]
}

fn grow(buffer: &mut Vec<f32>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
}
