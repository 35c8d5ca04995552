//! The free bytes of an arena. Pure.
//!
//! In: lengths. Out: places, first fit, aligned. It touches no memory.
//!
//! Invariant: taken pieces never overlap, and adjacent free bytes are one piece.

use std::collections::BTreeMap;

/// Alignment of pieces in bytes. It suits copies and tensor maps.
pub(super) const ALIGNMENT: u64 = 256;

/// See the module.
#[derive(Debug)]
pub(super) struct Shelf {
    /// Free bytes by where they begin.
    free: BTreeMap<u64, u64>,
}

impl Shelf {
    /// Everything of `bytes` is free.
    pub(super) fn new(bytes: u64) -> Self {
        Self { free: (bytes > 0).then_some((0, bytes)).into_iter().collect() }
    }

    /// Takes `bytes` and returns their position; none where no free piece is long enough.
    pub(super) fn take(&mut self, bytes: u64) -> Option<u64> {
        let needed = bytes.max(1).checked_next_multiple_of(ALIGNMENT)?;
        let (&at, &length) = self.free.iter().find(|(_, length)| **length >= needed)?;
        self.free.remove(&at);
        if length > needed {
            self.free.insert(at + needed, length - needed);
        }
        Some(at)
    }

    /// Takes back what [`Self::take`] gave for `bytes`.
    pub(super) fn give_back(&mut self, at: u64, bytes: u64) {
        let mut length = bytes.max(1).next_multiple_of(ALIGNMENT);
        let mut first = at;
        if let Some((&before, &of_it)) = self.free.range(..at).next_back()
            && before + of_it == at
        {
            self.free.remove(&before);
            (first, length) = (before, of_it + length);
        }
        if let Some(behind) = self.free.remove(&(first + length)) {
            length += behind;
        }
        self.free.insert(first, length);
    }

    /// Bytes of the longest free piece.
    pub(super) fn longest(&self) -> u64 {
        self.free.values().copied().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_never_overlap_and_all_comes_back(
            lengths in proptest::collection::vec((0_u64..2000, any::<bool>()), 1..60)
        ) {
            let whole = 16 * 1024;
            let mut shelf = Shelf::new(whole);
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (bytes, back) in lengths {
                match shelf.take(bytes) {
                    Some(at) => {
                        prop_assert!(at % ALIGNMENT == 0 && at + bytes <= whole);
                        for &(other, length) in &taken {
                            prop_assert!(at + bytes.max(1) <= other || other + length.max(1) <= at);
                        }
                        taken.push((at, bytes));
                    }
                    None => prop_assert!(shelf.longest() < bytes.max(1).next_multiple_of(ALIGNMENT)),
                }
                if back && !taken.is_empty() {
                    let (at, bytes) = taken.swap_remove(bytes as usize % taken.len());
                    shelf.give_back(at, bytes);
                }
            }
            for (at, bytes) in taken {
                shelf.give_back(at, bytes);
            }
            prop_assert_eq!(shelf.longest(), whole);
        }
    }
}
