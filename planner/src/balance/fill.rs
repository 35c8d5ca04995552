//! First placement: rows at home stay, all others go where most capacity is left.
//!
//! In: empty bins, and the documents that are **poured**: whose rows go wherever is best though slots stand where they
//! are ([`super::pour`] says which). Out: bins that hold all rows; none has more than its capacity by over one tile row,
//! but those whose own rank holds too much.
//!
//! Dear documents come first. A slot takes as many whole KV heads as it has room for; a head that no slot takes whole is
//! cut from its tail, one slot full after the other. So a document's heads are in few slots, and each of these holds one
//! prefix of a head's keys. Where the tail leaves less than a tile row of capacity, a few rows of the head's first ones,
//! whose keys are there already and whose tiles are cheap, fill it exactly.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::bins::Bins;
use super::groups::Span;
use super::prices::Prices;
use super::tails::ends;
use super::waiting::{Order, Priced, Queue};
use crate::{DocumentId, Error, RankId, TILE_ROWS};

/// Work below one part in this many of the level is not worth a task of its own.
const WORTH: u64 = 2_048;
/// A slot may get one part in this many of the level too much, so that a piece stays whole.
const OVER: u64 = 1_024;
/// Maximum slots that are compared for a piece. The one that holds most of its rows gets it, or the
/// nearest to them.
const NEAR: usize = 64;
/// Maximum pieces for which slots are compared by bytes. Every further piece goes to the slot with
/// the most capacity left.
const COMPARED: usize = 20_000;
/// Only slots are compared whose capacity left is within one part in this many of the most.
const LESS: u64 = 16;

/// Puts the rows of each rank with a slot in place into that slot, and returns all others. A tile belongs to
/// the rank that holds its first row.
pub(super) fn place_at_home(bins: &mut Bins<'_>, poured: &BTreeSet<DocumentId>) -> Vec<Span> {
    let mut homes = BTreeMap::new();
    for (bin, it) in bins.all.iter().enumerate() {
        if let Some(rank) = it.home() {
            homes.entry(rank).or_insert(bin);
        }
    }
    let mut others: Vec<Span> = Vec::new();
    let problem = bins.problem;
    for (document, whole) in (0..).map(DocumentId).zip(problem.layout.documents()) {
        if poured.contains(&document) {
            others.push(Span { document, heads: problem.all_heads(), rows: 0..whole.rows });
            continue;
        }
        let pieces = problem.layout.pieces_of_document(document);
        if let [one] = pieces
            && let Some(&bin) = homes.get(&one.rank)
            && bins.keep_whole(bin, document)
        {
            continue;
        }
        for piece in pieces {
            let aligned = |row: u32| row.next_multiple_of(TILE_ROWS).min(whole.rows);
            let rows = aligned(piece.rows.start)..aligned(piece.rows.end);
            if rows.is_empty() {
                continue;
            }
            let mut span = Span { document, heads: problem.all_heads(), rows };
            if let Some(&bin) = homes.get(&piece.rank) {
                let kept = if bins.has_room(bin, &span) {
                    span.clone()
                } else {
                    // It keeps the head, which needs the fewest keys; or the tail, if a window needs keys out of reach before it.
                    let [tail, head] = ends(&span, |it| bins.has_room(bin, it));
                    if tail.rows.len() > head.rows.len() { tail } else { head }
                };
                if !kept.rows.is_empty() {
                    bins.put(bin, &kept);
                }
                let rest = [span.rows.start..kept.rows.start, kept.rows.end..span.rows.end];
                span.rows = rest.into_iter().find(|it| !it.is_empty()).unwrap_or(0..0);
            }
            match others.last_mut() {
                _ if span.rows.is_empty() => {}
                Some(last) if last.document == document && last.rows.end == span.rows.start => {
                    last.rows.end = span.rows.end;
                }
                _ => others.push(span),
            }
        }
    }
    others
}

/// Places spans, the dearest first.
///
/// # Errors
///
/// A document for which no slot has memory left.
pub(super) fn fill(bins: &mut Bins<'_>, spans: Vec<Span>) -> Result<(), Error> {
    fill_with(Filling::new(bins), bins, spans)
}

/// As [`fill`], but KV heads go to slots that have rows of their document as long as one of these has room for a whole head.
pub(super) fn fill_near(bins: &mut Bins<'_>, spans: Vec<Span>) -> Result<(), Error> {
    let mut filling = Filling::new(bins);
    for (bin, it) in bins.all.iter().enumerate() {
        if let Some(rank) = it.home() {
            filling.near.entry(rank).or_default().push(bin);
        }
    }
    fill_with(filling, bins, spans)
}

