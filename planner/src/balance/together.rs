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
use crate::{DocumentId, TILE_ROWS};

/// Maximum further pieces that make up for the coarseness of tile rows.
const PIECES: usize = 3;
/// A surplus may be exceeded by one part in this many of the level.
const CLOSE: u64 = 4_096;
/// A donor may keep one part in this many of its capacity too much.
const OVER: u64 = 800;

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
        take(bins, &whole, &mut stock, &mut wanted[next], held[next]);
    }
    for it in wanted {
        make_up(bins, donors, &whole, it);
    }
}

/// Rows of the document that one donor gives.
struct Stock {
    donor: usize,
    rows: Range<u32>,
    /// Up to here it holds all rows, and keeps those above `rows`.
    top: u32,
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
        let all = rows_of(bins, donor, document);
        let top = |row: u32| all.iter().map(|it| it.end).find(|it| *it >= row).unwrap_or(row);
        let rows = around(&all, best, squares(bins.problem, cost));
        stock.extend(rows.into_iter().map(|rows| Stock { donor, top: top(rows.end), rows }));
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

/// Lets a receiver take from the top of the stock. Where it holds keys up to there already, it takes what the donor would
/// have kept above instead, so that the donor's keys end lower.
fn take(
    bins: &mut Bins<'_>,
    whole: &Span,
    stock: &mut Vec<Stock>,
    wanted: &mut Wanted,
    mut held: u32,
) {
    while let Some(Stock { donor, rows, top }) = stock.pop() {
        let worth = bins.cost(&whole.with_rows(rows.clone()));
        let end = if held >= top { top } else { rows.end };
        // Takes a tile row too much rather than too little: where tile rows are dear, a small rest
        // is hard to place.
        let tile = whole.with_rows(end.saturating_sub(TILE_ROWS).max(rows.start)..end);
        let over = if end == rows.end { 0 } else { bins.cost(&tile) };
        let cut = bins.tail(&whole.with_rows(rows.start..end), wanted.cost.min(worth + over));
        let is_enough = wanted.cost < worth;
        if !cut.rows.is_empty() {
            held = held.max(cut.rows.end);
            let cost = bins.cost(&cut);
            wanted.cost -= cost;
            bins.take(donor, &cut);
            bins.put(wanted.receiver, &cut);
            let rest =
                bins.head(&whole.with_rows(rows.start..cut.rows.start), worth.saturating_sub(cost));
            if is_enough {
                let last = (rest.rows.end + TILE_ROWS).min(cut.rows.start);
                let top = if end == top { cut.rows.start } else { last };
                stock.push(Stock { donor, rows: rows.start..last, top });
                stock.retain(|it| !it.rows.is_empty());
            }
        } else if is_enough {
            stock.push(Stock { donor, rows, top });
        }
        if is_enough {
            return;
        }
    }
}

/// Compensates for the rounding to tile rows: gives the receiver rows below its last one, whose
/// keys it holds already. They come from the donor with the largest surplus.
fn make_up(bins: &mut Bins<'_>, donors: &[usize], whole: &Span, wanted: &mut Wanted) {
    for _ in 0..PIECES {
        if !is_worth_a_tile(bins, wanted.cost) {
            return;
        }
        let end = held(bins, &bins.all[wanted.receiver], whole);
        let mut best: Option<(u64, usize, Span)> = None;
        for &donor in donors {
            let surplus = surplus(bins, donor);
            if !is_worth_a_tile(bins, surplus) {
                continue;
            }
            let most = wanted.cost.min(surplus + bins.level / CLOSE);
            for rows in rows_of(bins, donor, whole.document) {
                if rows.start >= end {
                    break;
                }
                let span = whole.with_rows(rows.start..rows.end.min(end));
                let tail = bins.tail(&span, most);
                let piece =
                    if tail.rows.is_empty() { dearest_tile(bins, &span, most) } else { tail };
                let cost = bins.cost(&piece);
                if cost <= most && best.as_ref().is_none_or(|it| it.0 < cost) {
                    best = Some((cost, donor, piece));
                }
            }
        }
        let Some((cost, donor, piece)) = best else {
            return;
        };
        wanted.cost -= cost;
        bins.take(donor, &piece);
        bins.put(wanted.receiver, &piece);
    }
}
