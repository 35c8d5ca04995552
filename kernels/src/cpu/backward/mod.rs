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
//! relative to their largest. Scratch: `4·(11·TILE·dim + 2·BLOCK·TILE)` bytes a thread, and for the query rows
//! of the heads in flight `12·dim` bytes each, see [`SPACE`].
#![allow(unsafe_code)]

mod rows;
mod turn;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::f32::consts::LOG2_E;
use std::ops::Range;
use std::sync::atomic::AtomicBool;

use rows::{RowBlock, row_blocks};
use turn::{Guard, Turn};

use super::block::{Into, Left, PANEL, Panels, Shape, Target, WIDTH, panelled};
use super::engine::Engine;
use super::shared::Shared;
use super::softmax::{Kept, RowSums, Scale};
use super::stage::{Source, clear_rows, round_up, transpose_rows};
use crate::attention::tile_keys;
use crate::{Backward, BackwardRows, Heads, Mask, Rows, TILE, Threads};

/// Maximum pairs of query row and head in one product.
const BLOCK: usize = 64;
/// Keys of a tile.
const KEYS: usize = TILE as usize;
/// Key tiles that use one staging of the query rows.
const TOGETHER: usize = 2;

/// Maximum elements of workspace that the bundles and heads in flight have together. Each thread may always have one head in
/// flight, whatever it needs.
pub(super) const SPACE: usize = 16 << 20;

