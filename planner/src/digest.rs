//! Digest of what a plan depends on: xxh3 of a canonical encoding.
//!
//! In: integers in a fixed order. Out: 64 bits. Every integer is written as eight little-endian
//! bytes and every list after its length, so two different things never have one encoding. No
//! derived encoding is used: the bytes must not change with a library.

use xxhash_rust::xxh3::Xxh3Default;

/// A digest being made.
pub(crate) struct Digest(Xxh3Default);

impl Digest {
    /// Starts with the name of what is digested.
    pub(crate) fn new(what: &str) -> Self {
        let mut digest = Self(Xxh3Default::new());
        digest.u64(what.len() as u64);
        digest.0.update(what.as_bytes());
        digest
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.0.update(&value.to_le_bytes());
    }

    pub(crate) fn u32s<const N: usize>(&mut self, values: [u32; N]) {
        for value in values {
            self.u64(value.into());
        }
    }

    pub(crate) fn value(&self) -> u64 {
        self.0.digest()
    }
}
