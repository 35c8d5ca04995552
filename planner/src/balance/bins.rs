//! Slots while they are being filled.
//!
//! In: pieces of documents put and taken. Out: exact loads and bytes of every slot at any time, and
//! at the end the shares of the plan.
//!
//! What the other steps rely on is what [`Group`] says.

use std::collections::BTreeMap;
use std::ops::Range;

use super::groups::{Group, Span, put, take};
use crate::memory::bytes;
use crate::plan::{Share, hull, level};
use crate::{DocumentId, Problem, RankId, Slot, SlotId, TILE_ROWS};

/// What a bin may hold at most, so that the plan fits the memory.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Bytes of a bundle, and kept free in each slot.
    reserve: Option<u64>,
}

impl Limits {
    pub(super) fn none() -> Self {
        Self { reserve: None }
    }

    pub(super) fn with_reserve(reserve: u64) -> Self {
        Self { reserve: Some(reserve) }
    }

    fn bundle(self) -> u64 {
        self.reserve.unwrap_or(u64::MAX)
    }

    /// Bytes of one of two phases.
    fn phase(self, slot: &Slot) -> u64 {
        self.reserve.map_or(u64::MAX, |reserve| slot.memory.saturating_sub(reserve) / 2)
    }
}

/// A slot that is not standby, and what it holds so far.
#[derive(Clone)]
pub(super) struct Bin<'a> {
    id: SlotId,
    slot: &'a Slot,
    /// Cost that it should get.
    capacity: u64,
    load: u64,
    bytes: u64,
    held: BTreeMap<DocumentId, Vec<Group>>,
}

impl Bin<'_> {
    pub(super) fn home(&self) -> Option<RankId> {
        self.slot.home
    }

    /// Cost that it should get.
    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Capacity less load; negative for a bin that has too much.
    pub(super) fn left(&self) -> i64 {
        self.capacity as i64 - self.load as i64
    }

    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    pub(super) fn finish(&self) -> u64 {
        self.slot.finish(self.load)
    }

    /// Cost that it works off in `time` of a slot of weight 100.
    pub(super) fn work_in(&self, time: u64) -> u64 {
        let work = u128::from(time) * u128::from(self.slot.weight) / 100;
        u64::try_from(work).unwrap_or(u64::MAX)
    }

    pub(super) fn weight(&self) -> u64 {
        self.slot.weight.into()
    }

    /// All it holds, by document, heads and row.
    pub(super) fn spans(&self) -> impl Iterator<Item = Span> + '_ {
        self.held.iter().flat_map(|(&document, groups)| {
            groups.iter().flat_map(move |Group { heads, rows }| {
                let span = move |rows: &Range<u32>| Span {
                    document,
                    heads: heads.clone(),
                    rows: rows.clone(),
                };
                rows.iter().map(span)
            })
        })
    }

    /// Its KV-head groups of one document, ascending.
    pub(super) fn groups_of(&self, document: DocumentId) -> &[Group] {
        self.held.get(&document).map_or(&[], Vec::as_slice)
    }

    /// Its documents.
    pub(super) fn documents(&self) -> impl Iterator<Item = (DocumentId, &[Group])> {
        self.held.iter().map(|(document, groups)| (*document, groups.as_slice()))
    }
}

/// All slots that are not standby.
#[derive(Clone)]
pub(super) struct Bins<'a> {
    pub(super) problem: &'a Problem,
    pub(super) all: Vec<Bin<'a>>,
    /// When all bins finish if each gets its capacity.
    pub(super) level: u64,
    limits: Limits,
}

impl<'a> Bins<'a> {
    /// Empty bins with capacities for `work`.
    pub(super) fn new(problem: &'a Problem, limits: Limits, work: u64) -> Self {
        let level = level(&problem.slots, work);
        let slots = (0..).map(SlotId).zip(&problem.slots);
        let bins = slots.filter(|(_, slot)| !slot.is_standby()).map(|(id, slot)| {
            let mut bin = Bin { id, slot, capacity: 0, load: 0, bytes: 0, held: BTreeMap::new() };
            bin.capacity = bin.work_in(level.saturating_sub(slot.head_start)).min(i64::MAX as u64);
            bin
        });
        Self { problem, all: bins.collect(), level, limits }
    }

    pub(super) fn cost(&self, span: &Span) -> u64 {
        self.problem.cost(span.document, &span.heads, &span.rows)
    }

