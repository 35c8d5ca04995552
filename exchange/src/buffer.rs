//! Owned memory that tensors travel in.
//!
//! A [`Buffer`] is handed over, never shared mutably: its owner fills it and publishes it behind an `Arc`
//! (read-only from then on), or hands it to a provider as the landing of pulls and takes it back when they
//! ended. It knows bytes, `f32` and `bf16`, and no shape.
//!
//! Invariant: the memory is 4-byte aligned and initialised, so every view is safe and without a copy.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use half::bf16;

use crate::pool::Pool;
use crate::shared::Part;

/// A block of memory with one owner, 4-byte aligned. A buffer taken from a [`Pool`] returns there when it is dropped.
#[derive(Default)]
pub struct Buffer {
    words: Words,
    bytes: usize,
    pool: Option<Arc<Pool>>,
}

/// Where the words of a buffer are stored.
enum Words {
    /// Memory of this process.
    Own(Vec<u32>),
    /// Memory that other processes of this machine can read.
    Shared(Part),
}

impl Default for Words {
    fn default() -> Self {
        Self::Own(Vec::new())
    }
}

impl Deref for Words {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        match self {
            Self::Own(words) => words,
            Self::Shared(part) => part.words(),
        }
    }
}

impl DerefMut for Words {
    fn deref_mut(&mut self) -> &mut [u32] {
        match self {
            Self::Own(words) => words,
            Self::Shared(part) => part.words_mut(),
        }
    }
}

impl Buffer {
    /// Zeroed memory of exactly `bytes` bytes.
    pub fn zeroed(bytes: usize) -> Self {
        Self { words: Words::Own(vec![0; bytes.div_ceil(4)]), bytes, pool: None }
    }

    /// A buffer over memory of a pool. Its length is the first `bytes` bytes of `words`.
    pub(crate) fn lent(words: Vec<u32>, bytes: usize, pool: Arc<Pool>) -> Self {
        Self { words: Words::Own(words), bytes, pool: Some(pool) }
    }

    /// A buffer over a part of an arena of a pool.
    pub(crate) fn shared(part: Part, bytes: usize, pool: Arc<Pool>) -> Self {
        Self { words: Words::Shared(part), bytes, pool: Some(pool) }
    }

    /// The part of the arena that these bytes lie in, by which other processes of this machine find them. None for memory of this
    /// process only.
    pub(crate) fn part(&self) -> Option<&Part> {
        match &self.words {
            Words::Own(_) => None,
            Words::Shared(part) => Some(part),
        }
    }

    /// Whether other processes of this machine can read the memory.
    pub fn is_shared(&self) -> bool {
        self.part().is_some()
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.bytes
    }

    /// Whether the buffer is 0 bytes long.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Length up to which [`Buffer::resize_zeroed`] needs no new memory. A pool can use buffers of
    /// equal capacity interchangeably.
    pub fn capacity_bytes(&self) -> usize {
        match &self.words {
            Words::Own(words) => words.capacity() * 4,
            Words::Shared(part) => part.words().len() * 4,
        }
    }

