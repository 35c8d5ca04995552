//! Matrix products of any size: packs both operands in panels and multiplies blocks that fit in cache.
//!
//! In: two views and C. Out: C. B is packed once for all threads; then a unit of work is a span of C's
//! rows, with the rows of A that it needs.
//!
//! Invariant: an element sums its products in steps of [`DEPTH`], in order, whatever the blocks.
#![allow(unsafe_code)]

use std::cell::RefCell;

use super::block::{Into, Left, PANEL, Panels, Shape, Target, WIDTH};
use super::engine::Engine;
use super::shared::Shared;
use super::stage::round_up;
use crate::Threads;
use crate::matmul::{Accumulate, Matrix};

/// Most rows of a block of A.
const ROWS: usize = 96;
/// Rows and columns of a square that is transposed at a time: both sides stay in cache.
const SIDE: usize = 16;
/// Inner numbers of a step.
const DEPTH: usize = 128;

thread_local! {
    /// A packed block of A, and a block of C for the columns that fill no whole panel.
    static SCRATCH: RefCell<(Vec<f32>, Vec<f32>)> = RefCell::default();
    /// Packed B of the product that this thread started.
    static PACKED: RefCell<Vec<f32>> = RefCell::default();
}

/// Computes C.
pub(super) fn run(
    engine: Engine,
    c: &mut [f32],
    (a, b): (Matrix<'_>, Matrix<'_>),
    accumulate: Accumulate,
    threads: Threads,
) {
    if a.columns == 0 {
        if accumulate == Accumulate::Replace {
            c.fill(0.0);
        }
        return;
    }
    let mut packed = PACKED.take();
    let width = pack_all(&mut packed, b, threads);
    // Two spans for each thread, so that a faster thread takes one that a slower thread has not begun.
    let span = round_up(a.rows.div_ceil(2 * threads.0.get()), 12).clamp(12, ROWS);
    let shared = Shared::new(c);
    threads.run(a.rows.div_ceil(span), |unit| {
        let rows = unit * span..a.rows.min((unit + 1) * span);
        // SAFETY: these rows are this unit's.
        let c = unsafe { shared.piece(rows.start * b.columns, rows.len() * b.columns) };
        SCRATCH.with_borrow_mut(|(of_a, of_c)| {
            for depth in (0..a.columns).step_by(DEPTH) {
                let k = DEPTH.min(a.columns - depth);
                let replace = depth == 0 && accumulate == Accumulate::Replace;
                let into = if replace { Into::Replace } else { Into::Add };
                let m = rows.len();
                let left = if a.column_stride == 1 {
                    Left::Rows(pack_block(of_a, a, (rows.start, m), (depth, k)))
                } else {
                    Left::Columns(pack_block(of_a, a.transposed(), (depth, k), (rows.start, m)))
                };
                let right = Panels::new(&packed[depth * width..], k);
                let shape = Shape { m, n: b.columns, k };
                multiply(engine, shape, c, left, right, (into, of_c));
            }
        });
    });
    PACKED.set(packed);
}

/// Packs all of B, step by step of the depth. Returns the elements of a packed row.
fn pack_all(to: &mut Vec<f32>, b: Matrix<'_>, threads: Threads) -> usize {
    let width = round_up(b.columns, PANEL);
    let len = b.rows * width;
    if to.len() < len {
        to.resize(len, 0.0);
    }
    let shared = Shared::new(&mut to[..len]);
    let panels = width / PANEL;
    threads.run(b.rows.div_ceil(DEPTH) * panels, |unit| {
        let (depth, column) = (unit / panels * DEPTH, unit % panels * PANEL);
        let (k, n) = (DEPTH.min(b.rows - depth), PANEL.min(b.columns - column));
        // SAFETY: panels do not overlap, and each is one unit's.
        let panel = unsafe { shared.piece(depth * width + column * k, k * PANEL) };
        pack(panel, b, (depth, k), (column, n));
    });
    width
}

/// Packs rows and columns of `from` (first, count) into panels.
fn pack_block<'a>(
    to: &'a mut Vec<f32>,
    from: Matrix<'_>,
    (row, rows): (usize, usize),
    (column, columns): (usize, usize),
) -> Panels<'a> {
    let len = round_up(columns, PANEL) * rows;
    if to.len() < len {
        to.resize(len, 0.0);
    }
    for (panel, to) in to[..len].chunks_exact_mut(rows * PANEL).enumerate() {
        let first = panel * PANEL;
        pack(to, from, (row, rows), (column + first, PANEL.min(columns - first)));
    }
    Panels::new(&to[..len], rows)
}

/// Multiplies packed blocks; C has any number of columns, without gaps.
fn multiply(
    engine: Engine,
    Shape { m, n, k }: Shape,
    c: &mut [f32],
    left: Left<'_>,
    right: Panels<'_>,
    (into, tile): (Into<'_>, &mut Vec<f32>),
) {
    let whole = n / WIDTH * WIDTH;
    (engine.product)(Shape { m, n: whole, k }, Target::rows(c, n), left, right, into);
    if whole == n {
        return;
    }
    // The last columns go through a block of full panel width.
    let first = n / PANEL * PANEL;
    let width = round_up(n - first, WIDTH);
    tile.resize((m * width).max(tile.len()), 0.0);
    let rows = |r: usize| (r * n + whole..(r + 1) * n, r * width..(r + 1) * width);
    for (of_c, of_tile) in (0..m).map(rows) {
        tile[of_tile][whole - first..n - first].copy_from_slice(&c[of_c]);
    }
    let right = right.skip_columns(first);
    (engine.product)(Shape { m, n: width, k }, Target::rows(tile, width), left, right, into);
    for (of_c, of_tile) in (0..m).map(rows) {
        c[of_c].copy_from_slice(&tile[of_tile][whole - first..n - first]);
    }
}

/// Copies rows and at most [`PANEL`] columns of `from` (first, count) to a panel, zeros beyond.
fn pack(
    to: &mut [f32],
    from: Matrix<'_>,
    (row, rows): (usize, usize),
    (column, columns): (usize, usize),
) {
    let Matrix { data, row_stride, column_stride, .. } = from;
    let at = |r: usize, c: usize| (row + r) * row_stride + (column + c) * column_stride;
    if column_stride == 1 {
        for (r, to) in to.chunks_exact_mut(PANEL).take(rows).enumerate() {
            to[..columns].copy_from_slice(&data[at(r, 0)..][..columns]);
            to[columns..].fill(0.0);
        }
        return;
    }
    for r in (0..rows).step_by(SIDE) {
        let square = r..rows.min(r + SIDE);
        for c in (0..columns).step_by(SIDE) {
            for c in c..columns.min(c + SIDE) {
                for r in square.clone() {
                    to[r * PANEL + c] = data[at(r, c)];
                }
            }
        }
        for r in square {
            to[r * PANEL + columns..(r + 1) * PANEL].fill(0.0);
        }
    }
}
