//! UCX as a way: what this process shows to readers, what it knows of owners, and the pulls that take it.
//!
//! In: publications; peers that connect and go. Out: rows that network cards have read, or pulls that go over the link after all.
//!
//! ```text
//! reader                                           owner
//!   connected: pull the card      ── link ──▶        address of its worker, key of its board
//!   look at the board once        ── UCX ──▶         the way is open
//!   pull: entries of its key      ── UCX ──▶         (notices nothing, where UCX does not emulate)
//!         keys of its stretches   ── link ──▶        once each
//!         its bytes, in parts     ── UCX ──▶
//!         its entry again         ── UCX ──▶         still the same: the pull counts
//! ```
//!
//! Arenas are shown in stretches of 64 MiB, as rows come to lie in them, since a card holds what it is shown. Messages, greetings and
//! deadlines of links stay as they are. A way that fails is left for its peer, said once, and tried again after a rest.
//!
//! Invariant: a pull counts only if its entry was the same before its first byte was read and after its last one was.

mod card;
mod leaving;
mod opening;
mod pulls;
mod reads;
#[cfg(test)]
mod tests;
mod way;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::card::{CARD, CARD_BYTES, Card, KEY_BYTES, LONGEST_KEY, PackedKey, STRETCH_BYTES};
use self::pulls::Reading;
use self::way::Way;
use super::ways::{FIRST_REST, LONGEST_REST};
use crate::buffer::Buffer;
use crate::peer::{PeerId, RegionKey};
use crate::provider::{LandingId, PullId};
use crate::shared::{Board, Spot, Stretch};
use crate::tcp::{Limits, Pull, Tcp};
use crate::ucx::{Done, GetId, Net, Transports, UcxError};

/// How long an owner may think about what it shows, and about the first look.
const PATIENCE: Duration = Duration::from_secs(5);

/// What there is where rows take UCX.
pub(super) struct Remote {
    /// Before the board, which it reads.
    net: Net,
    pub(super) required: bool,
    transports: Transports,
    pub(super) board: Board,
    /// Stretches of arenas that readers can get the keys of.
    shown: BTreeSet<(u64, u32)>,
    /// Where one could not be shown: until when none is tried, and the rest that follows.
    resting: Option<(Instant, Duration)>,
    longest_key: usize,
    ways: BTreeMap<PeerId, Way>,
    /// Pulls of cards and keys over links.
    asked: BTreeMap<PullId, Asked>,
    /// Pulls whose rows are being read, in the order in which they began.
    reading: BTreeMap<PullId, Reading>,
    /// When which of them may be late.
    deadlines: BTreeSet<(Instant, PullId)>,
    /// Reads under way: what for.
    gets: BTreeMap<GetId, For>,
    /// Bytes of rows that are under way.
    flying_bytes: u64,
    /// Ended reads that are counted and not handled yet.
    done: VecDeque<(For, Done)>,
    /// Where there is no other way: pulls that wait for theirs.
    waiting: Vec<Pull>,
    limits: Limits,
    /// Tells what was asked on a way from what was asked on an earlier one to the same peer.
    rounds: u64,
}

/// What a peer was asked for over its link.
struct Asked {
    peer: PeerId,
    round: u64,
    landing: LandingId,
    /// None: its card.
    stretch: Option<(u64, u32)>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum For {
    /// The first look at the board of a peer.
    Look(PeerId, u64),
    /// A look for a pull.
    Entry(PullId),
    /// A number of bytes of a pull.
    Rows(PullId, u64),
}

impl For {
    fn bytes(self) -> u64 {
        match self {
            Self::Look(..) | Self::Entry(_) => 0,
            Self::Rows(_, bytes) => bytes,
        }
    }
}

impl Remote {
    /// Opens UCX, registers a board, and publishes its card over `tcp`.
    pub(super) fn open(
        tcp: &mut Tcp,
        transports: Transports,
        required: bool,
        limits: Limits,
    ) -> Result<Self, UcxError> {
        let failed = |what, why: String| UcxError::Call { what, why };
        let mut net = Net::open(transports)?;
        let board = Board::new().map_err(|it| failed("show a board", it.to_string()))?;
        let stretch = board.stretch();
        let start = stretch.address();
        let packed = PackedKey::new(start, net.show(stretch, LONGEST_KEY)?);
        let packed = packed.ok_or_else(|| failed("show a board", "its key is too long".into()))?;
        let card = Card { board: packed, address: net.address()? }.encode();
        let card = card.ok_or_else(|| failed("say its address", "it is too long".into()))?;
        let mut region = Buffer::zeroed(CARD_BYTES);
        region.bytes_mut().copy_from_slice(&card);
        tcp.announce(CARD, Arc::new(region));
        tcp.watch_device(net.serving()?).map_err(|it| failed("be waited for", it.to_string()))?;
        Ok(Self {
            net,
            required,
            transports,
            board,
            shown: BTreeSet::new(),
            resting: None,
            longest_key: LONGEST_KEY,
            ways: BTreeMap::new(),
            asked: BTreeMap::new(),
            reading: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            gets: BTreeMap::new(),
            flying_bytes: 0,
            done: VecDeque::new(),
            waiting: Vec::new(),
            limits,
            rounds: 0,
        })
    }

