//! Cuts what several slots give to others from one document that all of them hold.
//!
//! In: donors, and who gets how much. Out: pieces moved. What is left is for the steps after.
//!
//! Of each donor those rows go that are cheapest for receivers of the average amount, [`around`] the row where such a piece is
//! best. Receivers take them in turn from the highest down, so that each holds one stretch: first those that hold keys up to there already, then
//! those that get most. Only where [`super::give::fits`] holds.

use std::ops::Range;

use super::bins::Bins;
use super::give::{Wanted, is_worth_a_tile, squares};
use super::groups::Span;
use super::pieces::{dearest_tile, held};
use super::shapes::{Rates, around};
use crate::DocumentId;

/// Part of its capacity that a donor may keep too much.
const OVER: u64 = 1_150;

/// Gives pieces of the document that reaches furthest at the first donor.
pub(super) fn give_together(
    bins: &mut Bins<'_>,
    rates: Rates,
    donors: &[usize],
    wanted: &mut [Wanted],
) {
    let Some(document) = donors.first().and_then(|it| bins.furthest(*it)) else {
        return;
    };
    let whole = Span {
        document,
        heads: bins.problem.all_heads(),
        rows: 0..bins.problem.document(document).rows,
    };
    let mut stock = stock(bins, rates, donors, wanted, document);
    let held: Vec<u32> =
        wanted.iter().map(|it| held(bins, &bins.all[it.receiver], &whole)).collect();
    let mut waiting: Vec<usize> = (0..wanted.len()).collect();
    waiting.sort_unstable_by_key(|it| (wanted[*it].cost, *it));
    while let Some(top) = stock.last().map(|it| it.rows.end) {
        let holder = waiting.iter().rposition(|it| held[*it] >= top);
        let Some(next) = holder.map(|it| waiting.remove(it)).or_else(|| waiting.pop()) else {
            break;
        };
        take(bins, &whole, &mut stock, &mut wanted[next]);
    }
    for it in wanted.iter().filter(|it| is_worth_a_tile(bins, it.cost)).copied().collect::<Vec<_>>()
    {
        give_tile(bins, donors, &whole, it);
    }
}

/// Rows of the document that a donor gives.
struct Stock {
    donor: usize,
    rows: Range<u32>,
}

/// What each donor gives, in row order.
fn stock(
    bins: &Bins<'_>,
    rates: Rates,
    donors: &[usize],
    wanted: &[Wanted],
    document: DocumentId,
) -> Vec<Stock> {
    let all: u64 = wanted.iter().map(|it| it.cost).sum();
    let surpluses: u64 = donors.iter().map(|it| surplus(bins, *it)).sum();
    let best = rates.best_row(squares(bins.problem, all / wanted.len().max(1) as u64));
    let mut stock: Vec<Stock> = Vec::new();
    for &donor in donors {
        let share = u128::from(surplus(bins, donor)) * u128::from(all.min(surpluses));
        let cost = u64::try_from(share / u128::from(surpluses.max(1))).unwrap_or(u64::MAX);
        let rows = rows_of(bins, donor, document);
        let rows = around(&rows, best, squares(bins.problem, cost));
        stock.extend(rows.into_iter().map(|rows| Stock { donor, rows }));
    }
    stock.sort_unstable_by_key(|it| it.rows.start);
    stock
}

fn surplus(bins: &Bins<'_>, donor: usize) -> u64 {
    let it = &bins.all[donor];
    u64::try_from(-it.left() - (it.capacity() / OVER) as i64).unwrap_or(0)
}

fn rows_of(bins: &Bins<'_>, donor: usize, document: DocumentId) -> Vec<Range<u32>> {
    let groups = bins.groups_of(&bins.all[donor], document);
    groups.iter().flat_map(|it| it.rows.iter().cloned()).collect()
}

/// Lets a receiver take from the top of the stock.
fn take(bins: &mut Bins<'_>, whole: &Span, stock: &mut Vec<Stock>, wanted: &mut Wanted) {
    while let Some(Stock { donor, rows }) = stock.pop() {
        let cut = bins.tail(&whole.with_rows(rows.clone()), wanted.cost);
        if !cut.rows.is_empty() {
            wanted.cost -= bins.cost(&cut);
            bins.take(donor, &cut);
            bins.put(wanted.receiver, &cut);
        }
        if cut.rows.start > rows.start {
            stock.push(Stock { donor, rows: rows.start..cut.rows.start });
            return;
        }
    }
}

/// Makes up for what a tile row was too coarse for: a tile of the donor with most surplus, below the receiver's last row.
fn give_tile(bins: &mut Bins<'_>, donors: &[usize], whole: &Span, it: Wanted) {
    let end = held(bins, &bins.all[it.receiver], whole);
    let Some(donor) = donors.iter().copied().max_by_key(|it| (surplus(bins, *it), *it)) else {
        return;
    };
    let tiles = rows_of(bins, donor, whole.document).into_iter().filter(|rows| rows.start < end);
    let tiles = tiles
        .map(|rows| dearest_tile(bins, &whole.with_rows(rows.start..rows.end.min(end)), it.cost));
    let fitting = tiles.map(|tile| (bins.cost(&tile), tile)).filter(|tile| tile.0 <= it.cost);
    if let Some((_, tile)) = fitting.max_by_key(|tile| tile.0) {
        bins.take(donor, &tile);
        bins.put(it.receiver, &tile);
    }
}
