//! Copies rows into scratch, contiguous, widened to f32 and padded with zeros.
//!
//! In: strided rows of the caller. Out: the same rows in panels, without gaps, or transposed.
//!
//! Rows a power of two apart share few cache sets, and bf16 has to be widened: so every tile is staged,
//! once for many products.

use std::ops::Range;

use super::block::{PANEL, panelled};
use super::engine::Engine;
use crate::{Rows, wire};

/// Rows of `dim` numbers, the first at `offset`, `distance` apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source<'a> {
    pub(super) rows: Rows<'a>,
    pub(super) offset: usize,
    pub(super) distance: usize,
    pub(super) dim: usize,
}

impl Source<'_> {
    /// Copies `count` rows times `factor` into panels of `rows` rows, and fills the rows behind them with zeros up to row `end`.
    /// Later rows keep their values.
    pub(super) fn copy(
        &self,
        with: Engine,
        (count, end): (usize, usize),
        factor: f32,
        to: &mut [f32],
        rows: usize,
    ) {
        self.place(with, count, factor, to, rows);
        clear_rows(&mut to[..panelled(rows, self.dim)], rows, count..end);
    }

    /// Copies `count` rows times `factor` to the first rows of panels of `rows` rows.
    pub(super) fn place(
        &self,
        with: Engine,
        count: usize,
        factor: f32,
        to: &mut [f32],
        rows: usize,
    ) {
        let from = match self.rows {
            Rows::F32(from) => {
                let from = &from[self.offset..];
                (with.place)(from, self.distance, (count, self.dim), factor, to, rows);
                return;
            }
            Rows::Bf16(from) => from,
        };
        let mut wide = [0.0; PANEL];
        for row in 0..count {
            let at = self.offset + row * self.distance;
            for (panel, from) in from[at..at + self.dim].chunks(PANEL).enumerate() {
                wire::to_f32(&mut wide[..from.len()], from);
                for x in &mut wide[..from.len()] {
                    *x *= factor;
                }
                wide[from.len()..].fill(0.0);
                copy(&mut to[(panel * rows + row) * PANEL..][..PANEL], &wide);
            }
        }
    }

    /// Copies `count` rows times `factor` to adjacent rows.
    pub(super) fn copy_rows(&self, count: usize, factor: f32, to: &mut [f32]) {
        for (row, to) in to.chunks_exact_mut(self.dim).take(count).enumerate() {
            self.widen(self.offset + row * self.distance, factor, to);
        }
    }

    /// Numbers from `at`, times `factor`.
    fn widen(&self, at: usize, factor: f32, to: &mut [f32]) {
        match self.rows {
            Rows::F32(from) => copy(to, &from[at..at + to.len()]),
            Rows::Bf16(from) => wire::to_f32(to, &from[at..at + to.len()]),
        }
        #[expect(clippy::float_cmp, reason = "1 is exact, and the usual case")]
        if factor != 1.0 {
            for x in to {
                *x *= factor;
            }
        }
    }
}

/// Writes zeros to some rows of panels of `rows` rows.
pub(super) fn clear_rows(panels: &mut [f32], rows: usize, which: Range<usize>) {
    for panel in panels.chunks_exact_mut(rows * PANEL) {
        panel[which.start * PANEL..which.end * PANEL].fill(0.0);
    }
}

/// Copies as many elements as a panel has columns, or fewer. It is faster than a library call for so few.
pub(super) fn copy(to: &mut [f32], from: &[f32]) {
    match (<&mut [f32; PANEL]>::try_from(&mut *to), <&[f32; PANEL]>::try_from(from)) {
        (Ok(to), Ok(from)) => *to = *from,
        _ => to.copy_from_slice(from),
    }
}

/// Transposes adjacent rows of `dim` numbers into panels `[rows / PANEL, dim, PANEL]`.
pub(super) fn transpose_rows(with: Engine, from: &[f32], dim: usize, to: &mut [f32]) {
    for (from, to) in from.chunks(PANEL * dim).zip(to.chunks_exact_mut(dim * PANEL)) {
        (with.transpose)(from, dim, (from.len() / dim, dim), to, PANEL);
    }
}

/// `x` rounded up to a multiple of `step`.
pub(super) fn round_up(x: usize, step: usize) -> usize {
    x.div_ceil(step) * step
}
