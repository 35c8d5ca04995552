//! What a slot can take: its memory, and the ranks that it reaches.
//!
//! In: bins and a span. Out: whether there is room, and how many KV heads a bundle has at most.
//!
//! What the plan's check relies on: a bin that was asked before each span holds nothing out of reach and, under limits, no
//! more than its memory.

use super::bin::Bin;
use super::bins::Bins;
use super::groups::{Group, Span, put};
use crate::DocumentId;
use crate::memory::bytes;

/// A bundle of several KV heads costs at most one part in this many of the level.
const BUNDLE: u64 = 16;
/// Splitting a group into bundles adds tasks; they may cost one part in this many of the group,
/// since slots were evened out without them.
const SPLIT: u64 = 4_096;
/// Up to this many slots, bundles are not split: each survivor gets a large part of a lost slot's
/// work in any case.
const FEW_SLOTS: usize = 6;

impl Bins<'_> {
    /// Whether a bin reaches all ranks.
    pub(super) fn reaches_all_ranks(&self, bin: usize) -> bool {
        let ranks = self.problem.layout.ranks().len();
        self.all[bin].beyond.first().is_none_or(|place| *place >= ranks)
    }

    /// Whether a bin reaches all ranks that hold what it has, and the keys that this needs.
    pub(super) fn reaches_what_it_holds(&self, bin: usize) -> bool {
        let it = &self.all[bin];
        let reaches =
            |(document, groups): (DocumentId, &[Group])| self.reaches_groups(it, document, groups);
        let reaches_whole = |document| reaches((document, &self.groups_of(it, document)));
        it.beyond.is_empty() || it.touched().all(reaches) && self.strangers(it).all(reaches_whole)
    }

    /// Whether a bin reaches all ranks that hold a span and the keys that it needs with it.
    pub(super) fn reaches(&self, bin: usize, span: &Span) -> bool {
        let it = &self.all[bin];
        if it.beyond.is_empty() {
            return true;
        }
        let mut groups = self.groups_of(it, span.document).into_owned();
        put(&mut groups, span);
        self.reaches_groups(it, span.document, &groups)
    }

    fn reaches_groups(&self, bin: &Bin<'_>, document: DocumentId, groups: &[Group]) -> bool {
        let mut needed = groups
            .iter()
            .flat_map(|group| group.rows.iter().cloned().chain(self.keys(document, &group.rows)));
        needed.all(|rows| {
            let mut pieces = self.problem.layout.locate(document, rows);
            pieces.all(|piece| bin.beyond.binary_search(&(piece.rank.0 as usize)).is_err())
        })
    }

    /// Whether a bin can take a span that it does not hold yet: it reaches the ranks, and its memory has room.
    pub(super) fn has_room(&self, bin: usize, span: &Span) -> bool {
        let it = &self.all[bin];
        if !self.reaches(bin, span) {
            return false;
        }
        if self.limits().are_none() {
            return true;
        }
        let phase = self.limits().phase(it.slot);
        let before = self.groups_of(it, span.document);
        let mut after = before.to_vec();
        put(&mut after, span);
        let bytes = it.bytes - self.all_bytes(span.document, &before)
            + self.all_bytes(span.document, &after);
        bytes <= phase && after.iter().all(|it| self.fits_bundle(span.document, it))
    }

    /// Bytes that a bin may hold more; negative if it holds too many.
    pub(super) fn free(&self, bin: usize) -> i128 {
        let it = &self.all[bin];
        i128::from(self.limits().phase(it.slot)) - i128::from(it.bytes)
    }

    /// Whether a group may be in bundles as they are allowed to be.
    pub(super) fn fits_bundle(&self, document: DocumentId, group: &Group) -> bool {
        let parts = if self.problem.heads_may_part() { group.heads.len() as u64 } else { 1 };
        self.largest_bundle(document, group) / parts <= self.limits().bundle()
    }

    /// Whether the first row of a span lies at a bin's rank.
    pub(super) fn is_home(&self, bin: usize, span: &Span) -> bool {
        let first = span.rows.start..span.rows.start + 1;
        let mut pieces = self.problem.layout.locate(span.document, first);
        pieces.any(|it| Some(it.rank) == self.all[bin].home())
    }

    /// How many KV heads of a group go into one bundle. Where heads may part, a bundle is limited
    /// to a small part of a slot's work, so that the bundles of a lost slot spread over many slots,
    /// and to the reserve. Bits do not depend on the number of heads in a bundle.
    pub(super) fn heads_of_bundle(&self, document: DocumentId, group: &Group) -> u16 {
        let heads = group.heads.len() as u16;
        if !self.problem.heads_may_part() || heads == 1 {
            return heads;
        }
        let share = |most: u64, all: u64| most.saturating_mul(heads.into()) / all.max(1);
        let cost = self.all_cost(document, std::slice::from_ref(group));
        let is_few = self.all.len() <= FEW_SLOTS;
        let mut count = if is_few { heads.into() } else { share(self.level / BUNDLE, cost) };
        let costs = &self.problem.costs;
        let tasks: u64 = group.rows.iter().map(|rows| costs.task_count(rows)).sum();
        let of_bundle = tasks.saturating_mul(costs.task.into());
        let most = (cost / SPLIT).checked_div(of_bundle).map_or(u64::MAX, |more| more + 1);
        count = count.max(u64::from(heads).div_ceil(most));
        if let Some(reserve) = self.limits().reserve {
            count = count.min(share(reserve, self.largest_bundle(document, group)));
        }
        u16::try_from(count).unwrap_or(heads).clamp(1, heads)
    }

    /// Bytes of groups; 0 where memory is not limited, since nothing reads it there.
    pub(super) fn all_bytes(&self, document: DocumentId, groups: &[Group]) -> u64 {
        if self.limits().reserve.is_none() {
            return 0;
        }
        groups.iter().map(|group| self.bytes(document, group)).sum()
    }

    /// Bytes of a group in a backward phase, which is the larger.
    pub(super) fn bytes(&self, document: DocumentId, group: &Group) -> u64 {
        self.bytes_of_bundles(document, group).sum()
    }

    /// Bytes of the largest bundle of a group whose heads stay together.
    fn largest_bundle(&self, document: DocumentId, group: &Group) -> u64 {
        self.bytes_of_bundles(document, group).max().unwrap_or(0)
    }

    fn bytes_of_bundles(&self, document: DocumentId, group: &Group) -> impl Iterator<Item = u64> {
        let bundles = self.bundles(document, &group.rows);
        bundles.map(|it| bytes(self.problem, &group.heads, it.0, it.1.len() as u64).most())
    }
}
