//! Exchanges a tile for a slightly cheaper one, where one tile alone is too much to move.
//!
//! In: a donor that finishes last, receivers. Out: the exchange after which both finish earlier
//! than the donor did, with the least bytes. Tiles of a causal document cost from one tile of keys
//! to all of them, so two tiles differ by as little as one needs.

use std::ops::Range;

use super::{Bin, Bins, Prices, Span, bytes_of_move, levelling};
use crate::TILE_ROWS;

/// What a receiver gets and, if anything, gives back.
type Exchange = (usize, Span, Option<Span>);

/// The best exchange of one tile each; `None` if there is none to gain from.
pub(super) fn best(
    bins: &Bins<'_>,
    prices: &Prices,
    donor: usize,
    receivers: impl Iterator<Item = usize>,
) -> Option<Exchange> {
    let from = &bins.all[donor];
    let mut best: Option<(i128, Exchange)> = None;
    for receiver in receivers {
        let to = &bins.all[receiver];
        // Any difference below twice this makes the later of the two earlier.
        let wanted = levelling(from, to);
        for (gives, takes) in pairs(bins, from, to, wanted) {
            let (gives_cost, takes_cost) = (bins.cost(&gives), bins.cost(&takes));
            let difference = gives_cost.saturating_sub(takes_cost);
            if difference < wanted / 2 || difference > wanted + wanted / 2 || difference == 0 {
                continue;
            }
            if !bins.has_room(receiver, &gives) || !bins.has_room(donor, &takes) {
                continue;
            }
            let bytes = bytes_of_move(bins, prices, from, to, &gives)
                + bytes_of_move(bins, prices, to, from, &takes);
            if best.as_ref().is_none_or(|(least, _)| bytes < *least) {
                best = Some((bytes, (receiver, gives, Some(takes))));
            }
        }
    }
    best.map(|(_, exchange)| exchange)
}

/// Tiles that the donor may give, each with a tile of the receiver that costs `less` less, as far
/// as there is one.
fn pairs(bins: &Bins<'_>, from: &Bin<'_>, to: &Bin<'_>, less: u64) -> Vec<(Span, Span)> {
    let mut pairs = Vec::new();
    for own in from.spans() {
        let held = bins.keys(own.document, to.rows_of(own.document)).end;
        for end in [own.rows.end, held.clamp(own.rows.start + 1, own.rows.end)] {
            let gives = tile_of(&own, (end - 1) / TILE_ROWS);
            let target = bins.cost(&gives).saturating_sub(less);
            pairs
                .extend(to.spans().map(|span| (gives.clone(), dearest_up_to(bins, &span, target))));
        }
        let gives = tile_of(&own, own.rows.start / TILE_ROWS);
        let target = bins.cost(&gives).saturating_sub(less);
        pairs.extend(to.spans().map(|span| (gives.clone(), dearest_up_to(bins, &span, target))));
    }
    pairs
}

/// The last tile of a span that costs at most `most`, if cost grows along the span; its first tile
/// if none does.
fn dearest_up_to(bins: &Bins<'_>, span: &Span, most: u64) -> Span {
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
fn tile_of(span: &Span, tile: u32) -> Span {
    let Range { start, end } = span.rows;
    let rows = (tile * TILE_ROWS).max(start)..((tile + 1) * TILE_ROWS).min(end);
    Span { document: span.document, rows }
}
