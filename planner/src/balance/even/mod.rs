//! Moves pieces from the slot that finishes last to those that finish first.
//!
//! In: bins that hold all rows. Out: the same rows, spread so that all bins finish together, up to
//! pieces too small to gain from.
//!
//! Of the pieces that a donor could give and that leave it no earlier than the receiver, the one with the least new bytes
//! per cost moves. Where there is none, [`exchange`] gives one and takes back another. Where that gains nothing either, a
//! piece moves after which the receiver finishes later than the donor, but earlier than the donor did. Every move makes
//! the later of the two earlier, so the number of moves is bounded, and by a count as well.

use std::cmp::Reverse;
use std::collections::BTreeSet;

mod exchange;

use super::bin::Bin;
use super::bins::Bins;
use super::groups::Span;
use super::pieces::{Offer, Scored, best_piece};
use super::prices::Prices;

/// Maximum receivers that are compared for an exchange, of which the one with the fewest bytes is taken, and that are tried for a
/// coarse piece.
const EXCHANGE_WITH: usize = 8;
/// Maximum receivers that are compared for a piece where distances have prices; the nearest is
/// taken.
const NEAR: usize = 8;
/// Maximum documents of a donor that are tried.
const DOCUMENTS: usize = 8;
/// Maximum receivers that are tried where memory binds: most are full, and trying all of them would take long.
const LIMITED: usize = 16;
/// Maximum (span, number of heads) pairs, the cheapest estimates, whose bytes are counted exactly;
/// see [`best_piece`].
const TRIES: usize = 4;

/// When the last bin may finish.
pub(super) fn latest(bins: &Bins<'_>) -> u64 {
    bins.level + bins.tolerated
}

/// Evens out the bins.
pub(super) fn even(bins: &mut Bins<'_>) {
    let prices = Prices::of(bins);
    let mut order: BTreeSet<(u64, usize)> =
        bins.all.iter().enumerate().map(|(bin, it)| (it.finish(), bin)).collect();
    for _ in 0..16 * bins.all.len() + 64 {
        let Some((finish, donor)) = last_to_finish(bins, &order) else {
            return;
        };
        if finish <= latest(bins) {
            return;
        }
        let all = || best(bins, &prices, &order, (finish, donor), usize::MAX);
        let best = best(bins, &prices, &order, (finish, donor), DOCUMENTS);
        let best = if bins.limits().are_none() { best.or_else(all) } else { best };
        let best = best.or_else(|| coarse(bins, &prices, &order, (finish, donor)));
        let Some((receiver, span, back)) = best else {
            return;
        };
        for bin in [donor, receiver] {
            order.remove(&(bins.all[bin].finish(), bin));
        }
        bins.take(donor, &span);
        bins.put(receiver, &span);
        if let Some(back) = back {
            bins.take(receiver, &back);
            bins.put(donor, &back);
        }
        order.extend([donor, receiver].map(|bin| (bins.all[bin].finish(), bin)));
    }
}

/// The best exchange for one of the `most` furthest documents of a donor: the receiver, the piece
/// it gets, and the piece it gives back.
fn best(
    bins: &Bins<'_>,
    prices: &Prices,
    order: &BTreeSet<(u64, usize)>,
    (finish, donor): (u64, usize),
    most: usize,
) -> Option<(usize, Span, Option<Span>)> {
    let near = if bins.problem.links.are_equal() { 1 } else { NEAR };
    let spans = bins.spans(donor, most);
    let asked = if bins.limits().are_none() { usize::MAX } else { LIMITED };
    let is_full = |bin: usize| !bins.limits().are_none() && bins.free(bin) <= 0;
    let early = order.iter().take_while(|it| it.0 < finish).map(|it| it.1);
    let receivers = || early.clone().filter(|bin| !is_full(*bin)).take(asked);
    let moved = |receiver| Some((receiver, best_move(bins, prices, donor, receiver, &spans)?));
    // The first to finish nearly always gains, so the others are seldom asked.
    let first = receivers().take(near).filter_map(moved).min_by(|a, b| a.1.order(&b.1));
    let best = first.or_else(|| receivers().skip(near).find_map(moved));
    best.map(|(receiver, it)| (receiver, it.span, None))
        .or_else(|| exchange::best(bins, prices, (donor, &spans), receivers().take(EXCHANGE_WITH)))
}

/// A piece that is more than levels donor and receiver: the receiver, one of those with most room, finishes earlier with it than the
/// donor did.
fn coarse(
    bins: &Bins<'_>,
    prices: &Prices,
    order: &BTreeSet<(u64, usize)>,
    (finish, donor): (u64, usize),
) -> Option<(usize, Span, Option<Span>)> {
    let early = order.iter().take_while(|it| it.0 < finish).map(|it| it.1);
    let room = |bin: usize| {
        let it = &bins.all[bin];
        it.most_by(finish - 1).saturating_sub(it.load)
    };
    let mut receivers: Vec<_> = early.map(|bin| (Reverse(room(bin)), bin)).collect();
    receivers.sort_unstable();
    let spans = bins.spans(donor, DOCUMENTS);
    receivers.into_iter().take(EXCHANGE_WITH).find_map(|(Reverse(wanted), receiver)| {
        let offer = [Offer { donor, spans: &spans, wanted }];
        let (_, it) = best_piece(bins, prices, &offer, receiver, TRIES)?;
        Some((receiver, it.span, None))
    })
}

/// When the last bin with work finishes, and which it is.
fn last_to_finish(bins: &Bins<'_>, order: &BTreeSet<(u64, usize)>) -> Option<(u64, usize)> {
    let (finish, _) = order.iter().rev().find(|it| !bins.all[it.1].is_empty())?;
    order.range((*finish, 0)..).find(|it| !bins.all[it.1].is_empty()).copied()
}

/// The cheapest piece that the donor can give and both gain from.
fn best_move(
    bins: &Bins<'_>,
    prices: &Prices,
    donor: usize,
    receiver: usize,
    spans: &[Span],
) -> Option<Scored> {
    let (from, to) = (&bins.all[donor], &bins.all[receiver]);
    let most = levelling(from, to);
    let wanted = from.left().min(0).unsigned_abs().min(to.left().max(0).unsigned_abs());
    let piece = |wanted| {
        let offer = [Offer { donor, spans, wanted }];
        best_piece(bins, prices, &offer, receiver, TRIES).map(|(_, it)| it)
    };
    [wanted.min(most), most].into_iter().find_map(piece)
}

/// The cost that has to move so that the receiver finishes when the donor does then.
pub(super) fn levelling(from: &Bin<'_>, to: &Bin<'_>) -> u64 {
    let both = u128::from(from.weight()) * u128::from(to.weight());
    let gap = u128::from(from.finish().saturating_sub(to.finish()));
    let cost = gap * both / (100 * (u128::from(from.weight()) + u128::from(to.weight())));
    u64::try_from(cost).unwrap_or(u64::MAX)
}
