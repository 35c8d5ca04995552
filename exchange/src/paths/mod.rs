//! A provider for rows in the host's memory that takes the best path to each peer: shared memory on one machine, UCX where both
//! have cards for RDMA, else TCP.
//!
//! In: [`PathsConfig`]; buffers, of which those of a shared [`crate::Pool`] can be read by others. Out: [`Paths`], a [`Provider`].
//! Links, greetings, messages and deadlines are those of [`Tcp`], and so are all pulls that have no better path.
//!
//! ```text
//! reader                                         owner
//!   connected: pull the offer      ── tcp ──▶      name of its door, ticket of its board
//!   ask for the board, for arenas  ── door ──▶     descriptors, each once
//!   pull: find the region on the board             (notices nothing)
//!         copy it from its arena
//!         look again: still the same publication?
//! ```
//!
//! By UCX a pull goes as `remote` says: the owner's card comes over tcp, and its board and rows are read by network cards.
//!
//! Whether a peer is of this machine is found by trying: who cannot be asked at the door, or offers nothing, is pulled by TCP, and
//! tried again later. A region that is not on the board, and one that was withdrawn while it was copied, is asked for by TCP,
//! which says what is true of it.
//!
//! The second look is what makes reuse safe, as it does for [`crate::Node`]: it is a load of a word that the owner clears before
//! it frees the memory.
//!
//! Invariant: a copy counts only if its region was published from before it began until after it was over.

mod choice;
mod copies;
mod demanded;
mod offer;
mod opened;
mod remote;
mod sharing;
#[cfg(test)]
mod tests;
mod told;
mod waiting;
mod ways;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use self::choice::{Path, PathsConfig, Sharing, Traffic};
use self::demanded::Demanded;
use self::offer::{OFFER, OFFER_BYTES, OFFER_PATIENCE, Offer};
use self::remote::{CARD, Remote};
use self::sharing::Shared;
use self::ways::Answer;
use crate::buffer::Buffer;
use crate::clock::Clock;
use crate::peer::{PeerId, Piece, RegionKey};
use crate::provider::{
    Error, Event, LandingId, Provider, PullError, PullId, PullRequest, RingError,
};
use crate::tcp::Tcp;
use crate::waker::Waker;

/// Why a peer that shares none has none, now and later.
const NO_SHARED_MEMORY: &str = "it offers no shared memory";
/// Why a peer without UCX has none, now and later.
const NO_UCX: &str = "it offers no UCX";

/// See the module.
pub struct Paths {
    /// Declared before the landings, so that it is dropped first: it may still write to them.
    remote: Option<Remote>,
    /// Why `remote` is none.
    no_ucx: String,
    tcp: Tcp,
    sharing: Option<Shared>,
    /// Pulls whose copy is done and whose event is still to be returned.
    copied: BTreeSet<PullId>,
    traffic: Traffic,
    demanded: Demanded,
    events: Vec<Event>,
}

impl Paths {
    /// Listens on a free port and, where rows are shared, at a door.
    ///
    /// # Errors
    ///
    /// [`Error::Open`], [`Error::Shared`], [`Error::Ucx`].
    pub fn open(config: PathsConfig) -> Result<Self, Error> {
        Self::open_at(config, Clock::system())
    }

    /// As [`Self::open`], with deadlines and pauses by `clock`.
    ///
    /// # Errors
    ///
    /// As [`Self::open`].
    pub fn open_at(config: PathsConfig, clock: Clock) -> Result<Self, Error> {
        let PathsConfig { tcp, sharing } = config;
        let (limits, encryption) = (tcp.limits, tcp.encryption);
        let mut tcp = Tcp::open_at(tcp, clock)?;
        let (remote, no_ucx) = match opened::remote(&mut tcp, sharing, encryption, limits)? {
            Ok(it) => (Some(it), String::new()),
            Err(why) => (None, why),
        };
        let opened = opened::shared(&tcp, sharing)?;
        if let Some(shared) = &opened {
            let mut offer = Buffer::zeroed(OFFER_BYTES);
            offer.bytes_mut().copy_from_slice(&shared.offer.encode());
            tcp.announce(OFFER, Arc::new(offer));
        }
        let (copied, traffic, events) = (BTreeSet::new(), Traffic::default(), Vec::new());
        let demanded = Demanded::new(sharing);
        Ok(Self { remote, no_ucx, tcp, sharing: opened, copied, traffic, demanded, events })
    }

    /// As [`Tcp::landed`].
    ///
    /// # Errors
    ///
    /// [`Error::UnknownLanding`].
    pub fn landed(&self, landing: LandingId) -> Result<&Buffer, Error> {
        self.tcp.landed(landing)
    }

    /// Asks a peer for its offer.
    fn ask(&mut self, peer: PeerId) {
        let Some(shared) = &mut self.sharing else { return };
        shared.ways.ask(peer, self.demanded.is_shut(peer));
        let landing = self.tcp.land(Buffer::zeroed(OFFER_BYTES));
        let pieces = vec![Piece { remote: 0, local: 0, bytes: OFFER_BYTES as u64 }];
        let (key, patience) = (OFFER, OFFER_PATIENCE);
        let pull = self.tcp.pull(PullRequest { peer, key, pieces, landing, patience });
        shared.asked.insert(pull, (peer, landing));
    }

