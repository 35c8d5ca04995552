//! What the provider owes its owner: landings, outstanding pulls, events.
//!
//! In: memory, pulls that begin, end or expire. Out: events, memory back. No socket here.
//!
//! ```text
//!             begin               end
//! (refused) ◀─────── waiting, sent ───▶ done, gone, peer failed, cancelled: landing free
//!                         │ expire
//!                         ▼
//!                     deadline: event sent, landing busy until the reply drained or the link closed
//! ```
//!
//! Invariants: every pull gets exactly one event; a byte of a landing is the target of one pull at a time.

use std::collections::BTreeMap;
use std::io::IoSliceMut;
use std::time::Instant;

use super::frame::Span;
use crate::buffer::Buffer;
use crate::peer::{PeerId, RegionKey};
use crate::provider::{Error, Event, LandingId, MAX_PIECES, PullError, PullId};

/// One outstanding pull.
#[derive(Debug)]
pub(super) struct Pull {
    pub(super) id: PullId,
    pub(super) key: RegionKey,
    /// Where the bytes lie in the peer's region, in stream order.
    pub(super) spans: Vec<Span>,
    /// Where they land, in stream order.
    pub(super) runs: Vec<Span>,
    pub(super) bytes: u64,
    pub(super) landing: LandingId,
    pub(super) deadline: Instant,
    /// Its event was sent; what still comes only drains.
    pub(super) expired: bool,
}

struct Landing {
    memory: Buffer,
    /// Bytes that outstanding pulls write: first to one behind the last.
    busy: BTreeMap<u64, u64>,
    outstanding: usize,
    discarded: bool,
}

/// Landings, deadlines and events that wait to be polled.
#[derive(Default)]
pub(super) struct Ledger {
    pub(super) events: Vec<Event>,
    landings: BTreeMap<LandingId, Landing>,
    deadlines: BTreeMap<(Instant, PullId), PeerId>,
    next_landing: u64,
    next_pull: u64,
}

impl Ledger {
    pub(super) fn land(&mut self, memory: Buffer) -> LandingId {
        let id = LandingId(self.next_landing);
        self.next_landing += 1;
        let busy = BTreeMap::new();
        self.landings.insert(id, Landing { memory, busy, outstanding: 0, discarded: false });
        id
    }

    pub(super) fn take(&mut self, id: LandingId) -> Result<Buffer, Error> {
        match self.landings.get(&id) {
            Some(Landing { discarded: false, outstanding: 0, .. }) => {}
            Some(Landing { discarded: false, outstanding, .. }) => {
                return Err(Error::Busy { landing: id, outstanding: *outstanding });
            }
            Some(_) | None => return Err(Error::UnknownLanding { landing: id }),
        }
        let landing = self.landings.remove(&id).expect("just found");
        Ok(landing.memory)
    }

    pub(super) fn discard(&mut self, id: LandingId) {
        if let Some(landing) = self.landings.get_mut(&id) {
            landing.discarded = true;
            if landing.outstanding == 0 {
                self.landings.remove(&id);
            }
        }
    }

    pub(super) fn new_pull(&mut self) -> PullId {
        let id = PullId(self.next_pull);
        self.next_pull += 1;
        id
    }

    /// Reserves the pull's bytes of its landing and starts its clock; a pull that breaks a rule ends here.
    pub(super) fn begin(&mut self, peer: PeerId, pull: Pull) -> Option<Pull> {
        match self.reserve(&pull) {
            Ok(()) => {
                self.deadlines.insert((pull.deadline, pull.id), peer);
                Some(pull)
            }
            Err(reason) => {
                let result = Err(PullError::Refused { reason });
                self.events.push(Event::Pulled { pull: pull.id, result });
                None
            }
        }
    }

    fn reserve(&mut self, pull: &Pull) -> Result<(), String> {
        if pull.spans.len() > MAX_PIECES {
            return Err(format!("{} pieces are above {MAX_PIECES}", pull.spans.len()));
        }
        let landing = self
            .landings
            .get_mut(&pull.landing)
            .filter(|it| !it.discarded)
            .ok_or_else(|| format!("landing {} was taken or discarded", pull.landing.0))?;
        let room = landing.memory.len_bytes() as u64;
        for (at, run) in pull.runs.iter().enumerate() {
            let reason = match run.end().filter(|&end| end <= room) {
                None => format!("a piece ends behind the landing of {room} bytes"),
                Some(end) => match landing.busy.range(..end).next_back() {
                    Some((_, &other)) if other > run.start => {
                        format!("byte {} of the landing is the target of a pull already", run.start)
                    }
                    Some(_) | None => {
                        landing.busy.insert(run.start, end);
                        continue;
                    }
                },
            };
            for run in &pull.runs[..at] {
                landing.busy.remove(&run.start);
            }
            return Err(reason);
        }
        landing.outstanding += 1;
        Ok(())
    }

    /// Ends a pull: its landing's bytes are free, its event is sent unless it expired before.
    pub(super) fn end(&mut self, pull: &Pull, result: Result<u64, PullError>) {
        let landing = self.landings.get_mut(&pull.landing).expect("busy landings stay");
        for run in &pull.runs {
            landing.busy.remove(&run.start);
        }
        landing.outstanding -= 1;
        if landing.discarded && landing.outstanding == 0 {
            self.landings.remove(&pull.landing);
        }
        if !pull.expired {
            self.deadlines.remove(&(pull.deadline, pull.id));
            self.events.push(Event::Pulled { pull: pull.id, result });
        }
    }

