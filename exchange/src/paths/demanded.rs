//! Peers to which the user demanded a path: what is said where rows do not come by it, and when a peer is tried again that it does
//! not reach.
//!
//! In: pulls and how they ended, paths that do not open. Out: a warning in the reader's log, once for each peer, since the reader
//! demanded the path; the time before which a peer is not dialled.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::Sharing;
use crate::peer::PeerId;
use crate::provider::PullId;

/// First and longest pause before a peer is dialled again whose path did not open. A peer that is not reached for seconds is lost.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(2560);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Demanded {
    /// The user's name of the demanded path; none where any path will do.
    path: Option<&'static str>,
    pulls: BTreeMap<PullId, PeerId>,
    said: BTreeSet<PeerId>,
    /// Peers whose path did not open, and has brought no rows since: the pause, and when it ends. One that ended longer ago than
    /// [`LONGEST_PAUSE`] is no reason for a longer one: a path that opened may bring words alone.
    shut: BTreeMap<PeerId, (Duration, Instant)>,
}

impl Demanded {
    pub(super) fn new(sharing: Sharing) -> Self {
        let path = match sharing {
            Sharing::Off | Sharing::Auto => None,
            Sharing::Required => Some("shm"),
            Sharing::Ucx(_) => Some("ucx"),
        };
        Self { path, ..Self::default() }
    }

    pub(super) fn begins(&mut self, pull: PullId, peer: PeerId) {
        if self.path.is_some() {
            self.pulls.insert(pull, peer);
        }
    }

    /// The path to a peer did not open, or broke, and its link was closed for that.
    pub(super) fn failed(&mut self, peer: PeerId, now: Instant) {
        let first = PeerId { incarnation: 0, ..peer };
        while let Some((&older, _)) = self.shut.range(first..peer).next() {
            self.shut.remove(&older);
        }
        let recent = self.shut.get(&peer).filter(|it| now < it.1 + LONGEST_PAUSE);
        let pause = recent.map_or(FIRST_PAUSE, |it| (2 * it.0).min(LONGEST_PAUSE));
        self.shut.insert(peer, (pause, now + pause));
    }

    /// Rows of a peer came by a path other than the link.
    pub(super) fn came(&mut self, peer: PeerId) {
        self.shut.remove(&peer);
    }

    /// Whether it was told that the path to a peer does not open, and no rows have come by it since.
    pub(super) fn is_shut(&self, peer: PeerId) -> bool {
        self.shut.contains_key(&peer)
    }

    /// The time before which a peer is not dialled.
    pub(super) fn dial_at(&self, peer: PeerId, now: Instant) -> Instant {
        self.shut.get(&peer).map_or(now, |it| it.1.max(now))
    }

