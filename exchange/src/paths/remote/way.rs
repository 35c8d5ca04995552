//! The UCX path to one owner: the stages from its card to an open endpoint, or why it is shut.
//!
//! In: what was asked and what came of it, with the time. Out: stages. Nothing is read here.
//!
//! ```text
//! connected ──▶ Asked: card over the link ──▶ Looking: a read of its board ──▶ Open: keys as they are needed
//!                  └──────────────▶ Shut ◀──────────┴─────────────────────────────┘
//!                    ▲               │ 30 s, doubling to 10 min; then with the next pull
//!                    └───────────────┘
//! ```

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use super::super::Path;
use super::super::ways::{FIRST_REST, LONGEST_REST};
use super::card::STRETCH_BYTES;
use crate::peer::PeerId;
use crate::provider::{PullError, PullId};
use crate::shared::Spot;
use crate::ucx::{EndId, KeyId, Read};

/// What the pulls of a way that closes do next.
pub(super) enum Onward {
    /// Over the link, from their first byte; those of the set are late.
    Link(BTreeSet<PullId>),
    /// Not at all.
    End(PullError),
}

/// Maximum looks in flight to one peer.
pub(super) const MOST_LOOKS: usize = 64;

/// See the module.
pub(super) struct Way {
    pub(super) stage: Stage,
    pub(super) round: u64,
    /// Keys of stretches, by arena and index; none while a key is being pulled.
    pub(super) keys: BTreeMap<(u64, u32), Option<Key>>,
    /// Bytes of rows in flight.
    pub(super) flying_bytes: u64,
    /// Looks in flight.
    pub(super) looks: usize,
    /// Pulls that wait to look at the board; some may have ended.
    pub(super) to_look: VecDeque<PullId>,
    /// Pulls that have not begun all their parts.
    pub(super) to_read: BTreeSet<PullId>,
    /// When a read last ended.
    pub(super) heard: Option<Instant>,
    /// Whether the way has been logged as open since the peer connected.
    pub(super) is_told: bool,
    /// The pause that follows when the way is shut.
    rest: Duration,
    /// The path that was logged last.
    said: Option<Path>,
}

pub(super) enum Stage {
    Asked,
    Looking { end: EndId, board: Key, until: Instant },
    Open { end: EndId, board: Key },
    Shut { again: Instant, why: String },
}

/// Registered memory of an owner.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key {
    pub(super) id: KeyId,
    /// First byte of the memory in the owner's process.
    pub(super) start: u64,
}

impl Key {
    /// A read of the memory that begins at its byte `at`.
    pub(super) fn at(self, end: EndId, at: u64) -> Read {
        Read { end, key: self.id, from: self.start.wrapping_add(at) }
    }
}

impl Way {
    /// A way whose card is being pulled; `before` is the former way to the same peer. `is_shut`: it was logged before the peer
    /// connected that none opens.
    pub(super) fn asked(round: u64, before: Option<Self>, is_shut: bool) -> Self {
        let shut = is_shut.then_some(Path::Tcp);
        let (rest, said, is_told) =
            before.map_or((FIRST_REST, shut, false), |it| (it.rest, it.said, it.is_told));
        let (stage, keys) = (Stage::Asked, BTreeMap::new());
        let (to_look, to_read) = (VecDeque::new(), BTreeSet::new());
        Self {
            stage,
            round,
            keys,
            flying_bytes: 0,
            looks: 0,
            to_look,
            to_read,
            heard: None,
            is_told,
            rest,
            said,
        }
    }

    pub(super) fn end(&self) -> Option<EndId> {
        match self.stage {
            Stage::Looking { end, .. } | Stage::Open { end, .. } => Some(end),
            Stage::Asked | Stage::Shut { .. } => None,
        }
    }

    /// Whether a pull waits to begin a look or a part.
    pub(super) fn is_hungry(&self) -> bool {
        !self.to_read.is_empty() || (!self.to_look.is_empty() && self.looks < MOST_LOOKS)
    }

    /// Whether the keys for the first `reach` bytes of a region are here.
    pub(super) fn has_keys(&self, spot: Spot, reach: u64) -> bool {
        let mut stretches = spot.at / STRETCH_BYTES..(spot.at + reach).div_ceil(STRETCH_BYTES);
        stretches.all(|it| matches!(self.keys.get(&(spot.arena, it as u32)), Some(Some(_))))
    }

    pub(super) fn why_shut(&self) -> Option<&str> {
        match &self.stage {
            Stage::Shut { why, .. } => Some(why),
            Stage::Asked | Stage::Looking { .. } | Stage::Open { .. } => None,
        }
    }

    pub(super) fn path(&self) -> Path {
        match self.stage {
            Stage::Asked | Stage::Looking { .. } => Path::Asked,
            Stage::Open { .. } => Path::Ucx,
            Stage::Shut { .. } => Path::Tcp,
        }
    }

    /// The first read of the peer's board succeeded.
    pub(super) fn open(&mut self, peer: PeerId, over: &str) {
        let Stage::Looking { end, board, .. } = self.stage else { return };
        if self.said != Some(Path::Ucx) {
            tracing::info!("rows of {peer} come by UCX ({over})");
        }
        (self.said, self.rest) = (Some(Path::Ucx), FIRST_REST);
        self.stage = Stage::Open { end, board };
    }

    /// Stops using the way until its pause is over.
    pub(super) fn shut(&mut self, peer: PeerId, why: &str, is_odd: bool, now: Instant) {
        if self.said != Some(Path::Tcp) {
            if is_odd {
                tracing::warn!("rows of {peer} do not come by UCX: {why}");
            } else {
                tracing::info!("rows of {peer} do not come by UCX: {why}");
            }
            self.said = Some(Path::Tcp);
        }
        self.stage = Stage::Shut { again: now + self.rest, why: why.to_owned() };
        self.rest = (2 * self.rest).min(LONGEST_REST);
        self.keys.clear();
        self.to_look.clear();
        self.to_read.clear();
    }
}
