//! Copies rows into scratch, contiguous, widened to f32 and padded with zeros.
//!
//! In: rows of the caller, every so many numbers one. Out: the same rows without gaps, or transposed.
//!
//! Rows a power of two apart share few cache sets, and bf16 has to be widened: so every tile is staged,
//! once for many products.

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
    /// Copies `count` rows times `factor` to rows of `width`, and clears `to` beyond them.
    pub(super) fn copy(&self, count: usize, factor: f32, to: &mut [f32], width: usize) {
        let dim = self.dim;
        for (row, to) in to.chunks_exact_mut(width).enumerate() {
            if row >= count {
                to.fill(0.0);
                continue;
            }
            let at = self.offset + row * self.distance;
            match self.rows {
                Rows::F32(from) => to[..dim].copy_from_slice(&from[at..at + dim]),
                Rows::Bf16(from) => wire::to_f32(&mut to[..dim], &from[at..at + dim]),
            }
            #[expect(clippy::float_cmp, reason = "1 is exact, and the usual case")]
            if factor != 1.0 {
                to[..dim].iter_mut().for_each(|x| *x *= factor);
            }
            to[dim..].fill(0.0);
        }
    }
}

/// Transposes rows of `width`, all of `from`, into `[dim, lanes]` with `distance` between rows.
pub(super) fn transpose(from: &[f32], width: usize, dim: usize, to: &mut [f32], distance: usize) {
    const SIDE: usize = 8;
    let rows = from.len() / width;
    for first in (0..rows).step_by(SIDE) {
        let count = SIDE.min(rows - first);
        for column in (0..dim).step_by(SIDE) {
            let mut tile = [[0.0; SIDE]; SIDE];
            for (row, tile) in tile.iter_mut().enumerate().take(count) {
                tile.copy_from_slice(&from[(first + row) * width + column..][..SIDE]);
            }
            for i in 0..SIDE {
                let to = &mut to[(column + i) * distance + first..][..count];
                for (to, row) in to.iter_mut().zip(&tile) {
                    *to = row[i];
                }
            }
        }
    }
}

/// `x` rounded up to a multiple of `step`.
pub(super) fn round_up(x: usize, step: usize) -> usize {
    x.div_ceil(step) * step
}
