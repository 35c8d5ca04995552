//! Peers whose results do not come, though what they say may: a path can lose large segments alone, or break under them.
//!
//! In: how pulls end. Out: about whom the conductor hears with each heartbeat, and for how long that has been so.
//!
//! Results of a peer do not come from the first pull that its path fails until one of its pulls ends well, or until nothing that
//! failed is wanted any more. An answer of the peer changes nothing. A link that breaks takes all its pulls with it, and the next
//! ones may take a while. So a break counts when a pull that began later fails as well; a pull that is late counts at once, since no
//! byte came over its link all the time.

use std::collections::{BTreeMap, BTreeSet};

use super::results::State;
use super::{Command, Trainer};
use crate::{At, Nanos, Peer, PullFailure, PullId, PullResult, Work};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Reach(BTreeMap<Peer, Failing>);

#[derive(Debug)]
struct Failing {
    since: Nanos,
    /// The first pull that began after the first failure.
    later: PullId,
    /// Whether more than one broken link shows it.
    counts: bool,
    /// What failed.
    lacking: BTreeSet<(At, Work)>,
}

impl Reach {
    /// For how long a peer's results have not come.
    pub(super) fn failing(&self, now: Nanos, peer: Peer) -> Option<Nanos> {
        self.0.get(&peer).filter(|it| it.counts).map(|it| now.since(it.since))
    }

    /// This process was paused, which does not count.
    pub(super) fn paused(&mut self, pause: Nanos) {
        for failing in self.0.values_mut() {
            failing.since = failing.since.after(pause);
        }
    }

    /// A peer is gone.
    pub(super) fn remove(&mut self, peer: Peer) {
        self.0.remove(&peer);
    }
}

impl Trainer {
    /// A pull of a result ended.
    pub(super) fn tried(
        &mut self,
        now: Nanos,
        (peer, pull): (Peer, PullId),
        what: (At, Work),
        result: PullResult,
    ) {
        let is_late = result == Err(PullFailure::Deadline);
        match result {
            Ok(_) => self.reach.remove(peer),
            Err(PullFailure::PeerFailed | PullFailure::Deadline) => {
                let (later, lacking) = (PullId(self.next_pull), BTreeSet::new());
                let first = Failing { since: now, later, counts: false, lacking };
                let failing = self.reach.0.entry(peer).or_insert(first);
                failing.counts |= is_late || pull >= failing.later;
                failing.lacking.insert(what);
            }
            Err(PullFailure::Gone | PullFailure::Cancelled) => {}
        }
    }

    /// Tells the conductor, with each heartbeat, whose results do not come.
    pub(super) fn say_unreached(&mut self, now: Nanos, out: &mut Vec<Command>) {
        let phases = &self.phases;
        let lacks = |(at, work): &(At, Work)| {
            let want = phases.get(at).and_then(|it| it.wants.get(work));
            want.is_some_and(|it| !matches!(it.state, State::Have(_)))
        };
        self.reach.0.retain(|_, failing| {
            failing.lacking.retain(lacks);
            !failing.lacking.is_empty()
        });
        let said = self.reach.0.iter().filter(|it| it.1.counts && self.links.fills(*it.0));
        for peer in said.map(|it| *it.0).collect::<Vec<_>>() {
            self.suspect(now, peer, out);
        }
    }
}
