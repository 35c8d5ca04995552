//! Backward attention: dQ, dK and dV from Q, K, V, dO, LSE and Δ.
//!
//! In: checked bundles. Out: their gradients. A unit of work is one or two key tiles of a bundle under
//! one KV head; it goes over all query rows of the bundle that reach them, in row order.
//!
//! Invariant: dK and dV of a key are summed over blocks of query rows whose edges are counted from the
//! document's start, dQ of a row over key tiles, ascending: units take turns at a block of dQ. A pair
//! that is masked, or whose row or key is not held, adds exactly 0.
//!
//! Numerics: P comes from the same sums as in the forward pass. Gradients are within 2e-5 of f64,
//! relative to their largest. Scratch: `4·(11·TILE·dim + 2·BLOCK·TILE + 3·BLOCK·dim)` bytes a thread.
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
/// Tiles that share the staging of the query rows.
const TOGETHER: usize = 2;

/// Runs a launch.
pub(super) fn run(engine: Engine, bundles: &mut [Backward<'_>], threads: Threads) {
    let bundles: Vec<Bundle<'_>> = bundles.iter_mut().map(Bundle::new).collect();
    let mut queues: Vec<(&Bundle<'_>, usize)> =
        bundles.iter().flat_map(|it| (0..it.heads.kv).map(move |head| (it, head))).collect();
    queues.sort_by_key(|(bundle, _)| std::cmp::Reverse(bundle.cost));
    // Tiles of a queue stay ascending: a unit waits only for units that were taken before it.
    let units: Vec<(&Bundle<'_>, usize, Range<u32>)> = queues
        .into_iter()
        .flat_map(|(bundle, head)| {
            let starts = bundle.tiles.clone().step_by(TOGETHER);
            let unit = |start: u32| start..bundle.tiles.end.min(start + TOGETHER as u32);
            starts.map(move |start| (bundle, head, unit(start)))
        })
        .collect();
    let failed = AtomicBool::new(false);
    threads.run(units.len(), |index| {
        let guard = Guard(&failed);
        let (bundle, head, tiles) = &units[index];
        SCRATCH.with_borrow_mut(|scratch| bundle.tiles(engine, scratch, *head, tiles, &failed));
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
    tiles: [Tile; TOGETHER],
    /// Rows to be transposed, `[KEYS, width]`.
    rows: Vec<f32>,
    block: Staged,
}

/// A key tile and its gradients.
#[derive(Default)]
struct Tile {
    /// Positions of its held keys.
    keys: Range<u32>,
    /// `[KEYS, width]`.
    k: Vec<f32>,
    /// Scaled K and V, `[dim, KEYS]`.
    k_columns: Vec<f32>,
    v_columns: Vec<f32>,
    /// `[KEYS, width]`.
    dk: Vec<f32>,
    dv: Vec<f32>,
}

/// A block of query rows.
#[derive(Default)]
struct Staged {
    pairs: usize,
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
            for part in &mut *parts {
                part.dq.fill(0.0);
            }
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

    /// Computes `tiles`, counted from the document's start, under KV head `head`.
    fn tiles(
        &self,
        engine: Engine,
        scratch: &mut Scratch,
        head: usize,
        tiles: &Range<u32>,
        failed: &AtomicBool,
    ) {
        let Heads { kv, dim, .. } = self.heads;
        let width = round_up(dim, WIDTH);
        let Scratch { tiles: staged, rows, block: rows_of_block } = scratch;
        let staged = &mut staged[..tiles.len()];
        for (tile, staged) in tiles.clone().zip(&mut *staged) {
            self.open(staged, rows, head, tile);
        }
        let keys = staged[0].keys.start..staged[tiles.len() - 1].keys.end;
        for block in &self.blocks {
            if block.keys.start >= keys.end || block.keys.end <= keys.start {
                continue;
            }
            self.stage(rows_of_block, head, block);
            let mut turn = None;
            for tile in &mut *staged {
                if block.keys.start >= tile.keys.end || block.keys.end <= tile.keys.start {
                    continue;
                }
                let columns = self.scores(engine, rows_of_block, block, tile);
                turn.get_or_insert_with(|| {
                    let turn =
                        Turn::wait(&block.turn[head], tiles.start.max(block.first_tile), failed);
                    self.dq_rows(head, block, |pair, dq| {
                        rows_of_block.dq[pair * width..][..dim].copy_from_slice(dq);
                    });
                    turn
                });
                let Staged { pairs, dq, dp, .. } = &mut *rows_of_block;
                let shape = Shape { m: round_up(*pairs, 8), n: width, k: columns.len() };
                let (left, right) = (&dp[..], &tile.k[columns.start * width..]);
                let left = (left, Left::RowMajor(KEYS));
                (engine.product)(shape, (dq, width), left, (right, width), Into::Add);
            }
            if let Some(turn) = turn {
                self.dq_rows(head, block, |pair, dq| {
                    dq.copy_from_slice(&rows_of_block.dq[pair * width..][..dim]);
                });
                turn.pass(tiles.end);
            }
        }
        for tile in staged {
            for key in 0..tile.keys.len() {
                let row = (tile.keys.start - self.keys.start) as usize + key;
                let at = (row * kv + head) * dim;
                // SAFETY: a row of dK and dV belongs to one head and key tile of one bundle: this unit.
                unsafe {
                    self.dk.piece(at, dim).copy_from_slice(&tile.dk[key * width..][..dim]);
                    self.dv.piece(at, dim).copy_from_slice(&tile.dv[key * width..][..dim]);
                }
            }
        }
    }

    /// Stages K and V of a tile and clears its gradients.
    fn open(&self, staged: &mut Tile, rows: &mut Vec<f32>, head: usize, tile: u32) {
        let Heads { kv, dim, .. } = self.heads;
        let width = round_up(dim, WIDTH);
        let first = self.keys.start / TILE;
        let keys = tile_keys(&self.keys, &(tile - first..tile - first + 1));
        let offset = ((keys.start - self.keys.start) as usize * kv + head) * dim;
        let source = |rows| Source { rows, offset, distance: kv * dim, dim };
        let Tile { keys: of_tile, k, k_columns, v_columns, dk, dv } = staged;
        for buffer in [&mut *rows, &mut *k] {
            buffer.resize(KEYS * width, 0.0);
        }
        for buffer in [&mut *k_columns, v_columns] {
            buffer.resize(dim * KEYS, 0.0);
        }
        source(self.k).copy(keys.len(), self.scale * LOG2_E, rows, width);
        transpose(rows, width, dim, k_columns, KEYS);
        source(self.v).copy(keys.len(), 1.0, rows, width);
        transpose(rows, width, dim, v_columns, KEYS);
        source(self.k).copy(keys.len(), 1.0, k, width);
        for buffer in [dk, dv] {
            buffer.clear();
            buffer.resize(KEYS * width, 0.0);
        }
        *of_tile = keys;
    }

    /// Leaves dS of the block in `staged.dp`, adds to dK and dV of the tile; returns its columns.
    fn scores(
        &self,
        engine: Engine,
        staged: &mut Staged,
        block: &RowBlock,
        tile: &mut Tile,
    ) -> Range<usize> {
        let dim = self.heads.dim;
        let width = round_up(dim, WIDTH);
        // Columns of the tile that any row keeps, whole vectors.
        let keys = &tile.keys;
        let start = (block.keys.start.max(keys.start) - keys.start) as usize / WIDTH * WIDTH;
        let end = (block.keys.end.min(keys.end) - keys.start) as usize;
        let columns = round_up(end - start, WIDTH);
        let all = self.bounds(staged, block, keys.start + start as u32, columns);
        let all = all && start + columns <= keys.len();

        let Staged { pairs, q, dout, scores, dp, .. } = staged;
        let Engine { product, gradient, .. } = engine;
        let shape = Shape { m: round_up(*pairs, 8), n: columns, k: dim };
        let (by_row, from) = (Left::RowMajor(width), start..);
        let right = (&tile.k_columns[from.clone()], KEYS);
        product(shape, (scores, KEYS), (q, by_row), right, Into::Replace);
        let right = (&tile.v_columns[from], KEYS);
        product(shape, (dp, KEYS), (dout, by_row), right, Into::Replace);
        let kept = (!all).then_some(Kept { low: &staged.low, high: &staged.high });
        let sums = RowSums { lse: &staged.lse, delta: &staged.delta, scale: self.scale };
        gradient((scores, dp), KEYS, (*pairs, columns), kept, sums);

        let shape = Shape { m: columns, n: width, k: *pairs };
        let (by_column, from) = (Left::ColumnMajor(KEYS), start * width..);
        let to = (&mut tile.dv[from.clone()], width);
        product(shape, to, (scores, by_column), (dout, width), Into::Add);
        let to = (&mut tile.dk[from], width);
        product(shape, to, (dp, by_column), (q, width), Into::Add);
        start..start + columns
    }

    /// Stages Q, dO, LSE and Δ of a block.
    fn stage(&self, scratch: &mut Staged, head: usize, block: &RowBlock) {
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
        scratch.pairs = pairs;
    }

    /// Sets the bounds of each pair in `columns` columns from key `start`; true where all are kept.
    fn bounds(&self, scratch: &mut Staged, block: &RowBlock, start: u32, columns: usize) -> bool {
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

/// The right to add to a block of dQ.
struct Turn<'a>(&'a AtomicU32);

impl<'a> Turn<'a> {
    /// Waits until the tiles before `tile` have added theirs; their units run on other threads.
    fn wait(turn: &'a AtomicU32, tile: u32, failed: &AtomicBool) -> Self {
        let mut spins = 0_u32;
        while turn.load(Ordering::Acquire) != tile {
            assert!(!failed.load(Ordering::Relaxed), "another thread of the launch has panicked");
            spins += 1;
            if spins < 1000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        Self(turn)
    }

    /// Hands the turn to the unit that starts at tile `next`.
    fn pass(self, next: u32) {
        self.0.store(next, Ordering::Release);
    }
}

fn grow(buffer: &mut Vec<f32>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
}
