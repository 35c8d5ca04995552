//! What a slot may hold at most, so that a plan fits the memory.
//!
//! In: the reserve for a bundle, of this plan and of one beside it. Out: bytes of a bundle and of a phase. [`super::room`] asks
//! whether something has room.

use crate::Slot;

/// What a bin may hold at most, so that the plan fits the memory.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Bytes of a bundle.
    pub(super) reserve: Option<u64>,
    /// Bytes that are kept free in each slot: for a bundle of this plan, or of one beside it.
    kept: u64,
    /// Whether slots may hold more for now: bundles are limited alone.
    are_open: bool,
}

impl Limits {
    pub(super) fn none() -> Self {
        Self { reserve: None, kept: 0, are_open: false }
    }

    pub(super) fn with_reserve(reserve: u64, beside: u64) -> Self {
        Self { reserve: Some(reserve), kept: reserve.max(beside), are_open: false }
    }

    pub(super) fn are_none(self) -> bool {
        self.reserve.is_none()
    }

    pub(super) fn bundle(self) -> u64 {
        self.reserve.unwrap_or(u64::MAX)
    }

    /// The same limit for bundles, but none for slots.
    pub(super) fn opened(self) -> Self {
        Self { are_open: true, ..self }
    }

    /// Bytes of one of two phases.
    pub(super) fn phase(self, slot: &Slot) -> u64 {
        if self.are_none() || self.are_open {
            return u64::MAX;
        }
        slot.memory.saturating_sub(self.kept) / 2
    }
}
