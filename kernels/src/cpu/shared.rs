//! A slice that the threads of one launch write in disjoint places.
//!
//! In: an exclusive slice. Out: exclusive pieces of it, handed out by offset.
//!
//! Invariant: units never hold overlapping pieces. They own them by construction (output rows) or in turn (dQ rows); nothing
//! checks that at run time.
#![allow(unsafe_code)]

use std::marker::PhantomData;

/// An exclusive slice, shared.
#[derive(Debug)]
pub(super) struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a `&mut [T]` whose pieces are handed out; those may go to any thread if T may.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: as above: `piece` asks its caller for exclusiveness.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(super) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// Numbers `[offset, offset + count)`.
    ///
    /// # Safety
    ///
    /// No other piece that overlaps this one is alive, on any thread.
    #[expect(clippy::mut_from_ref, reason = "exclusiveness is the caller's promise")]
    pub(super) unsafe fn piece(&self, offset: usize, count: usize) -> &mut [T] {
        assert!(offset + count <= self.len, "a piece ends beyond its slice");
        // SAFETY: within the slice by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(offset), count) }
    }

    /// Numbers `[offset, offset + count)` to read.
    ///
    /// # Safety
    ///
    /// No piece that overlaps this one is handed out while it is alive, on any thread.
    pub(super) unsafe fn read(&self, offset: usize, count: usize) -> &[T] {
        assert!(offset + count <= self.len, "a piece ends beyond its slice");
        // SAFETY: within the slice by the assertion, not written by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start.add(offset), count) }
    }
}
