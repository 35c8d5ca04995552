//! Bends a plan that asks for too much memory until it fits.
//!
//! In: a plan made as if slots held anything, and limits for what a slot and a bundle hold. Out: bins whose bundles are within
//! the limits, and whose slots are as far as could be found; or a document of which a part has no place. Flow:
//!
//! 1. [`trim`]: of a bundle that is too large the tail stays; what is before becomes loose, in parts that fit a bundle each.
//! 2. [`shed`]: a slot that holds too much lets go of what is much memory for little work: short documents, first rows of
//!    long ones.
//! 3. [`place`]: what is loose, the largest first, goes where memory is left: of few slots with most of it left to one that
//!    finishes in time and has most of the keys. Where none does, one bin after the other is filled, so that few have to give
//!    large pieces for it, not all of them small ones. What finds no room goes where most is left: too much there for now.
//! 4. [`settle`]: [`even`], and [`trade`] where memory lacks at those that finish first: they let go of short documents for a piece of the
//!    slot that finishes last. Where all that does not suffice, [`repair()`] makes many small moves before.
//!
//! Every loop has a bound: nothing is tried more often than a number that grows with slots and documents.

mod repair;
mod trade;

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::ops::Range;

use super::bins::Bins;
use super::even::{even, latest};
use super::groups::{Group, Span, put};
use super::limits::Limits;
use super::prices::Prices;
use super::tails::ends;
use crate::plan::least_work;
use crate::{DocumentId, Error, Plan, Problem, TILE_ROWS};

pub(super) use repair::repair;

/// Maximum slots with room that are compared for a loose span.
const COMPARED: usize = 8;
/// Maximum trades, per slot in the mean.
const TRADES: usize = 2;
/// Trading goes on only while it lowers the lateness of all slots together by one part in this many of the level.
const WORTH: u64 = 4_096;
/// A span that finds no room is halved unless it is smaller than one part in this many of the largest bundle.
const HALVED: u64 = 8;
/// A slot is filled up to one part in this many of the level too much before the next one is.
const GATHERED: u64 = 4;

/// Bins that hold what a plan has, but for what limits ask to move; and the first document for a part of which no slot had room.
///
/// # Errors
///
/// A document of which a part has no place: it fits no bundle, or no slot reaches it.
pub(super) fn bend<'a>(
    problem: &'a Problem,
    plan: &Plan,
    limits: Limits,
) -> Result<(Bins<'a>, Option<DocumentId>), Error> {
    let mut bins = Bins::new(problem, limits, least_work(problem));
    bins.hold(plan);
    let mut loose = Vec::new();
    for bin in 0..bins.all.len() {
        trim(&mut bins, bin, &mut loose)?;
        let over = -bins.free(bin);
        for span in shed(&bins, bin, over, None) {
            bins.take(bin, &span);
            parts(&bins, span, &mut loose)?;
        }
    }
    let lacking = place(&mut bins, loose)?;
    Ok((bins, lacking))
}

