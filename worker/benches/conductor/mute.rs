//! An exchange without sockets: gives what peers have sent in turn, keeps the words that are said to them, and hands out published bytes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use cadre_exchange::{
    Buffer, Error, Event, LandingId, PeerId, Piece, PullId, PullRequest, RegionKey, RingError,
    Waker,
};
use cadre_kernels::device;
use cadre_worker::io::exchange::Exchange;
use cadre_worker::memory::{Host, HostRows};

/// The encoding of an envelope with a word begins with this byte.
const WORD: u8 = 1;

/// See the module.
pub(crate) struct Mute {
    pub(crate) waker: Waker,
    pub(crate) rings: u64,
    /// What has come and nobody has taken: one event goes with each turn.
    pub(crate) events: VecDeque<Event>,
    /// Words that were said to others.
    pub(crate) words: Vec<(PeerId, Vec<u8>)>,
    /// What others have published, by publication.
    pub(crate) published: BTreeMap<u32, Arc<[u8]>>,
    landings: BTreeMap<LandingId, Buffer>,
    next: u64,
}

impl Mute {
    pub(crate) fn new(waker: Waker) -> Self {
        Self {
            waker,
            rings: 0,
            events: VecDeque::new(),
            words: Vec::new(),
            published: BTreeMap::new(),
            landings: BTreeMap::new(),
            next: 0,
        }
    }
}

impl Exchange for Mute {
    type Memory = HostRows;

    fn place(&self) -> &Host {
        &Host
    }

    fn path(&self, _peer: PeerId) -> Option<&'static str> {
        Some("mute")
    }

    fn resumes(&self) -> bool {
        false
    }

    fn address(&self) -> String {
        String::new()
    }

    fn connect(&mut self, _peer: PeerId, _address: &str) {}

    fn publish(&mut self, _key: RegionKey, _memory: &HostRows) {}

    fn withdraw(&mut self, _key: RegionKey) {}

    fn land(&mut self, bytes: usize) -> Result<LandingId, device::Error> {
        self.next += 1;
        let landing = LandingId(self.next);
        self.landings.insert(landing, Buffer::from(vec![0.0; bytes.div_ceil(4)]));
        Ok(landing)
    }

    fn is_busy(&self, _landing: LandingId) -> bool {
        false
    }

    fn take(&mut self, landing: LandingId) -> Result<Buffer, Error> {
        self.landings.remove(&landing).ok_or(Error::UnknownLanding { landing })
    }

    fn discard(&mut self, landing: LandingId) {
        self.landings.remove(&landing);
    }

    fn pull(&mut self, request: PullRequest) -> PullId {
        let PullRequest { key: RegionKey([_, _, publication, _]), pieces, landing, .. } = request;
        self.next += 1;
        let pull = PullId(self.next);
        let rows = self.landings.get_mut(&landing).expect("a word pulls into its own landing");
        let bytes: u64 = pieces.iter().map(|it| it.bytes).sum();
        for Piece { remote, local, bytes } in pieces {
            let from = &self.published[&publication][remote as usize..(remote + bytes) as usize];
            rows.bytes_mut()[local as usize..(local + bytes) as usize].copy_from_slice(from);
        }
        self.events.push_back(Event::Pulled { pull, result: Ok(bytes) });
        pull
    }

    fn ring(&mut self, peer: PeerId, message: &[u8]) -> Result<(), RingError> {
        self.rings += 1;
        if message.first() == Some(&WORD) {
            self.words.push((peer, message.to_vec()));
        }
        Ok(())
    }

    fn poll(&mut self, _timeout: Duration, events: &mut Vec<Event>) {
        events.extend(self.events.pop_front());
    }

    fn waker(&self) -> Waker {
        self.waker.clone()
    }

    fn close(&mut self, _peer: PeerId) {}
}
