//! The shared memory of each peer, as far as it is mapped here, or why it is not.
//!
//! In: peers that connect and go, what they offer, descriptors. Out: where a region can be copied from. Nothing is copied here.
//!
//! ```text
//! connected ──▶ Asked: offer over the link, board at the door ──▶ Open: arenas as they are needed
//!                  │                                                │ an arena cannot be had
//!                  └──────────────▶ Shut ◀──────────────────────────┘
//!                    ▲               │ 30 s, doubling to 10 min; then with the next pull
//!                    └───────────────┘
//! ```
//!
//! Invariant: a memory that is mapped here was given by the peer that proved itself on the link, or by whoever it told.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Path;
use super::offer::Offer;
use crate::door::Asker;
use crate::peer::{PeerId, RegionKey};
use crate::shared::{Foreign, Found, Reading};
use crate::waker::Waker;

/// First and longest pause before a way that is shut is tried again.
pub(super) const FIRST_REST: Duration = Duration::from_secs(30);
pub(super) const LONGEST_REST: Duration = Duration::from_mins(10);

/// Arenas of one peer that are mapped here: an honest one has a few. The system bounds the mappings of a process (65,530).
const MOST_ARENAS: usize = 1024;

/// Why rows come by tcp until the first pull has had their memory mapped.
const UNMAPPED: &str = "its shared memory is not mapped yet";

/// See the module.
pub(super) struct Ways {
    peers: BTreeMap<PeerId, Way>,
    asker: Asker<Question>,
    /// Counts ways. It tells answers to an earlier way with the same peer from those to the present one.
    rounds: u64,
    /// Number of failed ways: they were open, or should have been.
    pub(super) failures: u64,
}

struct Way {
    stage: Stage,
    round: u64,
    /// The pause that follows when the way is shut.
    rest: Duration,
    /// The state that was logged last.
    said: Option<Said>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Said {
    Open,
    Shut,
}

/// A way that is shut keeps the reason where it should have worked.
enum Stage {
    Asked,
    Open { offer: Offer, board: Reading, arenas: BTreeMap<u64, Option<Arc<Foreign>>> },
    Shut { again: Instant, why: Option<String> },
}

/// A request to a peer's door.
#[derive(Clone, Debug)]
pub(super) struct Question {
    peer: PeerId,
    round: u64,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
    Board(Offer),
    Arena(u64),
}

/// Where a region can be copied from.
pub(super) enum Source {
    /// From this memory.
    Shared(Found, Arc<Foreign>),
    /// Memory that is not mapped yet; its descriptor was requested.
    Coming,
    /// Over the link.
    Link,
}

#[cfg(test)]
impl Source {
    pub(super) fn is_coming(&self) -> bool {
        matches!(self, Self::Coming)
    }
}

/// Effect of a door's answer.
pub(super) enum Answer {
    /// The way is open.
    Open(PeerId),
    /// One more arena of this peer is mapped.
    Arena(PeerId),
    /// The way is shut.
    Shut(PeerId, String),
}

impl Ways {
    pub(super) fn new(waker: Waker) -> Self {
        Self { peers: BTreeMap::new(), asker: Asker::new(waker), rounds: 0, failures: 0 }
    }

    /// Begins a way: the peer is to be asked for its offer. `is_shut`: it was logged before the peer connected that none opens.
    pub(super) fn ask(&mut self, peer: PeerId, is_shut: bool) {
        self.rounds += 1;
        let old = self.peers.remove(&peer);
        let shut = is_shut.then_some(Said::Shut);
        let (rest, said) = old.map_or((FIRST_REST, shut), |it| (it.rest, it.said));
        self.peers.insert(peer, Way { stage: Stage::Asked, round: self.rounds, rest, said });
    }

    /// Handles a peer's offer, or its absence.
    pub(super) fn offered(
        &mut self,
        peer: PeerId,
        offer: Result<Offer, String>,
        now: Instant,
    ) -> Option<Answer> {
        let way = self.peers.get(&peer).filter(|it| matches!(it.stage, Stage::Asked))?;
        match offer {
            Ok(offer) => {
                let (site, ticket) = (offer.site(), offer.board());
                let question = Question { peer, round: way.round, what: What::Board(offer) };
                self.asker.ask(question, site, ticket);
                None
            }
            Err(why) => Some(self.shut(peer, why, false, now)),
        }
    }

