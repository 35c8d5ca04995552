//! Documents under windows, along a line: each slot takes one run of rows.
//!
//! In: empty bins, and what they hold as the other steps left them. Out: what they hold if they take their rows along a line, where
//! that is better.
//!
//! A row under a window needs the keys of its window alone, so a run of rows brings its own keys and one **halo** before them. What
//! is cheap under a causal mask is not here: a tile far from the others of its document brings a halo of its own. So all rows are
//! laid end to end, document after document, and cut where slots are full:
//!
//! * all heads together, with the slots that stand in place next to the rows of their ranks;
//! * or the rows of ranks stay there as far as the slot has room, and the rest is cut, under one KV head after the other where
//!   heads may part.
//!
//! Among all ways to cut a line at tile edges for slots in this order, the cuts are those with which the last finishes first.
//! Slots that cannot reach all ranks take the rows that they reach ([`reach`]).

mod reach;

use std::collections::BTreeSet;
use std::ops::Range;

use self::reach::{Next, Taking};
use super::bin::Bin;
use super::bins::Bins;
use super::coarse::{dearest_tile, is_cut_by_window, is_windowed};
use super::groups::Span;
use super::{even, fill, keeps_tolerance, rank};
use crate::{DocumentId, Problem, TILE_ROWS};

/// Where no plan keeps the tolerance, one may finish later by one part in this many of the level if it saves [`SAVED`].
const LATE: u64 = 100;
/// A plan that finishes later has to save one part in this many of the bytes.
const SAVED: i128 = 5;
/// The finish is narrowed down to one part in this many of the level.
const CLOSE: u64 = 65_536;

/// What bins hold that take their rows along a line; none if that is not better than what they hold by now.
pub(super) fn better<'a>(start: &Bins<'a>, known: &Bins<'a>) -> Option<Bins<'a>> {
    let problem = start.problem;
    if !is_windowed(problem) || !start.limits().are_none() {
        return None;
    }
    let documents = (0..).map(DocumentId).zip(problem.layout.documents());
    let whole = documents.map(|(document, it)| Span {
        document,
        heads: problem.all_heads(),
        rows: 0..it.rows,
    });
    let whole: Vec<Span> = whole.collect();
    let line = Line::of(start, whole.clone());
    let earliest = line.earliest(start, Next::GoesOn)?;
    let mut all = vec![
        line.cut(start, &line.taken(start, earliest, Next::GoesOn)?),
        line.cut(start, &line.shared(start)),
    ];
    all.extend(kept(start.clone(), earliest));
    if !problem.links.reach_all() {
        all.extend(line.earliest_cut(start, Next::Stops));
    }
    if problem.heads_may_part() && start.all.iter().any(|it| it.home().is_some()) {
        let line = Line::of(start, by_heads(problem, whole));
        all.extend(line.earliest_cut(start, Next::GoesOn));
    }
    all.retain(|it| (0..it.all.len()).all(|bin| it.reaches_what_it_holds(bin)));
    let mut best: Option<Bins<'a>> = None;
    for line in all {
        let mut evened = line.clone();
        if rank(&line).0 > 0 {
            even::even(&mut evened);
        }
        for bins in [line, evened] {
            if is_better(&bins, best.as_ref().unwrap_or(known)) {
                best = Some(bins);
            }
        }
    }
    best
}

/// Whether the last of `bins` finishes earlier, or fewer bytes travel; or, where neither keeps the tolerance nor the usual one,
/// hardly later with far fewer.
fn is_better(bins: &Bins<'_>, other: &Bins<'_>) -> bool {
    let (a, b) = (rank(bins), rank(other));
    let late = bins.level / LATE;
    let is_cheap = |a: (u64, i128), b: (u64, i128)| {
        !keeps_tolerance(bins, b.0) && a.0 <= b.0 + late && a.1 <= b.1 - b.1 / SAVED && a.1 < b.1
    };
    is_cheap(a, b) || !is_cheap(b, a) && a < b
}

