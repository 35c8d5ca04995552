//! Moves the surplus of slots that hold too much to those with room, in few large pieces.
//!
//! In: bins that hold all rows. Out: the same rows; what is left to even out is small.
//!
//! A piece that costs F needs about √F bytes, whichever long document it is cut from: its keys go up to its
//! last row. So few large pieces are cheaper than many small ones, and the fewest suffice where sums of
//! surpluses meet sums of rooms. Flow:
//!
//! 1. The largest surplus or room takes the one or two on the other side that leave least of it, until one
//!    side is used up. This gives **edges**: who gives how much to whom.
//! 2. Along each edge, the largest first, pieces move: of the donor's longest documents the piece, and with
//!    one lane the number of KV heads, with the least new bytes.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::bins::Bins;
use super::groups::Span;
use super::pieces::{Scored, best_piece};
use super::prices::Prices;
use crate::DocumentId;

/// Part of a slot's capacity that it may have above it.
const OVER: u64 = 800;
/// Part of the level that is left alone.
const WORTH: u64 = 4_000;
/// Candidates for the first of two that fit together.
const FIRST: usize = 32;
/// Documents of a donor that are looked at.
const DOCUMENTS: usize = 4;
/// Pieces along one edge at most.
const PIECES: usize = 6;

/// Moves surplus along edges.
pub(super) fn spread(bins: &mut Bins<'_>) {
    let prices = Prices::of(bins);
    let mut edges = edges(bins);
    edges.sort_by_key(|it| (Reverse(it.cost), it.donor, it.receiver));
    for Edge { donor, receiver, cost } in edges {
        send(bins, &prices, (donor, receiver), cost);
    }
}

/// Who gives how much to whom.
#[derive(Clone, Copy, Debug)]
struct Edge {
    donor: usize,
    receiver: usize,
    cost: u64,
}

/// Bins on one side with what they have too much or can take, by amount.
type Side = BTreeSet<(u64, usize)>;

fn edges(bins: &Bins<'_>) -> Vec<Edge> {
    let worth = bins.level / WORTH;
    let (mut surplus, mut room) = (Side::new(), Side::new());
    for (bin, it) in bins.all.iter().enumerate() {
        let left = it.left() + (it.capacity() / OVER) as i64;
        let side = if left < 0 { &mut surplus } else { &mut room };
        if left.unsigned_abs() > worth {
            side.insert((left.unsigned_abs(), bin));
        }
    }
    let mut edges = Vec::new();
    while let (Some(&most), Some(&widest)) = (surplus.last(), room.last()) {
        let gives = most >= widest;
        let (amount, bin) = most.max(widest);
        let (own, other) =
            if gives { (&mut surplus, &mut room) } else { (&mut room, &mut surplus) };
        let chosen = best_fit(other, amount);
        own.remove(&(amount, bin));
        let mut left = amount;
        for it in chosen {
            other.remove(&it);
            left -= it.0;
            let (donor, receiver) = if gives { (bin, it.1) } else { (it.1, bin) };
            edges.push(Edge { donor, receiver, cost: it.0 });
        }
        if left > worth {
            own.insert((left, bin));
        }
    }
    edges
}

/// One or two of a side that leave least of an amount; all of the side are at most the amount.
fn best_fit(side: &Side, amount: u64) -> Vec<(u64, usize)> {
    let mut best: Option<(u64, Vec<(u64, usize)>)> = None;
    for &first in side.iter().rev().take(FIRST) {
        let left = amount - first.0;
        let second = side.range(..=(left, usize::MAX)).rev().find(|it| **it != first).copied();
        let left = left - second.map_or(0, |it| it.0);
        if best.as_ref().is_none_or(|(least, _)| left < *least) {
            best = Some((left, [Some(first), second].into_iter().flatten().collect()));
        }
    }
    best.map_or_else(Vec::new, |(_, chosen)| chosen)
}

/// Moves pieces of `cost` together from a donor to a receiver.
fn send(bins: &mut Bins<'_>, prices: &Prices, (donor, receiver): (usize, usize), cost: u64) {
    let mut left = cost;
    for _ in 0..PIECES {
        if left <= bins.level / WORTH {
            return;
        }
        let spans = longest(bins, donor);
        let Some(Scored { span, moved, .. }) =
            best_piece(bins, prices, (donor, receiver), &spans, left)
        else {
            return;
        };
        bins.take(donor, &span);
        bins.put(receiver, &span);
        left = left.saturating_sub(u64::try_from(moved).unwrap_or(u64::MAX));
    }
}

/// The donor's rows of the documents that go furthest, by head group.
fn longest(bins: &Bins<'_>, donor: usize) -> Vec<Span> {
    let mut longest: Vec<(Reverse<u32>, DocumentId)> = Vec::with_capacity(DOCUMENTS + 1);
    for (document, groups) in bins.all[donor].documents() {
        let end = groups.iter().filter_map(|it| it.rows.last()).map(|it| it.end).max();
        let it = (Reverse(end.unwrap_or(0)), document);
        let at = longest.partition_point(|other| *other < it);
        if at < DOCUMENTS {
            longest.truncate(DOCUMENTS - 1);
            longest.insert(at, it);
        }
    }
    let spans = longest.iter().flat_map(|(_, document)| {
        bins.all[donor].groups_of(*document).iter().flat_map(|group| {
            let span = |rows: &std::ops::Range<u32>| Span {
                document: *document,
                heads: group.heads.clone(),
                rows: rows.clone(),
            };
            group.rows.iter().map(span)
        })
    });
    spans.collect()
}