    /// The effect of a door's next answer.
    pub(super) fn answer(&mut self, now: Instant) -> Option<Answer> {
        while let Some((Question { peer, round, what }, descriptor)) = self.asker.answer() {
            // An answer counts only for the way that asked.
            let Some(way) = self.peers.get_mut(&peer).filter(|it| it.round == round) else {
                continue;
            };
            let opens = matches!(what, What::Board(_));
            return Some(match way.take(what, descriptor) {
                Ok(()) if opens => Answer::Open(peer),
                Ok(()) => {
                    // Before an arena is mapped no row has come.
                    if way.said != Some(Said::Open) {
                        tracing::info!("rows of {peer} come by shared memory");
                    }
                    (way.said, way.rest) = (Some(Said::Open), FIRST_REST);
                    Answer::Arena(peer)
                }
                Err(error) => {
                    let elsewhere = matches!(
                        error.kind(),
                        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
                    );
                    let why = format!("its shared memory cannot be had: {error}");
                    self.shut(peer, why, !elsewhere, now)
                }
            });
        }
        None
    }

    /// Shuts a way until its pause is over.
    pub(super) fn shut(&mut self, peer: PeerId, why: String, is_odd: bool, now: Instant) -> Answer {
        if let Some(way) = self.peers.get_mut(&peer) {
            self.failures += u64::from(is_odd || matches!(way.stage, Stage::Open { .. }));
            if way.said != Some(Said::Shut) {
                if is_odd {
                    tracing::warn!("rows of {peer} do not come by shared memory: {why}");
                } else {
                    // The peer is on another machine or in another pod, which is normal.
                    tracing::info!("rows of {peer} do not come by shared memory: {why}");
                }
                way.said = Some(Said::Shut);
            }
            let why = Some(why.clone()).filter(|_| is_odd);
            way.stage = Stage::Shut { again: now + way.rest, why };
            way.rest = (2 * way.rest).min(LONGEST_REST);
        }
        Answer::Shut(peer, why)
    }

    /// Whether a way that is shut has rested long enough.
    pub(super) fn is_to_be_tried(&self, peer: PeerId, now: Instant) -> bool {
        let again = |it: &Way| matches!(it.stage, Stage::Shut { again, .. } if again <= now);
        self.peers.get(&peer).is_some_and(again)
    }

    /// Finds the memory of a peer's region, up to its byte `reach`. Requests its arena where that is not mapped yet. An error
    /// means that the peer's board contradicts its arenas.
    pub(super) fn find(
        &mut self,
        peer: PeerId,
        key: RegionKey,
        reach: u64,
    ) -> Result<Source, String> {
        let Some(Way { stage, round, .. }) = self.peers.get_mut(&peer) else {
            return Ok(Source::Link);
        };
        let (offer, board, arenas) = match stage {
            Stage::Asked => return Ok(Source::Coming),
            Stage::Shut { .. } => return Ok(Source::Link),
            Stage::Open { offer, board, arenas } => (offer, board, arenas),
        };
        let Some(found) = board.find(key).filter(|it| reach <= it.spot.bytes) else {
            // The owner answers over the link.
            return Ok(Source::Link);
        };
        let number = found.spot.arena;
        match arenas.get(&number) {
            Some(Some(arena)) => {
                let end = found.spot.at.checked_add(found.spot.bytes);
                if end.is_none_or(|end| end > arena.len_bytes()) {
                    return Err(format!("its region {key} ends behind its arena"));
                }
                Ok(Source::Shared(found, Arc::clone(arena)))
            }
            Some(None) => Ok(Source::Coming),
            None if arenas.len() >= MOST_ARENAS => {
                Err(format!("its rows lie in more than {MOST_ARENAS} arenas"))
            }
            None => {
                arenas.insert(number, None);
                let question = Question { peer, round: *round, what: What::Arena(number) };
                self.asker.ask(question, offer.site(), offer.arena(number));
                Ok(Source::Coming)
            }
        }
    }

    /// Whether a peer was asked for its offer since it connected.
    pub(super) fn knows(&self, peer: PeerId) -> bool {
        self.peers.contains_key(&peer)
    }

    /// The path that a peer's rows take once their memory is mapped.
    pub(super) fn path(&self, peer: PeerId) -> Path {
        match self.peers.get(&peer).map(|it| &it.stage) {
            Some(Stage::Asked) => Path::Asked,
            Some(Stage::Open { .. }) => Path::Shared,
            Some(Stage::Shut { .. }) | None => Path::Tcp,
        }
    }

    /// Whether any memory of a peer is mapped.
    pub(super) fn is_mapped(&self, peer: PeerId) -> bool {
        match self.peers.get(&peer).map(|it| &it.stage) {
            Some(Stage::Open { arenas, .. }) => arenas.values().any(Option::is_some),
            Some(Stage::Asked | Stage::Shut { .. }) | None => false,
        }
    }

    /// Why rows of a peer do not come by shared memory, where they should.
    pub(super) fn why_not(&self, peer: PeerId) -> Option<&str> {
        match &self.peers.get(&peer)?.stage {
            Stage::Shut { why, .. } => why.as_deref(),
            Stage::Open { .. } if !self.is_mapped(peer) => Some(UNMAPPED),
            Stage::Asked | Stage::Open { .. } => None,
        }
    }

