//! Pulls of the machines, in the provider's hands.
//!
//! In: what a machine pulls, of several regions; ends of the provider's pulls. Out: one end, when the last of them has ended, with the
//! failure that says most of the path.

use std::time::{Duration, Instant};

use cadre_exchange::{
    LandingId, MAX_PIECES, Piece, PullError, PullId as WirePull, PullRequest, RegionKey,
};
use cadre_protocol::{Nanos, Peer, PullFailure, PullId};

use super::{Shared, peer_of};
use crate::io::exchange::Exchange;
use crate::io::output::{Output, Side};
use crate::trace::Activity;

/// How long the provider refuses all pulls that end before this process gives up. A landing that a reader has left may be in the way
/// of many pulls at once, as long as its device copies. Longer than a pair of processes has whose rows do not come: where a path is
/// dead, its two ends are named first.
const MAX_REFUSED_FOR: Nanos = Nanos::from_millis(60_000);

/// Pulls that were refused, none between them that went well.
#[derive(Debug, Default)]
pub(super) struct Refusals(Option<Nanos>);

impl Refusals {
    fn end(&mut self) {
        self.0 = None;
    }

    /// Notes one more. Out: whether there were no others for too long.
    fn go_on(&mut self, now: Nanos) -> bool {
        now.since(*self.0.get_or_insert(now)) > MAX_REFUSED_FOR
    }
}

/// A pull of a machine, in the provider's hands.
#[derive(Debug)]
pub(super) struct Group {
    side: Side,
    pull: PullId,
    from: Peer,
    left: usize,
    /// Of them, those that the device does not copy yet.
    waiting: usize,
    bytes: u64,
    failure: Option<PullFailure>,
    incarnation: u32,
    start: Instant,
}

impl<P: Exchange> Shared<P> {
    /// Starts a machine's pull of pieces of several regions. It ends as late when nothing has come from the peer for as long as it is
    /// now until the deadline.
    pub fn pull(
        &mut self,
        (side, pull): (Side, PullId),
        from: Peer,
        mut parts: Vec<(RegionKey, Vec<Piece>, LandingId)>,
        deadline: Nanos,
    ) {
        parts.retain(|it| !it.1.is_empty());
        let Some((id, address)) = self.addresses.get(from) else {
            return self.ended(side, pull, Err(PullFailure::PeerFailed));
        };
        if parts.is_empty() {
            return self.ended(side, pull, Ok(from.incarnation()));
        }
        let id = *id;
        self.provider.connect(id, address);
        let patience = Duration::from_nanos(deadline.since(self.now()).0);
        let group = self.next_group;
        self.next_group += 1;
        let mut left = 0;
        let mut begin = |shared: &mut Self, key, pieces, landing| {
            let request = PullRequest { peer: id, key, pieces, landing, patience };
            let wire = shared.provider.pull(request);
            shared.pulls.insert(wire, group);
            left += 1;
        };
        for (key, pieces, landing) in parts {
            if pieces.len() <= MAX_PIECES {
                begin(self, key, pieces, landing);
                continue;
            }
            // Rows that lie apart, such as every eighth of a document, are many pieces.
            for pieces in pieces.chunks(MAX_PIECES) {
                begin(self, key, pieces.to_vec(), landing);
            }
        }
        let (bytes, failure, incarnation) = (0, None, from.incarnation());
        let (waiting, start) = (left, self.clock.moment());
        let group_of =
            Group { side, pull, from, left, waiting, bytes, failure, incarnation, start };
        self.groups.insert(group, group_of);
    }

    /// Pulls a region that is no machine's; the caller knows the pull when it ends.
    pub fn pull_region(&mut self, request: PullRequest) -> WirePull {
        if let Some((id, address)) = self.addresses.get(peer_of(request.peer)) {
            self.provider.connect(*id, address);
        }
        self.provider.pull(request)
    }

    /// The provider says that the device copies for a pull; if it was the last of a machine's, all of that one is under way.
    pub fn began(&mut self, wire: WirePull) {
        let Some(id) = self.pulls.get(&wire) else { return };
        let group = self.groups.get_mut(id).expect("a group lives until its last pull ended");
        group.waiting -= 1;
        if group.waiting == 0 {
            self.outputs.put(Output::Begun(group.side, group.pull));
        }
    }

    /// The provider says that a pull ended; if it was the last of a machine's, that one ended.
    pub fn pulled(&mut self, wire: WirePull, result: Result<u64, PullError>) {
        let Some(id) = self.pulls.remove(&wire) else { return };
        let now = self.now();
        let group = self.groups.get_mut(&id).expect("a group lives until its last pull ended");
        match result {
            Ok(bytes) => {
                group.bytes += bytes;
                group.incarnation = self.provider.found(wire).unwrap_or(group.incarnation);
                self.refused.end();
            }
            Err(error) => {
                tracing::debug!("a pull failed: {error}");
                let failure = match error {
                    PullError::Gone => PullFailure::Gone,
                    PullError::PeerFailed => PullFailure::PeerFailed,
                    PullError::Deadline => PullFailure::Deadline,
                    PullError::Cancelled => PullFailure::Cancelled,
                    PullError::Refused { reason } => {
                        // A copy that cannot be called back is in the way for a while; what stays refused is a bug.
                        if self.refused.go_on(now) {
                            let pull = format!("pulls from {} are refused: {reason}", group.from);
                            self.outputs.put(Output::Broken(pull));
                        }
                        tracing::error!("a pull was refused: {reason}");
                        PullFailure::Gone
                    }
                };
                group.failure = group.failure.max(Some(failure));
            }
        }
        group.left -= 1;
        if group.left == 0 {
            let group = self.groups.remove(&id).expect("it was there a moment ago");
            let span = (group.start, self.clock.moment());
            self.tracer
                .span_between("pull", Activity::Pull, span, || format!("{} bytes", group.bytes));
            let result = group.failure.map_or(Ok(group.incarnation), Err);
            self.ended(group.side, group.pull, result);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_gives_up_by_how_long_pulls_are_refused_and_not_by_how_many() {
        let mut refused = Refusals::default();
        let at = Nanos::from_millis;
        assert!((0..10_000).all(|it| !refused.go_on(at(1 + it))), "many in ten seconds");
        refused.end();
        assert!(!refused.go_on(at(25_000)) && !refused.go_on(at(85_000)));
        assert!(refused.go_on(at(85_001)));
    }
}
