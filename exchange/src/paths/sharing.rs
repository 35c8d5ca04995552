//! The shared memory of a process: its own board and door, and the mapped memory of its peers.
//!
//! In: publications. Out: a board and a door at which it and the arenas can be had. Nothing is copied here.
//!
//! Invariant: what stands on the board lies in an arena that the door knows.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rustix::rand::{GetRandomFlags, getrandom};

use super::Sharing;
use super::copies::{Copying, TURN_BYTES};
use super::offer::Offer;
use super::waiting::Waiting;
use super::ways::Ways;
use crate::buffer::Buffer;
use crate::door::Door;
use crate::peer::{PeerId, RegionKey};
use crate::provider::{LandingId, Provider as _, PullId};
use crate::shared::{Board, Spot};
use crate::tcp::Tcp;

/// State of the shared-memory path of a process.
pub(super) struct Shared {
    pub(super) required: bool,
    pub(super) offer: Offer,
    door: Door,
    pub(super) board: Board,
    /// Arenas that the door knows.
    shown: BTreeSet<u64>,
    pub(super) ways: Ways,
    /// Pulls of offers.
    pub(super) asked: BTreeMap<PullId, (PeerId, LandingId)>,
    pub(super) copying: VecDeque<Copying>,
    /// Pulls that wait for memory to be mapped because shared memory is demanded.
    pub(super) waiting: Waiting,
    /// Maximum bytes that one turn copies before links and the caller are served.
    pub(super) turn_bytes: u64,
    /// Whether it was logged that the board is full.
    said_full: bool,
    /// Whether it was logged that an arena cannot be shown, and none could be since.
    said_unshown: bool,
}

impl Shared {
    pub(super) fn open(tcp: &Tcp, sharing: Sharing) -> std::io::Result<Self> {
        let offer = Offer::new(random);
        let door = Door::open(offer.site())?;
        let board = Board::new()?;
        door.show(offer.board(), board.descriptor().try_clone_to_owned()?);
        Ok(Self {
            required: sharing == Sharing::Required,
            offer,
            door,
            board,
            shown: BTreeSet::new(),
            ways: Ways::new(tcp.waker()),
            asked: BTreeMap::new(),
            copying: VecDeque::new(),
            waiting: Waiting::default(),
            turn_bytes: TURN_BYTES,
            said_full: false,
            said_unshown: false,
        })
    }

    /// Puts a publication on the board if its memory can be shared. The caller has withdrawn earlier publications of the key.
    pub(super) fn publish(&mut self, key: RegionKey, number: u64, memory: &Buffer) {
        let Some(part) = memory.part() else { return };
        let arena = part.arena();
        if !self.shown.contains(&arena.number) {
            match arena.descriptor().try_clone_to_owned() {
                Ok(descriptor) => {
                    self.door.show(self.offer.arena(arena.number), descriptor);
                    self.shown.insert(arena.number);
                    self.said_unshown = false;
                }
                Err(error) => {
                    if !std::mem::replace(&mut self.said_unshown, true) {
                        tracing::warn!(%error, "an arena cannot be shown: its rows go over links");
                    }
                    return;
                }
            }
        }
        let bytes = memory.len_bytes() as u64;
        let spot = Spot { arena: arena.number, at: part.at(), bytes };
        if !self.board.publish(key, number, spot) && !std::mem::replace(&mut self.said_full, true) {
            tracing::warn!(
                "the board has no room for {key}: it goes over links, and so may others"
            );
        }
    }
}

/// A random key.
fn random() -> [u8; 32] {
    let mut words = [0; 32];
    let filled = getrandom(&mut words, GetRandomFlags::empty());
    assert_eq!(filled, Ok(words.len()), "the kernel has 32 random bytes");
    words
}
