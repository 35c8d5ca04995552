//! The longest part of a run of rows that costs no more than asked.
//!
//! In: a span and a cost. Out: its tail or head, cut at tiles. Cost grows with the rows, so the cut is found by halving, near
//! where pairs alone would put it.

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
        let square = f64::from(end) * f64::from(end);
        let cut = (square - self.squares(span, most)).max(0.0).sqrt();
        let near = tiles_between(cut as u32, end);
        from(most_tiles(tiles, near, |tiles| self.cost(&from(tiles)) <= most))
    }

    /// The longest head of a span that costs at most `most`; empty if not even one tile does.
    pub(super) fn head(&self, span: &Span, most: u64) -> Span {
        let Range { start, end } = span.rows;
        let tiles = tiles_between(start, end);
        let until = |tiles: u32| {
            span.with_rows(start..end.min((start / TILE_ROWS + tiles) * TILE_ROWS).max(start))
        };
        let square = f64::from(start) * f64::from(start);
        let cut = (square + self.squares(span, most)).sqrt();
        let near = tiles_between(start, cut as u32);
        until(most_tiles(tiles, near, |tiles| self.cost(&until(tiles)) <= most))
    }

    /// Difference of the squares of the end and the start of rows of a causal document that cost
    /// `cost`.
    fn squares(&self, span: &Span, cost: u64) -> f64 {
        2.0 * cost as f64 / self.problem.heads.query_count(&span.heads).max(1) as f64
    }
}

/// The longest tail and the longest head of a span for which `fits` holds, as it does of all shorter ones.
pub(super) fn ends(span: &Span, fits: impl Fn(&Span) -> bool) -> [Span; 2] {
    let Range { start, end } = span.rows;
    let tiles = tiles_between(start, end);
    let tail = |tiles: u32| {
        let first = (end.div_ceil(TILE_ROWS) - tiles) * TILE_ROWS;
        span.with_rows(if tiles == 0 { end..end } else { start.max(first)..end })
    };
    let head = |tiles: u32| {
        span.with_rows(start..end.min((start / TILE_ROWS + tiles) * TILE_ROWS).max(start))
    };
    let most =
        |part: &dyn Fn(u32) -> Span| part(most_tiles(tiles, tiles / 2, |tiles| fits(&part(tiles))));
    [most(&tail), most(&head)]
}

fn tiles_between(start: u32, end: u32) -> u32 {
    if start < end { end.div_ceil(TILE_ROWS) - start / TILE_ROWS } else { 0 }
}

/// The largest number up to `most` for which `fits` holds; it holds up to there and for zero. It is looked for around `near`.
fn most_tiles(most: u32, near: u32, fits: impl Fn(u32) -> bool) -> u32 {
    let (mut known, mut beyond) = (0, most + 1);
    let (mut middle, mut step) = (near.clamp(1, most.max(1)), 1);
    while beyond - known > 1 {
        if fits(middle) {
            known = middle;
            middle = known.saturating_add(step);
        } else {
            beyond = middle;
            middle = beyond.saturating_sub(step);
        }
        step = step.saturating_mul(4);
        // Where neither end is near any more, halving is faster than steps.
        if middle <= known || middle >= beyond || step > 256 {
            middle = known + (beyond - known) / 2;
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
            for near in [0, 1, 7, 18, 19, 40] {
                assert_eq!(most_tiles(19, near, |tiles| tiles <= edge), edge.min(19));
            }
        }
    }
}
