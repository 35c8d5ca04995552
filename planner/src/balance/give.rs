//! Cuts what one slot gives to several others from documents of its own.
//!
//! In: a donor, and who gets how much. Out: pieces moved. What is left, less than a tile row a receiver, is for the steps after.
//!
//! All receivers are looked at together, since each piece takes rows that others would have liked: [`runs`] says where all
//! pieces of a document go best. Only where [`fits`] holds.

use std::cmp::Reverse;
use std::ops::Range;

use super::bins::Bins;
use super::groups::Span;
use super::pieces::dearest_tile;
use super::shapes::{Rates, least_cost, runs};
use crate::{Mask, Problem, TILE_ROWS};

/// Maximum documents of a donor that are tried.
const DOCUMENTS: usize = 3;
/// Maximum ends that are tried for the highest piece of a run, to bring its cost close to its amount.
const ENDS: u32 = 12;
/// Tile rows below the first end for each of which one more end is tried.
const AWAY: u32 = 32;
/// Stop within this part of an amount: one in 4,096.
const CLOSE: u64 = 4_096;
/// Work above one part in this many of the level is worth a tile of its own.
const WORTH_TILE: u64 = 4_000;

/// Whether pieces can be cut by shape: documents are causal, heads move together, and neither memory nor reach binds.
pub(super) fn fits(bins: &Bins<'_>) -> bool {
    let documents = bins.problem.layout.documents();
    !bins.problem.heads_may_part()
        && bins.limits().are_none()
        && bins.problem.links.reach_all()
        && documents.iter().all(|it| it.mask == Mask::Causal)
}

/// What a receiver should get, and how much of that is still missing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) receiver: usize,
    pub(super) cost: u64,
}

/// A cost under all heads as a difference of squares of rows (see `shapes.rs`).
pub(super) fn squares(problem: &Problem, cost: u64) -> u64 {
    cost / u64::from(problem.heads.query) * 2
}

/// Gives pieces of the donor's longest documents.
pub(super) fn give(bins: &mut Bins<'_>, rates: Rates, donor: usize, wanted: &mut [Wanted]) {
    wanted.sort_unstable_by_key(|it| (Reverse(it.cost), it.receiver));
    let spans = bins.spans(donor, DOCUMENTS).into_iter();
    let mut lots: Vec<Lot> = spans.map(Lot::of).collect();
    for (taker, it) in wanted.iter().enumerate() {
        let amount = squares(bins.problem, it.cost);
        let least = least_cost(amount, rates);
        let mut best: Option<(u64, usize)> = None;
        for (at, lot) in lots.iter().enumerate() {
            let Some(cost) = lot.cost_with(amount, rates) else {
                continue;
            };
            let more = cost.saturating_sub(lot.cost);
            if best.is_none_or(|(least, _)| more < least) {
                best = Some((more, at));
            }
            if more <= least + least / 64 {
                break;
            }
        }
        if let Some((more, at)) = best {
            lots[at].add(amount, taker, more);
        }
    }
    for lot in lots {
        cut(bins, rates, donor, &lot, wanted);
    }
}

/// A document of a donor, and the receivers of its pieces.
struct Lot {
    span: Span,
    /// Ascending.
    amounts: Vec<u64>,
    takers: Vec<usize>,
    cost: u64,
}

impl Lot {
    fn of(span: Span) -> Self {
        Self { span, amounts: Vec::new(), takers: Vec::new(), cost: 0 }
    }

    /// What all pieces cost with one more that is no larger than the others.
    fn cost_with(&self, amount: u64, rates: Rates) -> Option<u64> {
        let others = self.amounts.iter().copied();
        let amounts: Vec<u64> = std::iter::once(amount).chain(others).collect();
        runs(&amounts, &self.span.rows, rates).map(|(_, cost)| cost)
    }

    fn add(&mut self, amount: u64, taker: usize, cost: u64) {
        self.amounts.insert(0, amount);
        self.takers.insert(0, taker);
        self.cost += cost;
    }
}

/// Moves the pieces of a document, the highest first.
fn cut(bins: &mut Bins<'_>, rates: Rates, donor: usize, lot: &Lot, wanted: &mut [Wanted]) {
    let Lot { span, amounts, takers, cost: _ } = lot;
    let Some((runs, _)) = runs(amounts, &span.rows, rates) else {
        return;
    };
    let mut above = span.rows.end;
    for run in runs.into_iter().rev() {
        above = above.min(run.end);
        // Rows that are left out within a run push all below them further down.
        let mut ends = ENDS.min(above.div_ceil(TILE_ROWS) / AWAY + 1);
        for piece in run.pieces.rev() {
            let it = &mut wanted[takers[piece]];
            let piece = close(bins, &span.with_rows(span.rows.start..above), it.cost, ends);
            if piece.rows.is_empty() {
                continue;
            }
            it.cost -= bins.cost(&piece);
            ends = 1;
            above = piece.rows.start;
            bins.take(donor, &piece);
            bins.put(it.receiver, &piece);
        }
    }
    give_tiles(bins, donor, span.with_rows(span.rows.start..above), takers, wanted);
}

/// The tail of a span, or of its head some tiles below its end, that costs at most `most` and comes closest to it.
fn close(bins: &Bins<'_>, span: &Span, most: u64, ends: u32) -> Span {
    let Range { start, end } = span.rows;
    let mut best = (most, span.with_rows(start..start));
    for tiles in 0..ends {
        let below = end.div_ceil(TILE_ROWS).saturating_sub(tiles) * TILE_ROWS;
        let end = if tiles == 0 { end } else { below };
        if end <= start || best.0 <= most / CLOSE {
            break;
        }
        let tail = bins.tail(&span.with_rows(start..end), most);
        let left = most - bins.cost(&tail);
        if left < best.0 {
            best = (left, tail);
        }
    }
    best.1
}

/// Makes up for what a tile row was too coarse for: a tile below a receiver's piece brings no keys.
fn give_tiles(
    bins: &mut Bins<'_>,
    donor: usize,
    mut rest: Span,
    takers: &[usize],
    wanted: &mut [Wanted],
) {
    let mut takers = takers.to_vec();
    takers.sort_unstable_by_key(|it| (Reverse(wanted[*it].cost), *it));
    for taker in takers {
        let Wanted { receiver, cost } = wanted[taker];
        if !is_worth_a_tile(bins, cost) || rest.rows.is_empty() {
            return;
        }
        let tile = dearest_tile(bins, &rest, cost);
        if bins.cost(&tile) <= cost {
            wanted[taker].cost -= bins.cost(&tile);
            rest.rows.end = tile.rows.start;
            bins.take(donor, &tile);
            bins.put(receiver, &tile);
        }
    }
}

/// Whether a cost is worth one more task.
pub(super) fn is_worth_a_tile(bins: &Bins<'_>, cost: u64) -> bool {
    cost > bins.level / WORTH_TILE
}
