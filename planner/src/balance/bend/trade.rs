//! Trades memory for work: a slot that finishes early and is full lets go of short documents for a piece of the last.
//!
//! In: bins within their limits that cannot be made more even by moves alone. Out: `true` if the last one finishes earlier; else
//! the bins as they were.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::{latest, parts, shed, spot};
use crate::balance::bins::Bins;
use crate::balance::even::levelling;
use crate::balance::groups::Span;
use crate::balance::pieces::{Offer, best_piece};
use crate::balance::prices::Prices;

/// Maximum receivers that are tried for a piece.
const RECEIVERS: usize = 16;
/// Maximum documents of the donor that are tried.
const DOCUMENTS: usize = 8;
/// Maximum (span, number of heads) pairs, the cheapest estimates, whose bytes are counted exactly;
/// see [`best_piece`].
const TRIES: usize = 4;
/// Divisors of the amount that would make both slots even: each quotient is tried.
const PARTS: [u64; 3] = [1, 3, 12];

/// A span that went from one bin to another.
type Moved = (usize, usize, Span);

pub(super) fn trade(bins: &mut Bins<'_>) -> bool {
    let Some(donor) = (0..bins.all.len())
        .filter(|bin| !bins.all[*bin].is_empty())
        .max_by_key(|bin| (bins.all[*bin].finish(), Reverse(*bin)))
    else {
        return false;
    };
    let finish = bins.all[donor].finish();
    if finish <= latest(bins) {
        return false;
    }
    let prices = Prices::of(bins);
    let spans = bins.spans(donor, DOCUMENTS);
    let mut receivers: Vec<(u64, usize)> =
        (0..bins.all.len()).map(|bin| (bins.all[bin].finish(), bin)).collect();
    receivers.sort_unstable();
    receivers.retain(|it| it.1 != donor && it.0 < finish);
    for (_, receiver) in receivers.into_iter().take(RECEIVERS) {
        for part in PARTS {
            let (from, to) = (&bins.all[donor], &bins.all[receiver]);
            let wanted = levelling(from, to) / part;
            let offer = [Offer { donor, spans: &spans, wanted }];
            let limits = bins.limits();
            bins.set_limits(limits.opened());
            let piece = best_piece(bins, &prices, &offer, receiver, TRIES);
            bins.set_limits(limits);
            let Some((_, piece)) = piece else {
                break;
            };
            let mut moved = Vec::new();
            if exchange(bins, &prices, (donor, receiver), piece.span, finish, &mut moved) {
                return true;
            }
            for (from, to, span) in moved.into_iter().rev() {
                bins.take(to, &span);
                bins.put(from, &span);
            }
        }
    }
    false
}

/// Moves a piece and what the receiver sheds for it; `false` if there is no room for that, or a bin finishes as late as before.
fn exchange(
    bins: &mut Bins<'_>,
    prices: &Prices,
    (donor, receiver): (usize, usize),
    piece: Span,
    finish: u64,
    moved: &mut Vec<Moved>,
) -> bool {
    let document = piece.document;
    let go = |bins: &mut Bins<'_>, from: usize, to: usize, span: Span, moved: &mut Vec<Moved>| {
        bins.take(from, &span);
        bins.put(to, &span);
        moved.push((from, to, span));
    };
    go(bins, donor, receiver, piece, moved);
    let gone = shed(bins, receiver, -bins.free(receiver), Some(document));
    let mut loose = Vec::new();
    for span in gone {
        if parts(bins, span, &mut loose).is_err() {
            return false;
        }
    }
    let mut order: BTreeSet<(Reverse<i128>, usize)> =
        (0..bins.all.len()).map(|bin| (Reverse(bins.free(bin)), bin)).collect();
    for span in loose {
        let Some(bin) = spot(bins, prices, &order, &span, Some((finish, receiver))) else {
            return false;
        };
        order.remove(&(Reverse(bins.free(bin)), bin));
        go(bins, receiver, bin, span, moved);
        order.insert((Reverse(bins.free(bin)), bin));
    }
    bins.free(receiver) >= 0 && bins.all[receiver].finish() < finish
}
