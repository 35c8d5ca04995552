//! UCX as a path for rows: what this process shows to readers, what it knows of owners, and the pulls that use it.
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
mod left;
mod opening;
mod pulls;
mod reads;
#[cfg(test)]
mod tests;
mod way;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) use self::card::CARD;
use self::card::{CARD_BYTES, Card, KEY_BYTES, LONGEST_KEY, PackedKey, STRETCH_BYTES};
use self::left::Left;
use self::pulls::Reading;
use self::way::Way;
use super::waiting::Waiting;
use super::ways::{FIRST_REST, LONGEST_REST};
use crate::buffer::Buffer;
use crate::peer::{PeerId, RegionKey};
use crate::provider::{LandingId, PullId};
use crate::shared::{Board, Part, Spot, Stretch};
use crate::tcp::{Limits, Tcp};
use crate::ucx::{Done, GetId, Net, Transports};
use crate::ucx_error::UcxError;

/// How long an owner may take to answer with its card or key and to the first look, and how long a closed endpoint may linger.
const PATIENCE: Duration = Duration::from_secs(5);

/// State of the UCX path of a process.
pub(super) struct Remote {
    /// Declared before the board, so that it is dropped first: its reads write there.
    net: Net,
    pub(super) required: bool,
    transports: Transports,
    pub(super) board: Board,
    /// Whether it was logged that the board is full.
    said_full: bool,
    /// Whether publications are put on the board: once a peer has asked, or from the start where UCX is demanded.
    pub(super) shows: bool,
    /// Registered stretches of arenas whose keys readers can get, by arena and index.
    shown: BTreeSet<(u64, u32)>,
    /// Registered stretches of arenas that reads of this process may write, by arena and index.
    held: BTreeSet<(u64, u32)>,
    /// After a failed registration: when the next one is tried, the pause after that, and why it failed.
    resting: Option<(Instant, Duration, String)>,
    /// Why the newest landing could not be registered, so that its rows come by TCP. None where it could.
    unheld: Option<String>,
    longest_key: usize,
    ways: BTreeMap<PeerId, Way>,
    /// Pulls of cards and keys over links.
    asked: BTreeMap<PullId, Asked>,
    /// Pulls whose rows are being read, in the order in which they began.
    reading: BTreeMap<PullId, Reading>,
    /// Pulls whose way was closed while UCX could write for them.
    left: BTreeMap<PullId, Left>,
    /// Landings of those whose end was told.
    busy: BTreeSet<(LandingId, PullId)>,
    /// None of those is due before this time.
    look_at_left: Option<Instant>,
    /// Deadlines of pulls: none is late before its time here.
    deadlines: BTreeSet<(Instant, PullId)>,
    /// Reads in flight, with their purpose.
    gets: BTreeMap<GetId, For>,
    /// Bytes of rows in flight.
    flying_bytes: u64,
    /// Ended reads that the windows count already, to be handled in order.
    done: VecDeque<(For, Done)>,
    /// Pulls that wait for a way because UCX is demanded.
    waiting: Waiting,
    limits: Limits,
    /// Counts ways. It tells the answers to an earlier way of the same peer from those to the present one.
    rounds: u64,
    /// Number of failed ways: they were open, or should have been.
    pub(super) failures: u64,
}

/// A request to a peer over its link.
struct Asked {
    peer: PeerId,
    round: u64,
    landing: LandingId,
    /// The stretch whose key was requested; none for the peer's card.
    stretch: Option<(u64, u32)>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum For {
    /// The first look at the board of a peer.
    Look(PeerId, u64),
    /// A look for a pull.
    Entry(PullId),
    /// Reads this many bytes of a pull's rows.
    Rows(PullId, u64),
    /// Reads rows of a pull whose way was closed.
    Left(PullId),
}

impl For {
    fn bytes(self) -> u64 {
        match self {
            Self::Look(..) | Self::Entry(_) | Self::Left(_) => 0,
            Self::Rows(_, bytes) => bytes,
        }
    }
}

/// What a stretch is registered for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Use {
    /// Others read it.
    Show,
    /// Reads of this process write it.
    Hold,
}

/// The stretches that the first `bytes` bytes of a part lie in, each as arena number and index.
fn stretches(part: &Part, bytes: u64) -> impl Iterator<Item = (u64, u32)> + use<> {
    let number = part.arena().number;
    let (first, end) = (part.at() / STRETCH_BYTES, (part.at() + bytes).div_ceil(STRETCH_BYTES));
    (first..end.max(first + 1)).filter_map(move |it| Some((number, u32::try_from(it).ok()?)))
}