/// Evens out bins within their limits.
pub(super) fn settle(mut bins: Bins<'_>) -> Bins<'_> {
    let mut before = None;
    for _ in 0..TRADES * bins.all.len() {
        even(&mut bins);
        let lateness = bins.all.iter().map(|it| it.finish().saturating_sub(latest(&bins)));
        let late = lateness.map(u128::from).sum::<u128>();
        let is_enough = before.is_some_and(|before| late + u128::from(bins.level / WORTH) > before);
        if is_enough || !trade::trade(&mut bins) {
            break;
        }
        before = Some(late);
    }
    bins
}

/// Share of their memory that bins hold too much in the mean.
pub(super) fn too_much(bins: &Bins<'_>) -> f64 {
    let over: i128 = (0..bins.all.len()).map(|bin| (-bins.free(bin)).max(0)).sum();
    let room: i128 =
        bins.all.iter().enumerate().map(|(bin, it)| bins.free(bin) + i128::from(it.bytes)).sum();
    over as f64 / room.max(1) as f64
}

/// Takes from a bin what makes its bundles too large.
fn trim(bins: &mut Bins<'_>, bin: usize, loose: &mut Vec<Span>) -> Result<(), Error> {
    let large: Vec<(DocumentId, Group)> = bins.all[bin]
        .touched()
        .flat_map(|(document, groups)| groups.iter().map(move |it| (document, it)))
        .filter(|(document, group)| !bins.fits_bundle(*document, group))
        .map(|(document, group)| (document, group.clone()))
        .collect();
    for (document, group) in large {
        let Some((last, others)) = group.rows.split_last() else {
            continue;
        };
        let span =
            |rows: &Range<u32>| Span { document, heads: group.heads.clone(), rows: rows.clone() };
        let last = span(last);
        let [kept, _] = ends(&last, |it| fits_alone(bins, it));
        let rest = last.with_rows(last.rows.start..kept.rows.start);
        let gone: Vec<Span> = others.iter().map(span).chain([rest]).collect();
        for span in gone.into_iter().filter(|it| !it.rows.is_empty()) {
            bins.take(bin, &span);
            parts(bins, span, loose)?;
        }
    }
    Ok(())
}

/// Whether a span alone fits a bundle.
fn fits_alone(bins: &Bins<'_>, span: &Span) -> bool {
    span.rows.is_empty() || bins.fits_bundle(span.document, &alone(span))
}

fn alone(span: &Span) -> Group {
    Group { heads: span.heads.clone(), rows: std::iter::once(span.rows.clone()).collect() }
}

/// Cuts a span into parts that fit a bundle each.
fn parts(bins: &Bins<'_>, mut span: Span, loose: &mut Vec<Span>) -> Result<(), Error> {
    while !span.rows.is_empty() {
        let [tail, _] = ends(&span, |it| fits_alone(bins, it));
        if tail.rows.is_empty() {
            return Err(Error::NoRoom { document: span.document });
        }
        span.rows.end = tail.rows.start;
        loose.push(tail);
    }
    Ok(())
}

/// Spans that a bin gives away to hold `over` fewer bytes: those with the most memory for their
/// work first, none of document `but`.
fn shed(bins: &Bins<'_>, bin: usize, over: i128, but: Option<DocumentId>) -> Vec<Span> {
    if over <= 0 {
        return Vec::new();
    }
    let mut left = u64::try_from(over).unwrap_or(u64::MAX);
    let mut held: Vec<(f64, u64, DocumentId, &Group)> = Vec::new();
    for (document, groups) in bins.all[bin].touched().filter(|it| Some(it.0) != but) {
        for group in groups {
            let bytes = bins.bytes(document, group);
            let work = bins.all_cost(document, std::slice::from_ref(group)).max(1);
            held.push((bytes as f64 / work as f64, bytes, document, group));
        }
    }
    held.sort_by(|a, b| {
        b.0.total_cmp(&a.0).then((a.2, a.3.heads.start).cmp(&(b.2, b.3.heads.start)))
    });
    let mut gone = Vec::new();
    for (_, bytes, document, group) in held {
        if left == 0 {
            break;
        }
        let mut heads = group.heads.clone();
        if bins.problem.heads_may_part() {
            let each = (bytes / heads.len() as u64).max(1);
            let count = left.div_ceil(each).min(heads.len() as u64) as u16;
            heads.start = heads.end - count;
        }
        let all: Vec<Span> = (group.rows.iter())
            .map(|rows| Span { document, heads: heads.clone(), rows: rows.clone() })
            .collect();
        let freed = bytes / group.heads.len() as u64 * heads.len() as u64;
        if freed > left
            && let [span] = all.as_slice()
            && let Some(part) = part_of(bins, span, freed - left)
        {
            gone.push(part);
            break;
        }
        left = left.saturating_sub(freed);
        gone.extend(all);
    }
    gone
}

/// Rows of a span without which it holds at most `most` bytes: its first or its last ones, whichever are less work.
fn part_of(bins: &Bins<'_>, span: &Span, most: u64) -> Option<Span> {
    let fits = |it: &Span| it.rows.is_empty() || bins.bytes(it.document, &alone(it)) <= most;
    let [tail, head] = ends(span, fits);
    let first = span.with_rows(span.rows.start..tail.rows.start);
    let last = span.with_rows(head.rows.end..span.rows.end);
    let parts = [(&tail, first), (&head, last)].into_iter();
    let parts = parts.filter(|(kept, gone)| !kept.rows.is_empty() && !gone.rows.is_empty());
    parts.map(|it| it.1).min_by_key(|it| bins.cost(it))
}

/// Puts loose spans where memory is left, the largest first. Returns the first document for which none was.
fn place(bins: &mut Bins<'_>, loose: Vec<Span>) -> Result<Option<DocumentId>, Error> {
    let mut order: BTreeSet<(Reverse<i128>, usize)> =
        (0..bins.all.len()).map(|bin| (Reverse(bins.free(bin)), bin)).collect();
    let prices = Prices::of(bins);
    let size = |bins: &Bins<'_>, span: &Span| bins.bytes(span.document, &alone(span));
    let (mut spans, mut lacking, mut filled) = (loose, None, None);
    let largest = bins.limits().bundle();
    let mut queue: BinaryHeap<(u64, Reverse<usize>)> =
        spans.iter().enumerate().map(|(at, it)| (size(bins, it), Reverse(at))).collect();
    while let Some((_, Reverse(at))) = queue.pop() {
        let span = spans[at].clone();
        let bin = if let Some(bin) = spot(bins, &prices, &order, &span, None) {
            let finish = |bin: usize| bins.all[bin].finish_with(bins.cost(&span));
            let most = bins.level + bins.level / GATHERED;
            let gathers = |it: &usize| finish(*it) <= most && bins.has_room(*it, &span);
            if finish(bin) > latest(bins) {
                *filled.insert(filled.filter(gathers).unwrap_or(bin))
            } else {
                bin
            }
        } else if size(bins, &span) > largest / HALVED
            && let Some(halves) = halves(bins, &span)
        {
            for half in halves {
                queue.push((size(bins, &half), Reverse(spans.len())));
                spans.push(half);
            }
            continue;
        } else {
            lacking = lacking.or(Some(span.document));
            overfull(bins, &order, &span)?
        };
        order.remove(&(Reverse(bins.free(bin)), bin));
        bins.put(bin, &span);
        order.insert((Reverse(bins.free(bin)), bin));
    }
    Ok(lacking)
}

/// The bin with the most memory left among those whose bundle limit the span respects, even if the
/// span exceeds the bin's memory.
fn overfull(
    bins: &Bins<'_>,
    order: &BTreeSet<(Reverse<i128>, usize)>,
    span: &Span,
) -> Result<usize, Error> {
    let fits = |bin: &usize| {
        let mut groups = bins.groups_of(&bins.all[*bin], span.document).into_owned();
        put(&mut groups, span);
        bins.reaches(*bin, span) && groups.iter().all(|it| bins.fits_bundle(span.document, it))
    };
    let found = order.iter().map(|it| it.1).find(fits);
    found.ok_or(Error::NoRoom { document: span.document })
}

/// The bin for a span. Of the bins with the most memory left, it takes one that finishes in time
/// and pulls the fewest bytes for the span. None if all of them would finish at or after `before`.
fn spot(
    bins: &Bins<'_>,
    prices: &Prices,
    order: &BTreeSet<(Reverse<i128>, usize)>,
    span: &Span,
    before: Option<(u64, usize)>,
) -> Option<usize> {
    let cost = bins.cost(span);
    let least = bins.bytes(span.document, &Group { heads: span.heads.clone(), rows: Vec::new() });
    let wide = order.iter().take_while(|it| it.0.0 > i128::from(least)).map(|it| it.1);
    let after = |bin: usize| bins.all[bin].finish_with(cost);
    let with_room = wide.filter(|&bin| {
        before.is_none_or(|(finish, but)| bin != but && after(bin) < finish)
            && bins.has_room(bin, span)
    });
    let rated = with_room.take(COMPARED).map(|bin| {
        let late = after(bin).saturating_sub(latest(bins));
        (late, prices.added(bins, &bins.all[bin], span), bin)
    });
    rated.min().map(|it| it.2)
}

/// A span in two, by its heads or its rows; `None` of one tile under as few heads as may be.
fn halves(bins: &Bins<'_>, span: &Span) -> Option<[Span; 2]> {
    let Span { document, heads, rows } = span;
    let of = |heads: Range<u16>, rows: Range<u32>| Span { document: *document, heads, rows };
    if bins.problem.heads_may_part() && heads.len() > 1 {
        let middle = heads.start.midpoint(heads.end);
        return Some([of(heads.start..middle, rows.clone()), of(middle..heads.end, rows.clone())]);
    }
    let middle = rows.start.midpoint(rows.end).next_multiple_of(TILE_ROWS);
    (middle > rows.start && middle < rows.end)
        .then(|| [of(heads.clone(), rows.start..middle), of(heads.clone(), middle..rows.end)])
}
