//! The state machine of a pull: look at the slip, fetch the arena, copy, look again, end.
//!
//! In: events of the links, descriptors, the clock. Out: events of pulls.
//!
//! ```text
//! Looking ──slip──▶ Fetching ──arena──▶ Copying ──over──▶ Checking ──same slip──▶ done
//!            └────────known arena─────────▶┘ └─late, closed─▶ (told) ─over─▶ landing free
//! ```
//!
//! Invariants: every pull is told once, and its landing is free when no copy writes to it any more; no step walks through all
//! pulls ([`Outstanding`](super::outstanding)).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device::Device;
use super::slip::{SLIP_BYTES, Slip};
use super::{COPYING, Node};
use crate::buffer::Buffer;
use crate::door::{Site, Ticket};
use crate::peer::{PeerId, Piece, RegionKey};
use crate::provider::{Event, LandingId, Provider as _, PullError, PullId, PullRequest};

/// A pull that has not ended, or whose copy is still in progress.
pub(super) struct Pull<D: Device> {
    peer: PeerId,
    key: RegionKey,
    pieces: Vec<Piece>,
    landing: LandingId,
    patience: Duration,
    since: Instant,
    /// When the node looks whether it is late; none where its patience has no end.
    look_at: Option<Instant>,
    /// Whether the event of its end was sent. Then the pull only waits for its copy.
    told: bool,
    stage: Stage<D>,
}

enum Stage<D: Device> {
    /// The slip is on its way, to a landing of the links.
    Looking(PullId, LandingId),
    /// The arena is asked for.
    Fetching(Slip),
    /// The device copies; the arena stays mapped meanwhile.
    Copying(Slip, (D::Copy, Arc<D::Imported>)),
    /// The slip is on its way again.
    Checking(Slip, PullId, LandingId),
}

/// An arena of a peer.
pub(super) struct Import<D: Device> {
    /// Its length, as the first slip that names it says.
    bytes: u64,
    arena: Arena<D>,
}

enum Arena<D: Device> {
    /// It is asked for. These pulls wait for it; some may have ended.
    Asked(Vec<PullId>),
    Mapped(Arc<D::Imported>),
}

impl<D: Device> Pull<D> {
    pub(super) fn new(request: PullRequest) -> Self {
        let PullRequest { peer, key, pieces, landing, patience } = request;
        // Replaced as soon as it begins.
        let stage = Stage::Looking(PullId(0), LandingId(0));
        let since = Instant::now();
        let look_at = since.checked_add(patience);
        Self { peer, key, pieces, landing, patience, since, look_at, told: false, stage }
    }

    pub(super) fn peer(&self) -> PeerId {
        self.peer
    }

    /// Whether the event of its end has not been sent.
    pub(super) fn is_open(&self) -> bool {
        !self.told
    }

    /// When the node looks whether it is late. None where it is not to be looked at: it has ended, or it waits for its slip, which
    /// the links watch.
    pub(super) fn look_at(&self) -> Option<Instant> {
        match self.stage {
            Stage::Fetching(_) | Stage::Copying(..) if self.is_open() => self.look_at,
            Stage::Fetching(_) | Stage::Copying(..) | Stage::Looking(..) | Stage::Checking(..) => {
                None
            }
        }
    }
}

impl<D: Device> Node<D> {
    /// Sends a pull's first look.
    pub(super) fn begin(&mut self, id: PullId, mut pull: Pull<D>) {
        let (look, landing) = self.look(id, &pull);
        pull.stage = Stage::Looking(look, landing);
        self.pulls.insert(id, pull);
    }

    fn look(&mut self, id: PullId, pull: &Pull<D>) -> (PullId, LandingId) {
        let landing = self.tcp.land(Buffer::zeroed(SLIP_BYTES));
        let pieces = vec![Piece { remote: 0, local: 0, bytes: SLIP_BYTES as u64 }];
        let Pull { peer, key, patience, .. } = *pull;
        let look = self.tcp.pull(PullRequest { peer, key, pieces, landing, patience });
        self.looks.insert(look, id);
        (look, landing)
    }

    /// How long the node may sleep unless the links have news.
    pub(super) fn rest(&self, now: Instant) -> Duration {
        let look = self.pulls.next_look();
        let late = look.map_or(Duration::MAX, |it| it.0.saturating_duration_since(now));
        if self.pulls.oldest_copy().is_some() { late.min(COPYING) } else { late }
    }

    /// Handles what does not come from the links: fetched arenas, finished copies, late pulls.
    pub(super) fn advance(&mut self) {
        while let Some((what, descriptor)) = self.asker.answer() {
            self.arrived(what, descriptor);
        }
        while let Some(id) = self.pulls.oldest_copy()
            && let Some(how) = self.is_copied(id)
        {
            self.pulls.forget_oldest_copy();
            self.copied(id, how);
        }
        self.end_late(Instant::now());
    }

