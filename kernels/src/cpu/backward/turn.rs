//! Whose turn it is to add to a block of dQ, so that key tiles add in ascending order.
//!
//! In: the counter of a block, and whether a unit of the launch has panicked. Out: the right to write the
//! block until [`Turn::pass`].
//!
//! A unit waits only for units that were taken before it, so waiting ends.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Tells waiting units that one has panicked.
pub(super) struct Guard<'a>(pub(super) &'a AtomicBool);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The right to add to a block of dQ.
pub(super) struct Turn<'a>(&'a AtomicU32);

impl<'a> Turn<'a> {
    /// Waits until the tiles before `tile` have added theirs; their units run on other threads.
    pub(super) fn wait(turn: &'a AtomicU32, tile: u32, failed: &AtomicBool) -> Self {
        let mut spins = 0_u32;
        while turn.load(Ordering::Acquire) != tile {
            assert!(!failed.load(Ordering::Relaxed), "another thread of the launch has panicked");
            spins += 1;
            if spins < 1000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        Self(turn)
    }

    /// Hands the turn to the unit that starts at tile `next`.
    pub(super) fn pass(self, next: u32) {
        self.0.store(next, Ordering::Release);
    }
}
