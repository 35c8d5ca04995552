//! Arenas that grow in number as rows need them.
//!
//! In: lengths. Out: parts with one owner each. Freed parts are used again, those of the first arena before later ones. An arena
//! is never freed, since readers have it mapped. The machine commits its memory at the first write, and the seals prevent anybody
//! from giving it back. So an arena should be longer than all rows that are live at a time: then the lowest gaps are used again,
//! whatever the lengths, and the memory stays near its peak use.
//!
//! Invariant: a part that is longer than an arena has an arena of its own.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::process::{Resource, getrlimit};

use super::mapping::{Arena, Part};

/// Shortest first arena that is tried where the machine refuses longer ones.
const LEAST_BYTES: usize = 64 << 20;
/// Of the addresses that a process may have an arena takes one part in this many.
const SHARE_OF_ADDRESSES: usize = 64;

/// See the module. Shared by all threads that take from it.
#[derive(Debug)]
pub(crate) struct Arenas {
    bytes: usize,
    held: Mutex<Vec<Arc<Arena>>>,
}

impl Arenas {
    /// Makes the first arena at once, so that a process without shared memory fails here. Limits of
    /// the process may make it shorter: those who read it under the same limit map those of all their peers.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        let limit = getrlimit(Resource::As).current.and_then(|it| usize::try_from(it).ok());
        let most = limit.map_or(bytes, |it| (it / SHARE_OF_ADDRESSES).max(LEAST_BYTES));
        let mut bytes = bytes.min(most);
        loop {
            match Arena::new(bytes) {
                Ok(it) => return Ok(Self { bytes, held: Mutex::new(vec![it]) }),
                Err(_) if bytes > LEAST_BYTES => bytes = (bytes / 2).max(LEAST_BYTES),
                Err(error) => return Err(error),
            }
        }
    }

    /// A part of `words` words, with arbitrary content.
    pub(crate) fn take(&self, words: usize) -> io::Result<Part> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(part) = held.iter().find_map(|it| it.take(words)) {
            return Ok(part);
        }
        let arena = Arena::new(self.bytes.max(words * 4))?;
        let part = arena.take(words).expect("a new arena has room for what it was made for");
        held.push(arena);
        Ok(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arenas_grow_in_number_and_are_used_again() {
        let arenas = Arenas::new(1 << 16).unwrap();
        let place = |it: &Part| (it.arena().number, it.at());
        let parts: Vec<_> = (0..3).map(|_| arenas.take(10_000).unwrap()).collect();
        let large = arenas.take(1 << 20).unwrap();
        assert_eq!(large.words().len(), 1 << 20);
        let numbers: std::collections::BTreeSet<_> = parts.iter().map(|it| place(it).0).collect();
        assert_eq!(numbers.len(), 3, "each fills an arena");
        let first = place(&parts[0]);
        drop(parts);
        assert_eq!(place(&arenas.take(9_000).unwrap()), first);
        assert_eq!(arenas.held.lock().unwrap().len(), 4);
    }

    /// Units of 64 KiB that the machine has committed, relative to the most in use at a time. Each phase is cut into parts of
    /// `mean` units on average. Two phases are in use, and their parts are freed in any order.
    fn taken(seed: u64, mean: usize) -> f64 {
        const PHASE: usize = 16 << 10;
        let mut random = crate::tests::Random::new(seed);
        let mut free = super::super::free::Free::new(1 << 19);
        let (mut taken, mut used, mut most) = (0, 0, 0);
        let mut phases = std::collections::VecDeque::new();
        for _ in 0..300 {
            if phases.len() == 2 {
                let mut parts: Vec<(usize, usize)> = phases.pop_front().unwrap();
                while !parts.is_empty() {
                    let (at, units) = parts.swap_remove(random.below(parts.len()));
                    free.give_back(at, units);
                    used -= units;
                }
            }
            let (mut left, mut parts) = (PHASE - random.below(PHASE / 3), Vec::new());
            while left > 0 {
                let units = (1 + random.below(2 * mean)).min(left);
                let at = free.take(units).expect("the arena is long");
                (left, used, taken) = (left - units, used + units, taken.max(at + units));
                most = most.max(used);
                parts.push((at, units));
            }
            phases.push_back(parts);
        }
        taken as f64 / most as f64
    }

    #[test]
    fn rows_of_any_lengths_take_little_more_than_their_peak() {
        // In parts of 1, 10 and 40 MiB, of phases of 1 GiB.
        for (mean, most) in [(16, 1.01), (160, 1.05), (640, 1.1)] {
            for seed in 0..8 {
                let taken = taken(seed, mean);
                assert!(taken <= most, "{taken} of the peak, seed {seed}, mean {mean}");
            }
        }
    }
}
