//! Spans that wait for a bin, and bins by what they have left.
//!
//! In: spans and bins. Out: the dearest span, the bin with most capacity. [`super::fill`] puts the one into the other.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::ops::Bound;

use super::bins::Bins;
use super::groups::Span;
use crate::DocumentId;

/// A span, with what a look at its document says of it. Spans come in the order of their cost, and documents lie in another: each
/// look is one far away.
pub(super) struct Priced {
    pub(super) cost: u64,
    pub(super) span: Span,
    /// Whether it is all of its document.
    is_whole: bool,
}

impl Priced {
    pub(super) fn of(bins: &Bins<'_>, span: Span) -> Self {
        let all = 0..bins.problem.document(span.document).rows;
        let is_whole = span.rows == all && span.heads == bins.problem.all_heads();
        Self { cost: bins.cost(&span), span, is_whole }
    }
}

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

/// Bins that are sorted in one list; more of them in a tree. A list of this many is moved in the time in which a tree finds two
/// places.
const LISTED_SLOTS: usize = 1_024;

/// Bins by capacity left, most first.
pub(super) enum Order {
    List(Vec<Place>),
    Tree(BTreeSet<Place>),
}

impl Order {
    pub(super) fn new(bins: &Bins<'_>) -> Self {
        let places = bins.all.iter().enumerate().map(|(bin, it)| (Reverse(it.left()), bin));
        if bins.all.len() > LISTED_SLOTS {
            return Self::Tree(places.collect());
        }
        let mut list: Vec<_> = places.collect();
        list.sort_unstable();
        Self::List(list)
    }

    /// The bin behind another; the first with most capacity left. Those without any are left out.
    pub(super) fn next(&self, last: Option<Place>) -> Option<Place> {
        let next = match self {
            Self::List(list) => {
                list.get(last.map_or(0, |last| list.partition_point(|it| *it <= last)))
            }
            Self::Tree(tree) => {
                let from = last.map_or(Bound::Unbounded, Bound::Excluded);
                tree.range((from, Bound::Unbounded)).next()
            }
        };
        next.copied().filter(|it| it.0.0 > 0)
    }

    /// The first bin, also of those without capacity left, that will do.
    pub(super) fn find(&self, will_do: impl Fn(usize) -> bool) -> Option<usize> {
        match self {
            Self::List(list) => list.iter().map(|it| it.1).find(|bin| will_do(*bin)),
            Self::Tree(tree) => tree.iter().map(|it| it.1).find(|bin| will_do(*bin)),
        }
    }

    /// A bin was at `before`. It may have more left than it had: two tasks that become one save what a task costs.
    fn moved(&mut self, before: Place, after: Place) {
        match self {
            Self::List(list) => {
                // As a rule it had most left.
                let is_first = list.first() == Some(&before);
                let from = if is_first { 0 } else { list.partition_point(|it| *it < before) };
                if after < before {
                    let to = list[..from].partition_point(|it| *it < after);
                    list.copy_within(to..from, to + 1);
                    list[to] = after;
                } else {
                    let to = from + list[from..].partition_point(|it| *it <= after);
                    list.copy_within(from + 1..to, from);
                    list[to - 1] = after;
                }
            }
            Self::Tree(tree) => {
                tree.remove(&before);
                tree.insert(after);
            }
        }
    }

    pub(super) fn put(&mut self, bins: &mut Bins<'_>, bin: usize, span: &Span) {
        let priced = Priced::of(bins, span.clone());
        self.put_priced(bins, bin, &priced);
    }

    pub(super) fn put_priced(&mut self, bins: &mut Bins<'_>, bin: usize, priced: &Priced) {
        let before = (Reverse(bins.all[bin].left()), bin);
        let Priced { cost, span, is_whole } = priced;
        if !is_whole || !bins.keep_whole_priced(bin, span.document, (*cost, span.rows.end)) {
            bins.put(bin, span);
        }
        self.moved(before, (Reverse(bins.all[bin].left()), bin));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_list_of_bins_has_the_order_of_a_tree(
            lefts in proptest::collection::vec(-3_i64..9, 1..40),
            moves in proptest::collection::vec((0_usize..40, -3_i64..9), 0..60),
        ) {
            let mut lefts = lefts;
            let places = |lefts: &[i64]| {
                let mut all: Vec<Place> =
                    lefts.iter().enumerate().map(|(bin, left)| (Reverse(*left), bin)).collect();
                all.sort_unstable();
                all
            };
            let mut list = Order::List(places(&lefts));
            let mut tree = Order::Tree(places(&lefts).into_iter().collect());
            for (bin, left) in moves {
                let bin = bin % lefts.len();
                let (before, after) = ((Reverse(lefts[bin]), bin), (Reverse(left), bin));
                lefts[bin] = left;
                list.moved(before, after);
                tree.moved(before, after);
                let expected = places(&lefts);
                for at in std::iter::once(None).chain(expected.iter().copied().map(Some)) {
                    let behind = expected.iter().copied().find(|it| Some(*it) > at);
                    let behind = behind.filter(|it| it.0.0 > 0);
                    prop_assert_eq!(list.next(at), behind);
                    prop_assert_eq!(tree.next(at), behind);
                }
                let odd = |bin: usize| bin % 2 == 1;
                let first = expected.iter().map(|it| it.1).find(|bin| odd(*bin));
                prop_assert_eq!(list.find(odd), first);
                prop_assert_eq!(tree.find(odd), first);
            }
        }
    }
}
