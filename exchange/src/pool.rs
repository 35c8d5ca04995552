//! A pool of reusable memory. Reused memory is mapped already, and need not be zeroed.
//!
//! In: lengths. Out: [`Buffer`]s that return to the pool when they are dropped, on any thread. Their content is unspecified, so
//! the owner has to write every byte before anyone reads it.
//!
//! Memory of a shared pool lies in arenas, which other processes of this machine can read ([`crate::Paths`]); these stay.
//!
//! Invariant: outside of arenas, lent and idle memory together never exceed the most that was lent at a time.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::buffer::Buffer;
use crate::shared::{Arenas, Part};

/// See the module. Shared by all threads that take from it.
#[derive(Debug, Default)]
pub struct Pool {
    shelves: Mutex<Shelves>,
    /// Source of memory that other processes can read.
    arenas: Option<Arenas>,
    /// Value that fills all memory when it is lent, and memory of arenas also when it is returned.
    poison: Option<u32>,
    /// Whether the lack of an arena was logged.
    said: AtomicBool,
}

#[derive(Debug, Default)]
struct Shelves {
    /// Idle memory, by length in words.
    kept: BTreeMap<usize, Vec<Vec<u32>>>,
    kept_words: usize,
    lent_words: usize,
    most_lent_words: usize,
}

impl Pool {
    /// An empty pool.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// A pool whose buffers are filled with NaN, so that computations with unwritten bytes show.
    pub fn poisoned() -> Arc<Self> {
        Arc::new(Self { poison: Some(u32::MAX), ..Self::default() })
    }

    /// A pool whose buffers other processes of this machine can read. They lie in arenas of
    /// `arena_bytes`, or longer for a longer buffer.
    ///
    /// # Errors
    ///
    /// The machine gives no sealed shared memory (`memfd_create`, Linux 5.1).
    pub fn shared(arena_bytes: usize) -> io::Result<Arc<Self>> {
        let arenas = Some(Arenas::new(arena_bytes)?);
        Ok(Arc::new(Self { arenas, ..Self::default() }))
    }

    /// As [`Self::shared`] and [`Self::poisoned`]. Arena memory is also poisoned when it is returned, so that reads of freed
    /// bytes show.
    ///
    /// # Errors
    ///
    /// As [`Self::shared`].
    pub fn shared_and_poisoned(arena_bytes: usize) -> io::Result<Arc<Self>> {
        let arenas = Some(Arenas::new(arena_bytes)?);
        Ok(Arc::new(Self { arenas, poison: Some(u32::MAX), ..Self::default() }))
    }

    /// A buffer of `bytes` bytes with unspecified content. Where no arena can be added, only this process can read it.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Buffer {
        if let Some(arenas) = &self.arenas {
            match arenas.take(bytes.div_ceil(4)) {
                Ok(mut part) => {
                    if let Some(poison) = self.poison {
                        part.words_mut().fill(poison);
                    }
                    return Buffer::shared(part, bytes, Arc::clone(self));
                }
                Err(error) if !self.said.swap(true, Ordering::Relaxed) => {
                    tracing::warn!(%error, "no more memory that other processes can read: rows beyond it go through sockets");
                }
                Err(_) => {}
            }
        }
        let words = class(bytes.div_ceil(4));
        let mut memory = self.lend(words).unwrap_or_else(|| vec![0; words]);
        if let Some(poison) = self.poison {
            memory.fill(poison);
        }
        Buffer::lent(memory, bytes, Arc::clone(self))
    }

    fn lend(&self, words: usize) -> Option<Vec<u32>> {
        let mut shelves = self.shelves.lock().unwrap_or_else(PoisonError::into_inner);
        let found = shelves.kept.get_mut(&words).and_then(Vec::pop);
        if found.is_some() {
            shelves.kept_words -= words;
        }
        shelves.lent_words += words;
        shelves.most_lent_words = shelves.most_lent_words.max(shelves.lent_words);
        shelves.trim();
        found
    }

    /// Takes memory back.
    pub(crate) fn give_back(&self, memory: Vec<u32>) {
        let mut shelves = self.shelves.lock().unwrap_or_else(PoisonError::into_inner);
        let words = memory.len();
        shelves.lent_words -= words;
        shelves.kept_words += words;
        shelves.kept.entry(words).or_default().push(memory);
        shelves.trim();
    }

    /// Takes back a part of an arena.
    pub(crate) fn give_back_part(&self, mut part: Part) {
        if let Some(poison) = self.poison {
            part.words_mut().fill(poison);
        }
    }

    /// Stops counting memory that leaves the pool for good.
    pub(crate) fn let_go(&self, words: usize) {
        let mut shelves = self.shelves.lock().unwrap_or_else(PoisonError::into_inner);
        shelves.lent_words -= words;
    }
}

