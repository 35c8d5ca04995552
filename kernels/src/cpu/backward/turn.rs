//! Orders the writes to a block's workspace: the first unit stages the rows, then key tiles add to dQ in ascending order.
//!
//! In: the counter of a block, and whether a unit of the launch has panicked. Out: the right to write until
//! [`Turn::pass`].
//!
//! Invariant: a unit waits only for units that were taken before it, so every wait ends.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Tells waiting units when its own unit panics.
pub(super) struct Guard<'a>(pub(super) &'a AtomicBool);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Value of a counter before the rows of its block are staged.
const UNSTAGED: u32 = u32::MAX;

/// One unit's view of the counter of a block: whose turn it is to add to dQ.
pub(super) struct Turn<'a> {
    tile: &'a AtomicU32,
    failed: &'a AtomicBool,
}

impl<'a> Turn<'a> {
    /// A counter at its start.
    pub(super) fn unstaged() -> AtomicU32 {
        AtomicU32::new(UNSTAGED)
    }

    pub(super) fn new(tile: &'a AtomicU32, failed: &'a AtomicBool) -> Self {
        Self { tile, failed }
    }

    /// Waits until the block's first unit has staged its rows.
    pub(super) fn wait_until_staged(&self) {
        self.wait(|tile| tile != UNSTAGED);
    }

    /// Waits until the tiles before `first`, which run on other threads, have added to dQ.
    pub(super) fn wait_for(&self, first: u32) {
        self.wait(|tile| tile == first);
    }

    /// Marks the rows as staged, or passes the turn to the unit that starts at tile `next`.
    pub(super) fn pass(&self, next: u32) {
        self.tile.store(next, Ordering::Release);
    }

    fn wait(&self, until: impl Fn(u32) -> bool) {
        let mut spins = 0_u32;
        while !until(self.tile.load(Ordering::Acquire)) {
            let failed = self.failed.load(Ordering::Relaxed);
            assert!(!failed, "another thread of the launch has panicked");
            spins += 1;
            if spins < 1000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }
}
