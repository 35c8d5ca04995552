//! The pulls of a node that have not ended, or whose copy is still in progress, found by what happens to them.
//!
//! In: pulls, each time their stage has changed. Out: the oldest copy, the pull that may be late next, the pulls from a peer. What
//! a pull does next is not decided here.
//!
//! Invariant: no event costs more the more pulls there are that it does not concern.

#[cfg(test)]
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use super::device::Device;
use super::pulls::Pull;
use crate::peer::PeerId;
use crate::provider::PullId;

/// See the module.
pub(super) struct Outstanding<D: Device> {
    pulls: BTreeMap<PullId, Pull<D>>,
    /// Pulls whose end was not told, by their peer.
    open: BTreeSet<(PeerId, PullId)>,
    /// When pulls that the links do not watch may be late.
    looks: BTreeSet<(Instant, PullId)>,
    /// Pulls that are being copied, in the order in which their copies began.
    copying: VecDeque<PullId>,
    /// How often a pull was looked at.
    #[cfg(test)]
    pub(super) steps: Cell<u64>,
}

impl<D: Device> Default for Outstanding<D> {
    fn default() -> Self {
        Self {
            pulls: BTreeMap::new(),
            open: BTreeSet::new(),
            looks: BTreeSet::new(),
            copying: VecDeque::new(),
            #[cfg(test)]
            steps: Cell::default(),
        }
    }
}

impl<D: Device> Outstanding<D> {
    pub(super) fn get(&self, id: PullId) -> Option<&Pull<D>> {
        #[cfg(test)]
        self.steps.set(self.steps.get() + 1);
        self.pulls.get(&id)
    }

    /// Takes a pull out, to change it.
    pub(super) fn remove(&mut self, id: PullId) -> Option<Pull<D>> {
        #[cfg(test)]
        self.steps.set(self.steps.get() + 1);
        let pull = self.pulls.remove(&id)?;
        self.open.remove(&(pull.peer(), id));
        if let Some(at) = pull.look_at() {
            self.looks.remove(&(at, id));
        }
        Some(pull)
    }

    pub(super) fn insert(&mut self, id: PullId, pull: Pull<D>) {
        if pull.is_open() {
            self.open.insert((pull.peer(), id));
        }
        if let Some(at) = pull.look_at() {
            self.looks.insert((at, id));
        }
        self.pulls.insert(id, pull);
    }

    /// The copy of a pull has begun.
    pub(super) fn copies(&mut self, id: PullId) {
        self.copying.push_back(id);
    }

    /// The pull whose copy ends next.
    pub(super) fn oldest_copy(&self) -> Option<PullId> {
        self.copying.front().copied()
    }

    /// The oldest copy is over.
    pub(super) fn forget_oldest_copy(&mut self) {
        self.copying.pop_front();
    }

    /// The pull that may be late next, and when.
    pub(super) fn next_look(&self) -> Option<(Instant, PullId)> {
        self.looks.first().copied()
    }

    /// Pulls from a peer whose end was not told.
    pub(super) fn open_from(&self, peer: PeerId) -> Vec<PullId> {
        let theirs = (peer, PullId(0))..=(peer, PullId(u64::MAX));
        self.open.range(theirs).map(|it| it.1).collect()
    }
}