fn stretch(part: &Part, (_, index): (u64, u32)) -> Option<Stretch> {
    Stretch::of_arena(part.arena(), u64::from(index) * STRETCH_BYTES, STRETCH_BYTES as usize)
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
        if transports != Transports::Rdma {
            tracing::warn!(
                "CADRE_UCX_OVER: UCX emulates reads with the owner's processor ({}), which is for tests",
                transports.names()
            );
        }
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
            said_full: false,
            shows: required,
            shown: BTreeSet::new(),
            held: BTreeSet::new(),
            resting: None,
            unheld: None,
            longest_key: LONGEST_KEY,
            ways: BTreeMap::new(),
            asked: BTreeMap::new(),
            reading: BTreeMap::new(),
            left: BTreeMap::new(),
            busy: BTreeSet::new(),
            look_at_left: None,
            deadlines: BTreeSet::new(),
            gets: BTreeMap::new(),
            flying_bytes: 0,
            done: VecDeque::new(),
            waiting: Waiting::default(),
            limits,
            rounds: 0,
            failures: 0,
        })
    }

    /// Puts a publication on the board if its memory can be registered. The caller has withdrawn earlier publications of the key.
    pub(super) fn publish(&mut self, tcp: &mut Tcp, key: RegionKey, number: u64, memory: &Buffer) {
        let Some(part) = memory.part().filter(|_| self.shows) else { return };
        for place in stretches(part, memory.len_bytes() as u64) {
            if self.shown.contains(&place) {
                continue;
            }
            let Some(stretch) = stretch(part, place) else { return };
            if !self.register(tcp, place, stretch, Use::Show) {
                return;
            }
        }
        let (arena, bytes) = (part.arena().number, memory.len_bytes() as u64);
        let spot = Spot { arena, at: part.at(), bytes };
        if !self.board.publish(key, number, spot) && !std::mem::replace(&mut self.said_full, true) {
            tracing::warn!(
                "the board has no room for {key}: it goes over links, and so may others"
            );
        }
    }

    /// Registers the arena stretches of a landing. Returns whether reads may write to it. Memory outside of arenas is left to
    /// UCX.
    pub(super) fn hold(&mut self, tcp: &mut Tcp, landing: LandingId) -> bool {
        let Ok(memory) = tcp.landed(landing) else { return false };
        let Some(part) = memory.part() else {
            self.unheld = None;
            return true;
        };
        let new: Vec<_> = stretches(part, memory.len_bytes() as u64)
            .filter(|it| !self.held.contains(it))
            .filter_map(|it| Some((it, stretch(part, it)?)))
            .collect();
        let is_held =
            new.into_iter().all(|(place, stretch)| self.register(tcp, place, stretch, Use::Hold));
        self.unheld = self.resting.as_ref().filter(|_| !is_held).map(|it| it.2.clone());
        is_held
    }

    /// Registers a stretch and returns whether that succeeded. After a failure it pauses: a try costs time, and the usual reason,
    /// the limit of locked memory, holds for all stretches.
    fn register(&mut self, tcp: &mut Tcp, place: (u64, u32), stretch: Stretch, what: Use) -> bool {
        let now = tcp.now();
        if self.resting.as_ref().is_some_and(|it| now < it.0) {
            return false;
        }
        let done = match what {
            Use::Show => self.show(tcp, place, stretch),
            Use::Hold => self.net.hold(stretch).map(|()| _ = self.held.insert(place)),
        };
        match done {
            Ok(()) => {
                self.resting = None;
                true
            }
            Err(why) => {
                let rest = self.resting.as_ref().map_or(FIRST_REST, |it| it.1);
                if self.resting.is_none() {
                    tracing::warn!("rows in new memory go over tcp, not UCX: {why}");
                }
                let why = format!("memory cannot be registered: {why}");
                self.resting = Some((now + rest, (2 * rest).min(LONGEST_REST), why));
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

    /// Readies the descriptors that end a wait. Returns false where there is something to do already.
    pub(super) fn arm(&mut self) -> bool {
        self.done.is_empty() && self.net.arm()
    }

    /// Acts as if memory could not be registered.
    #[cfg(test)]
    pub(super) fn rest_from(&mut self, now: Instant) {
        self.resting = Some((now + LONGEST_REST, LONGEST_REST, "a test says so".to_owned()));
    }

    /// Whether no peer was asked for its card.
    #[cfg(test)]
    pub(super) fn is_unused(&self) -> bool {
        self.ways.is_empty()
    }

    /// How many memories readers can read, and to how many reads may write.
    #[cfg(test)]
    pub(super) fn memories(&self) -> [usize; 2] {
        self.net.memories()
    }

    /// Whether nothing is asked, read or waited for.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        let is_idle = self.reading.is_empty() && self.gets.is_empty() && self.waiting.is_empty();
        let is_idle = is_idle && self.left.is_empty();
        assert!(!is_idle || self.flying_bytes == 0 && self.deadlines.is_empty());
        is_idle
    }
}