    /// How a copy has ended, if it has.
    fn is_copied(&self, id: PullId) -> Option<Result<(), D::Error>> {
        let pull = self.pulls.get(id).expect("a pull stays while it is copied");
        match &pull.stage {
            Stage::Copying(_, (copy, _)) => match self.device.is_over(copy) {
                Ok(false) => None,
                Ok(true) => Some(Ok(())),
                Err(why) => Some(Err(why)),
            },
            Stage::Looking(..) | Stage::Fetching(_) | Stage::Checking(..) => {
                unreachable!("a copy ends once")
            }
        }
    }

    /// Ends pulls of whose peers no pull has made progress during their patience.
    fn end_late(&mut self, now: Instant) {
        while let Some((at, id)) = self.pulls.next_look()
            && at <= now
        {
            let mut pull = self.pulls.remove(id).expect("it was just looked at");
            let moved = self.moved.get(&pull.peer).copied().unwrap_or(pull.since);
            let deadline = moved.max(pull.since).checked_add(pull.patience);
            let is_late = deadline.is_some_and(|it| it <= now);
            if !is_late {
                pull.look_at = deadline;
            }
            self.pulls.insert(id, pull);
            if is_late {
                self.end(id, Err(PullError::Deadline));
            }
        }
    }

    /// Handles an event of the links.
    pub(super) fn take_in(&mut self, event: Event) {
        match event {
            Event::Pulled { pull: look, result } => {
                if let Some(id) = self.looks.remove(&look) {
                    self.looked(id, result);
                }
            }
            Event::Closed { peer, error } => {
                self.end_all(peer, &PullError::PeerFailed);
                self.events.push(Event::Closed { peer, error });
            }
            Event::Connected(_)
            | Event::Message { .. }
            | Event::Begun { .. }
            | Event::Room { .. }
            | Event::Refused { .. }
            | Event::Unfit { .. }
            | Event::Broken { .. } => {
                self.events.push(event);
            }
        }
    }

    /// A look has ended, with a slip or an error.
    fn looked(&mut self, id: PullId, result: Result<u64, PullError>) {
        let Some(pull) = self.pulls.get(id) else { return };
        let (Stage::Looking(_, landing) | Stage::Checking(_, _, landing)) = pull.stage else {
            return;
        };
        self.moved.insert(pull.peer, Instant::now());
        let memory = self.tcp.take(landing).expect("a look is the only pull on its landing");
        let result = result.and_then(|_| {
            let reason = "the peer published no slip: run one build and one exchange everywhere";
            Slip::decode(memory.bytes()).ok_or_else(|| PullError::Refused { reason: reason.into() })
        });
        match (result, &pull.stage) {
            (Err(error), _) => self.end(id, Err(error)),
            // The region was withdrawn and published anew during the copy.
            (Ok(slip), Stage::Checking(before, ..)) if slip != *before => {
                self.end(id, Err(PullError::Gone));
            }
            (Ok(_), Stage::Checking(..)) => {
                let bytes = pull.pieces.iter().map(|it| it.bytes).sum();
                self.end(id, Ok(bytes));
            }
            (Ok(slip), _) => self.found(id, slip),
        }
    }

    /// The first look succeeded: the slip says where the rows are.
    fn found(&mut self, id: PullId, slip: Slip) {
        let pull = self.pulls.get(id).expect("it was just looked at");
        let inside =
            |it: &Piece| it.remote.checked_add(it.bytes).is_some_and(|end| end <= slip.bytes);
        if !pull.pieces.iter().all(inside) {
            let reason = format!("a piece ends behind the region of {} bytes", slip.bytes);
            return self.end(id, Err(PullError::Refused { reason }));
        }
        let from = (pull.peer, slip.ticket);
        match self.imports.get_mut(&from) {
            Some(Import { bytes, .. }) if *bytes != slip.arena_bytes => {
                let said = slip.arena_bytes;
                let reason = format!("an arena of {bytes} bytes is said to have {said} bytes");
                return self.end(id, Err(PullError::Refused { reason }));
            }
            Some(Import { arena: Arena::Mapped(arena), .. }) => {
                let arena = Arc::clone(arena);
                return self.copy(id, slip, arena);
            }
            Some(Import { arena: Arena::Asked(waiting), .. }) => waiting.push(id),
            None => self.fetch(from, slip.arena_bytes, id),
        }
        self.change(id, |it| it.stage = Stage::Fetching(slip));
    }

    /// Changes a pull that is outstanding.
    fn change(&mut self, id: PullId, how: impl FnOnce(&mut Pull<D>)) {
        let mut pull = self.pulls.remove(id).expect("it is outstanding");
        how(&mut pull);
        self.pulls.insert(id, pull);
    }

