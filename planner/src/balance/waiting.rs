//! Spans that wait for a bin, and bins by what they have left.
//!
//! In: spans and bins. Out: the dearest span, the bin with most capacity. [`super::fill`] puts the one into the other.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::ops::Bound;

use super::bins::Bins;
use super::groups::Span;
use crate::DocumentId;

/// Cost, document, rows and heads of a span: of equally dear ones the first comes first.
type Waiting = (u64, Reverse<DocumentId>, Reverse<u32>, u32, Reverse<u16>, u16);

/// Spans that wait, the dearest first.
#[derive(Default)]
pub(super) struct Queue(BinaryHeap<Waiting>);

impl Queue {
    pub(super) fn push(&mut self, bins: &Bins<'_>, span: Span) {
        if !span.rows.is_empty() && !span.heads.is_empty() {
            let cost = bins.cost(&span);
            let Span { document, heads, rows } = span;
            let rows = (Reverse(rows.start), rows.end);
            self.0.push((cost, Reverse(document), rows.0, rows.1, Reverse(heads.start), heads.end));
        }
    }

    pub(super) fn first_cost(&self) -> Option<u64> {
        self.0.peek().map(|it| it.0)
    }

    pub(super) fn pop(&mut self) -> Option<Span> {
        let (_, Reverse(document), Reverse(start), end, Reverse(first), last) = self.0.pop()?;
        Some(Span { document, heads: first..last, rows: start..end })
    }
}

/// A bin with the capacity that it has left.
pub(super) type Place = (Reverse<i64>, usize);

/// Bins by capacity left, most first.
pub(super) struct Order(pub(super) BTreeSet<Place>);

impl Order {
    pub(super) fn new(bins: &Bins<'_>) -> Self {
        Self(bins.all.iter().enumerate().map(|(bin, it)| (Reverse(it.left()), bin)).collect())
    }

    /// The bin behind another; the first with most capacity left. Those without any are left out.
    pub(super) fn next(&self, last: Option<Place>) -> Option<Place> {
        let from = last.map_or(Bound::Unbounded, Bound::Excluded);
        self.0.range((from, Bound::Unbounded)).next().copied().filter(|it| it.0.0 > 0)
    }

    pub(super) fn put(&mut self, bins: &mut Bins<'_>, bin: usize, span: &Span) {
        self.0.remove(&(Reverse(bins.all[bin].left()), bin));
        let Span { document, heads, rows } = span;
        let whole = 0..bins.problem.document(*document).rows;
        let is_whole = *rows == whole && *heads == bins.problem.all_heads();
        if !is_whole || !bins.keep_whole(bin, *document) {
            bins.put(bin, span);
        }
        self.0.insert((Reverse(bins.all[bin].left()), bin));
    }
}
