//! Exchanges a tile for a slightly cheaper one, where one tile alone is too much to move.
//!
//! In: a donor that finishes last, receivers. Out: the exchange after which both finish earlier
//! than the donor did, with the least bytes. Tiles of a causal document cost from one tile of keys
//! to all of them, so two tiles differ by as little as one needs.

use super::{Bin, Bins, DOCUMENTS, Prices, Span, levelling};
use crate::TILE_ROWS;
use crate::balance::pieces::{dearest_tile, held, tile_of};

/// The receiver, the piece that it gets, and the piece that it gives back, if any.
type Exchange = (usize, Span, Option<Span>);

/// The best exchange of one tile each; `None` if there is none to gain from.
pub(super) fn best(
    bins: &Bins<'_>,
    prices: &Prices,
    (donor, spans): (usize, &[Span]),
    receivers: impl Iterator<Item = usize>,
) -> Option<Exchange> {
    let from = &bins.all[donor];
    let mut best: Option<(i128, Exchange)> = None;
    for receiver in receivers {
        let to = &bins.all[receiver];
        // Any difference below twice this makes the later of the two earlier.
        let wanted = levelling(from, to);
        let theirs = bins.spans(receiver, DOCUMENTS);
        for (gives, takes) in pairs(bins, to, (spans, &theirs), wanted) {
            let (gives_cost, takes_cost) = (bins.cost(&gives), bins.cost(&takes));
            let difference = gives_cost.saturating_sub(takes_cost);
            if difference < wanted / 2 || difference > wanted + wanted / 2 || difference == 0 {
                continue;
            }
            if !bins.has_room(receiver, &gives) || !bins.has_room(donor, &takes) {
                continue;
            }
            let bytes =
                prices.of_move(bins, from, to, &gives) + prices.of_move(bins, to, from, &takes);
            if best.as_ref().is_none_or(|(least, _)| bytes < *least) {
                best = Some((bytes, (receiver, gives, Some(takes))));
            }
        }
    }
    best.map(|(_, exchange)| exchange)
}

/// Tiles that the donor may give, each with a tile of the receiver that costs `less` less, as far
/// as there is one.
fn pairs(
    bins: &Bins<'_>,
    to: &Bin<'_>,
    (ours, theirs): (&[Span], &[Span]),
    less: u64,
) -> Vec<(Span, Span)> {
    let mut pairs = Vec::new();
    for own in ours {
        let of_end = |end: u32| (end - 1) / TILE_ROWS;
        let held = held(bins, to, own).clamp(own.rows.start + 1, own.rows.end);
        for tile in [of_end(own.rows.end), of_end(held), own.rows.start / TILE_ROWS] {
            let gives = tile_of(own, tile);
            let target = bins.cost(&gives).saturating_sub(less);
            let takes = theirs.iter().map(|span| dearest_tile(bins, span, target));
            pairs.extend(takes.map(|it| (gives.clone(), it)));
        }
    }
    pairs
}
