//! What one document needs at least, however it is cut.
//!
//! In: a problem and the most that a slot can do. Out: bytes of a document that must travel, and what each of its rows
//! travels at least.
//!
//! **Why it holds.** Take a causal document of n rows. The work above row x is done by (slot, KV head) pairs whose rows
//! reach beyond x, so that they need keys x, and none does more than a slot can: with W(x) that work under one head and c
//! the most of a slot, at least `r(x) = max(1, ⌈W(x) / c⌉)` pairs a head need key row x: pairs are whole. So all pairs
//! together need `∫ r(x) dx` keys a head, and every row of queries once. The j-th pair more than the first needs the rows
//! where `W(x) > j · c`. What lies at home already comes off: a pair of a slot with h
//! rows of the document at its rank saves its keys and queries there, at most `(q + k) · h`, as much as the keys of the
//! first `x₀ = (1 + q/k) · h` rows. So keys below x₀ are let go; and a pair that ends so early that it saves more than it
//! asks for has that taken off. Or, where a document needs many more slots than stand at its ranks: a head has one pair at
//! each of those slots and no other saves anything, so that the sum of `(q + k) · h` over those slots is taken off. Of both the
//! larger bound holds.
//!
//! Rows are counted as in [`super`]: half a row and the overhead of a tile further on.

use std::collections::BTreeMap;
use std::ops::Range;

use super::ROUNDING;
use crate::{DocumentId, Mask, Problem};

/// Maximum pairs a head that are counted: more than there can be slots.
const MOST_PAIRS: u32 = 1 << 15;
/// Maximum pairs a head that are counted where bundles are limited: a document that needs more
/// counts as one that needs this many.
const MORE_PAIRS: u32 = 64;

/// How many pairs need a key row at least, as a function of the row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cover {
    /// Pairs a head at a row are `by · (last² − row²)`, rounded up, and at least one.
    by: f64,
    last: f64,
    shift: f64,
}

impl Cover {
    /// The cover of a document. `most` is the most work that a slot can do; rows are counted
    /// `shift` further on.
    pub(super) fn of(problem: &Problem, document: DocumentId, most: f64, shift: f64) -> Self {
        let whole = problem.document(document);
        let heads = if problem.heads_may_part() { 1..2 } else { problem.all_heads() };
        let query_heads = problem.heads.query_count(&heads) as f64;
        let by = if whole.mask == Mask::Causal { query_heads / 2.0 / most } else { 0.0 };
        let by = by.max(f64::MIN_POSITIVE);
        Self { by, last: f64::from(whole.rows) + shift, shift }
    }

    /// The sum over some rows of the pairs a head beyond `own` that need them.
    pub(super) fn sum(&self, rows: &Range<f64>, own: u32) -> f64 {
        let Range { start, end } = *rows;
        let mut sum = 0.0;
        for pair in own..own.saturating_add(MOST_PAIRS) {
            let needed = if pair == 0 { end } else { self.end_of(pair).min(end) };
            if needed <= start {
                break;
            }
            sum += needed - start;
        }
        sum
    }

    /// The row up to which each row needs more than `pairs` pairs.
    fn end_of(&self, pairs: u32) -> f64 {
        let square = self.last * self.last - f64::from(pairs) * (1.0 + ROUNDING) / self.by;
        square.max(0.0).sqrt() - self.shift
    }
}

/// Bytes that a bundle of a document may have, and what a query row and a key row of it need.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    pub(super) bundle: f64,
    pub(super) row: f64,
    pub(super) key: f64,
}

impl Limit {
    /// The row up to which each row needs more than `pairs` pairs, in a document of `rows` rows. The
    /// work above row x is in bundles that hold keys `[0, x)`; one of them has the last row and so
    /// holds all keys. So j bundles suffice only where
    /// `(rows - x) * row + rows * key + (j - 1) * x * key` is at most j times the bytes that a bundle
    /// may have.
    fn end_of(&self, mask: Mask, rows: f64, pairs: u32) -> f64 {
        let Self { bundle, row, key } = *self;
        let left = row - f64::from(pairs.saturating_sub(1)) * key;
        let pairs = f64::from(pairs) * (1.0 + ROUNDING);
        match mask {
            Mask::Causal if left > 0.0 => {
                ((rows * (row + key) - pairs * bundle) / left).clamp(0.0, rows)
            }
            // Every bundle holds all keys.
            Mask::Full if rows * row > pairs * (bundle - key * rows) => rows,
            Mask::Causal | Mask::Full | Mask::Window { .. } => 0.0,
        }
    }
}

