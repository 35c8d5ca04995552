//! The board of a process: a table in shared memory that tells readers of its machine where each published region lies. They can
//! only read it.
//!
//! In: publications and their ends. Out: a table of words. From another process's table: where a region lies, and whether it is
//! still published. A region for which the table has no room is missing; readers then ask the owner over the link.
//!
//! An entry is 8 words: number of the publication (0: none), key (2), arena, first byte, bytes, and 2 of nothing. A key
//! may stand in any entry of its bucket.
//!
//! ```text
//! publish    place ── release fence ── number        find    number ── acquire ── place ── acquire ── same number?
//! withdraw   0 ── full fence ── memory is free       still   copy   ── acquire fence ── same number?
//! ```
//!
//! Invariant: numbers never come back, so an entry that has the same number before and after was the same all the while, and
//! nobody has written its region meanwhile.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::mapping::{Foreign, Own, Stretch};
use crate::peer::RegionKey;

const ENTRY_WORDS: usize = 8;
const BUCKET_ENTRIES: usize = 8;
const BUCKETS: usize = 65_536;
const WORDS: usize = BUCKETS * BUCKET_ENTRIES * ENTRY_WORDS;

/// Bytes of an entry, and of a bucket: the adjacent entries that a key may take.
pub(crate) const ENTRY_BYTES: usize = ENTRY_WORDS * 8;
pub(crate) const BUCKET_BYTES: usize = BUCKET_ENTRIES * ENTRY_BYTES;

/// Position of a region.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Spot {
    pub(crate) arena: u64,
    pub(crate) at: u64,
    pub(crate) bytes: u64,
}

/// The table of this process.
#[derive(Debug)]
pub(crate) struct Board {
    words: Arc<Own>,
    /// Position of the entry of each key.
    places: BTreeMap<RegionKey, usize>,
}

impl Board {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { words: Arc::new(Own::new(WORDS * 8)?), places: BTreeMap::new() })
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.words.descriptor()
    }

    /// The memory of the whole table, for a device that reads it.
    pub(crate) fn stretch(&self) -> Stretch {
        Stretch::of_own(&self.words)
    }

    /// Adds a publication. Its key has no entry, and its number is not 0 and was never used. False where the bucket is full.
    pub(crate) fn publish(&mut self, key: RegionKey, number: u64, spot: Spot) -> bool {
        let Some(entry) = entries(key).find(|it| self.words.load(*it) == 0) else { return false };
        let [one, two] = key_words(key);
        for (index, word) in [one, two, spot.arena, spot.at, spot.bytes].into_iter().enumerate() {
            self.words.store(entry + 1 + index, word);
        }
        fence(Ordering::Release);
        self.words.store(entry, number);
        self.places.insert(key, entry);
        true
    }

    /// Ends a publication: when this returns, its memory may be written.
    pub(crate) fn withdraw(&mut self, key: RegionKey) {
        if let Some(entry) = self.places.remove(&key) {
            self.words.store(entry, 0);
            // A process that reads a byte written after this fence also reads the 0.
            fence(Ordering::SeqCst);
        }
    }

    /// Ends all publications.
    pub(crate) fn withdraw_all(&mut self) {
        for key in self.places.keys().copied().collect::<Vec<_>>() {
            self.withdraw(key);
        }
    }
}

/// The table of another process.
#[derive(Debug)]
pub(crate) struct Reading(Foreign);

/// A publication that was found.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Found {
    entry: usize,
    pub(crate) number: u64,
    pub(crate) spot: Spot,
}

impl Found {
    /// First byte of the bucket of a key in its owner's table.
    pub(crate) fn bucket(key: RegionKey) -> u64 {
        entries(key).next().map_or(0, |it| it as u64 * 8)
    }

    /// Finds a region among the words of its bucket, which a device has copied. The words may mix
    /// two publications, so the caller copies the entry again after the rows, and checks with
    /// [`Self::is_still`].
    pub(crate) fn among(key: RegionKey, words: &[u64]) -> Option<Self> {
        let mut bucket = entries(key).zip(words.chunks_exact(ENTRY_WORDS));
        bucket.find_map(|(entry, words)| {
            let &[number, one, two, arena, at, bytes, ..] = words else { return None };
            let found = Self { entry, number, spot: Spot { arena, at, bytes } };
            (number != 0 && [one, two] == key_words(key)).then_some(found)
        })
    }

    /// First byte of its entry in its owner's table.
    pub(crate) fn place(&self) -> u64 {
        self.entry as u64 * 8
    }

    /// Whether a later copy of the entry is the same. If so, the region was published when the
    /// first copy was made, its position was right, and it lasted until the second copy began.
    pub(crate) fn is_still(&self, key: RegionKey, words: &[u64]) -> bool {
        let Spot { arena, at, bytes } = self.spot;
        let [one, two] = key_words(key);
        words.starts_with(&[self.number, one, two, arena, at, bytes])
    }
}

