//! Arenas that grow in number as rows need them.
//!
//! In: lengths. Out: parts that nobody else has. Freed parts are used again, the first arena before later ones; an arena is
//! kept once it was made, since readers have it mapped. Its memory is taken from the machine when it is first written.
//!
//! Invariant: a part is longer than an arena only if it has one of its own.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use super::mapping::{Arena, Part};

/// See the module. Shared by all threads that take from it.
#[derive(Debug)]
pub(crate) struct Arenas {
    bytes: usize,
    held: Mutex<Vec<Arc<Arena>>>,
}

impl Arenas {
    /// Makes the first one, so that whoever lacks shared memory learns it here.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        Ok(Self { bytes, held: Mutex::new(vec![Arena::new(bytes)?]) })
    }

    /// A part of `words` words, with anything in it.
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
}
