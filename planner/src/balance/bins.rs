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

use super::bin::Bin;
use super::groups::{Group, Span, put, take};
use super::limits::Limits;
use crate::plan::{Draft, level};
use crate::{Bundle, BundleId, Cuts, DocumentId, Error, Plan, Problem, SlotId};

/// Maximum whole documents of a slot, the longest ones, that are candidates when rows have to leave
/// the slot.
pub(super) const LONGEST: usize = 8;

/// All slots that are not standby.
#[derive(Clone)]
pub(super) struct Bins<'a> {
    pub(super) problem: &'a Problem,
    pub(super) all: Vec<Bin<'a>>,
    /// When all bins finish if each gets its capacity: all work poured over them, and what is tolerated beyond the usual.
    pub(super) level: u64,
    /// How much later the last may finish.
    pub(super) tolerated: u64,
    /// How much later it finishes at most where bins count as even.
    pub(super) enough: u64,
    limits: Limits,
    /// By document: the bin that holds it whole. Such documents are not in `held`, since there may
    /// be a million of them.
    owners: Vec<u32>,
}

/// No bin holds a document whole.
const NOBODY: u32 = u32::MAX;

impl<'a> Bins<'a> {
    /// Empty bins with capacities for `work`.
    pub(super) fn new(problem: &'a Problem, limits: Limits, work: u64) -> Self {
        let tolerance = problem.tolerance;
        let level = tolerance.raised(level(&problem.slots, work));
        let ((places, _), beyond) = (problem.places(), problem.links.beyond_reach());
        let slots = (0..).map(SlotId).zip(&problem.slots);
        let active = slots.filter(|(_, slot)| !slot.is_standby());
        let bins = (0..).zip(active).map(|(index, (id, slot))| {
            let mut bin = Bin {
                id,
                index,
                slot,
                place: places[id.0 as usize],
                beyond: beyond.get(places[id.0 as usize]).cloned().unwrap_or_default(),
                capacity: 0,
                load: 0,
                bytes: 0,
                whole: Vec::new(),
                has_strangers: false,
                longest: Vec::new(),
                held: BTreeMap::new(),
            };
            bin.capacity = bin.work_in(level.saturating_sub(slot.head_start));
            bin
        });
        let owners = vec![NOBODY; problem.layout.documents().len()];
        Self {
            problem,
            all: bins.collect(),
            level,
            tolerated: tolerance.aim(level),
            enough: tolerance.enough(level),
            limits,
            owners,
        }
    }

    /// What a bin may hold at most.
    pub(super) fn limits(&self) -> Limits {
        self.limits
    }

    /// Sets other limits for bins that hold something; both limit bundles, so that bytes are counted under either.
    pub(super) fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Gives empty bins what a plan has them hold.
    pub(super) fn hold(&mut self, plan: &Plan) {
        for (bundle, it) in (0..).map(BundleId).zip(plan.bundles()) {
            let Ok(bin) = self.all.binary_search_by_key(&it.slot, |bin| bin.id) else {
                continue;
            };
            for run in plan.runs_of(bundle) {
                let Bundle { document, ref kv_heads, .. } = *it;
                self.put(bin, &Span { document, heads: kv_heads.clone(), rows: run.rows });
            }
        }
    }

    /// Gives a bin a whole document that no bin holds rows of; `false` if limits ask to look at each.
    pub(super) fn keep_whole(&mut self, bin: usize, document: DocumentId) -> bool {
        let rows = self.problem.document(document).rows;
        let cost = self.problem.cost(document, &self.problem.all_heads(), &(0..rows));
        self.keep_whole_priced(bin, document, (cost, rows))
    }