fn fill_with(mut filling: Filling, bins: &mut Bins<'_>, spans: Vec<Span>) -> Result<(), Error> {
    // Sorting is several times faster than a heap of a million.
    let mut spans: Vec<Priced> = spans.into_iter().map(|it| Priced::of(bins, it)).collect();
    spans.sort_by_key(|it| Reverse(it.cost));
    for next in &spans {
        while filling.queue.first_cost().is_some_and(|first| first > next.cost)
            && let Some(span) = filling.queue.pop()
        {
            filling.place(bins, &Priced::of(bins, span))?;
        }
        filling.place(bins, next)?;
    }
    while let Some(span) = filling.queue.pop() {
        filling.place(bins, &Priced::of(bins, span))?;
    }
    Ok(())
}

/// State of the placement: spans that are still to be placed, and slots in the order of their
/// capacity left.
struct Filling {
    prices: Prices,
    queue: Queue,
    order: Order,
    /// Whether it matters which of several slots with room gets a piece.
    compares: bool,
    compared: usize,
    /// The slots at home at each rank, where those that have rows of a document come before those with most capacity left.
    near: BTreeMap<RankId, Vec<usize>>,
}

impl Filling {
    fn new(bins: &Bins<'_>) -> Self {
        let compares =
            !bins.problem.links.are_equal() || bins.all.iter().any(|it| it.home().is_some());
        let (prices, order) = (Prices::of(bins), Order::new(bins));
        let near = BTreeMap::new();
        Self { prices, queue: Queue::default(), order, compares, compared: 0, near }
    }

    /// Puts a span, or a part of it and the rest back into the queue.
    fn place(&mut self, bins: &mut Bins<'_>, priced: &Priced) -> Result<(), Error> {
        let span = &priced.span;
        for bin in self.at_home(bins, span).into_iter().chain(self.nearest(bins, priced)) {
            if self.place_at(bins, bin, priced) {
                return Ok(());
            }
        }
        let mut last = None;
        while let Some(at) = self.order.next(last) {
            if self.place_at(bins, at.1, priced) {
                return Ok(());
            }
            // Without limits of memory and reach, a span that does not fit in the slot with the
            // most capacity left fits in none.
            if bins.limits().are_none() && bins.problem.links.reach_all() {
                break;
            }
            last = Some(at);
        }
        self.place_one_tile(bins, span)
    }

    /// Bins that have rows of a span's document and room for one of its heads, those with most room first.
    fn at_home(&self, bins: &Bins<'_>, span: &Span) -> Vec<usize> {
        if self.near.is_empty() {
            return Vec::new();
        }
        let (one, over) = (bins.cost(&heads_for(bins, span, 0)), bins.level / OVER);
        let left = |bin: &usize| u64::try_from(bins.all[*bin].left()).unwrap_or(0);
        let pieces = bins.problem.layout.pieces_of_document(span.document);
        let near = pieces.iter().filter_map(|it| self.near.get(&it.rank)).flatten().copied();
        let mut found: Vec<usize> =
            near.filter(|bin| left(bin) > 0 && left(bin) + over >= one).collect();
        found.sort_unstable_by_key(|bin| (Reverse(left(bin)), *bin));
        found.dedup();
        found
    }

    /// Candidates for a span, those first that hold most of it or are nearest to it. Candidates are
    /// the slots that can take all of it; if there is none, those with nearly the most capacity
    /// left.
    fn nearest(&mut self, bins: &Bins<'_>, Priced { cost, span, .. }: &Priced) -> Vec<usize> {
        let most = self.order.next(None).and_then(|it| u64::try_from(it.0.0).ok()).unwrap_or(0);
        if !self.compares || most == 0 || self.compared >= COMPARED {
            return Vec::new();
        }
        self.compared += 1;
        let enough = if bins.problem.links.are_equal() {
            (*cost).min(most - most / LESS)
        } else {
            (*cost).min(most.div_ceil(2))
        };
        let part = part_for(bins, span, most);
        let mut near: Vec<(i128, Reverse<i64>, usize)> = Vec::with_capacity(NEAR);
        let mut last = None;
        while near.len() < NEAR
            && let Some(at) = self.order.next(last).filter(|it| it.0.0 >= enough as i64)
        {
            let way = self.prices.added(bins, &bins.all[at.1], &part);
            near.push((way, at.0, at.1));
            last = Some(at);
        }
        near.sort_unstable();
        near.into_iter().map(|it| it.2).collect()
    }

