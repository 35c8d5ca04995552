//! The bookkeeping of a provider: landings, outstanding pulls, events.
//!
//! In: memory, pulls that begin and end. Out: events, memory back, pulls that are to be looked at because they may be late.
//! No socket here, no clock.
//!
//! Invariants: every pull gets exactly one event; a landing stays while a pull writes to it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IoSliceMut;
use std::time::Instant;

use super::landing::Landing;
use super::pull::Pull;
use crate::buffer::Buffer;
use crate::peer::PeerId;
use crate::provider::{Error, Event, LandingId, MAX_PIECES, PullError, PullId};

/// Landings, deadlines and events that wait to be polled.
#[derive(Default)]
pub(super) struct Ledger {
    pub(super) events: Vec<Event>,
    landings: BTreeMap<LandingId, Landing>,
    /// When each pull may be late.
    looks: BTreeSet<(Instant, PullId, PeerId)>,
    next_landing: u64,
    next_pull: u64,
}

impl Ledger {
    pub(super) fn land(&mut self, memory: Buffer) -> LandingId {
        let id = LandingId(self.next_landing);
        self.next_landing += 1;
        self.landings.insert(id, Landing::new(memory));
        id
    }

    pub(super) fn landed(&self, id: LandingId) -> Result<&Buffer, Error> {
        let landing = self.landings.get(&id).filter(|it| !it.discarded);
        Ok(landing.ok_or(Error::UnknownLanding { landing: id })?.memory())
    }

    pub(super) fn take(&mut self, id: LandingId) -> Result<Buffer, Error> {
        let landing = self.landings.get(&id).filter(|it| !it.discarded);
        match landing.ok_or(Error::UnknownLanding { landing: id })?.outstanding() {
            0 => Ok(self.landings.remove(&id).expect("just found").into_memory()),
            outstanding => Err(Error::Busy { landing: id, outstanding }),
        }
    }

    pub(super) fn discard(&mut self, id: LandingId) {
        if let Some(landing) = self.landings.get_mut(&id) {
            landing.discarded = true;
            if landing.outstanding() == 0 {
                self.landings.remove(&id);
            }
        }
    }

    pub(super) fn new_pull(&mut self) -> PullId {
        let id = PullId(self.next_pull);
        self.next_pull += 1;
        id
    }

    /// Reserves the pull's bytes of its landing and starts its deadline; a pull that breaks a rule ends here.
    pub(super) fn begin(&mut self, mut pull: Pull) -> Option<Pull> {
        match self.claim(&mut pull) {
            Ok(()) => {
                self.watch(&pull);
                Some(pull)
            }
            Err(reason) => {
                let result = Err(PullError::Refused { reason });
                self.events.push(Event::Pulled { pull: pull.id, result });
                None
            }
        }
    }

    fn claim(&mut self, pull: &mut Pull) -> Result<(), String> {
        let pieces = pull.wish.spans.len();
        if pieces > MAX_PIECES {
            return Err(format!("{pieces} pieces are above {MAX_PIECES}"));
        }
        if pull.wish.spans.iter().any(|it| it.end().is_none()) {
            return Err("a piece ends behind the peer's region".to_owned());
        }
        let landing = self.landings.get_mut(&pull.landing).filter(|it| !it.discarded);
        landing
            .ok_or_else(|| format!("landing {} was taken or discarded", pull.landing.0))?
            .claim(pull)
    }

    /// Ends a pull: its landing's bytes are free, its event is sent.
    pub(super) fn end(&mut self, pull: Pull, result: Result<u64, PullError>) {
        let keep = match &result {
            Ok(_) | Err(PullError::PeerFailed | PullError::Deadline | PullError::Cancelled) => true,
            Err(PullError::Gone | PullError::Refused { .. }) => false,
        };
        self.tell(&pull, result);
        self.free(pull, keep);
    }

    /// Sends the event of a pull's end. Its landing's bytes stay reserved until [`Self::free`].
    pub(super) fn tell(&mut self, pull: &Pull, result: Result<u64, PullError>) {
        self.looks.remove(&(pull.look_at, pull.id, pull.wish.peer));
        self.events.push(Event::Pulled { pull: pull.id, result });
    }

    /// Frees the landing's bytes of a pull whose end was told; `keep` says whether the same pull may go on there.
    pub(super) fn free(&mut self, pull: Pull, keep: bool) {
        let at = pull.landing;
        let landing = self.landings.get_mut(&at).expect("landings that are written to stay");
        landing.release(pull, keep);
        if landing.discarded && landing.outstanding() == 0 {
            self.landings.remove(&at);
        }
    }

    /// Schedules the next check of a pull: when it may be late.
    pub(super) fn watch(&mut self, pull: &Pull) {
        self.looks.insert((pull.look_at, pull.id, pull.wish.peer));
    }

    /// Restarts the deadline of a pull at `now`.
    pub(super) fn watch_anew(&mut self, pull: &mut Pull, now: Instant) {
        self.looks.remove(&(pull.look_at, pull.id, pull.wish.peer));
        pull.since = now;
        pull.look_at = pull.deadline(now);
        self.watch(pull);
    }

    /// When the next pull may be late.
    pub(super) fn next_look(&self) -> Option<Instant> {
        self.looks.first().map(|it| it.0)
    }

    /// A pull that may be late. It is not watched any more: the caller ends it or watches it again.
    pub(super) fn look(&mut self, now: Instant) -> Option<(PeerId, PullId)> {
        let (_, pull, peer) = *self.looks.first().filter(|it| it.0 <= now)?;
        self.looks.pop_first();
        Some((peer, pull))
    }

    /// As [`Landing::slices`], of a pull that is outstanding.
    pub(super) fn slices(&mut self, pull: &Pull, left: u64) -> (Vec<IoSliceMut<'_>>, u64) {
        let landing = self.landings.get_mut(&pull.landing);
        let landing = landing.expect("landings that are written to stay");
        landing.slices(&pull.wish.runs, pull.landed_to(), left)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::pull::tests::{PEER, pull};
    use super::*;

    #[test]
    fn landings_are_busy_until_their_pulls_end() {
        let mut ledger = Ledger::default();
        let landing = ledger.land(Buffer::zeroed(8));
        let id = ledger.new_pull();
        let begun = ledger.begin(pull(id.0, landing, &[(0, 8)])).expect("free");
        assert!(matches!(ledger.take(landing), Err(Error::Busy { outstanding: 1, .. })));
        ledger.discard(landing);
        assert!(matches!(ledger.take(landing), Err(Error::UnknownLanding { .. })));
        assert_eq!(ledger.landings.len(), 1);
        ledger.end(begun, Ok(8));
        assert!(ledger.landings.is_empty());
        assert_eq!(ledger.events.len(), 1, "one event a pull");
        assert!(ledger.begin(pull(9, landing, &[(0, 1)])).is_none(), "it is discarded");
    }

    #[test]
    fn pulls_are_looked_at_once_when_they_may_be_late() {
        let mut ledger = Ledger::default();
        let landing = ledger.land(Buffer::zeroed(8));
        let begun = ledger.begin(pull(3, landing, &[(0, 8)])).expect("free");
        assert_eq!(ledger.next_look(), Some(begun.look_at));
        assert_eq!(ledger.look(begun.look_at.checked_sub(Duration::from_nanos(1)).unwrap()), None);
        assert_eq!(ledger.look(begun.look_at), Some((PEER, begun.id)));
        assert_eq!(ledger.look(begun.look_at), None);
        ledger.watch(&begun);
        ledger.end(begun, Err(PullError::Deadline));
        assert_eq!(ledger.next_look(), None);
    }
}