    /// As [`Self::keep_whole`], of a document whose cost and rows are known.
    pub(super) fn keep_whole_priced(
        &mut self,
        bin: usize,
        document: DocumentId,
        (cost, rows): (u64, u32),
    ) -> bool {
        if self.limits.reserve.is_some() {
            return false;
        }
        self.owners[document.0 as usize] = bin as u32;
        let holder = self.problem.layout.holder(document);
        let is_home = holder.is_some() && holder == self.all[bin].home();
        let it = &mut self.all[bin];
        it.whole.push(document);
        it.has_strangers |= !is_home;
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
            None if self.is_whole_at(bin, document) => {
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
            None if self.is_whole_at(bin, document) => {
                let all = 0..self.problem.document(document).rows;
                call(&self.problem.all_heads(), std::slice::from_ref(&all));
            }
            None => {}
        }
    }

    /// Whether a bin holds rows of a document, but not all.
    pub(super) fn holds(&self, bin: usize, document: DocumentId) -> bool {
        self.all[bin].held.get(&document).is_some_and(|it| !it.is_empty())
    }

    fn is_whole_at(&self, bin: &Bin<'_>, document: DocumentId) -> bool {
        self.owners[document.0 as usize] == bin.index
    }

    /// Rows that a bin could give away, by document, heads and row: of the `most` documents that go furthest.
    pub(super) fn spans(&self, bin: usize, most: usize) -> Vec<Span> {
        let it = &self.all[bin];
        let end =
            |groups: &[Group]| groups.iter().filter_map(|it| it.rows.last()).map(|it| it.end).max();
        let touched = it.touched().filter_map(|(id, groups)| Some((Reverse(end(groups)?), id)));
        let whole: Vec<DocumentId> = if most > LONGEST {
            self.whole_of(it)
        } else {
            it.longest.iter().map(|(_, document)| *document).collect()
        };
        let whole = whole.into_iter().filter(|id| self.is_whole_at(it, *id));
        let whole = whole.map(|id| (Reverse(self.problem.document(id).rows), id));
        let mut longest: Vec<(Reverse<u32>, DocumentId)> = touched.chain(whole).collect();
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

    /// Rebuilds the lists of whole documents and of the longest among them, after many documents
    /// have left.
    pub(super) fn forget_what_left(&mut self) {
        self.list_whole();
        for bin in &mut self.all {
            let rows = |id: &DocumentId| (self.problem.document(*id).rows, *id);
            let mut longest: Vec<(u32, DocumentId)> = bin.whole.iter().map(rows).collect();
            longest.sort_unstable_by_key(|(rows, id)| (Reverse(*rows), *id));
            longest.truncate(LONGEST);
            bin.longest = longest;
        }
    }

    /// The document of which a bin holds the furthest row.
    pub(super) fn furthest(&self, bin: usize) -> Option<DocumentId> {
        self.spans(bin, 1).last().map(|it| it.document)
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
        self.into_draft().finish(digest, Cuts::Tiles)
    }

    /// The same, as yet unchecked.
    pub(super) fn into_draft(mut self) -> Draft<'a> {
        self.list_whole();
        let mut draft = Draft::new(self.problem);
        let mut add = |bin: &Bin<'_>, document: DocumentId, group: &Group| {
            let heads = self.heads_of_bundle(document, group);
            for first in group.heads.clone().step_by(heads.into()) {
                let heads = first..group.heads.end.min(first + heads);
                draft.rows(bin.id, document, &heads, group.rows.iter().cloned());
            }
        };
        let mut whole =
            Group { heads: self.problem.all_heads(), rows: std::iter::once(0..0).collect() };
        for bin in &self.all {
            let mut held = bin.held.iter().peekable();
            for &document in &bin.whole {
                while let Some((id, groups)) = held.next_if(|it| *it.0 < document) {
                    for it in groups {
                        add(bin, *id, it);
                    }
                }
                whole.rows[0].end = self.problem.document(document).rows;
                add(bin, document, &whole);
            }
            for (id, groups) in held {
                for it in groups {
                    add(bin, *id, it);
                }
            }
        }
        draft
    }

    /// Documents that a bin holds whole; empty if all of them lie at the bin's rank.
    pub(super) fn strangers(&self, bin: &Bin<'_>) -> impl Iterator<Item = DocumentId> {
        let all: &[DocumentId] = if bin.has_strangers { &bin.whole } else { &[] };
        all.iter().copied().filter(|it| self.is_whole_at(bin, *it))
    }

    /// Lists the whole documents of each bin anew, in order: none that has left is among them then.
    fn list_whole(&mut self) {
        self.all.iter_mut().for_each(|it| it.whole.clear());
        for (document, &owner) in (0..).map(DocumentId).zip(&self.owners) {
            if let Some(bin) = self.all.get_mut(owner as usize) {
                bin.whole.push(document);
            }
        }
    }

    /// Documents that a bin holds whole, in order.
    fn whole_of(&self, bin: &Bin<'_>) -> Vec<DocumentId> {
        let all = bin.whole.iter().copied();
        let mut whole: Vec<DocumentId> = all.filter(|it| self.is_whole_at(bin, *it)).collect();
        whole.sort_unstable();
        whole
    }

    fn change(&mut self, bin: usize, document: DocumentId, change: impl FnOnce(&mut Vec<Group>)) {
        let mut groups = match self.all[bin].held.get_mut(&document) {
            Some(groups) => std::mem::take(groups),
            None => self.groups_of(&self.all[bin], document).into_owned(),
        };
        let before = (self.all_cost(document, &groups), self.all_bytes(document, &groups));
        change(&mut groups);
        let after = (self.all_cost(document, &groups), self.all_bytes(document, &groups));
        if self.is_whole_at(&self.all[bin], document) {
            self.owners[document.0 as usize] = NOBODY;
        }
        let it = &mut self.all[bin];
        it.load = it.load - before.0 + after.0;
        it.bytes = it.bytes - before.1 + after.1;
        if groups.is_empty() {
            it.held.remove(&document);
        } else {
            it.held.insert(document, groups);
        }
    }

    pub(super) fn all_cost(&self, document: DocumentId, groups: &[Group]) -> u64 {
        let cost = |group: &Group| -> u64 {
            group.rows.iter().map(|rows| self.problem.cost(document, &group.heads, rows)).sum()
        };
        groups.iter().map(cost).sum()
    }

    /// Keys that ascending rows of a document need, as ascending ranges that do not touch.
    pub(super) fn keys(
        &self,
        document: DocumentId,
        rows: &[Range<u32>],
    ) -> impl Iterator<Item = Range<u32>> {
        self.bundles(document, rows).map(|it| it.1)
    }

    /// Number of rows, and keys, of the bundles that ascending rows of a document are.
    pub(super) fn bundles(
        &self,
        document: DocumentId,
        rows: &[Range<u32>],
    ) -> impl Iterator<Item = (u64, Range<u32>)> {
        let whole = self.problem.document(document);
        whole.mask.unions(whole.rows, rows)
    }

    /// Keys that a bin needs more when it gets rows of a document beside ascending others that it holds.
    pub(super) fn keys_of_more(
        &self,
        document: DocumentId,
        held: &[Range<u32>],
        rows: &Range<u32>,
    ) -> Range<u32> {
        let at = held.partition_point(|it| it.end <= rows.start);
        let before = held[..at].last().cloned();
        let whole = self.problem.document(document);
        whole.mask.fresh(whole.rows, rows.clone(), before, held.get(at).cloned())
    }

    /// Keys that a bin needs no more when it loses rows of a document that are among ascending ones that it holds.
    pub(super) fn keys_of_less(
        &self,
        document: DocumentId,
        held: &[Range<u32>],
        rows: &Range<u32>,
    ) -> Range<u32> {
        let at = held.partition_point(|it| it.end <= rows.start);
        let run = &held[at];
        let head = run.start..rows.start;
        let tail = rows.end..run.end;
        let before = if head.is_empty() { held[..at].last().cloned() } else { Some(head) };
        let behind = if tail.is_empty() { held.get(at + 1).cloned() } else { Some(tail) };
        let whole = self.problem.document(document);
        whole.mask.fresh(whole.rows, rows.clone(), before, behind)
    }
}