/// Runs a launch; `most_space` is [`SPACE`], less in tests.
pub(super) fn run(
    engine: Engine,
    bundles: &mut [Backward<'_>],
    threads: Threads,
    most_space: usize,
) {
    let mut bundles: Vec<Bundle<'_>> = bundles.iter_mut().map(Bundle::new).collect();
    bundles.sort_by_key(|bundle| std::cmp::Reverse(bundle.cost));
    let mut queues: VecDeque<(&Bundle<'_>, usize)> =
        bundles.iter().flat_map(|it| (0..it.heads.kv).map(move |head| (it, head))).collect();
    let mut space = SPACES.take();
    while !queues.is_empty() {
        let (mut wave, mut used) = (Vec::new(), 0);
        while let Some(&(bundle, head)) = queues.front() {
            if wave.len() >= threads.0.get() && used + bundle.space > most_space {
                break;
            }
            wave.push(Queue { bundle, head, space: used });
            used += bundle.space;
            queues.pop_front();
        }
        if space.len() < used {
            space.resize(used, 0.0);
        }
        run_wave(engine, &wave, &Shared::new(&mut space), threads);
    }
    if space.len() <= SPACE {
        SPACES.set(space);
    }
}

/// A KV head of a bundle.
#[derive(Clone, Copy)]
struct Queue<'a, 'b> {
    bundle: &'a Bundle<'b>,
    head: usize,
    /// First number of its workspace.
    space: usize,
}

/// Runs the units of some queues.
fn run_wave(engine: Engine, wave: &[Queue<'_, '_>], space: &Shared<'_, f32>, threads: Threads) {
    // Tiles of a queue stay ascending, since a unit waits only for units that were taken before it. Queues of equal work, as
    // heads of a document are, alternate, so that a unit seldom waits.
    let mut units = Vec::new();
    let alike = |a: &Queue<'_, '_>, b: &Queue<'_, '_>| {
        (&a.bundle.tiles, a.bundle.cost) == (&b.bundle.tiles, b.bundle.cost)
    };
    for queues in wave.chunk_by(alike) {
        let tiles = &queues[0].bundle.tiles;
        for start in tiles.clone().step_by(TOGETHER) {
            let end = tiles.end.min(start + TOGETHER as u32);
            units.extend(queues.iter().map(|queue| (*queue, start..end)));
        }
    }
    let failed = AtomicBool::new(false);
    threads.run(units.len(), |index| {
        let guard = Guard(&failed);
        let (queue, tiles) = &units[index];
        SCRATCH.with_borrow_mut(|scratch| {
            queue.bundle.tiles(engine, scratch, (queue.head, tiles), (space, queue.space), &failed);
        });
        std::mem::forget(guard);
    });
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
    /// Workspace of the launches that this thread starts.
    static SPACES: RefCell<Vec<f32>> = RefCell::default();
}

/// Buffers of a thread, kept from launch to launch.
#[derive(Default)]
struct Scratch {
    tiles: [Tile; TOGETHER],
    /// Rows to be transposed, `[KEYS, dim]`.
    rows: Vec<f32>,
    scores: Scores,
}

/// A key tile and its gradients, in panels.
#[derive(Default)]
struct Tile {
    /// Positions of its held keys.
    keys: Range<u32>,
    /// `[KEYS, dim]`.
    k: Vec<f32>,
    /// Scaled K and V, `[dim, KEYS]`.
    k_columns: Vec<f32>,
    v_columns: Vec<f32>,
    /// `[KEYS, dim]`.
    dk: Vec<f32>,
    dv: Vec<f32>,
}

/// Scores of a block of query rows and a tile, in panels, and what they need of each pair.
#[derive(Default)]
struct Scores {
    /// P and dS, `[pairs, KEYS]`.
    p: Vec<f32>,
    ds: Vec<f32>,
    lse: Vec<f32>,
    delta: Vec<f32>,
    low: Vec<f32>,
    high: Vec<f32>,
}

impl Scores {
    /// Makes room for a block, and loads LSE and Δ of its rows.
    fn open(&mut self, bundle: &Bundle<'_>, block: &RowBlock, head: usize) {
        let Self { p, ds, lse, delta, .. } = self;
        for buffer in [p, ds] {
            buffer.resize(panelled(block.stride, KEYS).max(buffer.len()), 0.0);
        }
        block.sums(bundle, head, lse, delta);
    }
}

struct Bundle<'a> {
    heads: Heads,
    mask: Mask,
    scale: f32,
    softcap: Option<f32>,
    document_rows: u32,
    keys: Range<u32>,
    k: Rows<'a>,
    v: Rows<'a>,
    dk: Shared<'a, f32>,
    dv: Shared<'a, f32>,
    parts: Vec<Part<'a>>,
    blocks: Vec<RowBlock>,
    /// Elements of workspace that a KV head needs.
    space: usize,
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

impl<'a> Bundle<'a> {
    fn new(bundle: &'a mut Backward<'_>) -> Self {
        let cost = crate::backward_cost(bundle);
        let Backward { heads, mask, scale, softcap, document_rows, .. } = *bundle;
        let Backward { keys, k, v, parts, dk, dv, key_tiles, .. } = bundle;
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
            heads,
            mask,
            scale,
            softcap,
            document_rows,
            keys: keys.clone(),
            k: *k,
            v: *v,
            dk: Shared::new(dk),
            dv: Shared::new(dv),
            parts,
            blocks: Vec::new(),
            space: 0,
            tiles: first + key_tiles.start..first + key_tiles.end,
            cost,
        };
        (bundle.blocks, bundle.space) = row_blocks(&bundle);
        bundle
    }

    /// Computes `tiles`, counted from the document's start, under KV head `head`.
    fn tiles(
        &self,
        engine: Engine,
        scratch: &mut Scratch,
        (head, tiles): (usize, &Range<u32>),
        (space, at): (&Shared<'_, f32>, usize),
        failed: &AtomicBool,
    ) {
        let width = round_up(self.heads.dim, WIDTH);
        let Scratch { tiles: staged, rows, scores } = scratch;
        let staged = &mut staged[..tiles.len()];
        for (tile, staged) in tiles.clone().zip(&mut *staged) {
            self.open(engine, staged, rows, (head, tile));
        }
        let keys = staged[0].keys.start..staged[tiles.len() - 1].keys.end;
        for block in &self.blocks {
            if block.keys.start >= keys.end || block.keys.end <= keys.start {
                continue;
            }
            let turn = Turn::new(&block.turn[head], failed);
            if tiles.start <= block.tiles.start {
                // SAFETY: the first unit that reaches the block has its workspace alone until it says so.
                unsafe { block.stage(engine, self, head, space, at) };
                turn.pass(block.tiles.start);
            }
            turn.wait_until_staged();
            // SAFETY: the rows are staged, and Q and dO are written no more.
            let inputs = unsafe { block.inputs(self, space, at) };
            scores.open(self, block, head);
            let (stride, mut waits) = (block.stride, true);
            for tile in &mut *staged {
                if block.keys.start >= tile.keys.end || block.keys.end <= tile.keys.start {
                    continue;
                }
                let columns = self.scores(engine, scores, block, inputs, tile);
                if std::mem::take(&mut waits) {
                    turn.wait_for(tiles.start.max(block.tiles.start));
                }
                // SAFETY: this unit has the turn.
                let dq = unsafe { block.dq(self, space, at) };
                let shape = Shape { m: stride, n: width, k: columns.len() };
                let left = Left::Rows(Panels::new(&scores.ds, stride));
                let right = Panels::new(&tile.k, KEYS).skip_rows(columns.start);
                (engine.product)(shape, Target::panels(dq, stride), left, right, Into::Add);
            }
            if tiles.end >= block.tiles.end {
                // SAFETY: this unit has the turn, since it reaches one of its tiles.
                unsafe { block.finish(self, head, space, at) };
            }
            turn.pass(tiles.end);
        }
        for tile in staged {
            self.write(tile, head);
        }
    }

    /// Stages K and V of a tile and clears its gradients. It covers only as many rows as the products read, so that a tile of a
    /// short document costs no more than its keys.
    fn open(
        &self,
        engine: Engine,
        staged: &mut Tile,
        rows: &mut Vec<f32>,
        (head, tile): (usize, u32),
    ) {
        let Heads { kv, dim, .. } = self.heads;
        let first = self.keys.start / TILE;
        let keys = tile_keys(&self.keys, &(tile - first..tile - first + 1));
        let offset = ((keys.start - self.keys.start) as usize * kv + head) * dim;
        let source = |rows| Source { rows, offset, distance: kv * dim, dim };
        let Tile { keys: of_tile, k, k_columns, v_columns, dk, dv } = staged;
        // Whole panels of columns, whole vectors of rows.
        let (columns, held) = (round_up(keys.len(), PANEL), round_up(keys.len(), WIDTH));
        rows.resize(KEYS * dim, 0.0);
        rows[keys.len() * dim..columns * dim].fill(0.0);
        let scale = Scale::new(self.scale, self.softcap);
        for (to, from, factor) in [(k_columns, self.k, scale.staged), (v_columns, self.v, 1.0)] {
            source(from).copy_rows(keys.len(), factor, rows);
            to.resize(panelled(dim, KEYS), 0.0);
            transpose_rows(engine, &rows[..columns * dim], dim, to);
        }
        k.resize(panelled(KEYS, dim), 0.0);
        source(self.k).copy(engine, (keys.len(), held), 1.0, k, KEYS);
        for buffer in [dk, dv] {
            buffer.resize(panelled(KEYS, dim), 0.0);
            clear_rows(buffer, KEYS, 0..held);
        }
        *of_tile = keys;
    }

    /// Leaves dS of the block in `scores.ds`, adds to dK and dV of the tile; returns its columns.
    fn scores(
        &self,
        engine: Engine,
        scores: &mut Scores,
        block: &RowBlock,
        (q, dout): (&[f32], &[f32]),
        tile: &mut Tile,
    ) -> Range<usize> {
        let dim = self.heads.dim;
        let width = round_up(dim, WIDTH);
        // Columns of the tile that any row keeps, from a panel on, whole vectors.
        let keys = &tile.keys;
        let start = (block.keys.start.max(keys.start) - keys.start) as usize / PANEL * PANEL;
        let end = (block.keys.end.min(keys.end) - keys.start) as usize;
        let columns = round_up(end - start, WIDTH);
        let Scores { p, ds, lse, delta, low, high } = scores;
        let all = block.bounds(self, (low, high), keys.start + start as u32, columns);
        let all = all && start + columns <= keys.len();

        let (pairs, stride) = (block.pairs, block.stride);
        let Engine { product, gradient, .. } = engine;
        let shape = Shape { m: stride, n: columns, k: dim };
        for (to, left, right) in [(&mut *p, q, &tile.k_columns), (&mut *ds, dout, &tile.v_columns)]
        {
            let left = Left::Rows(Panels::new(left, stride));
            let right = Panels::new(right, dim).skip_columns(start);
            product(shape, Target::panels(to, stride), left, right, Into::Replace);
        }
        let kept = (!all).then_some(Kept { low, high });
        let cap = Scale::new(self.scale, self.softcap).cap;
        let sums = RowSums { lse, delta, scale: self.scale, cap };
        gradient((p, ds), stride, (pairs, columns), kept, sums);

        let shape = Shape { m: columns, n: width, k: pairs };
        for (to, left, right) in [(&mut tile.dv, &*p, dout), (&mut tile.dk, &*ds, q)] {
            let to = Target::panels(&mut to[start * PANEL..], KEYS);
            let left = Left::Columns(Panels::new(left, stride));
            product(shape, to, left, Panels::new(right, stride), Into::Add);
        }
        start..start + columns
    }

    /// Writes the gradients of a finished tile.
    fn write(&self, tile: &Tile, head: usize) {
        let Heads { kv, dim, .. } = self.heads;
        let first = (tile.keys.start - self.keys.start) as usize;
        for key in 0..tile.keys.len() {
            let at = ((first + key) * kv + head) * dim;
            for (to, from) in [(&self.dk, &tile.dk), (&self.dv, &tile.dv)] {
                // SAFETY: a row of dK and dV belongs to one head and key tile of one bundle: this unit.
                let to = unsafe { to.piece(at, dim) };
                for (panel, to) in to.chunks_mut(PANEL).enumerate() {
                    to.copy_from_slice(&from[(panel * KEYS + key) * PANEL..][..to.len()]);
                }
            }
        }
    }
}
