//! Which piece of what a slot holds moves best to another.
//!
//! In: a donor, a receiver, rows that the donor holds, the cost that should move. Out: the piece with the
//! least new bytes per cost of those that cost no more.
//!
//! For a causal document the best piece is seldom its tail: it may end where queries and keys cost the
//! same ([`Prices::cheapest_end`]), or inside the prefix of keys that the receiver holds already.

use std::cmp::Ordering;
use std::ops::Range;

use super::bins::{Bin, Bins};
use super::groups::Span;
use super::prices::Prices;
use crate::TILE_ROWS;

/// A piece with what it would cost to move.
pub(super) struct Scored {
    pub(super) span: Span,
    pub(super) moved: i128,
    bytes: i128,
    /// Whether it is less than half of what should move.
    is_small: bool,
}

/// The cheapest piece of `spans` that costs at most `wanted`; `None` if not even one tile does.
pub(super) fn best_piece(
    bins: &Bins<'_>,
    prices: &Prices,
    (donor, receiver): (usize, usize),
    spans: &[Span],
    wanted: u64,
) -> Option<Scored> {
    let (from, to) = (&bins.all[donor], &bins.all[receiver]);
    let mut best: Option<Scored> = None;
    for span in spans {
        let heads = span.heads.clone();
        let all = heads.len() as u16;
        let fewest = if bins.problem.heads_may_part() { 1 } else { all };
        // All numbers up to 8, then some; of a document that spans ranks, whose pieces are many, halves.
        let spans = bins.problem.layout.spans_ranks(span.document);
        let fewer = |it: &u16| Some(if spans { it / 2 } else { it - it.div_ceil(8) });
        let counts = std::iter::successors(Some(all), fewer);
        for count in counts.take_while(|it| *it >= fewest) {
            let span = Span { heads: heads.end - count..heads.end, ..span.clone() };
            for piece in candidates(bins, prices, to, &span, wanted) {
                if piece.rows.is_empty() || !bins.has_room(receiver, &piece) {
                    continue;
                }
                let moved = bins.cost(&piece);
                let is_small = moved < wanted / 2;
                if is_small && best.as_ref().is_some_and(|best| !best.is_small) {
                    continue;
                }
                let bytes = prices.of_move(bins, from, to, &piece);
                let it = Scored { span: piece, moved: moved.max(1).into(), bytes, is_small };
                if best.as_ref().is_none_or(|best| it.is_better_than(best)) {
                    best = Some(it);
                }
            }
        }
    }
    best
}

/// Pieces of a span that cost at most `most`, some of them empty.
fn candidates(bins: &Bins<'_>, prices: &Prices, to: &Bin<'_>, span: &Span, most: u64) -> Vec<Span> {
    if bins.cost(span) <= most {
        return vec![span.clone()];
    }
    let Range { start, end } = span.rows;
    let ends_at = |row: u32| {
        let row = row.next_multiple_of(TILE_ROWS).clamp(start + 1, end);
        let row = row.next_multiple_of(TILE_ROWS).min(end);
        bins.tail(&span.with_rows(start..row), most)
    };
    let cheapest = prices.cheapest_end(bins, &span.heads, most).min(end);
    let held = held(bins, to, span).min(end);
    let mut pieces = Vec::with_capacity(5);
    pieces.push(ends_at(end));
    if start > 0 || cheapest >= end {
        pieces.push(bins.head(span, most));
    }
    if cheapest < end {
        pieces.push(ends_at(cheapest));
    }
    if held > start {
        pieces.push(ends_at(held));
        let tile = dearest_tile(bins, &span.with_rows(start..held), most);
        if bins.cost(&tile) <= most {
            pieces.push(tile);
        }
    }
    pieces
}

/// Where the keys end that a bin holds for all heads of a span.
pub(super) fn held(bins: &Bins<'_>, bin: &Bin<'_>, span: &Span) -> u32 {
    let groups = bins.groups_of(bin, span.document);
    let shared = groups
        .iter()
        .filter(|it| it.heads.start < span.heads.end && span.heads.start < it.heads.end);
    let mut heads = 0;
    let ends = shared.map(|it| {
        heads += it.heads.end.min(span.heads.end) - it.heads.start.max(span.heads.start);
        bins.keys(span.document, &it.rows).end
    });
    let end = ends.min().unwrap_or(0);
    if usize::from(heads) == span.heads.len() { end } else { 0 }
}

/// The last tile of a span that costs at most `most`, if cost grows along the span; its first tile
/// if none does.
pub(super) fn dearest_tile(bins: &Bins<'_>, span: &Span, most: u64) -> Span {
    let first = span.rows.start / TILE_ROWS;
    let tiles = span.rows.end.div_ceil(TILE_ROWS) - first;
    let (mut known, mut beyond) = (0, tiles);
    while beyond - known > 1 {
        let middle = known + (beyond - known) / 2;
        if bins.cost(&tile_of(span, first + middle)) <= most {
            known = middle;
        } else {
            beyond = middle;
        }
    }
    tile_of(span, first + known)
}

/// A tile of a span, cut by the span's ends.
pub(super) fn tile_of(span: &Span, tile: u32) -> Span {
    let Range { start, end } = span.rows;
    span.with_rows((tile * TILE_ROWS).max(start)..((tile + 1) * TILE_ROWS).min(end))
}

impl Scored {
    /// The better first.
    pub(super) fn order(&self, other: &Self) -> Ordering {
        let bytes = (self.bytes * other.moved).cmp(&(other.bytes * self.moved));
        self.is_small.cmp(&other.is_small).then(bytes)
    }

    /// Fewer bytes per cost; the first found wins a tie.
    fn is_better_than(&self, other: &Self) -> bool {
        self.order(other) == Ordering::Less
    }
}
