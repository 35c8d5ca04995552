//! Pulls whose bytes are copied on this machine instead of asked for: what `paths` needs of this provider.
//!
//! In: pulls that were claimed here, and a copier. Out: their bytes in the landings that all pulls land in, their ends among all
//! events. A pull that is not copied to its end goes over the link as if nothing had been.
//!
//! It reads no shared memory itself. Invariant: bytes of a copied pull count only when [`Tcp::end_copied`] says so.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

use super::Tcp;
use super::frame::{Span, merged};
use super::pull::{Pull, Wish};
use crate::buffer::Buffer;
use crate::peer::{PeerId, RegionKey};
use crate::provider::{Event, LandingId, PullError, PullId, PullRequest};

impl Tcp {
    /// Publishes a region: the number of the publication, which is not 0.
    pub(crate) fn announce(&mut self, key: RegionKey, memory: Arc<Buffer>) -> u64 {
        self.publication = self.publication.wrapping_add(1).max(1);
        let (number, is_read) = (self.publication, Cell::default());
        self.regions.insert(key, super::Published { memory, number, is_read });
        number
    }

    /// Whether a peer has pulled the region over a link since it was published.
    pub(crate) fn is_read(&self, key: RegionKey) -> bool {
        self.regions.get(&key).is_some_and(|it| it.is_read.get())
    }

    /// All regions, with the numbers of their publications.
    pub(crate) fn regions(&self) -> Vec<(RegionKey, u64, Arc<Buffer>)> {
        self.regions.iter().map(|(key, it)| (*key, it.number, Arc::clone(&it.memory))).collect()
    }

    /// Reserves the landing's bytes for a pull. None if the pull has ended already.
    pub(crate) fn claim(&mut self, request: &PullRequest) -> (PullId, Option<Pull>) {
        let PullRequest { peer, key, ref pieces, landing, patience } = *request;
        let id = self.ledger.new_pull();
        let spans = merged(pieces.iter().map(|it| Span { start: it.remote, bytes: it.bytes }));
        let runs = merged(pieces.iter().map(|it| Span { start: it.local, bytes: it.bytes }));
        // The ledger accepts only runs that are disjoint and inside of the landing, so the sum cannot overflow.
        let bytes = runs.iter().map(|it| it.bytes).fold(0, u64::saturating_add);
        let wish = Wish { peer, key, spans, runs, bytes };
        let token = self.peers.get(&peer).and_then(|it| it.outgoing);
        // Links count from 3.
        let place = (landing, token.unwrap_or(0));
        let pull = Pull::new(id, wish, place, patience, self.clock.now());
        (id, self.ledger.begin(pull))
    }

    /// Sends a claimed pull over the link.
    pub(crate) fn send_pull(&mut self, pull: Pull) {
        let token = self.peers.get(&pull.wish.peer).and_then(|it| it.outgoing);
        match token.and_then(|it| self.outgoing.get_mut(&it).map(|link| (it, link))) {
            Some((token, link)) => {
                link.pulls.add(pull);
                self.restless.insert(token);
            }
            None => self.ledger.end(pull, Err(PullError::PeerFailed)),
        }
    }

    /// Sends a pull over the link from its first byte on, with a new deadline: its copied bytes do
    /// not count.
    pub(crate) fn send_anew(&mut self, mut pull: Pull) {
        pull.restart();
        self.watch_anew(&mut pull);
        self.send_pull(pull);
    }

    /// Restarts the deadline of a pull.
    pub(crate) fn watch_anew(&mut self, pull: &mut Pull) {
        self.ledger.watch_anew(pull, self.clock.now());
    }

    /// Lets `copy` write the next bytes of a pull, at most `most`, and returns how many it wrote. `copy` gets the first byte's
    /// position in the region, and the memory of the landing.
    pub(crate) fn copy_on(
        &mut self,
        pull: &mut Pull,
        most: u64,
        mut copy: impl FnMut(u64, &mut [u8]),
    ) -> u64 {
        let (spans, bytes) = pull.cut(most);
        let mut spans = spans.into_iter();
        let (mut span, mut left) = (Span { start: 0, bytes: 0 }, bytes);
        while left > 0 {
            let (slices, total) = self.ledger.slices(pull, left);
            for mut slice in slices {
                let mut to = &mut slice[..];
                while !to.is_empty() {
                    if span.bytes == 0 {
                        span = spans.next().expect("a part has as many bytes as its spans");
                    }
                    let (now, later) = to.split_at_mut(to.len().min(span.bytes as usize));
                    copy(span.start, now);
                    span.start += now.len() as u64;
                    span.bytes -= now.len() as u64;
                    to = later;
                }
            }
            pull.land(total);
            left -= total;
        }
        bytes
    }

    /// Ends a copied pull: with success if all its bytes are of the publication with this number.
    pub(crate) fn end_copied(&mut self, mut pull: Pull, result: Result<u64, PullError>) {
        match result {
            Ok(number) => {
                pull.publication = Some(number);
                let bytes = pull.wish.bytes;
                self.ledger.end(pull, Ok(bytes));
            }
            Err(error) => {
                pull.restart();
                self.ledger.end(pull, Err(error));
            }
        }
    }

    /// Sends the event of a pull's end although its landing may still be written. The landing stays reserved until
    /// [`Self::free_told`].
    pub(crate) fn tell_end(&mut self, pull: &Pull, why: PullError) {
        self.ledger.tell(pull, Err(why));
    }

    /// Frees the landing of a pull whose end was sent: nothing writes there any more. The bytes that landed do not count.
    pub(crate) fn free_told(&mut self, pull: Pull) {
        self.ledger.free(pull, false);
    }

    /// Closes the links with a peer whose demanded path failed. Its pulls end as if the links had broken.
    pub(crate) fn break_links(&mut self, peer: PeerId) {
        self.drop_links(peer, &PullError::PeerFailed);
    }

    /// Whether a link to a peer is open or being opened.
    pub(crate) fn is_opening(&self, peer: PeerId) -> bool {
        self.peers.get(&peer).is_some_and(|it| it.outgoing.is_some())
    }

    /// What happened since the last poll.
    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.ledger.events)
    }

    /// The time of deadlines.
    pub(crate) fn now(&self) -> Instant {
        self.clock.now()
    }
}

impl Pull {
    pub(crate) fn id(&self) -> PullId {
        self.id
    }

    pub(crate) fn peer(&self) -> PeerId {
        self.wish.peer
    }

    pub(crate) fn key(&self) -> RegionKey {
        self.wish.key
    }

    pub(crate) fn landing(&self) -> LandingId {
        self.landing
    }

    /// The end of the last byte that the pull reads of the region.
    pub(crate) fn reach(&self) -> u64 {
        self.wish.spans.iter().filter_map(|it| it.end()).max().unwrap_or(0)
    }

    /// When the pull is late if nothing comes for it.
    pub(crate) fn late_at(&self) -> Instant {
        self.deadline(self.since)
    }

    /// When the pull is late if something last came from its peer at `heard`.
    pub(crate) fn late_after(&self, heard: Option<Instant>) -> Instant {
        self.deadline(heard.unwrap_or(self.since))
    }

    /// Discards what has landed of the pull.
    pub(crate) fn begin_anew(&mut self) {
        self.restart();
    }

    pub(crate) fn is_late(&self, now: Instant) -> bool {
        self.late_at() <= now
    }

    /// Keeps the bytes that an earlier pull has landed, if they are of the publication with this number. Else discards them.
    pub(crate) fn is_to_be_of(&mut self, number: u64) {
        if self.publication.is_some_and(|it| it != number) {
            self.restart();
        }
    }
}
