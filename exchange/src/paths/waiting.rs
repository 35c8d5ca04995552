//! Pulls that wait for a path because it is demanded.
//!
//! In: claimed pulls. Out: those that are late, and those of a peer, in the order in which they began.
//!
//! Invariant: the deadline of a pull does not change while it waits.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use crate::peer::PeerId;
use crate::provider::PullId;
use crate::tcp::Pull;

/// See the module.
#[derive(Default)]
pub(super) struct Waiting {
    pulls: BTreeMap<PeerId, BTreeMap<PullId, Pull>>,
    deadlines: BTreeSet<(Instant, PeerId, PullId)>,
}

impl Waiting {
    pub(super) fn push(&mut self, pull: Pull) {
        self.deadlines.insert((pull.late_at(), pull.peer(), pull.id()));
        self.pulls.entry(pull.peer()).or_default().insert(pull.id(), pull);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pulls.is_empty()
    }

    /// When the first pull is late.
    pub(super) fn next_late(&self) -> Option<Instant> {
        self.deadlines.first().map(|it| it.0)
    }

    /// Takes out a pull that is late.
    pub(super) fn take_late(&mut self, now: Instant) -> Option<Pull> {
        let &(at, peer, id) = self.deadlines.first()?;
        if at > now {
            return None;
        }
        self.deadlines.remove(&(at, peer, id));
        let theirs = self.pulls.get_mut(&peer)?;
        let pull = theirs.remove(&id);
        if theirs.is_empty() {
            self.pulls.remove(&peer);
        }
        pull
    }

    /// Takes out all pulls from a peer.
    pub(super) fn take_from(&mut self, peer: PeerId) -> impl Iterator<Item = Pull> + use<> {
        let theirs = self.pulls.remove(&peer).unwrap_or_default();
        for pull in theirs.values() {
            self.deadlines.remove(&(pull.late_at(), peer, pull.id()));
        }
        theirs.into_values()
    }
}
