//! Long words on their way: which one is next of each peer, whose pull is which, and when something is due.
//!
//! In: what becomes of each. Out: whose a pull was, who is due. Pulls nothing itself.
//!
//! Invariant: every pull that is under way and every wait is found by an index, so that no event looks at the words of all peers; of a
//! peer one word is pulled or read at a time, one that nobody wants any more among them.

use std::collections::{BTreeMap, BTreeSet};

use cadre_exchange::{Buffer, LandingId, PullId};
use cadre_protocol::{Nanos, Peer};
use cadre_step::words::Published;

/// A long word on its way.
#[derive(Debug)]
pub(super) struct Fetch {
    pub(super) word: Published,
    /// What has come of it: parts, how many bytes of each, and of all.
    pub(super) parts: Vec<(Buffer, usize)>,
    pub(super) bytes: u64,
    /// Where a part landed that did not come whole.
    pub(super) begun: Option<LandingId>,
    /// When a part of it came last, or it was asked for first.
    pub(super) since: Nanos,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum State {
    Pulling {
        pull: PullId,
        landing: LandingId,
        bytes: u64,
    },
    /// To be pulled at this time.
    Waiting(Nanos),
    /// Whole; another thread reads it.
    Reading(u64),
}

/// The end of a word that nobody wants any more, which still holds memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Drained {
    Pull(PullId),
    Reading(u64),
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Fetches {
    of: BTreeMap<Peer, (Fetch, State)>,
    drained: BTreeMap<Peer, Drained>,
    /// Pulls of both that are under way.
    pulls: BTreeMap<PullId, Peer>,
    /// States [`State::Waiting`].
    due: BTreeSet<(Nanos, Peer)>,
}

impl Fetches {
    /// Whether nothing is on its way that somebody wants.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    /// The word that is next of a peer.
    pub(super) fn get(&self, of: Peer) -> Option<(&Fetch, State)> {
        self.of.get(&of).map(|it| (&it.0, it.1))
    }

    /// The same, to be changed.
    pub(super) fn get_mut(&mut self, of: Peer) -> Option<(&mut Fetch, State)> {
        self.of.get_mut(&of).map(|it| (&mut it.0, it.1))
    }

    /// A word is next of a peer; of each peer one at a time.
    pub(super) fn begin(&mut self, of: Peer, fetch: Fetch, state: State) {
        let before = self.of.insert(of, (fetch, state));
        debug_assert!(before.is_none(), "the word before it is over");
        self.index(of, state);
    }

    /// What becomes of it.
    pub(super) fn set(&mut self, of: Peer, state: State) {
        let Some((_, now)) = self.of.get_mut(&of) else { return };
        let before = std::mem::replace(now, state);
        self.unindex(of, before);
        self.index(of, state);
    }

    /// It is over; nothing of it is under way.
    pub(super) fn end(&mut self, of: Peer) {
        if let Some((_, state)) = self.of.remove(&of) {
            self.unindex(of, state);
        }
    }

    /// Nobody wants it any more. What is pulled or read of it holds memory until [`Self::ended`] or [`Self::is_read`].
    pub(super) fn give_up(&mut self, of: Peer) -> Option<(Fetch, State)> {
        let (fetch, state) = self.of.remove(&of)?;
        match state {
            State::Pulling { pull, .. } => {
                self.drained.insert(of, Drained::Pull(pull));
            }
            State::Reading(reading) => {
                self.drained.insert(of, Drained::Reading(reading));
            }
            State::Waiting(_) => self.unindex(of, state),
        }
        Some((fetch, state))
    }

    /// Whether a word of this peer that nobody wants any more still holds memory.
    pub(super) fn is_draining(&self, of: Peer) -> bool {
        self.drained.contains_key(&of)
    }

    /// Whether a pull brings a part of a word.
    pub(super) fn brings(&self, pull: PullId) -> bool {
        self.pulls.contains_key(&pull)
    }

    /// A pull ended. Out: whose, if somebody wants the word.
    pub(super) fn ended(&mut self, pull: PullId) -> Option<Peer> {
        let of = self.pulls.remove(&pull)?;
        if self.drained.get(&of) == Some(&Drained::Pull(pull)) {
            self.drained.remove(&of);
            return None;
        }
        Some(of)
    }

