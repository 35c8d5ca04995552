//! First placement: rows at home stay, all others go where most capacity is left.
//!
//! In: empty bins. Out: bins that hold all rows; none has more than its capacity by over one tile
//! row, but those whose own rank holds too much.
//!
//! Long documents come first and are cut from their tail, one slot full after the other, so that a
//! document is in few slots and each of these holds one prefix of its keys. Where the tail leaves
//! less than a tile row of capacity, a few rows of the document's head, whose keys are there
//! already and whose tiles are cheap, fill it exactly.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::ops::Range;

use super::bins::Bins;
use super::groups::Span;
use super::prices::away;
use crate::{DocumentId, Error, TILE_ROWS};

/// Parts of the level that are worth a task of their own.
const WORTH: u64 = 2_048;
/// Bins among which the nearest is sought.
const NEAR: usize = 64;

/// Places all rows.
///
/// # Errors
///
/// A document for which no slot has memory left.
pub(super) fn fill(bins: &mut Bins<'_>) -> Result<(), Error> {
    let mut queue = Queue::default();
    for span in place_at_home(bins) {
        queue.push(bins, span);
    }
    let mut order = Order::new(bins);
    while let Some((document, rows)) = queue.pop() {
        let span = Span { document, heads: bins.problem.all_heads(), rows };
        place(bins, &mut order, &mut queue, &span)?;
    }
    Ok(())
}

/// Gives rows at ranks with a slot in place to that slot, and returns all others. A tile belongs to
/// the rank that holds its first row.
fn place_at_home(bins: &mut Bins<'_>) -> Vec<Span> {
    let mut homes = BTreeMap::new();
    for (bin, it) in bins.all.iter().enumerate() {
        if let Some(rank) = it.home() {
            homes.entry(rank).or_insert(bin);
        }
    }
    let mut others: Vec<Span> = Vec::new();
    let problem = bins.problem;
    for (document, whole) in (0..).map(DocumentId).zip(problem.layout.documents()) {
        let pieces = problem.layout.pieces_of_document(document);
        if let [one] = pieces
            && let Some(&bin) = homes.get(&one.rank)
            && bins.keep_home(bin, document)
        {
            continue;
        }
        for piece in pieces {
            let aligned = |row: u32| row.next_multiple_of(TILE_ROWS).min(whole.rows);
            let rows = aligned(piece.rows.start)..aligned(piece.rows.end);
            if rows.is_empty() {
                continue;
            }
            let span = Span { document, heads: problem.all_heads(), rows };
            match homes.get(&piece.rank).filter(|bin| bins.has_room(**bin, &span)) {
                Some(&bin) => bins.put(bin, &span),
                None => match others.last_mut() {
                    Some(last) if last.document == document && last.rows.end == span.rows.start => {
                        last.rows.end = span.rows.end;
                    }
                    _ => others.push(span),
                },
            }
        }
    }
    others
}

/// Puts a span, or a part of it and the rest back into the queue.
fn place(
    bins: &mut Bins<'_>,
    order: &mut Order,
    queue: &mut Queue,
    span: &Span,
) -> Result<(), Error> {
    let worth = bins.level / WORTH;
    for (left, bin) in order.candidates(bins, span) {
        if bins.cost(span) <= left && bins.has_room(bin, span) {
            order.put(bins, bin, span);
            return Ok(());
        }
        let tail = bins.tail(span, left);
        if tail.rows.is_empty() || !bins.has_room(bin, &tail) {
            continue;
        }
        order.put(bins, bin, &tail);
        let mut rest = span.with_rows(span.rows.start..tail.rows.start);
        let left = u64::try_from(bins.all[bin].left()).unwrap_or(0);
        if left > worth {
            let head = bins.head(&rest, left);
            if !head.rows.is_empty() && bins.has_room(bin, &head) {
                order.put(bins, bin, &head);
                rest.rows.start = head.rows.end;
            }
        }
        queue.push(bins, rest);
        return Ok(());
    }
    place_one_tile(bins, order, queue, span)
}

/// Puts the last tile of a span where most capacity is left, though it is not enough.
fn place_one_tile(
    bins: &mut Bins<'_>,
    order: &mut Order,
    queue: &mut Queue,
    span: &Span,
) -> Result<(), Error> {
    let cut = (span.rows.end - 1) / TILE_ROWS * TILE_ROWS;
    let tile = span.with_rows(cut.max(span.rows.start)..span.rows.end);
    let bin = order.0.iter().map(|(_, bin)| *bin).find(|bin| bins.has_room(*bin, &tile));
    let bin = bin.ok_or(Error::NoRoom { document: span.document })?;
    order.put(bins, bin, &tile);
    queue.push(bins, span.with_rows(span.rows.start..tile.rows.start));
    Ok(())
}

/// Spans that wait, the dearest first.
#[derive(Default)]
struct Queue(BinaryHeap<(u64, Reverse<DocumentId>, Reverse<u32>, u32)>);

impl Queue {
    fn push(&mut self, bins: &Bins<'_>, span: Span) {
        if !span.rows.is_empty() {
            let cost = bins.cost(&span);
            let Span { document, heads: _, rows } = span;
            self.0.push((cost, Reverse(document), Reverse(rows.start), rows.end));
        }
    }

    fn pop(&mut self) -> Option<(DocumentId, Range<u32>)> {
        let (_, Reverse(document), Reverse(start), end) = self.0.pop()?;
        Some((document, start..end))
    }
}

/// Bins by capacity left, most first.
struct Order(BTreeSet<(Reverse<i64>, usize)>);

impl Order {
    fn new(bins: &Bins<'_>) -> Self {
        Self(bins.all.iter().enumerate().map(|(bin, it)| (Reverse(it.left()), bin)).collect())
    }

    /// Bins with capacity left, most first; where links differ, the nearest of the first few come first: of those that
    /// take all of the span, else of those that have half of the most.
    fn candidates(&self, bins: &Bins<'_>, span: &Span) -> Vec<(u64, usize)> {
        let left = |&(Reverse(left), bin): &(Reverse<i64>, usize)| {
            u64::try_from(left).ok().filter(|it| *it > 0).map(|left| (left, bin))
        };
        let all = self.0.iter().map_while(left);
        if bins.problem.links.are_equal() {
            return all.collect();
        }
        let mut all: Vec<(u64, usize)> = all.collect();
        let cost = bins.cost(span);
        let enough = all.first().map_or(0, |(most, _)| cost.min(most.div_ceil(2)));
        let near = all.partition_point(|(left, _)| *left >= enough).min(NEAR);
        all[..near].sort_by_cached_key(|(left, bin)| {
            let way = away(bins, &bins.all[*bin], span.document, &span.rows);
            (way, Reverse(*left), *bin)
        });
        all
    }

    fn put(&mut self, bins: &mut Bins<'_>, bin: usize, span: &Span) {
        self.0.remove(&(Reverse(bins.all[bin].left()), bin));
        bins.put(bin, span);
        self.0.insert((Reverse(bins.all[bin].left()), bin));
    }
}
