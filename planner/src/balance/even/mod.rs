//! Moves pieces from the slot that finishes last to those that finish first.
//!
//! In: bins that hold all rows. Out: the same rows, spread so that all bins finish together, up to
//! pieces too small to gain from.
//!
//! Of the pieces that a donor could give, the one with the least new bytes per cost moves. Where the
//! smallest piece is too large to gain from, [`exchange`] gives one and takes back another. Every move makes
//! the later of the two earlier, so the number of moves is bounded, and by a count as well.

use std::cmp::Reverse;

mod exchange;

use super::bins::{Bin, Bins};
use super::groups::Span;
use super::pieces::best_piece;
use super::prices::Prices;

/// Part of the level by which the last may finish late.
const WORTH: u64 = 640;
/// Part of the level below which a difference is not worth an exchange, which makes two tasks more.
const WORTH_EXCHANGE: u64 = 560;
/// Receivers among which the exchange with the least bytes is sought.
const EXCHANGE_WITH: usize = 8;

/// Evens out the bins.
pub(super) fn even(bins: &mut Bins<'_>) {
    let prices = Prices::of(bins);
    let most_moves = 16 * bins.all.len() + 64;
    for _ in 0..most_moves {
        let Some(donor) = last_to_finish(bins) else {
            return;
        };
        let finish = bins.all[donor].finish();
        if finish <= bins.level + bins.level / WORTH {
            return;
        }
        let mut receivers: Vec<(u64, usize)> = bins
            .all
            .iter()
            .enumerate()
            .map(|(bin, it)| (it.finish(), bin))
            .filter(|(receiver, _)| *receiver < finish)
            .collect();
        let moved = |&(_, receiver): &(u64, usize)| {
            best_move(bins, &prices, donor, receiver).map(|span| (receiver, span, None))
        };
        // The first to finish nearly always gains, so the others are seldom sorted.
        let best = receivers.iter().min().and_then(moved).or_else(|| {
            receivers.sort_unstable();
            receivers.iter().find_map(moved)
        });
        let best = best.or_else(|| {
            let is_worth_it = finish > bins.level + bins.level / WORTH_EXCHANGE;
            receivers.truncate(if is_worth_it { EXCHANGE_WITH } else { 0 });
            exchange::best(bins, &prices, donor, receivers.iter().map(|(_, bin)| *bin))
        });
        let Some((receiver, span, back)) = best else {
            return;
        };
        bins.take(donor, &span);
        bins.put(receiver, &span);
        if let Some(back) = back {
            bins.take(receiver, &back);
            bins.put(donor, &back);
        }
    }
}

fn last_to_finish(bins: &Bins<'_>) -> Option<usize> {
    let filled = (0..bins.all.len()).filter(|bin| !bins.all[*bin].is_empty());
    filled.max_by_key(|bin| (bins.all[*bin].finish(), Reverse(*bin)))
}

/// The cheapest piece that the donor can give and both gain from.
fn best_move(bins: &Bins<'_>, prices: &Prices, donor: usize, receiver: usize) -> Option<Span> {
    let (from, to) = (&bins.all[donor], &bins.all[receiver]);
    let most = levelling(from, to);
    let wanted = from.left().min(0).unsigned_abs().min(to.left().max(0).unsigned_abs());
    let spans: Vec<Span> = from.spans().collect();
    let piece = |cost| best_piece(bins, prices, (donor, receiver), &spans, cost);
    [wanted.min(most), most].into_iter().find_map(piece).map(|it| it.span)
}

/// The cost that has to move so that the receiver finishes when the donor does then.
fn levelling(from: &Bin<'_>, to: &Bin<'_>) -> u64 {
    let both = u128::from(from.weight()) * u128::from(to.weight());
    let gap = u128::from(from.finish().saturating_sub(to.finish()));
    let cost = gap * both / (100 * (u128::from(from.weight()) + u128::from(to.weight())));
    u64::try_from(cost).unwrap_or(u64::MAX)
}