impl Reading {
    pub(crate) fn new(descriptor: &OwnedFd) -> io::Result<Self> {
        let table = Foreign::new(descriptor)?;
        if table.len_bytes() != WORDS as u64 * 8 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "this is no board"));
        }
        Ok(Self(table))
    }

    /// Position of a region, if it is published and on the board.
    pub(crate) fn find(&self, key: RegionKey) -> Option<Found> {
        entries(key).find_map(|entry| {
            let number = self.0.load(entry);
            if number == 0 {
                return None;
            }
            fence(Ordering::Acquire);
            let [one, two, arena, at, bytes] = [1, 2, 3, 4, 5].map(|it| self.0.load(entry + it));
            let found = Found { entry, number, spot: Spot { arena, at, bytes } };
            ([one, two] == key_words(key) && self.still(&found)).then_some(found)
        })
    }

    /// Whether the region has stayed published since it was found. If so, the bytes copied meanwhile are its rows.
    pub(crate) fn still(&self, found: &Found) -> bool {
        fence(Ordering::Acquire);
        self.0.load(found.entry) == found.number
    }
}

fn key_words(RegionKey([a, b, c, d]): RegionKey) -> [u64; 2] {
    [u64::from(a) << 32 | u64::from(b), u64::from(c) << 32 | u64::from(d)]
}

/// Indices of the entries that a key may take.
fn entries(key: RegionKey) -> impl Iterator<Item = usize> {
    let [one, two] = key_words(key);
    let mut mixed = one.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ two.rotate_left(29);
    mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let bucket = (mixed >> 40) as usize % BUCKETS;
    (0..BUCKET_ENTRIES).map(move |it| (bucket * BUCKET_ENTRIES + it) * ENTRY_WORDS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Board, Reading) {
        let board = Board::new().unwrap();
        let reading = Reading::new(&board.descriptor().try_clone_to_owned().unwrap()).unwrap();
        (board, reading)
    }

    fn spot(at: u64) -> Spot {
        Spot { arena: 3, at, bytes: 2 * at }
    }

    #[test]
    fn a_region_is_found_while_it_is_published_and_no_longer() {
        let (mut board, reading) = pair();
        let key = RegionKey([1, 2, 3, 4]);
        assert_eq!(reading.find(key), None);
        assert!(board.publish(key, 7, spot(64)));
        let found = reading.find(key).unwrap();
        assert_eq!((found.number, found.spot, reading.still(&found)), (7, spot(64), true));
        assert_eq!(reading.find(RegionKey([1, 2, 3, 5])), None);
        board.withdraw(key);
        assert_eq!((reading.find(key), reading.still(&found)), (None, false));
        // The same entry again: the number tells them apart.
        assert!(board.publish(key, 8, spot(64)));
        assert!(!reading.still(&found));
        board.withdraw(key);
        assert!(board.publish(key, 9, spot(128)));
        let found = reading.find(key).unwrap();
        assert_eq!(found.spot, spot(128));
        board.withdraw_all();
        assert_eq!((reading.find(key), reading.still(&found)), (None, false));
    }

    #[test]
    fn copied_words_of_a_table_say_the_same_as_the_table() {
        let (mut board, _) = pair();
        let words = |board: &Board, at: u64, bytes: usize| -> Vec<u64> {
            (0..bytes / 8).map(|it| board.words.load(at as usize / 8 + it)).collect()
        };
        for at in 0..20_u32 {
            let key = RegionKey([at % 3, at, 5, at]);
            assert!(board.publish(key, u64::from(at) + 7, spot(64)));
            let bucket = words(&board, Found::bucket(key), BUCKET_BYTES);
            let found = Found::among(key, &bucket).unwrap();
            assert_eq!((found.number, found.spot), (u64::from(at) + 7, spot(64)));
            assert_eq!(Found::among(RegionKey([9, 9, at, 1]), &bucket), None);
            let still =
                |board: &Board| found.is_still(key, &words(board, found.place(), ENTRY_BYTES));
            assert!(still(&board));
            // The same number with another place is a mixture of two publications.
            board.words.store(found.entry + 4, 65);
            assert!(!still(&board));
            board.withdraw(key);
            assert!(!still(&board));
            assert_eq!(Found::among(key, &words(&board, Found::bucket(key), BUCKET_BYTES)), None);
        }
    }

    #[test]
    fn what_has_no_room_is_said_and_what_has_is_found() {
        let (mut board, reading) = pair();
        let keys = (0..800_000).map(|it| RegionKey([it % 7, it, 5, it / 3]));
        let there: Vec<_> =
            keys.zip(1..).map(|(key, at)| (key, at, board.publish(key, at, spot(at)))).collect();
        let placed = there.iter().filter(|it| it.2).count();
        assert!((320_000..524_289).contains(&placed), "{placed} of 524,288 entries are used");
        for (key, at, placed) in &there {
            assert_eq!(reading.find(*key).map(|it| it.spot), placed.then_some(spot(*at)));
        }
        for (key, ..) in there {
            board.withdraw(key);
            assert_eq!(reading.find(key), None);
        }
    }
}
