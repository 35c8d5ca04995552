//! Tiles of a small problem under heads that stay together, each an item that moves alone.
//!
//! In: bins. Out: what each item costs and needs in each of them, and what no way to spread them is below.

use std::ops::Range;

use super::below::Below;
use super::bins::Bins;
use super::floors::Floors;
use super::groups::Span;
use super::prices::Prices;
use crate::{DocumentId, TILE_ROWS};

/// Bytes of an item, and of the keys of a column, are below this: those of all items, and their price of lateness, fit 63 bits.
const MOST_BYTES: i64 = i64::MAX >> 20;

/// A tile under heads that stay together, and what it costs in each bin.
pub(super) struct Item {
    pub(super) span: Span,
    pub(super) cost: u64,
    /// Bytes of its query rows, by bin.
    pub(super) queries: Vec<i64>,
    /// Bytes of the keys before those that it needs, and up to their end, by bin.
    before: Vec<i64>,
    until: Vec<i64>,
}

/// All tiles; those of a document and its heads, a **column**, side by side from the first on.
pub(super) struct Items {
    pub(super) all: Vec<Item>,
    /// By item: the first of its column.
    pub(super) first: Vec<usize>,
    pub(super) column: Vec<usize>,
    /// Draws an item, and one of the bins that another one leaves.
    pub(super) any: Below,
    pub(super) other: Below,
}

impl Items {
    /// The items of bins; none if their bytes are more than 64 bits can sum.
    pub(super) fn of(bins: &Bins<'_>) -> Option<Self> {
        let problem = bins.problem;
        let prices = Prices::of(bins);
        let bytes = |it: i128| i64::try_from(it).ok().filter(|it| *it < MOST_BYTES);
        let (mut all, mut firsts, mut column, mut next) = (Vec::new(), Vec::new(), Vec::new(), 0);
        let parts = if problem.heads_may_part() { 1 } else { problem.heads.kv };
        for (document, it) in (0..).map(DocumentId).zip(problem.layout.documents()) {
            for head in problem.all_heads().step_by(parts.into()) {
                let first = all.len();
                for start in (0..it.rows).step_by(TILE_ROWS as usize) {
                    let rows = start..it.rows.min(start + TILE_ROWS);
                    let needed = it.mask.keys(it.rows, rows.clone());
                    let span = Span { document, heads: head..head + parts, rows };
                    let none = span.with_rows(0..0);
                    let of = |span: &Span, keys: Range<u32>| -> Option<Vec<i64>> {
                        let all = bins.all.iter();
                        all.map(|bin| bytes(prices.of_rows(bins, bin, span, &keys))).collect()
                    };
                    all.push(Item {
                        cost: bins.cost(&span),
                        queries: of(&span, 0..0)?,
                        before: of(&none, 0..needed.start)?,
                        until: of(&none, 0..needed.end)?,
                        span,
                    });
                    firsts.push(first);
                    column.push(next);
                }
                next += 1;
            }
        }
        let (any, other) = (Below::new(all.len()), Below::new(bins.all.len() - 1));
        Some(Self { all, first: firsts, column, any, other })
    }

    /// What no state is below. The query rows of every item travel somewhere, and who has the last tile of a column pulls the keys
    /// that it needs.
    pub(super) fn floors(&self, bins: &Bins<'_>) -> Floors {
        let last = |at: &usize| self.column.get(at + 1) != Some(&self.column[*at]);
        let of_item = |at: usize| {
            let it = &self.all[at];
            let keys = it.until.iter().zip(&it.before).map(|(until, before)| until - before);
            let keys = keys.min().filter(|_| last(&at)).unwrap_or(0);
            it.queries.iter().min().copied().unwrap_or(0) + keys
        };
        let costs = self.all.iter().map(|it| it.cost).collect();
        Floors::of(bins, costs, (0..self.all.len()).map(of_item).sum())
    }

    /// Bytes of the keys that a bin needs for some tiles of a column.
    pub(super) fn keys(&self, first: usize, tiles: u32, bin: usize) -> i64 {
        if tiles == 0 {
            return 0;
        }
        let low = first + tiles.trailing_zeros() as usize;
        let high = first + tiles.ilog2() as usize;
        let (before, until) =
            (|at: usize| self.all[at].before[bin], |at: usize| self.all[at].until[bin]);
        if before(high) <= until(low) {
            // No two tiles have keys between those of both.
            return until(high) - before(low);
        }
        let (mut bytes, mut end) = (0, before(low));
        for at in (low..=high).filter(|at| tiles >> (at - first) & 1 == 1) {
            bytes += until(at) - before(at).max(end);
            end = until(at);
        }
        bytes
    }
}