    /// Whether a region has stayed published since it was found.
    pub(super) fn still(&self, peer: PeerId, found: &Found) -> bool {
        match self.peers.get(&peer).map(|it| &it.stage) {
            Some(Stage::Open { board, .. }) => board.still(found),
            Some(Stage::Asked | Stage::Shut { .. }) | None => false,
        }
    }

    /// Forgets a peer that is gone, and unmaps its memory.
    pub(super) fn forget(&mut self, peer: PeerId) {
        self.peers.remove(&peer);
    }
}

impl Way {
    fn take(&mut self, what: What, descriptor: io::Result<OwnedFd>) -> io::Result<()> {
        let descriptor = descriptor?;
        match (what, &mut self.stage) {
            (What::Board(offer), stage @ Stage::Asked) => {
                let board = Reading::new(&descriptor)?;
                *stage = Stage::Open { offer, board, arenas: BTreeMap::new() };
            }
            (What::Arena(number), Stage::Open { arenas, .. }) => {
                let arena = Foreign::new(&descriptor).map_err(|it| {
                    let why = format!("an arena cannot be mapped ({it}); raise ulimit -v");
                    io::Error::new(it.kind(), why)
                })?;
                arenas.insert(number, Some(Arc::new(arena)));
            }
            // An answer to a question of the way before it was shut.
            (
                What::Board(_) | What::Arena(_),
                Stage::Asked | Stage::Open { .. } | Stage::Shut { .. },
            ) => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::{Board, Spot};

    const PEER: PeerId = PeerId { role: crate::peer::Role::Server, index: 0, incarnation: 0 };
    const KEY: RegionKey = RegionKey([1, 2, 3, 4]);

    /// A way that is open to the owner of a board.
    fn open(board: &Board) -> Ways {
        let board = Reading::new(&board.descriptor().try_clone_to_owned().unwrap()).unwrap();
        let mut ways = Ways::new(Waker::new().unwrap());
        ways.ask(PEER, false);
        let offer = Offer::new(|| [7; 32]);
        ways.peers.get_mut(&PEER).unwrap().stage =
            Stage::Open { offer, board, arenas: BTreeMap::new() };
        ways
    }

    #[test]
    fn a_peer_with_more_arenas_than_a_process_may_map_is_left() {
        let mut board = Board::new().unwrap();
        let mut ways = open(&board);
        for arena in 0..=MOST_ARENAS as u64 {
            assert!(board.publish(KEY, arena + 1, Spot { arena, at: 0, bytes: 8 }));
            let found = ways.find(PEER, KEY, 8);
            assert_eq!(found.is_err(), arena == MOST_ARENAS as u64, "arena {arena}");
            board.withdraw(KEY);
        }
    }

    #[test]
    fn whatever_stands_on_a_board_nothing_is_read_behind_an_arena() {
        let mut board = Board::new().unwrap();
        let mut ways = open(&board);
        let arena = crate::shared::Arenas::new(4096).unwrap().take(16).unwrap();
        let descriptor = arena.arena().descriptor().try_clone_to_owned().unwrap();
        let foreign = Arc::new(Foreign::new(&descriptor).unwrap());
        let length = foreign.len_bytes();
        if let Stage::Open { arenas, .. } = &mut ways.peers.get_mut(&PEER).unwrap().stage {
            arenas.insert(3, Some(foreign));
        }
        let edges = [0, 1, 64, length - 1, length, length + 1, 1 << 63, u64::MAX];
        let mut number = 0;
        for (at, bytes, reach) in edges
            .iter()
            .flat_map(|at| edges.iter().map(move |bytes| (*at, *bytes)))
            .flat_map(|(at, bytes)| edges.iter().map(move |reach| (at, bytes, *reach)))
        {
            number += 1;
            assert!(board.publish(KEY, number, Spot { arena: 3, at, bytes }));
            let fits = at.checked_add(bytes).is_some_and(|end| end <= length);
            match ways.find(PEER, KEY, reach) {
                Ok(Source::Shared(found, arena)) => {
                    assert!(fits && reach <= bytes, "{at} {bytes} {reach}");
                    arena.copy(found.spot.at, &mut vec![0; reach as usize]);
                }
                // The owner is asked for what it does not have.
                Ok(Source::Link) => assert!(reach > bytes, "{at} {bytes} {reach}"),
                Ok(Source::Coming) => panic!("it is mapped"),
                Err(_) => assert!(!fits && reach <= bytes, "{at} {bytes} {reach}"),
            }
            board.withdraw(KEY);
        }
    }
}
