//! Rotary positions: the halves of every head are turned by angles that grow with the position.
//!
//! In: rows `[rows, heads, dim]` and their positions in their documents. Out: the same rows, turned, or
//! turned back for gradients.
//!
//! Invariant: the angles come from IEEE additions and products alone, so the same bits everywhere.

use cadre_kernels::Threads;

use super::math::{blocks, share, trigonometry};

/// Cosines and sines of all positions and frequencies.
#[derive(Clone, Debug)]
pub(super) struct Rotation {
    half: usize,
    /// (cos, sin) of `[positions, dim / 2]`.
    table: Vec<(f32, f32)>,
}

/// Which way to turn.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Turn {
    Forward,
    Back,
}

/// Base of the frequencies (Su et al. 2021) as its natural logarithm: ln 10000.
const LN_BASE: f64 = 9.210_340_371_976_184;

impl Rotation {
    /// Knows positions below `positions`; `dim` is even.
    pub(super) fn new(dim: usize, positions: u32) -> Self {
        let mut rotation = Self { half: dim / 2, table: Vec::new() };
        rotation.reach(positions);
        rotation
    }

    /// Extends the table to positions below `positions`.
    pub(super) fn reach(&mut self, positions: u32) {
        let known = (self.table.len() / self.half) as u32;
        let exponent = |index: usize| -LN_BASE * index as f64 / self.half as f64;
        let frequencies: Vec<_> =
            (0..self.half).map(|index| trigonometry::exp(exponent(index))).collect();
        for position in known..positions {
            self.table.extend(frequencies.iter().map(|frequency| {
                let (cos, sin) = trigonometry::cos_sin(f64::from(position) * frequency);
                (cos as f32, sin as f32)
            }));
        }
    }

    /// Turns rows of `width` numbers in place.
    ///
    /// # Panics
    ///
    /// When a position is beyond the table.
    pub(super) fn turn(
        &self,
        threads: Threads,
        rows: &mut [f32],
        width: usize,
        positions: &[u32],
        turn: Turn,
    ) {
        let sign = if turn == Turn::Forward { 1.0 } else { -1.0 };
        share(threads, blocks(rows, width, positions), |(rows, positions)| {
            for (row, &position) in rows.chunks_exact_mut(width).zip(positions) {
                let angles = &self.table[position as usize * self.half..][..self.half];
                for head in row.chunks_exact_mut(2 * self.half) {
                    let (low, high) = head.split_at_mut(self.half);
                    for ((low, high), &(cos, sin)) in low.iter_mut().zip(high).zip(angles) {
                        let sin = sign * sin;
                        let (x, y) = (*low, *high);
                        *low = x * cos - y * sin;
                        *high = y * cos + x * sin;
                    }
                }
            }
        });
    }
}