    /// Makes the buffer `bytes` long. Old bytes keep their values, new ones are zero.
    pub fn resize_zeroed(&mut self, bytes: usize) {
        let mut words = self.keep();
        words.truncate(self.bytes.div_ceil(4));
        words.resize(bytes.div_ceil(4), 0);
        self.words = Words::Own(words);
        let kept = self.bytes.min(bytes);
        self.bytes = bytes;
        // The last word may hold bytes behind the old or the new end.
        let edge = kept.next_multiple_of(4).min(self.words.len() * 4);
        bytemuck::cast_slice_mut::<_, u8>(&mut self.words)[kept..edge].fill(0);
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.bytes]
    }

    /// All bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.bytes]
    }

    /// The whole `f32` values that fit; bytes behind the last whole one are left out.
    pub fn f32s(&self) -> &[f32] {
        &bytemuck::cast_slice(&self.words)[..self.bytes / 4]
    }

    /// The whole `f32` values that fit, to write.
    pub fn f32s_mut(&mut self) -> &mut [f32] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.bytes / 4]
    }

    /// The whole `bf16` values that fit.
    pub fn bf16s(&self) -> &[bf16] {
        &bytemuck::cast_slice(&self.words)[..self.bytes / 2]
    }

    /// The whole `bf16` values that fit, to write.
    pub fn bf16s_mut(&mut self) -> &mut [bf16] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.bytes / 2]
    }

    /// The memory as `f32` values; copied only if it lies in an arena.
    pub fn into_f32s(mut self) -> Vec<f32> {
        let mut words = self.keep();
        words.truncate(self.bytes / 4);
        bytemuck::cast_vec(words)
    }

    /// Takes the words out, so that they do not return to the pool. Words in an arena are copied to memory of this process.
    fn keep(&mut self) -> Vec<u32> {
        if matches!(self.words, Words::Shared(_)) {
            let words = self.words[..self.bytes.div_ceil(4)].to_vec();
            self.give_back();
            return words;
        }
        let Words::Own(words) = std::mem::take(&mut self.words) else { return Vec::new() };
        if let Some(pool) = self.pool.take() {
            pool.let_go(words.len());
        }
        words
    }

    fn give_back(&mut self) {
        let Some(pool) = self.pool.take() else { return };
        match std::mem::take(&mut self.words) {
            Words::Own(words) => pool.give_back(words),
            Words::Shared(part) => pool.give_back_part(part),
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.give_back();
    }
}

impl Clone for Buffer {
    /// A copy of the bytes, in memory of its own.
    fn clone(&self) -> Self {
        let words = Words::Own(self.words[..self.bytes.div_ceil(4)].to_vec());
        Self { words, bytes: self.bytes, pool: None }
    }
}

impl PartialEq for Buffer {
    fn eq(&self, other: &Self) -> bool {
        self.bytes() == other.bytes()
    }
}

impl Eq for Buffer {}

impl fmt::Debug for Buffer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Buffer").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl From<Vec<f32>> for Buffer {
    /// Takes the vector's memory, without a copy.
    fn from(values: Vec<f32>) -> Self {
        let bytes = values.len() * 4;
        Self { words: Words::Own(bytemuck::cast_vec(values)), bytes, pool: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f32_vectors_go_in_and_out_without_a_copy() {
        let values = vec![1.0_f32, -2.5, f32::NEG_INFINITY];
        let place = values.as_ptr();
        let mut buffer = Buffer::from(values);
        assert_eq!(buffer.len_bytes(), 12);
        buffer.f32s_mut()[0] = 4.0;
        let values = buffer.into_f32s();
        assert_eq!(values, [4.0, -2.5, f32::NEG_INFINITY]);
        assert_eq!(values.as_ptr(), place);
    }

    #[test]
    fn odd_lengths_show_whole_values_only() {
        let mut buffer = Buffer::zeroed(7);
        buffer.bytes_mut().fill(0xff);
        assert_eq!((buffer.bytes().len(), buffer.f32s().len(), buffer.bf16s().len()), (7, 1, 3));
        assert_eq!(buffer.clone().into_f32s().len(), 1);
        buffer.resize_zeroed(2);
        buffer.resize_zeroed(9);
        assert_eq!(buffer.bytes(), [0xff, 0xff, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn memory_of_an_arena_is_a_buffer_like_any_other() {
        let pool = Pool::shared(1 << 16).unwrap();
        let mut buffer = pool.take(10);
        assert!(buffer.is_shared() && !buffer.clone().is_shared());
        buffer.bytes_mut().copy_from_slice(&[5; 10]);
        assert_eq!((buffer.bytes(), buffer.f32s().len()), (&[5; 10][..], 2));
        let place = buffer.bytes().as_ptr();
        buffer.resize_zeroed(14);
        assert_eq!(buffer.bytes(), [5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 0, 0, 0, 0]);
        assert!(!buffer.is_shared(), "its part is free");
        let mut again = pool.take(8);
        assert_eq!(again.bytes().as_ptr(), place);
        again.f32s_mut().copy_from_slice(&[1.5, 2.5]);
        assert_eq!(again.into_f32s(), [1.5, 2.5]);
        assert_eq!(pool.take(8).bytes().as_ptr(), place);
    }

    #[test]
    fn an_empty_buffer_has_no_values() {
        let buffer = Buffer::zeroed(0);
        assert!(buffer.is_empty() && buffer.bytes().is_empty() && buffer.into_f32s().is_empty());
    }
}
