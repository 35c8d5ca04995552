//! Slots while they are being filled.
//!
//! In: pieces of documents put and taken. Out: exact loads and bytes of every slot at any time, and
//! at the end the shares of the plan.
//!
//! What the other steps rely on is what [`Group`] says.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use super::groups::{Group, Span, put, take};
use crate::memory::bytes;
use crate::plan::{Draft, level};
use crate::{Cuts, DocumentId, Error, Plan, Problem, RankId, Slot, SlotId};

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

    pub(super) fn are_none(self) -> bool {
        self.reserve.is_none()
    }

    fn bundle(self) -> u64 {
        self.reserve.unwrap_or(u64::MAX)
    }

    /// Bytes of one of two phases.
    fn phase(self, slot: &Slot) -> u64 {
        self.reserve.map_or(u64::MAX, |reserve| slot.memory.saturating_sub(reserve) / 2)
    }
}

/// Documents at home that are looked at when rows are to leave: the longest.
const LONGEST: usize = 8;

/// A slot that is not standby, and what it holds so far.
#[derive(Clone)]
pub(super) struct Bin<'a> {
    id: SlotId,
    slot: &'a Slot,
    place: usize,
    /// Cost that it should get.
    capacity: u64,
    load: u64,
    /// Counted under limits only.
    bytes: u64,
    /// Whether it holds the documents that lie whole at its rank, where `held` says nothing else.
    keeps_home: bool,
    /// The longest of those, with their rows.
    longest: Vec<(u32, DocumentId)>,
    held: BTreeMap<DocumentId, Vec<Group>>,
}