/// Rows stay at ranks whose slot finishes with them by a time; the others go along the line.
fn kept(mut bins: Bins<'_>, finish: u64) -> Option<Bins<'_>> {
    let mut others = fill::place_at_home(&mut bins, &BTreeSet::new());
    let finish = finish.max(bins.level + bins.tolerated);
    for bin in 0..bins.all.len() {
        give_ends(&mut bins, bin, finish, &mut others);
    }
    // A document that left may come back whole to the slot that still lists it.
    bins.forget_what_left();
    others.sort_unstable_by_key(|it| (it.document, it.rows.start));
    others.dedup_by(|next, last| {
        let touch = next.document == last.document && next.rows.start == last.rows.end;
        if touch {
            last.rows.end = next.rows.end;
        }
        touch
    });
    let line = Line::of(&bins, by_heads(bins.problem, others));
    line.earliest_cut(&bins, Next::GoesOn)
}

/// Spans of all heads, each under one after the other where these may part.
fn by_heads(problem: &Problem, spans: Vec<Span>) -> Vec<Span> {
    if !problem.heads_may_part() {
        return spans;
    }
    let documents = problem.layout.documents();
    let of_heads = |span: Span| {
        // Documents within their window have no halo to save, and may be hundreds of thousands.
        let heads = if is_cut_by_window(&documents[span.document.0 as usize]) {
            problem.all_heads().map(|head| head..head + 1).collect()
        } else {
            vec![span.heads.clone()]
        };
        heads.into_iter().map(move |heads| Span { heads, ..span.clone() })
    };
    spans.into_iter().flat_map(of_heads).collect()
}

/// Takes from a bin the last rows, those with which it would finish later.
fn give_ends(bins: &mut Bins<'_>, bin: usize, finish: u64, others: &mut Vec<Span>) {
    if bins.all[bin].finish() <= finish {
        return;
    }
    let mut spans = bins.spans(bin, usize::MAX);
    spans.sort_unstable_by_key(|it| (it.document, it.rows.start));
    while bins.all[bin].finish() > finish
        && let Some(span) = spans.pop()
    {
        let over = beyond(&bins.all[bin], finish);
        let mut end = span.clone();
        if bins.cost(&span) > over {
            // As few tiles as cost that much.
            let start = bins.tail(&span, over - 1).rows.start;
            end.rows.start = (start - 1) / TILE_ROWS * TILE_ROWS;
            end.rows.start = end.rows.start.max(span.rows.start);
        }
        bins.take(bin, &end);
        others.push(end);
    }
}

/// Cost with which a bin finishes after a time.
fn beyond(bin: &Bin<'_>, finish: u64) -> u64 {
    bin.load.saturating_sub(bin.most_by(finish))
}

/// Most cost that a bin can get yet to finish by a time.
fn room_by(bin: &Bin<'_>, finish: u64) -> u64 {
    bin.most_by(finish).saturating_sub(bin.load)
}

/// `all · share / room`, where no share is above the room.
fn part(all: u64, share: u128, room: u128) -> u128 {
    let shift = (u128::BITS - room.leading_zeros()).saturating_sub(u64::BITS);
    u128::from(all) * (share >> shift) / (room >> shift)
}

/// Spans end to end, and the bins in the order in which they take from them.
struct Line {
    spans: Vec<Span>,
    /// Cost of all spans before each, and one more entry.
    before: Vec<u64>,
    order: Vec<usize>,
}

/// Runs of whole spans, and parts of spans, by bin.
type Taken = (Vec<(usize, Range<usize>)>, Vec<(usize, Span)>);

impl Line {
    fn of(bins: &Bins<'_>, spans: Vec<Span>) -> Self {
        let mut before = Vec::with_capacity(spans.len() + 1);
        let mut sum = 0;
        for it in &spans {
            before.push(sum);
            sum += bins.cost(it);
        }
        before.push(sum);
        let mut line = Self { spans, before, order: Vec::new() };
        line.order = line.order(bins);
        line
    }

    /// Bins in place as near to the rows of their ranks as they come to lie, dedicated ones between them.
    fn order(&self, bins: &Bins<'_>) -> Vec<usize> {
        let room = |bin: usize| u64::try_from(bins.all[bin].left()).unwrap_or(0);
        let (mut dedicated, mut at_home) = (Vec::new(), Vec::new());
        for (bin, it) in bins.all.iter().enumerate() {
            match self.middle(bins, it) {
                Some(middle) => at_home.push((middle, bin)),
                None => dedicated.push(bin),
            }
        }
        at_home.sort_unstable();
        let mut dedicated = dedicated.into_iter().peekable();
        let mut at_home = at_home.into_iter().peekable();
        let (mut order, mut at) = (Vec::with_capacity(bins.all.len()), 0_u64);
        loop {
            let next = match (at_home.peek(), dedicated.peek()) {
                (Some(&(middle, bin)), Some(&other)) => {
                    let now = at + room(bin) / 2;
                    let then = now + room(other);
                    let is_near = now.abs_diff(middle) <= then.abs_diff(middle);
                    if is_near { at_home.next().map(|it| it.1) } else { dedicated.next() }
                }
                (Some(_), None) => at_home.next().map(|it| it.1),
                (None, _) => dedicated.next(),
            };
            let Some(bin) = next else {
                return order;
            };
            at += room(bin);
            order.push(bin);
        }
    }

    /// Where on the line the rows of a bin's rank are, or would be; none for a dedicated slot.
    fn middle(&self, bins: &Bins<'_>, bin: &Bin<'_>) -> Option<u64> {
        let home = bin.home()?;
        let stretches = bins.problem.layout.ranks().get(home.0 as usize)?;
        let Some(longest) = stretches.iter().max_by_key(|it| it.end - it.start) else {
            return Some(0);
        };
        let at = |row: u32| {
            let key = (longest.document, row);
            let next = self.spans.partition_point(|it| (it.document, it.rows.start) <= key);
            let Some(last) = next.checked_sub(1) else {
                return 0;
            };
            let span = &self.spans[last];
            let end = if span.document == longest.document { row } else { span.rows.end };
            let part = span.with_rows(span.rows.start..end.min(span.rows.end));
            self.before[last] + bins.cost(&part)
        };
        Some(at(longest.start).midpoint(at(longest.end)))
    }

    /// The earliest that the last bin can finish; none if no bin has room.
    fn earliest(&self, bins: &Bins<'_>, next: Next) -> Option<u64> {
        let slowest = bins.all.iter().map(Bin::weight).min().unwrap_or(1).max(1);
        // No bin lets more room go than one tile row needs.
        let tile = dearest_tile(bins, bins.problem.all_heads());
        let mut never = bins.level;
        // Who cannot reach all ranks may let more go.
        let later =
            [0, bins.level / 16, bins.level / 4].map(|it| never + it + tile * 100 / slowest + 1);
        let mut finish = later.into_iter().find(|it| self.taken(bins, *it, next).is_some())?;
        while finish - never > bins.level / CLOSE + 1 {
            let middle = never.midpoint(finish);
            match self.taken(bins, middle, next) {
                Some(_) => finish = middle,
                None => never = middle,
            }
        }
        Some(finish)
    }

    /// Bins with what they take of the line if the last finishes as early as it can.
    fn earliest_cut<'a>(&self, bins: &Bins<'a>, next: Next) -> Option<Bins<'a>> {
        let taken = self.taken(bins, self.earliest(bins, next)?, next)?;
        Some(self.cut(bins, &taken))
    }

    /// Bins with what they take of the line.
    fn cut<'a>(&self, bins: &Bins<'a>, (whole, parts): &Taken) -> Bins<'a> {
        let mut bins = bins.clone();
        for (bin, spans) in whole {
            for span in &self.spans[spans.clone()] {
                let rows = bins.problem.document(span.document).rows;
                let is_whole = span.rows == (0..rows) && span.heads == bins.problem.all_heads();
                if !is_whole || !bins.keep_whole(*bin, span.document) {
                    bins.put(*bin, span);
                }
            }
        }
        for (bin, span) in parts {
            bins.put(*bin, span);
        }
        bins
    }

    /// What each bin takes that ends at the tile edge next to its share, so that it stays near to where it stands.
    fn shared(&self, bins: &Bins<'_>) -> Taken {
        let (mut whole, mut parts) = (Vec::new(), Vec::new());
        let all = self.before.last().copied().unwrap_or(0);
        let rooms = self.order.iter().map(|bin| bins.all[*bin].left().max(0).unsigned_abs());
        let room = rooms.clone().map(u128::from).sum::<u128>().max(1);
        let (mut at, mut row, mut share) = (0, 0, 0_u128);
        for (index, (&bin, more)) in self.order.iter().zip(rooms).enumerate() {
            share += u128::from(more);
            // At most 2^78 times 2^57 where rooms are as wide as they can be; then half of the bits of both will do.
            let until = part(all, share, room);
            let until = if index + 1 == self.order.len() { all } else { until as u64 };
            // The last span that begins before there, and the tile edge of it that is next.
            let last = self.before.partition_point(|it| *it < until).saturating_sub(1);
            let Some(span) = self.spans.get(last) else { continue };
            let wanted = until - self.before[last].min(until);
            let head = bins.head(span, wanted).rows.end;
            let next = span.rows.end.min((head / TILE_ROWS + 1) * TILE_ROWS);
            let cost = |end: u32| bins.cost(&span.with_rows(span.rows.start..end));
            let is_next = cost(next).abs_diff(wanted) < cost(head).abs_diff(wanted);
            let end = if is_next { next } else { head };
            let (last, end) = if end == span.rows.end { (last + 1, 0) } else { (last, end) };
            if (last, end) <= (at, row) {
                continue;
            }
            if row > 0 {
                let rest = &self.spans[at];
                let stop = if at == last { end } else { rest.rows.end };
                parts.push((bin, rest.with_rows(row..stop)));
                (at, row) = if at == last { (at, stop) } else { (at + 1, 0) };
            }
            if at < last {
                whole.push((bin, at..last));
            }
            if at <= last && row == 0 && end > 0 {
                let span = &self.spans[last];
                if end > span.rows.start {
                    parts.push((bin, span.with_rows(span.rows.start..end)));
                }
            }
            (at, row) = (last, end);
        }
        (whole, parts)
    }

    /// What each bin takes if none finishes later; none if not all finds room.
    fn taken(&self, bins: &Bins<'_>, finish: u64, next: Next) -> Option<Taken> {
        let mut taking = Taking::new(self, bins, next);
        for &bin in &self.order {
            taking.turn(bin, room_by(&bins.all[bin], finish));
            if taking.is_done() {
                break;
            }
        }
        taking.finish()
    }
}