/// Keys a head that all pairs of a document hold more since their bundles are limited.
pub(super) fn more_keys(cover: &Cover, document: crate::Document, limit: Limit) -> f64 {
    let rows = f64::from(document.rows);
    let mut more = 0.0;
    for pair in 1..MORE_PAIRS {
        let limited = limit.end_of(document.mask, rows, pair);
        if limited <= 0.0 {
            break;
        }
        more += (limited - cover.end_of(pair).clamp(0.0, rows)).max(0.0);
    }
    more
}

/// Bytes of a document under one KV head that travel at least, with `query` and `key` bytes a row.
pub(super) fn bytes(
    problem: &Problem,
    slots_at: &[u32],
    document: DocumentId,
    cover: &Cover,
    (query, key): (f64, f64),
) -> f64 {
    let whole = problem.document(document);
    let pieces = problem.layout.pieces_of_document(document);
    if whole.mask != Mask::Causal {
        // Every row that lies at no slot's place goes to one.
        let away = pieces.iter().filter(|it| slots_at[it.rank.0 as usize] == 0);
        let rows: f64 = away.map(|it| f64::from(it.rows.end - it.rows.start)).sum();
        return rows * (query + key);
    }
    let (mut most_own, mut early, mut saved_by_all) = (0.0_f64, 0.0, 0.0);
    let mut at_rank: Vec<(u32, f64, f64)> = Vec::new();
    let mut index: BTreeMap<u32, usize> = BTreeMap::new();
    for piece in pieces.iter().filter(|it| slots_at[it.rank.0 as usize] > 0) {
        let rows = f64::from(piece.rows.end - piece.rows.start);
        let end = f64::from(piece.rows.end);
        let at = *index.entry(piece.rank.0).or_insert_with(|| {
            at_rank.push((piece.rank.0, 0.0, 0.0));
            at_rank.len() - 1
        });
        let (_, own, saved) = &mut at_rank[at];
        *own += rows;
        *saved = saved.max((query + key) * *own - key * end);
    }
    let rows = f64::from(whole.rows);
    let by_few = query * rows + key * cover.sum(&(0.0..rows), 0);
    if at_rank.is_empty() {
        return by_few.max(0.0);
    }
    for (rank, own, saved) in at_rank {
        most_own = most_own.max(own);
        early += saved * f64::from(slots_at[rank as usize]);
        saved_by_all += (query + key) * own * f64::from(slots_at[rank as usize]);
    }
    let first = ((1.0 + query / key) * most_own).min(rows);
    let by_each = query * rows + key * cover.sum(&(first..rows), 0) - early;
    by_each.max(by_few - saved_by_all).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_summed_as_row_by_row() {
        let cover = Cover { by: 3e-6, last: 1_000.5, shift: 0.5 };
        for own in [0, 1, 2] {
            for (start, end) in [(0, 1_000), (0, 200), (300, 900), (950, 1_000)] {
                // Pairs that reach beyond a row, whole ones.
                let of_row = |row: u32| {
                    let row = f64::from(row) + 0.5;
                    let pairs = (3e-6_f64 * (1_000.5 * 1_000.5 - row * row)).ceil();
                    (pairs.max(1.0) - f64::from(own)).max(0.0)
                };
                let by_row: f64 = (start..end).map(of_row).sum();
                let sum = cover.sum(&(f64::from(start)..f64::from(end)), own);
                assert!(
                    sum <= by_row + 1e-6 && by_row < sum + 3.0,
                    "{sum} {by_row} of {start}..{end}, {own}"
                );
            }
        }
    }
}