    /// The next deadline.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first_key_value().map(|((deadline, _), _)| *deadline)
    }

    /// A pull whose deadline has passed; its event is sent. The caller marks it, or ends it if it was never sent.
    pub(super) fn expire(&mut self, now: Instant) -> Option<(PeerId, PullId)> {
        let entry = self.deadlines.first_entry().filter(|it| it.key().0 <= now)?;
        let ((_, pull), peer) = entry.remove_entry();
        self.events.push(Event::Pulled { pull, result: Err(PullError::Deadline) });
        Some((peer, pull))
    }

    /// Where the stream continues that has `runs` to go, `skip` bytes of the first one done: as many slices,
    /// in stream order, as lie one behind the other, and their length.
    pub(super) fn slices(
        &mut self,
        landing: LandingId,
        runs: &[Span],
        skip: u64,
    ) -> (Vec<IoSliceMut<'_>>, u64) {
        const MOST: usize = 512;
        let landing = self.landings.get_mut(&landing).expect("busy landings stay");
        let mut rest = landing.memory.bytes_mut();
        let mut slices = Vec::with_capacity(runs.len().min(MOST) + 1);
        let (mut at, mut total) = (0, 0);
        for (index, run) in runs.iter().take(MOST).enumerate() {
            let skip = if index == 0 { skip } else { 0 };
            let (start, bytes) = (run.start + skip, run.bytes - skip);
            if start < at {
                break;
            }
            let (slice, tail) = rest[(start - at) as usize..].split_at_mut(bytes as usize);
            slices.push(IoSliceMut::new(slice));
            (rest, at, total) = (tail, start + bytes, total + bytes);
        }
        (slices, total)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const PEER: PeerId = PeerId { role: crate::peer::Role::Server, index: 0, incarnation: 0 };

    fn begin(ledger: &mut Ledger, landing: LandingId, runs: &[(u64, u64)]) -> Option<Pull> {
        let runs: Vec<_> = runs.iter().map(|&(start, bytes)| Span { start, bytes }).collect();
        let bytes = runs.iter().map(|it| it.bytes).fold(0, u64::saturating_add);
        let id = ledger.new_pull();
        let (key, spans, deadline) = (RegionKey::default(), runs.clone(), Instant::now());
        ledger.begin(PEER, Pull { id, key, spans, runs, bytes, landing, deadline, expired: false })
    }

    #[test]
    fn a_byte_is_the_target_of_one_pull_at_a_time() {
        let mut ledger = Ledger::default();
        let landing = ledger.land(Buffer::zeroed(100));
        let first = begin(&mut ledger, landing, &[(10, 10), (50, 10)]).expect("all free");
        for runs in
            [&[(19, 1)][..], &[(0, 11)], &[(0, 100)], &[(20, 5), (55, 1)], &[(30, 5), (32, 1)]]
        {
            assert!(begin(&mut ledger, landing, runs).is_none(), "{runs:?}");
        }
        let second = begin(&mut ledger, landing, &[(20, 30), (0, 10), (60, 40)]).expect("free");
        ledger.end(&first, Ok(20));
        ledger.end(&second, Ok(80));
        assert!(begin(&mut ledger, landing, &[(0, 100)]).is_some());
    }

    #[test]
    fn pieces_outside_of_the_landing_are_refused() {
        let mut ledger = Ledger::default();
        let landing = ledger.land(Buffer::zeroed(8));
        for run in [(0, 9), (8, 1), (u64::MAX, 2), (2, u64::MAX)] {
            assert!(begin(&mut ledger, landing, &[run]).is_none(), "{run:?}");
        }
        ledger.discard(landing);
        assert!(begin(&mut ledger, landing, &[(0, 1)]).is_none());
        assert_eq!(ledger.events.len(), 5);
        assert!(ledger.landings.is_empty());
    }

    #[test]
    fn landings_are_busy_until_their_pulls_end() {
        let mut ledger = Ledger::default();
        let landing = ledger.land(Buffer::zeroed(8));
        let mut pull = begin(&mut ledger, landing, &[(0, 8)]).expect("free");
        let later = Instant::now() + Duration::from_secs(1);
        assert_eq!(ledger.expire(later), Some((PEER, pull.id)));
        assert_eq!(ledger.expire(later), None);
        pull.expired = true;
        assert!(matches!(ledger.take(landing), Err(Error::Busy { outstanding: 1, .. })));
        ledger.discard(landing);
        assert!(matches!(ledger.take(landing), Err(Error::UnknownLanding { .. })));
        assert_eq!(ledger.landings.len(), 1);
        ledger.end(&pull, Ok(8));
        assert!(ledger.landings.is_empty());
        assert_eq!(ledger.events.len(), 1, "one event a pull");
    }

    #[test]
    fn slices_follow_the_stream_as_far_as_it_ascends() {
        let mut ledger = Ledger::default();
        let landing = ledger.land(Buffer::zeroed(100));
        let runs = [(10, 10), (30, 5), (0, 4)].map(|(start, bytes)| Span { start, bytes });
        let (slices, total) = ledger.slices(landing, &runs, 3);
        assert_eq!((slices.iter().map(|it| it.len()).collect::<Vec<_>>(), total), (vec![7, 5], 12));
        assert_eq!(ledger.slices(landing, &runs[2..], 0).1, 4);
    }
}
