//! Moves pieces from the slot that finishes last to those that finish first.
//!
//! In: bins that hold all rows. Out: the same rows, spread so that all bins finish together, up to
//! pieces too small to gain from.
//!
//! Of the pieces that a donor could give, the one with the least new bytes per cost moves. For a
//! causal document the best piece is seldom its tail: it may end where queries and keys cost the
//! same, at `y = sqrt(2 · pairs · price of a query row / price of a key row)`, or inside the prefix
//! that the receiver holds already. Where the smallest piece is too large to gain from, [`exchange`] gives one
//! and takes back another. Every move makes the later of the two earlier, so the number of
//! moves is bounded, and by a count as well.

use std::cmp::Reverse;
use std::ops::Range;

mod exchange;

use super::bins::{Bin, Bins, Span, insert, remove};
use crate::memory::bytes;
use crate::{DocumentId, RankId, TILE_ROWS};

/// Part of the level below which a difference is left alone.
const WORTH: u64 = 8_192;
/// Part of the level below which a difference is not worth an exchange, which makes two tasks more.
const WORTH_EXCHANGE: u64 = 1_024;
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

/// Bytes that a row costs on the wire, forward and backward together.
struct Prices {
    query: i128,
    key: i128,
}

impl Prices {
    fn of(bins: &Bins<'_>) -> Self {
        let price = |rows, keys| {
            let it = bytes(bins.problem, &bins.problem.all_heads(), rows, keys);
            i128::from(it.forward) + i128::from(it.backward)
        };
        Self { query: price(1, 0), key: price(0, 1) }
    }
}

/// The cheapest piece that the donor can give and both gain from.
fn best_move(bins: &Bins<'_>, prices: &Prices, donor: usize, receiver: usize) -> Option<Span> {
    let (from, to) = (&bins.all[donor], &bins.all[receiver]);
    let most = levelling(from, to);
    let wanted = from.left().min(0).unsigned_abs().min(to.left().max(0).unsigned_abs());
    [wanted.min(most), most].into_iter().find_map(|cost| {
        let candidates = from.spans().flat_map(|span| candidates(bins, prices, to, &span, cost));
        candidates
            .filter(|span| !span.rows.is_empty() && bins.has_room(receiver, span))
            .map(|span| Scored::of(bins, prices, from, to, span, cost))
            .reduce(|best, it| if it.is_better_than(&best) { it } else { best })
            .map(|it| it.span)
    })
}

/// The cost that has to move so that the receiver finishes when the donor does then.
fn levelling(from: &Bin<'_>, to: &Bin<'_>) -> u64 {
    let both = u128::from(from.weight()) * u128::from(to.weight());
    let gap = u128::from(from.finish().saturating_sub(to.finish()));
    let cost = gap * both / (100 * (u128::from(from.weight()) + u128::from(to.weight())));
    u64::try_from(cost).unwrap_or(u64::MAX)
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
        bins.tail(&Span { rows: start..row, document: span.document }, most)
    };
    let pairs = i128::from(most / u64::from(bins.problem.heads.query));
    let cheapest = u128::try_from(2 * pairs * prices.query / prices.key.max(1)).unwrap_or(0);
    let cheapest = u32::try_from(cheapest.isqrt()).unwrap_or(u32::MAX >> 1).min(end);
    let held = bins.keys(span.document, to.rows_of(span.document)).end.min(end);
    let mut pieces = vec![ends_at(end), ends_at(cheapest), bins.head(span, most)];
    if held > start {
        pieces.push(ends_at(held));
    }
    pieces
}

/// A piece with what it would cost to move.
struct Scored {
    span: Span,
    moved: i128,
    bytes: i128,
    /// Whether it is less than half of what should move.
    is_small: bool,
}

impl Scored {
    fn of(
        bins: &Bins<'_>,
        prices: &Prices,
        from: &Bin<'_>,
        to: &Bin<'_>,
        span: Span,
        wanted: u64,
    ) -> Self {
        let moved = bins.cost(&span);
        let before =
            pulled(bins, prices, from, &span, |_| {}) + pulled(bins, prices, to, &span, |_| {});
        let after = pulled(bins, prices, from, &span, |rows| remove(rows, &span.rows))
            + pulled(bins, prices, to, &span, |rows| insert(rows, span.rows.clone()));
        // Every piece is a task more: as dear as one tile.
        let task = i128::from(TILE_ROWS) * (prices.query + prices.key);
        let is_small = moved < wanted / 2;
        Self { span, moved: moved.max(1).into(), bytes: after - before + task, is_small }
    }

    /// Fewer bytes per cost; the first found wins a tie.
    fn is_better_than(&self, other: &Self) -> bool {
        if self.is_small != other.is_small {
            return other.is_small;
        }
        self.bytes * other.moved < other.bytes * self.moved
    }
}

/// Bytes that are pulled more when a span moves.
fn bytes_of_move(
    bins: &Bins<'_>,
    prices: &Prices,
    from: &Bin<'_>,
    to: &Bin<'_>,
    span: &Span,
) -> i128 {
    let before = pulled(bins, prices, from, span, |_| {}) + pulled(bins, prices, to, span, |_| {});
    let after = pulled(bins, prices, from, span, |rows| remove(rows, &span.rows))
        + pulled(bins, prices, to, span, |rows| insert(rows, span.rows.clone()));
    // Every piece is a task more: as dear as one tile.
    after - before + i128::from(TILE_ROWS) * (prices.query + prices.key)
}

/// Bytes that a bin pulls for a span's document after a change of its rows.
fn pulled(
    bins: &Bins<'_>,
    prices: &Prices,
    bin: &Bin<'_>,
    span: &Span,
    change: impl FnOnce(&mut Vec<Range<u32>>),
) -> i128 {
    let mut rows = bin.rows_of(span.document).to_vec();
    change(&mut rows);
    let away = |it: &Range<u32>| away(bins, bin.home(), span.document, it);
    let queries: i128 = rows.iter().map(away).sum();
    queries * prices.query + away(&bins.keys(span.document, &rows)) * prices.key
}

/// How many rows are not at a rank.
fn away(bins: &Bins<'_>, home: Option<RankId>, document: DocumentId, rows: &Range<u32>) -> i128 {
    let here = home.map_or(0, |rank| bins.problem.layout.rows_at(rank, document, rows));
    rows.len() as i128 - i128::from(here)
}
