//! Takes documents in bulk from slots that hold far too much in short ones.
//!
//! In: bins after the matching. Out: rows taken from them, which [`super::fill`] then deals to whoever has capacity left.
//! A matching sends few pieces along an edge, and the last step moves one piece at a time: neither gets rid of hundreds of
//! short documents. Of the longest the tails go, which bring the fewest bytes for their cost: rows `[a, n)` are
//! cheapest where their mean price is that of row a, so all tails begin at one row, and none is of a document so short that its
//! own best tail begins below.
//!
//! It leaves alone what few moves can do, and never takes a bin below its capacity.

use std::ops::Range;

use super::bins::{Bins, LONGEST};
use super::even::latest;
use super::groups::Span;
use super::prices::Prices;
use crate::{Mask, TILE_ROWS};

/// Bins that finish late and whose longest documents together cost less than what they have too much.
pub(super) fn overfull(bins: &Bins<'_>) -> Vec<usize> {
    let is_overfull = |bin: &usize| {
        bins.all[*bin].finish() > latest(bins) && {
            let longest = bins.spans(*bin, LONGEST);
            longest.iter().map(|it| bins.cost(it)).sum::<u64>() < surplus(bins, *bin)
        }
    };
    (0..bins.all.len()).filter(is_overfull).collect()
}

/// Takes the surplus from overfull bins, the longest documents first. Of a bin's causal documents
/// it takes the rows from one row on, the same row for all, which makes the last row of each
/// equally dear.
pub(super) fn take(bins: &mut Bins<'_>, overfull: &[usize]) -> Vec<Span> {
    let tail = Prices::of(bins).cheapest_tail();
    let mut taken = Vec::new();
    for &bin in overfull {
        let spans = bins.spans(bin, usize::MAX);
        let first = first_row(bins, bin, tail, &spans);
        for span in spans {
            let surplus = surplus(bins, bin);
            if surplus == 0 {
                break;
            }
            let part = part_from(bins, bin, tail, &span, first);
            if !part.rows.is_empty() && bins.cost(&part) <= surplus {
                bins.take(bin, &part);
                taken.push(part);
            }
        }
    }
    bins.forget_what_left();
    taken
}

/// The highest row from which on all spans together cost no less than the surplus.
fn first_row(bins: &Bins<'_>, bin: usize, tail: f64, spans: &[Span]) -> u32 {
    let surplus = surplus(bins, bin);
    let cost = |tile: u32| -> u64 {
        let parts = spans.iter().map(|it| part_from(bins, bin, tail, it, tile * TILE_ROWS));
        parts.filter(|it| !it.rows.is_empty()).map(|it| bins.cost(&it)).sum()
    };
    let longest = spans.iter().map(|it| it.rows.end).max().unwrap_or(0);
    let (mut enough, mut little) = (0, longest / TILE_ROWS + 1);
    while little - enough > 1 {
        let middle = enough.midpoint(little);
        if cost(middle) >= surplus { enough = middle } else { little = middle }
    }
    enough * TILE_ROWS
}

/// The rows of a span from `first` on, if the span ends so far beyond `first` that they are a cheap
/// tail. The whole span if its document is not causal, or if its keys do not lie at the bin's rank.
fn part_from(bins: &Bins<'_>, bin: usize, tail: f64, span: &Span, first: u32) -> Span {
    let Range { start, end } = span.rows;
    if bins.problem.document(span.document).mask != Mask::Causal || !bins.is_home(bin, span) {
        return span.clone();
    }
    let is_good = f64::from(end) * tail >= f64::from(first);
    span.with_rows(if is_good { start.max(first).min(end)..end } else { end..end })
}

fn surplus(bins: &Bins<'_>, bin: usize) -> u64 {
    bins.all[bin].left().min(0).unsigned_abs()
}
