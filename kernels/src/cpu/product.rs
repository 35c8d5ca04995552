//! Matrix products of any size: packs panels that fit in cache and multiplies blocks of them.
//!
//! In: two views and C. Out: C. A unit of work is a panel of C's rows and columns.
//!
//! Invariant: an element sums its products in steps of [`DEPTH`], in order, whatever the panel.
#![allow(unsafe_code)]

use std::cell::RefCell;

use super::block::{Into, Left, Shape, WIDTH};
use super::engine::Engine;
use super::shared::Shared;
use super::stage::round_up;
use crate::Threads;
use crate::matmul::{Accumulate, Matrix};

/// Rows of a panel of A.
const ROWS: usize = 96;
/// Columns of a panel of B.
const COLUMNS: usize = 64;
/// Rows and columns of a square that is transposed at a time: both sides stay in cache.
const SIDE: usize = 16;
/// Inner numbers of a step.
const DEPTH: usize = 256;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

#[derive(Default)]
struct Scratch {
    a: Vec<f32>,
    /// Panels of all columns.
    b: Vec<Vec<f32>>,
    c: Vec<f32>,
}

/// Computes C.
pub(super) fn run(
    engine: Engine,
    c: &mut [f32],
    (a, b): (Matrix<'_>, Matrix<'_>),
    accumulate: Accumulate,
    threads: Threads,
) {
    if accumulate == Accumulate::Replace && a.columns == 0 {
        c.fill(0.0);
    }
    let columns = b.columns;
    // A thread packs B for its rows alone: so as few spans of rows as there are threads.
    let span = round_up(a.rows.div_ceil(threads.0.get()), 8).max(1);
    let shared = Shared::new(c);
    threads.run(a.rows.div_ceil(span), |unit| {
        let rows = unit * span..a.rows.min((unit + 1) * span);
        // SAFETY: these rows are this unit's.
        let c = unsafe { shared.piece(rows.start * columns, rows.len() * columns) };
        SCRATCH.with_borrow_mut(|scratch| {
            for depth in (0..a.columns).step_by(DEPTH) {
                let k = DEPTH.min(a.columns - depth);
                let replace = depth == 0 && accumulate == Accumulate::Replace;
                let into = if replace { Into::Replace } else { Into::Add };
                scratch.b.resize_with(columns.div_ceil(COLUMNS), Vec::new);
                for (panel, column) in scratch.b.iter_mut().zip((0..columns).step_by(COLUMNS)) {
                    let n = COLUMNS.min(columns - column);
                    pack(panel, b, (depth, k), (column, n), round_up(n, WIDTH));
                }
                for row in rows.clone().step_by(ROWS) {
                    let m = ROWS.min(rows.end - row);
                    let left = if a.column_stride == 1 {
                        pack(&mut scratch.a, a, (row, m), (depth, k), k);
                        Left::RowMajor(k)
                    } else {
                        pack(&mut scratch.a, a.transposed(), (depth, k), (row, m), m);
                        Left::ColumnMajor(m)
                    };
                    let Scratch { a, b, c: tile } = &mut *scratch;
                    for (panel, column) in b.iter().zip((0..columns).step_by(COLUMNS)) {
                        let n = COLUMNS.min(columns - column);
                        let c = (&mut c[(row - rows.start) * columns + column..], columns);
                        multiply(engine, Shape { m, n, k }, c, (a, left), panel, (into, tile));
                    }
                }
            }
        });
    });
}

/// Multiplies packed panels; C is any number of columns wide.
fn multiply(
    engine: Engine,
    Shape { m, n, k }: Shape,
    (c, distance): (&mut [f32], usize),
    left: (&[f32], Left),
    right: &[f32],
    (into, tile): (Into<'_>, &mut Vec<f32>),
) {
    let width = round_up(n, WIDTH);
    let shape = Shape { m, n: width, k };
    if width == n {
        (engine.product)(shape, (c, distance), left, (right, width), into);
        return;
    }
    tile.resize((m * width).max(tile.len()), 0.0);
    let rows = |r: usize| (r * distance..r * distance + n, r * width..r * width + n);
    for (of_c, of_tile) in (0..m).map(rows) {
        tile[of_tile].copy_from_slice(&c[of_c]);
    }
    (engine.product)(shape, (tile, width), left, (right, width), into);
    for (of_c, of_tile) in (0..m).map(rows) {
        c[of_c].copy_from_slice(&tile[of_tile]);
    }
}

/// Copies rows and columns of `from` (first, count) to `to`, rows `width` apart, zeros beyond.
fn pack(
    to: &mut Vec<f32>,
    from: Matrix<'_>,
    (row, rows): (usize, usize),
    (column, columns): (usize, usize),
    width: usize,
) {
    to.resize((rows * width).max(to.len()), 0.0);
    let Matrix { data, row_stride, column_stride, .. } = from;
    let at = |r: usize, c: usize| (row + r) * row_stride + (column + c) * column_stride;
    if column_stride == 1 {
        for (r, to) in to.chunks_exact_mut(width).take(rows).enumerate() {
            to[..columns].copy_from_slice(&data[at(r, 0)..][..columns]);
            to[columns..].fill(0.0);
        }
        return;
    }
    for r in (0..rows).step_by(SIDE) {
        for c in (0..columns).step_by(SIDE) {
            for c in c..columns.min(c + SIDE) {
                for r in r..rows.min(r + SIDE) {
                    to[r * width + c] = data[at(r, c)];
                }
            }
        }
        for r in r..rows.min(r + SIDE) {
            to[r * width + columns..(r + 1) * width].fill(0.0);
        }
    }
}