    /// A pull has ended; `by_link` of its bytes came over the link.
    pub(super) fn ended(&mut self, pull: PullId, by_link: u64) {
        if let Some(peer) = self.pulls.remove(&pull)
            && let Some(path) = self.path
            && by_link > 0
            && self.said.insert(peer)
        {
            tracing::warn!(
                "rows of {peer:?} came by tcp, though --exchange is {path}: they lie in memory that it cannot show by {path}; its log says why; or say --exchange auto"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tracing::span::{Attributes, Id, Record};
    use tracing::{Level, Metadata, Subscriber};

    use super::super::offer::{OFFER, OFFER_BYTES, Offer};
    use super::super::{Paths, PathsConfig};
    use super::*;
    use crate::buffer::Buffer;
    use crate::clock::Clock;
    use crate::peer::{Piece, RegionKey, Role};
    use crate::pool::Pool;
    use crate::provider::{Event, Provider, PullError, PullRequest};
    use crate::tcp::{Encryption, Limits, TcpConfig};

    fn open(index: u16, sharing: Sharing, clock: Clock) -> (PeerId, Paths) {
        let me = PeerId { role: Role::Trainer, index, incarnation: 0 };
        let (bind, limits) = (IpAddr::V4(Ipv4Addr::LOCALHOST), Limits::default());
        let encryption = Encryption::Off;
        let tcp = TcpConfig { bind, me, secret: [3; 32], data_version: 1, encryption, limits };
        (me, Paths::open_at(PathsConfig { tcp, sharing }, clock).unwrap())
    }

    /// Counts what is logged of paths.
    struct Lines(Arc<AtomicUsize>);

    impl Subscriber for Lines {
        fn enabled(&self, it: &Metadata<'_>) -> bool {
            *it.level() <= Level::INFO && it.target().contains("paths")
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, _: &tracing::Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn a_peer_whose_demanded_path_does_not_open_is_dialled_after_a_pause_and_told_of_once() {
        let (clock, hand) = Clock::driven();
        let (peer, mut owner) = open(1, Sharing::Off, Clock::system());
        // It offers a door that is on another machine.
        let mut offer = Buffer::zeroed(OFFER_BYTES);
        offer.bytes_mut().copy_from_slice(&Offer::new(|| [7; 32]).encode());
        owner.publish(OFFER, Arc::new(offer));
        let (_, mut reader) = open(0, Sharing::Required, clock);
        let lines = Arc::<AtomicUsize>::default();
        let _logged = tracing::subscriber::set_default(Lines(Arc::clone(&lines)));
        let more = [10, 20, 40, 80, 160, 320, 640, 1280, 2560, 2560];
        // It was there again for a minute, and no rows came.
        let afresh = [60_000, 0, 10, 20];
        for pause in [0].into_iter().chain(more).chain(afresh) {
            if pause == 60_000 {
                hand.advance(Duration::from_millis(pause));
                continue;
            }
            let mut events = Vec::new();
            reader.connect(peer, &owner.address());
            if pause > 0 {
                hand.advance(Duration::from_millis(pause - 1));
                for _ in 0..5 {
                    reader.poll(Duration::from_millis(1), &mut events);
                    owner.poll(Duration::ZERO, &mut Vec::new());
                }
                assert!(events.is_empty() && reader.tcp.is_resting(peer), "{pause}: {events:?}");
                hand.advance(Duration::from_millis(1));
            }
            let start = Instant::now();
            while !events.iter().any(|it| matches!(it, Event::Closed { .. })) {
                assert!(start.elapsed() < Duration::from_mins(1), "{pause}: {events:?}");
                reader.poll(Duration::from_millis(1), &mut events);
                owner.poll(Duration::ZERO, &mut Vec::new());
            }
        }
        assert_eq!(lines.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn rows_that_no_demanded_path_can_show_are_told_of_at_the_reader_once() {
        let open = |index| open(index, Sharing::Required, Clock::system());
        let ((_, mut reader), (peer, mut owner)) = (open(0), open(1));
        let pool = Pool::shared_and_poisoned(1 << 20).unwrap();
        let [shown, hidden] = [1, 2].map(|it| RegionKey([it; 4]));
        owner.publish(shown, Arc::new(pool.take(64)));
        owner.publish(hidden, Arc::new(Buffer::zeroed(64)));
        reader.connect(peer, &owner.address());
        for (key, told) in [(shown, 0), (hidden, 1), (hidden, 1)] {
            let landing = reader.land(Buffer::zeroed(64));
            let pieces = vec![Piece { remote: 0, local: 0, bytes: 64 }];
            let patience = Duration::from_secs(20);
            let pull = reader.pull(PullRequest { peer, key, pieces, landing, patience });
            let start = Instant::now();
            let mut events = Vec::new();
            let over = |it: &Event| matches!(it, Event::Pulled { pull: it, result } if *it == pull && result.is_ok());
            while !events.iter().any(over) {
                assert!(start.elapsed() < patience, "{events:?}");
                owner.poll(Duration::ZERO, &mut Vec::new());
                reader.poll(Duration::from_millis(1), &mut events);
            }
            assert_eq!(reader.demanded.said.len(), told);
            assert!(reader.demanded.pulls.is_empty());
        }
    }

    #[test]
    fn pulls_over_a_link_that_is_closed_for_its_path_end_as_those_of_a_broken_one() {
        let open = |index| open(index, Sharing::Required, Clock::system());
        let ((_, mut reader), (peer, mut owner)) = (open(0), open(1));
        // In no arena, so that it comes over the link.
        owner.publish(RegionKey::default(), Arc::new(Buffer::zeroed(64)));
        reader.connect(peer, &owner.address());
        let (start, mut events) = (Instant::now(), Vec::new());
        while !events.contains(&Event::Connected(peer)) {
            assert!(start.elapsed() < Duration::from_mins(1), "{events:?}");
            owner.poll(Duration::ZERO, &mut Vec::new());
            reader.poll(Duration::from_millis(1), &mut events);
        }
        let (landing, key) = (reader.land(Buffer::zeroed(64)), RegionKey::default());
        let pieces = vec![Piece { remote: 0, local: 0, bytes: 64 }];
        let patience = Duration::from_mins(1);
        let pull = reader.pull(PullRequest { peer, key, pieces, landing, patience });
        let now = reader.tcp.now();
        let ways = &mut reader.sharing.as_mut().unwrap().ways;
        let answer = ways.shut(peer, "a test".to_owned(), false, now);
        reader.take_answer(answer);
        reader.poll(Duration::ZERO, &mut events);
        assert!(events.contains(&Event::Pulled { pull, result: Err(PullError::PeerFailed) }));
    }
}
