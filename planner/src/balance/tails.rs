//! The longest part of a run of rows that costs no more than asked.
//!
//! In: a span and a cost. Out: its tail or head, cut at tiles. Cost grows with the rows, so the cut is found by halving.

use std::ops::Range;

use super::bins::Bins;
use super::groups::Span;
use crate::TILE_ROWS;

impl Bins<'_> {
    /// The longest tail of a span that costs at most `most`; empty if not even one tile does.
    pub(super) fn tail(&self, span: &Span, most: u64) -> Span {
        let Range { start, end } = span.rows;
        let tiles = tiles_between(start, end);
        let from = |tiles: u32| {
            span.with_rows(if tiles == 0 {
                end..end
            } else {
                start.max((end.div_ceil(TILE_ROWS) - tiles) * TILE_ROWS)..end
            })
        };
        from(most_tiles(tiles, |tiles| self.cost(&from(tiles)) <= most))
    }

    /// The longest head of a span that costs at most `most`; empty if not even one tile does.
    pub(super) fn head(&self, span: &Span, most: u64) -> Span {
        let Range { start, end } = span.rows;
        let tiles = tiles_between(start, end);
        let until = |tiles: u32| {
            span.with_rows(start..end.min((start / TILE_ROWS + tiles) * TILE_ROWS).max(start))
        };
        until(most_tiles(tiles, |tiles| self.cost(&until(tiles)) <= most))
    }
}

fn tiles_between(start: u32, end: u32) -> u32 {
    if start < end { end.div_ceil(TILE_ROWS) - start / TILE_ROWS } else { 0 }
}

/// The largest number up to `most` for which `fits` holds; it holds up to there and for zero.
fn most_tiles(most: u32, fits: impl Fn(u32) -> bool) -> u32 {
    let (mut known, mut beyond) = (0, most + 1);
    while beyond - known > 1 {
        let middle = known + (beyond - known) / 2;
        if fits(middle) {
            known = middle;
        } else {
            beyond = middle;
        }
    }
    known
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_tiles_finds_the_edge() {
        for edge in 0..20 {
            assert_eq!(most_tiles(19, |tiles| tiles <= edge), edge.min(19));
        }
    }
}