    /// Puts a span or a part of it into a bin, and the rest into the queue; `false` if not even a tile has room.
    fn place_at(&mut self, bins: &mut Bins<'_>, bin: usize, priced: &Priced) -> bool {
        let span = &priced.span;
        let Ok(left) = u64::try_from(bins.all[bin].left()) else {
            return false;
        };
        if left == 0 {
            return false;
        }
        if priced.cost <= left + bins.level / OVER && bins.has_room(bin, span) {
            self.order.put_priced(bins, bin, priced);
            return true;
        }
        let most = if self.near.is_empty() { left } else { left + bins.level / OVER };
        for part in [heads_for(bins, span, most), heads_for(bins, span, 0)] {
            let is_part = part.heads != span.heads;
            if is_part && bins.cost(&part) <= most && bins.has_room(bin, &part) {
                self.order.put(bins, bin, &part);
                let heads = part.heads.end..span.heads.end;
                self.queue.push(bins, Span { heads, ..span.clone() });
                return true;
            }
        }
        let part = heads_for(bins, span, 0);
        let mut tail = bins.tail(&part, left);
        if tail.rows.is_empty() {
            return false;
        }
        if !bins.has_room(bin, &tail) {
            [tail, _] = ends(&tail, |it| bins.has_room(bin, it));
            if tail.rows.is_empty() {
                return false;
            }
        }
        self.order.put(bins, bin, &tail);
        let mut rest = part.with_rows(part.rows.start..tail.rows.start);
        let left = u64::try_from(bins.all[bin].left()).unwrap_or(0);
        if left > bins.level / WORTH {
            let head = bins.head(&rest, left);
            if !head.rows.is_empty() && bins.has_room(bin, &head) {
                self.order.put(bins, bin, &head);
                rest.rows.start = head.rows.end;
            }
        }
        self.queue.push(bins, rest);
        let heads = part.heads.end..span.heads.end;
        self.queue.push(bins, Span { heads, ..span.clone() });
        true
    }

    /// Puts the last tile of a span into the slot with the most capacity left, although that is too
    /// little. If memory is limited it puts the last sixteenth of the span, which may be long.
    fn place_one_tile(&mut self, bins: &mut Bins<'_>, span: &Span) -> Result<(), Error> {
        let part = heads_for(bins, span, 0);
        let sixteenth = if bins.limits().are_none() { 0 } else { span.rows.len() as u32 / 16 };
        let cut = (span.rows.end - 1 - sixteenth) / TILE_ROWS * TILE_ROWS;
        let tile = part.with_rows(cut.max(span.rows.start)..span.rows.end);
        let place = |tile: &Span| self.order.find(|bin| bins.has_room(bin, tile));
        let last = (span.rows.end - 1) / TILE_ROWS * TILE_ROWS;
        let one = part.with_rows(last.max(span.rows.start)..span.rows.end);
        let found =
            place(&tile).map(|bin| (bin, tile)).or_else(|| Some((place(&one)?, one.clone())));
        let Some((bin, tile)) = found else {
            let tile = one;
            let Span { document, ref rows, .. } = tile;
            return Err(if (0..bins.all.len()).any(|bin| bins.reaches(bin, &tile)) {
                Error::NoRoom { document }
            } else {
                Error::OutOfReach { document, start: rows.start, end: rows.end }
            });
        };
        self.order.put(bins, bin, &tile);
        self.queue.push(bins, part.with_rows(span.rows.start..tile.rows.start));
        let heads = part.heads.end..span.heads.end;
        self.queue.push(bins, Span { heads, ..span.clone() });
        Ok(())
    }
}

/// The span under its first KV heads: as many as cost at most `most` with all rows, at least one, or all if heads stay
/// together.
fn heads_for(bins: &Bins<'_>, span: &Span, most: u64) -> Span {
    if !bins.problem.heads_may_part() || span.heads.len() == 1 {
        return span.clone();
    }
    let one = Span { heads: span.heads.start..span.heads.start + 1, ..span.clone() };
    let count = (most / bins.cost(&one).max(1)).clamp(1, span.heads.len() as u64);
    Span { heads: span.heads.start..span.heads.start + count as u16, ..one }
}

/// The part of a span that a slot with this capacity left would take.
fn part_for(bins: &Bins<'_>, span: &Span, left: u64) -> Span {
    let part = heads_for(bins, span, left);
    let tail = bins.tail(&part, left);
    if tail.rows.is_empty() { part } else { tail }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::balance::limits::Limits;
    use crate::plan::least_work;
    use crate::{Costs, Document, Heads, Layout, Links, Mask, Problem, Slot, Tolerance};

    fn dedicated(kv: u16, lanes: u16, slots: usize) -> Problem {
        let document = Document { rows: 65_536, mask: Mask::Causal };
        Problem {
            layout: Layout::end_to_end(vec![document], 65_536).unwrap(),
            heads: Heads { query: 32, kv, dim: 128 },
            element_bytes: 2,
            lanes,
            slots: vec![Slot { weight: 100, head_start: 0, home: None, memory: 1 << 50 }; slots],
            costs: Costs::pairs_only(),
            links: Links::equal(),
            tolerance: Tolerance::USUAL,
        }
    }

    #[test]
    fn whole_heads_come_before_cuts_of_rows() {
        let problem = dedicated(8, 1, 4);
        let mut bins = Bins::new(&problem, Limits::none(), least_work(&problem));
        let spans = place_at_home(&mut bins, &BTreeSet::new());
        fill(&mut bins, spans).unwrap();
        for bin in &bins.all {
            let groups = bins.groups_of(bin, DocumentId(0));
            assert_eq!(groups.len(), 1);
            assert_eq!(groups[0].heads.len(), 2);
        }
    }
}
