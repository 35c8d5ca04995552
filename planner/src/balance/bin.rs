//! A slot while it is being filled.
//!
//! In and out: what it holds, and when it would finish with it. [`super::bins`] puts and takes.

use std::collections::BTreeMap;

use super::groups::Group;
use crate::problem::MOST_COST;
use crate::{DocumentId, RankId, Slot, SlotId};

/// More than all work of a checked problem: capacities and rooms beyond it count as this.
const BEYOND_ALL_WORK: u64 = 2 * MOST_COST;

/// A slot that is not standby, and what it holds so far.
#[derive(Clone)]
pub(super) struct Bin<'a> {
    pub(super) id: SlotId,
    /// Index of this bin in [`Bins::all`](super::bins::Bins).
    pub(super) index: u32,
    pub(super) slot: &'a Slot,
    pub(super) place: usize,
    /// Places that it cannot reach, ascending.
    pub(super) beyond: std::rc::Rc<[usize]>,
    /// Cost that it should get.
    pub(super) capacity: u64,
    pub(super) load: u64,
    /// Counted under limits only.
    pub(super) bytes: u64,
    /// Documents that were placed here whole. Some may have left since; `Bins::owners` says which
    /// are still here.
    pub(super) whole: Vec<DocumentId>,
    /// Whether rows of some of `whole` lie at another rank.
    pub(super) has_strangers: bool,
    /// The longest of `whole`, with their rows.
    pub(super) longest: Vec<(u32, DocumentId)>,
    pub(super) held: BTreeMap<DocumentId, Vec<Group>>,
}

impl Bin<'_> {
    pub(super) fn home(&self) -> Option<RankId> {
        self.slot.home
    }

    /// The slot's place in the network.
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

    /// When the slot would finish with `more` work on top.
    pub(super) fn finish_with(&self, more: u64) -> u64 {
        self.slot.finish(self.load + more)
    }

    /// Cost that it works off in `time` of a slot of weight 100.
    pub(super) fn work_in(&self, time: u64) -> u64 {
        let work = u128::from(time) * u128::from(self.slot.weight) / 100;
        work.min(BEYOND_ALL_WORK.into()) as u64
    }

    /// Most cost with which it finishes by a time.
    pub(super) fn most_by(&self, finish: u64) -> u64 {
        let Some(time) = finish.checked_sub(self.slot.head_start) else {
            return 0;
        };
        let load = ((u128::from(time) + 1) * u128::from(self.slot.weight) - 1) / 100;
        load.min(BEYOND_ALL_WORK.into()) as u64
    }

    pub(super) fn weight(&self) -> u64 {
        self.slot.weight.into()
    }

    /// The first document, from `document` on, of which the bin holds a part; wraps around to the
    /// lowest number.
    pub(super) fn from(&self, document: DocumentId) -> Option<(DocumentId, &[Group])> {
        let next = self.held.range(document..).next().or_else(|| self.held.first_key_value());
        next.map(|(document, groups)| (*document, groups.as_slice()))
    }

    /// Whether it holds rows of a document in part.
    pub(super) fn has(&self, document: DocumentId) -> bool {
        self.held.contains_key(&document)
    }

    /// Documents that it holds in part; under limits all it holds.
    pub(super) fn touched(&self) -> impl Iterator<Item = (DocumentId, &[Group])> {
        self.held.iter().map(|(document, groups)| (*document, groups.as_slice()))
    }
}