    /// Shows all publications to UCX readers once a peer has pulled the card. A peer with shared memory does not pull it, and
    /// shown memory is pinned.
    fn show_if_asked(&mut self) {
        let Some(remote) = self.remote.as_mut().filter(|it| !it.shows) else { return };
        if !self.tcp.is_read(CARD) {
            return;
        }
        remote.shows = true;
        for (key, number, memory) in self.tcp.regions() {
            remote.publish(&mut self.tcp, key, number, &memory);
        }
    }

    /// Makes progress that needs no link. Returns whether more can be done at once.
    fn advance(&mut self) -> bool {
        let now = self.tcp.now();
        self.show_if_asked();
        while let Some(answer) = self.sharing.as_mut().and_then(|it| it.ways.answer(now)) {
            self.take_answer(answer);
        }
        self.end_late(now);
        self.copy();
        self.advance_remote()
    }

    /// Readies the descriptors that end a wait. Returns false where there is something to do already.
    fn arm(&mut self) -> bool {
        self.remote.as_mut().is_none_or(Remote::arm)
    }

    /// How long a poll may sleep unless the links or a door have news.
    fn rest(&self) -> Duration {
        let now = self.tcp.now();
        let remote = self.rest_remote(now);
        let Some(shared) = &self.sharing else { return remote };
        if !shared.copying.is_empty() {
            return Duration::ZERO;
        }
        let late = shared.waiting.next_late().map(|it| it.saturating_duration_since(now));
        late.unwrap_or(Duration::MAX).min(remote)
    }

    /// Takes a region off the boards. When this returns, its memory may be written.
    fn withdraw_from_boards(&mut self, key: RegionKey) {
        if let Some(shared) = &mut self.sharing {
            shared.board.withdraw(key);
        }
        if let Some(remote) = &mut self.remote {
            remote.board.withdraw(key);
        }
    }

    fn take_answer(&mut self, answer: Answer) {
        if !self.sharing.as_ref().is_some_and(|it| it.required) {
            if let Answer::Shut(peer, _) = answer {
                self.ask_card_if_due(peer);
            }
            return;
        }
        match answer {
            Answer::Open(peer) => {
                // The event is held back until the peer has a way.
                self.events.push(Event::Connected(peer));
                self.begin_waiting(peer);
            }
            Answer::Arena(peer) => self.begin_waiting(peer),
            Answer::Shut(peer, why) => {
                // Where the link broke, that is the reason, and its event follows.
                let is_linked = self.tcp.is_opening(peer);
                self.tcp.break_links(peer);
                self.end_all(peer, &PullError::PeerFailed);
                let error = format!(
                    "{why}; run both on one machine, or without requiring shared memory (--exchange auto)"
                );
                self.closed(peer, is_linked.then_some(error), why == NO_SHARED_MEMORY);
            }
        }
    }

    /// Tells that a link was closed since its peer cannot be reached by the path that has to be there; where it never can, that too.
    fn closed(&mut self, peer: PeerId, error: Option<String>, is_unfit: bool) {
        let Some(error) = error else { return };
        self.demanded.failed(peer, self.tcp.now());
        let unfit = is_unfit.then(|| Event::Unfit { peer, reason: error.clone() });
        self.events.push(Event::Closed { peer, error });
        self.events.extend(unfit);
    }

    /// Handles an event of the links.
    fn take_in(&mut self, event: Event) {
        match &event {
            Event::Connected(peer) => {
                self.ask(*peer);
                // Shared memory is tried before UCX.
                if self.sharing.is_none() {
                    self.ask_card(*peer);
                }
                if self.sharing.as_ref().is_some_and(|it| it.required)
                    || self.remote.as_ref().is_some_and(|it| it.required)
                {
                    return;
                }
            }
            Event::Closed { peer, .. } => self.end_all(*peer, &PullError::PeerFailed),
            Event::Pulled { pull, result } => {
                let asked = self.sharing.as_mut().and_then(|it| it.asked.remove(pull));
                if let Some((peer, landing)) = asked {
                    return self.offered(peer, landing, result);
                }
                if self.take_said(*pull, result) {
                    return;
                }
                let is_copied = self.copied.remove(pull);
                let by_link = if is_copied { 0 } else { *result.as_ref().unwrap_or(&0) };
                self.traffic.tcp_bytes += by_link;
                self.demanded.ended(*pull, by_link);
            }
            Event::Message { .. }
            | Event::Begun { .. }
            | Event::Room { .. }
            | Event::Refused { .. }
            | Event::Unfit { .. }
            | Event::Broken { .. } => {}
        }
        self.events.push(event);
    }