    /// Whether a bin's memory has room for a span that it does not hold yet.
    pub(super) fn has_room(&self, bin: usize, span: &Span) -> bool {
        let it = &self.all[bin];
        let phase = self.limits.phase(it.slot);
        if phase == u64::MAX {
            return true;
        }
        let before = it.groups_of(span.document);
        let mut after = before.to_vec();
        put(&mut after, span);
        let largest = after.iter().map(|group| self.bytes(span.document, group)).max();
        let bytes = it.bytes - self.all_bytes(span.document, before)
            + self.all_bytes(span.document, &after);
        largest.unwrap_or(0) <= self.limits.bundle() && bytes <= phase
    }

    /// Gives a bin rows that it does not hold.
    pub(super) fn put(&mut self, bin: usize, span: &Span) {
        self.change(bin, span.document, |groups| put(groups, span));
    }

    /// Takes from a bin rows that it holds.
    pub(super) fn take(&mut self, bin: usize, span: &Span) {
        self.change(bin, span.document, |groups| take(groups, span));
    }

    pub(super) fn into_shares(self) -> Vec<Share> {
        let shares = self.all.into_iter().flat_map(|bin| {
            let slot = bin.id;
            bin.held.into_iter().flat_map(move |(document, groups)| {
                groups.into_iter().map(move |Group { heads: kv_heads, rows }| Share {
                    slot,
                    document,
                    kv_heads,
                    rows,
                })
            })
        });
        shares.collect()
    }

    fn change(&mut self, bin: usize, document: DocumentId, change: impl FnOnce(&mut Vec<Group>)) {
        let mut groups = self.all[bin].held.remove(&document).unwrap_or_default();
        let before = (self.all_cost(document, &groups), self.all_bytes(document, &groups));
        change(&mut groups);
        let after = (self.all_cost(document, &groups), self.all_bytes(document, &groups));
        let it = &mut self.all[bin];
        it.load = it.load - before.0 + after.0;
        it.bytes = it.bytes - before.1 + after.1;
        if !groups.is_empty() {
            it.held.insert(document, groups);
        }
    }

    fn all_cost(&self, document: DocumentId, groups: &[Group]) -> u64 {
        let cost = |group: &Group| -> u64 {
            group.rows.iter().map(|rows| self.problem.cost(document, &group.heads, rows)).sum()
        };
        groups.iter().map(cost).sum()
    }

    fn all_bytes(&self, document: DocumentId, groups: &[Group]) -> u64 {
        groups.iter().map(|group| self.bytes(document, group)).sum()
    }

    fn bytes(&self, document: DocumentId, Group { heads, rows }: &Group) -> u64 {
        let keys = self.keys(document, rows);
        let rows = rows.iter().map(|it| it.len() as u64).sum();
        bytes(self.problem, heads, rows, keys.len() as u64).most()
    }

    /// Keys that rows of a document need, without holes.
    pub(super) fn keys(&self, document: DocumentId, rows: &[Range<u32>]) -> Range<u32> {
        let whole = self.problem.document(document);
        let keys: Vec<_> = rows.iter().map(|it| whole.mask.keys(whole.rows, it.clone())).collect();
        hull(keys.iter())
    }

    /// The longest tail of a span that costs at most `most`; empty if not even one tile does.
    pub(super) fn tail(&self, span: &Span, most: u64) -> Span {
        let Range { start, end } = span.rows;
        let tiles = tiles_between(start, end);
        let from = |tiles: u32| {
            span.with_rows(if tiles == 0 {
                end..end
            } else {
                start.max((end.div_ceil(TILE_ROWS) - tiles) * TILE_ROWS)..end
            })
        };
        from(most_tiles(tiles, |tiles| self.cost(&from(tiles)) <= most))
    }

    /// The longest head of a span that costs at most `most`; empty if not even one tile does.
    pub(super) fn head(&self, span: &Span, most: u64) -> Span {
        let Range { start, end } = span.rows;
        let tiles = tiles_between(start, end);
        let until = |tiles: u32| {
            span.with_rows(start..end.min((start / TILE_ROWS + tiles) * TILE_ROWS).max(start))
        };
        until(most_tiles(tiles, |tiles| self.cost(&until(tiles)) <= most))
    }
}

fn tiles_between(start: u32, end: u32) -> u32 {
    if start < end { end.div_ceil(TILE_ROWS) - start / TILE_ROWS } else { 0 }
}

/// The largest number up to `most` for which `fits` holds; it holds up to there and for zero.
fn most_tiles(most: u32, fits: impl Fn(u32) -> bool) -> u32 {
    let (mut known, mut beyond) = (0, most + 1);
    while beyond - known > 1 {
        let middle = known + (beyond - known) / 2;
        if fits(middle) {
            known = middle;
        } else {
            beyond = middle;
        }
    }
    known
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_tiles_finds_the_edge() {
        for edge in 0..20 {
            assert_eq!(most_tiles(19, |tiles| tiles <= edge), edge.min(19));
        }
    }
}