impl Shelves {
    /// Frees the largest idle blocks until the pool holds no more than was once lent at a time.
    fn trim(&mut self) {
        while self.lent_words + self.kept_words > self.most_lent_words
            && let Some(mut shelf) = self.kept.last_entry()
        {
            if let Some(memory) = shelf.get_mut().pop() {
                self.kept_words -= memory.len();
            }
            if shelf.get().is_empty() {
                shelf.remove();
            }
        }
    }
}

/// Rounds a length in words up by at most an eighth, so that phases of similar length share memory.
fn class(words: usize) -> usize {
    let step = (words.next_power_of_two() / 16).max(16);
    words.next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(pool: &Pool) -> (usize, usize) {
        let shelves = pool.shelves.lock().unwrap();
        assert_eq!(
            shelves.kept.iter().map(|it| it.0 * it.1.len()).sum::<usize>(),
            shelves.kept_words
        );
        (shelves.lent_words, shelves.kept_words)
    }

    #[test]
    fn memory_of_nearly_one_length_is_used_again() {
        let pool = Pool::new();
        let mut first = pool.take(1_000_000);
        first.bytes_mut().fill(7);
        let place = first.bytes().as_ptr();
        drop(first);
        let again = pool.take(990_001);
        assert_eq!((again.bytes().as_ptr(), again.len_bytes()), (place, 990_001));
        let (lent, kept) = held(&pool);
        assert!((250_000..250_000 * 9 / 8).contains(&lent) && kept == 0, "{lent}");
        // A clone has memory of its own, and memory that is kept for good does not count as lent.
        let other = again.clone();
        assert_eq!(other, again);
        drop(again.into_f32s());
        drop(other);
        assert_eq!(held(&pool), (0, 0));
    }

    #[test]
    fn no_more_is_held_than_was_lent_at_a_time() {
        let pool = Pool::new();
        let lent: Vec<_> = (1..=20).map(|it| pool.take(it * 40_000)).collect();
        let most = held(&pool).0;
        drop(lent);
        assert_eq!(held(&pool), (0, most), "all of it waits");
        // New lengths displace idle memory of other lengths.
        for bytes in [900_000, 1_000_000, 1_500_000, 3_000_000] {
            drop(pool.take(bytes));
            let (lent, kept) = held(&pool);
            assert!(lent + kept <= most.max(class(bytes.div_ceil(4))), "{bytes}: {kept}");
        }
    }

    #[test]
    fn poisoned_memory_is_not_a_number_wherever_it_was_not_written() {
        for pool in [Pool::poisoned(), Pool::shared_and_poisoned(1 << 16).unwrap()] {
            for _ in 0..2 {
                let mut buffer = pool.take(4_000);
                assert!(buffer.f32s().iter().all(|it| it.is_nan()));
                assert!(buffer.bf16s().iter().all(|it| it.is_nan()));
                buffer.bytes_mut().fill(0);
            }
        }
    }

    #[test]
    fn what_comes_back_to_a_poisoned_arena_is_not_a_number_at_once() {
        let pool = Pool::shared_and_poisoned(1 << 16).unwrap();
        let mut buffer = pool.take(4_000);
        buffer.bytes_mut().fill(0);
        let part = buffer.part().unwrap();
        let descriptor = part.arena().descriptor().try_clone_to_owned().unwrap();
        let (foreign, at) = (crate::shared::Foreign::new(&descriptor).unwrap(), part.at());
        let mut read = Buffer::zeroed(4_000);
        foreign.copy(at, read.bytes_mut());
        assert!(read.f32s().iter().all(|it| *it == 0.0));
        drop(buffer);
        foreign.copy(at, read.bytes_mut());
        assert!(read.f32s().iter().all(|it| it.is_nan()));
    }
}