    fn offered(&mut self, peer: PeerId, landing: LandingId, result: &Result<u64, PullError>) {
        let landed = self.tcp.take(landing);
        let offer = match (result, landed) {
            (Ok(_), Ok(landed)) => {
                Offer::decode(landed.bytes()).ok_or_else(|| "its offer is cut".to_owned())
            }
            (Err(PullError::Gone), _) => Err(NO_SHARED_MEMORY.to_owned()),
            (Err(why), _) => Err(format!("it does not say what it offers: {why}")),
            (Ok(_), Err(why)) => Err(why.to_string()),
        };
        let now = self.tcp.now();
        let answer = self.sharing.as_mut().and_then(|it| it.ways.offered(peer, offer, now));
        if let Some(answer) = answer {
            self.take_answer(answer);
        }
    }
}

impl Drop for Paths {
    /// Ends all publications before their memory is freed, and logs the bytes of each path.
    fn drop(&mut self) {
        let boards = [
            self.sharing.as_mut().map(|it| &mut it.board),
            self.remote.as_mut().map(|it| &mut it.board),
        ];
        let is_more = boards.iter().any(Option::is_some);
        for board in boards.into_iter().flatten() {
            board.withdraw_all();
        }
        if is_more {
            let Traffic { shared_bytes, ucx_bytes, tcp_bytes, sent_anew } = self.traffic;
            tracing::info!(
                "bytes of rows came by shared memory: {shared_bytes}, by UCX: {ucx_bytes}, by tcp: {tcp_bytes} ({sent_anew} pulls had no better path in time; {} ways failed)",
                self.failed_ways()
            );
        }
    }
}

impl Provider for Paths {
    type Memory = Buffer;

    fn address(&self) -> String {
        self.tcp.address()
    }

    fn connect(&mut self, peer: PeerId, address: &str) {
        let at = self.demanded.dial_at(peer, self.tcp.now());
        self.tcp.connect_at(peer, address, at);
    }

    fn publish(&mut self, key: RegionKey, memory: Arc<Buffer>) {
        // First, since the next line may free what was published before.
        self.withdraw_from_boards(key);
        let number = self.tcp.announce(key, Arc::clone(&memory));
        if let Some(shared) = &mut self.sharing {
            shared.publish(key, number, &memory);
        }
        if let Some(remote) = &mut self.remote {
            remote.publish(&mut self.tcp, key, number, &memory);
        }
    }

    fn withdraw(&mut self, key: RegionKey) -> Option<Arc<Buffer>> {
        self.withdraw_from_boards(key);
        self.tcp.withdraw(key)
    }

    fn land(&mut self, memory: Buffer) -> LandingId {
        self.tcp.land(memory)
    }

    fn take(&mut self, landing: LandingId) -> Result<Buffer, Error> {
        self.tcp.take(landing)
    }

    fn is_busy(&self, landing: LandingId) -> bool {
        self.remote.as_ref().is_some_and(|it| it.is_busy(landing))
    }

    fn discard(&mut self, landing: LandingId) {
        self.tcp.discard(landing);
    }

    fn pull(&mut self, request: PullRequest) -> PullId {
        let peer = request.peer;
        let (id, pull) = self.tcp.claim(&request);
        self.demanded.begins(id, peer);
        if let Some(pull) = pull {
            let now = self.tcp.now();
            if self.sharing.as_ref().is_some_and(|it| it.ways.is_to_be_tried(peer, now)) {
                self.ask(peer);
            }
            // UCX is not asked while the peer has shared memory, or may have it.
            let shared = self.sharing.as_ref().map_or(Path::Tcp, |it| it.ways.path(peer));
            let is_due = |it: &Remote| shared == Path::Tcp && it.is_to_be_tried(peer, now);
            if self.remote.as_ref().is_some_and(is_due) {
                self.ask_card(peer);
            }
            self.begin(pull);
        }
        id
    }

    fn ring(&mut self, peer: PeerId, message: &[u8]) -> Result<(), RingError> {
        self.tcp.ring(peer, message)
    }

    fn poll(&mut self, timeout: Duration, events: &mut Vec<Event>) {
        let (until, mut news) = (Instant::now().checked_add(timeout), Vec::new());
        loop {
            let is_more = self.advance();
            let now = Instant::now();
            let left = until.map_or(Duration::MAX, |it| it.saturating_duration_since(now));
            let done = !self.events.is_empty() || left.is_zero();
            // Polls the links also when there is news already: queued messages have to be sent now, not at the caller's next
            // poll.
            let sleep =
                if done || is_more || !self.arm() { Duration::ZERO } else { left.min(self.rest()) };
            self.tcp.poll(sleep, &mut news);
            // Also where nothing of what came with it is the caller's.
            let woken = self.tcp.was_called();
            for event in news.drain(..) {
                self.take_in(event);
            }
            if done || woken || !self.events.is_empty() {
                return events.append(&mut self.events);
            }
        }
    }

    fn waker(&self) -> Waker {
        self.tcp.waker()
    }

    fn close(&mut self, peer: PeerId) {
        self.tcp.close(peer);
        self.end_all(peer, &PullError::Cancelled);
    }
}