    /// Requests an arena for a pull when a thread is free.
    fn fetch(&mut self, from: (PeerId, Ticket), bytes: u64, pull: PullId) {
        self.imports.insert(from, Import { bytes, arena: Arena::Asked(vec![pull]) });
        let path = self.doors.get(&from.0).cloned().unwrap_or_default();
        self.asker.ask((from, bytes), Site::File(path), from.1);
    }

    fn arrived(
        &mut self,
        (from, bytes): ((PeerId, Ticket), u64),
        descriptor: std::io::Result<OwnedFd>,
    ) {
        // The peer was closed meanwhile.
        let Some(Import { arena: Arena::Asked(waiting), bytes: asked }) =
            self.imports.get_mut(&from)
        else {
            return;
        };
        if *asked != bytes {
            return;
        }
        let waiting = std::mem::take(waiting);
        self.moved.insert(from.0, Instant::now());
        let import = |it: OwnedFd| self.device.import(&it, bytes).map_err(|it| it.to_string());
        let arena = descriptor.map_err(|it| it.to_string()).and_then(import);
        match arena {
            Ok(arena) => {
                let arena = Arc::new(arena);
                let mapped = Arena::Mapped(Arc::clone(&arena));
                self.imports.insert(from, Import { bytes, arena: mapped });
                for id in waiting {
                    if let Some(Pull { stage: Stage::Fetching(slip), .. }) = self.pulls.get(id) {
                        self.copy(id, slip.clone(), Arc::clone(&arena));
                    }
                }
            }
            Err(why) => {
                self.imports.remove(&from);
                let reason = format!("the arena of {} cannot be had: {why}", from.0);
                for id in waiting {
                    self.end(id, Err(PullError::Refused { reason: reason.clone() }));
                }
            }
        }
    }

    fn copy(&mut self, id: PullId, slip: Slip, arena: Arc<D::Imported>) {
        let pull = self.pulls.get(id).expect("a pull that is not over");
        let in_arena = |it: &Piece| Piece { remote: it.remote + slip.at, ..*it };
        let pieces: Vec<_> = pull.pieces.iter().map(in_arena).collect();
        match self.device.copy(&arena, self.landings.memory(pull.landing), &pieces) {
            Ok(copy) => {
                self.change(id, |it| it.stage = Stage::Copying(slip, (copy, arena)));
                self.pulls.copies(id);
                self.events.push(Event::Begun { pull: id });
            }
            Err(error) => self.fail(id, &error),
        }
    }

    /// Ends a pull because the device cannot copy, and reports the device as broken.
    fn fail(&mut self, id: PullId, error: &D::Error) {
        let reason = error.to_string();
        self.events.push(Event::Broken { reason: reason.clone() });
        self.end(id, Err(PullError::Refused { reason }));
    }

    /// A copy has ended, or failed.
    fn copied(&mut self, id: PullId, how: Result<(), D::Error>) {
        let Some(mut pull) = self.pulls.remove(id) else { return };
        if pull.told {
            self.landings.release(pull.landing, &pull.pieces);
            if let Err(error) = how {
                self.events.push(Event::Broken { reason: error.to_string() });
            }
            return;
        }
        self.moved.insert(pull.peer, Instant::now());
        let (look, landing) = self.look(id, &pull);
        if let Stage::Copying(slip, _) = pull.stage {
            pull.stage = Stage::Checking(slip, look, landing);
        }
        self.pulls.insert(id, pull);
        if let Err(error) = how {
            self.fail(id, &error);
        }
    }

    /// Sends the event of a pull's end. Forgets the pull unless its copy is still in progress.
    fn end(&mut self, id: PullId, result: Result<u64, PullError>) {
        if !self.pulls.get(id).is_some_and(Pull::is_open) {
            return;
        }
        let mut pull = self.pulls.remove(id).expect("it was just looked at");
        if let Some(call) = self.calls.remove(&id) {
            call(result.is_ok());
        }
        self.events.push(Event::Pulled { pull: id, result });
        match pull.stage {
            Stage::Copying(..) => {
                pull.told = true;
                self.pulls.insert(id, pull);
                return;
            }
            Stage::Looking(look, landing) | Stage::Checking(_, look, landing) => {
                if self.looks.remove(&look).is_some() {
                    self.tcp.discard(landing);
                }
            }
            Stage::Fetching(_) => {}
        }
        self.landings.release(pull.landing, &pull.pieces);
    }

    /// Ends all pulls from a peer, and forgets its arenas once nothing is copied from them.
    pub(super) fn end_all(&mut self, peer: PeerId, why: &PullError) {
        for id in self.pulls.open_from(peer) {
            self.end(id, Err(why.clone()));
        }
        self.imports.retain(|(of, _), _| *of != peer);
        self.moved.remove(&peer);
    }
}