    /// A word was read. Out: whether somebody wants it.
    pub(super) fn is_read(&mut self, of: Peer, reading: u64) -> bool {
        if self.drained.get(&of) == Some(&Drained::Reading(reading)) {
            self.drained.remove(&of);
            return false;
        }
        self.get(of).is_some_and(|it| it.1 == State::Reading(reading))
    }

    /// When the next one is due.
    pub(super) fn next_deadline(&self) -> Option<Nanos> {
        self.due.first().map(|it| it.0)
    }

    /// Whose words are due.
    pub(super) fn due(&self, now: Nanos) -> Vec<Peer> {
        self.due.iter().take_while(|it| it.0 <= now).map(|it| it.1).collect()
    }

    fn index(&mut self, of: Peer, state: State) {
        match state {
            State::Pulling { pull, .. } => {
                self.pulls.insert(pull, of);
            }
            State::Waiting(at) => {
                self.due.insert((at, of));
            }
            State::Reading(_) => {}
        }
    }

    fn unindex(&mut self, of: Peer, state: State) {
        match state {
            State::Pulling { pull, .. } => {
                self.pulls.remove(&pull);
            }
            State::Waiting(at) => {
                self.due.remove(&(at, of));
            }
            State::Reading(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use cadre_protocol::{ServerId, TrainerId};

    use super::*;

    fn fetch() -> Fetch {
        let word = Published { publication: 1, bytes: 8, digest: 9 };
        Fetch { word, parts: Vec::new(), bytes: 0, begun: None, since: Nanos(0) }
    }

    #[test]
    fn every_pull_and_every_wait_of_a_word_is_found_and_none_that_is_over() {
        let peers = [0, 1, 2].map(|it| Peer::Trainer(TrainerId(it)));
        let server = Peer::Server(ServerId { index: 0, incarnation: 0 });
        let pulling = |it| State::Pulling { pull: PullId(it), landing: LandingId(it), bytes: 8 };
        let mut all = Fetches::default();
        for (at, of) in peers.into_iter().enumerate() {
            all.begin(of, fetch(), State::Waiting(Nanos(30 - 10 * at as u64)));
        }
        assert_eq!(all.next_deadline(), Some(Nanos(10)));
        assert_eq!(all.due(Nanos(20)), [peers[2], peers[1]]);
        for (at, of) in peers.into_iter().enumerate() {
            all.set(of, pulling(at as u64));
        }
        assert_eq!((all.next_deadline(), all.due(Nanos(99))), (None, Vec::new()));
        assert!((0..3).all(|it| all.brings(PullId(it))) && !all.brings(PullId(3)));
        assert_eq!((all.ended(PullId(1)), all.ended(PullId(1))), (Some(peers[1]), None));
        // Given up, and still pulled: its end is nobody's.
        all.give_up(peers[0]).expect("it was pulled");
        assert!(all.brings(PullId(0)) && all.is_draining(peers[0]) && all.get(peers[0]).is_none());
        assert_eq!(all.ended(PullId(0)), None);
        assert!(!all.brings(PullId(0)) && !all.is_draining(peers[0]));
        // Given up while it waits: nothing is left of it.
        all.set(peers[1], State::Waiting(Nanos(40)));
        all.give_up(peers[1]).expect("it waited");
        assert!(all.next_deadline().is_none() && !all.is_draining(peers[1]));
        // Read for nobody, and read for somebody.
        all.set(peers[2], State::Reading(5));
        assert!(!all.brings(PullId(2)), "it has all parts");
        all.give_up(peers[2]).expect("it was read");
        all.begin(peers[2], fetch(), State::Waiting(Nanos(50)));
        assert!(!all.is_read(peers[2], 5) && !all.is_draining(peers[2]));
        all.set(peers[2], State::Reading(6));
        assert!(all.is_read(peers[2], 6) && !all.is_read(peers[2], 5) && !all.is_read(server, 6));
        all.end(peers[2]);
        assert!(all.is_empty() && all.next_deadline().is_none());
    }
}
