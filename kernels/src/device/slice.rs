//! Numbers in device memory that launches read or write, without their owner.
//!
//! In: a buffer, or the address of somebody else's memory. Out: a [`Slice`] or [`SliceMut`], and parts of it.
//!
//! Nothing is copied or freed. Invariant: a part lies inside its slice.

// Foreign addresses are taken on trust.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use super::tables::Plain;

/// Numbers in device memory that a launch reads.
#[derive(Clone, Copy, Debug)]
pub struct Slice<'a, T> {
    address: u64,
    len: usize,
    of: PhantomData<&'a T>,
}

/// Numbers in device memory that a launch writes.
#[derive(Debug)]
pub struct SliceMut<'a, T> {
    address: u64,
    len: usize,
    of: PhantomData<&'a mut T>,
}

impl<'a, T: Plain> Slice<'a, T> {
    /// `len` numbers at `address`; the caller names their owner.
    pub(super) fn new(address: u64, len: usize) -> Self {
        Self { address, len, of: PhantomData }
    }

    /// The `len` elements from `at` on.
    ///
    /// # Panics
    ///
    /// Beyond the end.
    #[must_use]
    pub fn part(self, at: usize, len: usize) -> Slice<'a, T> {
        assert!(at + len <= self.len, "a part lies inside its slice");
        Slice { address: self.address + (at * size_of::<T>()) as u64, len, of: PhantomData }
    }

    /// A slice of memory that this crate does not own.
    ///
    /// # Safety
    ///
    /// `len` numbers lie at `address` on the GPU of the launches that get it, and nobody writes them until those are done.
    pub unsafe fn foreign(address: u64, len: usize) -> Self {
        Self { address, len, of: PhantomData }
    }

    /// Where it begins, and how many numbers there are.
    pub(super) fn place(&self) -> (u64, usize) {
        (self.address, self.len)
    }
}

impl<'a, T: Plain> SliceMut<'a, T> {
    /// `len` numbers at `address`; the caller names their owner.
    pub(super) fn new(address: u64, len: usize) -> Self {
        Self { address, len, of: PhantomData }
    }

    /// The `len` elements from `at` on.
    ///
    /// # Panics
    ///
    /// Beyond the end.
    #[must_use]
    pub fn part(self, at: usize, len: usize) -> SliceMut<'a, T> {
        assert!(at + len <= self.len, "a part lies inside its slice");
        SliceMut { address: self.address + (at * size_of::<T>()) as u64, len, of: PhantomData }
    }

    /// A slice of memory that this crate does not own.
    ///
    /// # Safety
    ///
    /// `len` numbers lie at `address` on the GPU of the launches that get it, and nobody else touches them until those are
    /// done.
    pub unsafe fn foreign(address: u64, len: usize) -> Self {
        Self { address, len, of: PhantomData }
    }

    /// Where it begins, and how many numbers there are.
    pub(super) fn place(&self) -> (u64, usize) {
        (self.address, self.len)
    }
}