impl Bin<'_> {
    pub(super) fn home(&self) -> Option<RankId> {
        self.slot.home
    }

    /// Its place in the network.
    pub(super) fn place(&self) -> usize {
        self.place
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
        self.load == 0
    }

    pub(super) fn finish(&self) -> u64 {
        self.slot.finish(self.load)
    }

    /// Cost that it works off in `time` of a slot of weight 100.
    pub(super) fn work_in(&self, time: u64) -> u64 {
        let work = u128::from(time) * u128::from(self.slot.weight) / 100;
        u64::try_from(work).unwrap_or(u64::MAX)
    }

    /// Most cost with which it finishes by a time.
    pub(super) fn most_by(&self, finish: u64) -> u64 {
        let Some(time) = finish.checked_sub(self.slot.head_start) else {
            return 0;
        };
        let load = ((u128::from(time) + 1) * u128::from(self.slot.weight) - 1) / 100;
        u64::try_from(load).unwrap_or(u64::MAX)
    }

    pub(super) fn weight(&self) -> u64 {
        self.slot.weight.into()
    }

    /// Documents that it holds in part or from elsewhere; under limits all it holds.
    pub(super) fn touched(&self) -> impl Iterator<Item = (DocumentId, &[Group])> {
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
        let (places, _) = problem.places();
        let slots = (0..).map(SlotId).zip(&problem.slots);
        let bins = slots.filter(|(_, slot)| !slot.is_standby()).map(|(id, slot)| {
            let mut bin = Bin {
                id,
                slot,
                place: places[usize::from(id.0)],
                capacity: 0,
                load: 0,
                bytes: 0,
                keeps_home: false,
                longest: Vec::new(),
                held: BTreeMap::new(),
            };
            bin.capacity = bin.work_in(level.saturating_sub(slot.head_start)).min(i64::MAX as u64);
            bin
        });
        Self { problem, all: bins.collect(), level, limits }
    }

    /// What a bin may hold at most.
    pub(super) fn limits(&self) -> Limits {
        self.limits
    }

    /// Lets a bin hold a document that lies whole at its rank; `false` if limits ask to look at each.
    pub(super) fn keep_home(&mut self, bin: usize, document: DocumentId) -> bool {
        if self.limits.reserve.is_some() {
            return false;
        }
        let rows = self.problem.document(document).rows;
        let cost = self.problem.cost(document, &self.problem.all_heads(), &(0..rows));
        let it = &mut self.all[bin];
        it.keeps_home = true;
        it.load += cost;
        let at = it.longest.partition_point(|other| other.0 >= rows);
        if at < LONGEST {
            it.longest.truncate(LONGEST - 1);
            it.longest.insert(at, (rows, document));
        }
        true
    }

    pub(super) fn cost(&self, span: &Span) -> u64 {
        self.problem.cost(span.document, &span.heads, &span.rows)
    }

    /// A bin's KV-head groups of one document, ascending.
    pub(super) fn groups_of<'b>(&self, bin: &'b Bin<'_>, document: DocumentId) -> Cow<'b, [Group]> {
        match bin.held.get(&document) {
            Some(groups) => Cow::Borrowed(groups),
            None if self.is_at_home(bin, document) => {
                let rows = std::iter::once(0..self.problem.document(document).rows).collect();
                Cow::Owned(vec![Group { heads: self.problem.all_heads(), rows }])
            }
            None => Cow::Borrowed(&[]),
        }
    }

    /// Calls with the heads and rows of each of a bin's groups of a document: what [`Self::groups_of`] has, without making it.
    pub(super) fn each_group(
        &self,
        bin: &Bin<'_>,
        document: DocumentId,
        mut call: impl FnMut(&Range<u16>, &[Range<u32>]),
    ) {
        match bin.held.get(&document) {
            Some(groups) => groups.iter().for_each(|it| call(&it.heads, &it.rows)),
            None if self.is_at_home(bin, document) => {
                let all = 0..self.problem.document(document).rows;
                call(&self.problem.all_heads(), std::slice::from_ref(&all));
            }
            None => {}
        }
    }

    /// Whether a bin holds rows of a document, those that lie whole at its rank not counted.
    pub(super) fn holds(&self, bin: usize, document: DocumentId) -> bool {
        self.all[bin].held.get(&document).is_some_and(|it| !it.is_empty())
    }

    fn is_at_home(&self, bin: &Bin<'_>, document: DocumentId) -> bool {
        match self.problem.layout.pieces_of_document(document) {
            [one] => bin.keeps_home && Some(one.rank) == bin.home(),
            _ => false,
        }
    }

    /// Rows that a bin could give away, by document, heads and row: of the `most` documents that go furthest.
    pub(super) fn spans(&self, bin: usize, most: usize) -> Vec<Span> {
        let it = &self.all[bin];
        let end =
            |groups: &[Group]| groups.iter().filter_map(|it| it.rows.last()).map(|it| it.end).max();
        let touched = it.touched().filter_map(|(id, groups)| Some((Reverse(end(groups)?), id)));
        let home: Vec<DocumentId> = if most > LONGEST {
            self.home_of(it)
        } else {
            it.longest.iter().map(|(_, document)| *document).collect()
        };
        let home = home.into_iter().filter(|id| !it.held.contains_key(id));
        let home = home.map(|id| (Reverse(self.problem.document(id).rows), id));
        let mut longest: Vec<(Reverse<u32>, DocumentId)> = touched.chain(home).collect();
        if longest.len() > most {
            longest.select_nth_unstable(most);
            longest.truncate(most);
        }
        longest.sort_unstable();
        let mut spans = Vec::with_capacity(longest.len());
        for (_, document) in longest {
            for Group { heads, rows } in self.groups_of(it, document).iter() {
                let span =
                    |rows: &Range<u32>| Span { document, heads: heads.clone(), rows: rows.clone() };
                spans.extend(rows.iter().map(span));
            }
        }
        spans
    }

    /// The document of which a bin holds the furthest row.
    pub(super) fn furthest(&self, bin: usize) -> Option<DocumentId> {
        self.spans(bin, 1).last().map(|it| it.document)
    }

    /// Whether a bin's memory has room for a span that it does not hold yet.
    pub(super) fn has_room(&self, bin: usize, span: &Span) -> bool {
        let it = &self.all[bin];
        let phase = self.limits.phase(it.slot);
        if phase == u64::MAX {
            return true;
        }
        let before = self.groups_of(it, span.document);
        let mut after = before.to_vec();
        put(&mut after, span);
        let largest = after.iter().map(|group| self.bytes(span.document, group)).max();
        let bytes = it.bytes - self.all_bytes(span.document, &before)
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

    /// The plan of what the bins hold.
    pub(super) fn into_plan(self, digest: u64) -> Result<Plan, Error> {
        let mut draft = Draft::new(self.problem);
        for bin in &self.all {
            let mut held = bin.held.iter().peekable();
            for document in self.home_of(bin) {
                while let Some((id, groups)) = held.next_if(|it| *it.0 <= document) {
                    for Group { heads, rows } in groups {
                        draft.bundle(bin.id, *id, heads.clone(), rows.iter().cloned());
                    }
                }
                if !bin.held.contains_key(&document) {
                    let rows = 0..self.problem.document(document).rows;
                    draft.bundle(bin.id, document, self.problem.all_heads(), [rows]);
                }
            }
            for (id, groups) in held {
                for Group { heads, rows } in groups {
                    draft.bundle(bin.id, *id, heads.clone(), rows.iter().cloned());
                }
            }
        }
        draft.finish(digest, Cuts::Tiles)
    }

    /// Documents that a bin holds because they lie whole at its rank, or did before they were touched.
    fn home_of(&self, bin: &Bin<'_>) -> Vec<DocumentId> {
        let Some(RankId(rank)) = bin.home().filter(|_| bin.keeps_home) else {
            return Vec::new();
        };
        let all = self.problem.layout.ranks()[usize::from(rank)].iter().map(|it| it.document);
        let mut home: Vec<DocumentId> = all.filter(|it| self.is_at_home(bin, *it)).collect();
        home.sort_unstable();
        home
    }

    fn change(&mut self, bin: usize, document: DocumentId, change: impl FnOnce(&mut Vec<Group>)) {
        let is_home = self.is_at_home(&self.all[bin], document);
        let mut groups = match self.all[bin].held.get_mut(&document) {
            Some(groups) => std::mem::take(groups),
            None => self.groups_of(&self.all[bin], document).into_owned(),
        };
        let before = (self.all_cost(document, &groups), self.all_bytes(document, &groups));
        change(&mut groups);
        let after = (self.all_cost(document, &groups), self.all_bytes(document, &groups));
        let it = &mut self.all[bin];
        it.load = it.load - before.0 + after.0;
        it.bytes = it.bytes - before.1 + after.1;
        if groups.is_empty() && !is_home {
            it.held.remove(&document);
        } else {
            it.held.insert(document, groups);
        }
    }

    fn all_cost(&self, document: DocumentId, groups: &[Group]) -> u64 {
        let cost = |group: &Group| -> u64 {
            group.rows.iter().map(|rows| self.problem.cost(document, &group.heads, rows)).sum()
        };
        groups.iter().map(cost).sum()
    }

    /// Bytes of groups; zero without limits, where nobody asks.
    fn all_bytes(&self, document: DocumentId, groups: &[Group]) -> u64 {
        if self.limits.reserve.is_none() {
            return 0;
        }
        groups.iter().map(|group| self.bytes(document, group)).sum()
    }

    fn bytes(&self, document: DocumentId, Group { heads, rows }: &Group) -> u64 {
        let keys = self.keys(document, rows);
        let rows = rows.iter().map(|it| it.len() as u64).sum();
        bytes(self.problem, heads, rows, keys.len() as u64).most()
    }

    /// Keys that rows of a document need, without holes.
    pub(super) fn keys(&self, document: DocumentId, rows: &[Range<u32>]) -> Range<u32> {
        self.keys_of(document, rows.iter().cloned())
    }

    /// The same, of ranges some of which may be empty.
    pub(super) fn keys_of(
        &self,
        document: DocumentId,
        rows: impl Iterator<Item = Range<u32>>,
    ) -> Range<u32> {
        let whole = self.problem.document(document);
        let keys = rows.filter(|it| !it.is_empty()).map(|it| whole.mask.keys(whole.rows, it));
        keys.reduce(|all, it| all.start.min(it.start)..all.end.max(it.end)).unwrap_or(0..0)
    }
}
