//! Digest of what a plan depends on: xxh3 of a canonical encoding.
//!
//! In: integers in a fixed order. Out: 64 bits. Every integer is written as eight little-endian
//! bytes and every list after its length, so two different things never have one encoding. No
//! derived encoding is used: the bytes must not change with a library.

use xxhash_rust::xxh3::Xxh3Default;

/// Integers that are hashed at once.
const BUFFER: usize = 512;

/// A digest being made.
pub(crate) struct Digest {
    hash: Xxh3Default,
    buffer: [[u8; 8]; BUFFER],
    filled: usize,
}

impl Digest {
    /// Begins a digest; `what` names the kind of data, so that equal bytes of two kinds differ.
    pub(crate) fn new(what: &str) -> Self {
        let mut hash = Xxh3Default::new();
        hash.update(&(what.len() as u64).to_le_bytes());
        hash.update(what.as_bytes());
        Self { hash, buffer: [[0; 8]; BUFFER], filled: 0 }
    }

    pub(crate) fn u64(&mut self, value: u64) {
        if self.filled == BUFFER {
            self.hash.update(self.buffer.as_flattened());
            self.filled = 0;
        }
        self.buffer[self.filled] = value.to_le_bytes();
        self.filled += 1;
    }

    #[inline]
    pub(crate) fn u32s<const N: usize>(&mut self, values: [u32; N]) {
        match self.buffer.get_mut(self.filled..).and_then(|it| it.first_chunk_mut::<N>()) {
            Some(room) => {
                *room = values.map(|it| u64::from(it).to_le_bytes());
                self.filled += N;
            }
            None => values.into_iter().for_each(|it| self.u64(it.into())),
        }
    }

    pub(crate) fn value(mut self) -> u64 {
        self.hash.update(self.buffer[..self.filled].as_flattened());
        self.hash.digest()
    }
}