    /// Puts a publication on the board, if readers can have the keys of its memory. Another one of the key was withdrawn.
    pub(super) fn publish(&mut self, tcp: &mut Tcp, key: RegionKey, number: u64, memory: &Buffer) {
        let Some(part) = memory.part() else { return };
        let (arena, bytes) = (part.arena(), memory.len_bytes() as u64);
        let (first, end) = (part.at() / STRETCH_BYTES, (part.at() + bytes).div_ceil(STRETCH_BYTES));
        for index in first..end.max(first + 1) {
            let Some(place) = u32::try_from(index).ok().map(|it| (arena.number, it)) else {
                return;
            };
            if self.shown.contains(&place) {
                continue;
            }
            let at = index * STRETCH_BYTES;
            let Some(stretch) = Stretch::of_arena(arena, at, STRETCH_BYTES as usize) else {
                return;
            };
            if !self.show_unless_it_rests(tcp, place, stretch) {
                return;
            }
        }
        let spot = Spot { arena: arena.number, at: part.at(), bytes };
        if !self.board.publish(key, number, spot) {
            tracing::debug!("the board has no room for {key}: it goes over links");
        }
    }

    /// Shows a stretch, but not soon after one could not be shown: registering costs time, and the reason, as a rule a limit of
    /// locked memory, is the same for all. Whether it was shown.
    fn show_unless_it_rests(&mut self, tcp: &mut Tcp, place: (u64, u32), stretch: Stretch) -> bool {
        let now = tcp.now();
        if self.resting.is_some_and(|it| now < it.0) {
            return false;
        }
        match self.show(tcp, place, stretch) {
            Ok(()) => {
                self.resting = None;
                true
            }
            Err(why) => {
                let rest = self.resting.map_or(FIRST_REST, |it| it.1);
                if self.resting.is_none() {
                    tracing::warn!("rows in new memory go over tcp, not UCX: {why}");
                }
                self.resting = Some((now + rest, (2 * rest).min(LONGEST_REST)));
                false
            }
        }
    }

    fn show(&mut self, tcp: &mut Tcp, place: (u64, u32), stretch: Stretch) -> Result<(), UcxError> {
        let start = stretch.address();
        let packed = PackedKey::new(start, self.net.show(stretch, self.longest_key)?);
        let packed = packed.ok_or_else(|| UcxError::Call {
            what: "show memory",
            why: "its key is too long".to_owned(),
        })?;
        let mut region = Buffer::zeroed(KEY_BYTES);
        region.bytes_mut().copy_from_slice(&packed.encode());
        tcp.announce(card::key_region(place), Arc::new(region));
        self.shown.insert(place);
        Ok(())
    }

    /// Readies the descriptors to end a wait: false where there is something to do already.
    pub(super) fn arm(&mut self) -> bool {
        self.done.is_empty() && self.net.arm()
    }

    /// Whether nothing is asked, read or waited for.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        let is_idle = self.reading.is_empty() && self.gets.is_empty() && self.waiting.is_empty();
        assert!(!is_idle || self.flying_bytes == 0 && self.deadlines.is_empty());
        is_idle
    }
}
