//! What an owner says of itself to readers by UCX: its card, and the keys of its memory.
//!
//! In: addresses and keys of UCX, which nobody else reads. Out: bytes of fixed length that are published like rows, under keys of
//! their own, so that only peers that have proved the job's secret read them.
//!
//! ```text
//! key    address of the memory u64, length of the key u32, 0 u32, the key, zeros              1,024 bytes
//! card   "cadrucx1", key of the board, length of the worker's address u32, 0 u32, it, zeros   8,192 bytes
//! ```
//!
//! Invariant: what is decoded encodes to the same bytes.

use crate::peer::RegionKey;

/// Key of the region that holds the card. No rows have this key.
pub(in crate::paths) const CARD: RegionKey = RegionKey([u32::MAX, 0, UCX, u32::MAX]);

/// Length of a card.
pub(super) const CARD_BYTES: usize = 8192;

/// Length of a key.
pub(super) const KEY_BYTES: usize = 1024;

/// Bytes of the longest key of UCX that has room there.
pub(super) const LONGEST_KEY: usize = KEY_BYTES - KEY_HEAD;

/// Bytes of a stretch, the unit in which arenas are registered; the last stretch of an arena is
/// shorter.
pub(super) const STRETCH_BYTES: u64 = 64 << 20;

/// Tells these regions from others.
const UCX: u32 = 0x7563_7800;

const MAGIC: &[u8; 8] = b"cadrucx1";
const KEY_HEAD: usize = 16;
const CARD_HEAD: usize = 8 + KEY_BYTES + 8;

/// Key of the region that holds the UCX key of a stretch. Arenas count from 1.
pub(super) fn key_region((arena, index): (u64, u32)) -> RegionKey {
    RegionKey([u32::MAX, arena as u32, UCX | (arena >> 32) as u32 & 0xff, index])
}

/// A key of UCX, and where its memory is in the owner's process.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct PackedKey {
    pub(super) start: u64,
    pub(super) key: Vec<u8>,
}

/// See the module.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Card {
    pub(super) board: PackedKey,
    pub(super) address: Vec<u8>,
}

impl PackedKey {
    /// None where it has no room.
    pub(super) fn new(start: u64, key: Vec<u8>) -> Option<Self> {
        (key.len() <= LONGEST_KEY).then_some(Self { start, key })
    }

    pub(super) fn encode(&self) -> [u8; KEY_BYTES] {
        let mut out = [0; KEY_BYTES];
        out[..8].copy_from_slice(&self.start.to_le_bytes());
        out[8..12].copy_from_slice(&(self.key.len() as u32).to_le_bytes());
        out[KEY_HEAD..KEY_HEAD + self.key.len()].copy_from_slice(&self.key);
        out
    }

    /// None where it is no key.
    pub(super) fn decode(input: &[u8]) -> Option<Self> {
        let (start, rest) = input.split_first_chunk()?;
        let key = counted(rest)?;
        let decoded = Self::new(u64::from_le_bytes(*start), key)?;
        (decoded.encode()[..] == *input).then_some(decoded)
    }
}

impl Card {
    /// None where it has no room.
    pub(super) fn encode(&self) -> Option<[u8; CARD_BYTES]> {
        let mut out = [0; CARD_BYTES];
        let (head, address) = out.split_at_mut(CARD_HEAD);
        head[..8].copy_from_slice(MAGIC);
        head[8..8 + KEY_BYTES].copy_from_slice(&self.board.encode());
        let bytes = self.address.len() as u32;
        head[8 + KEY_BYTES..][..4].copy_from_slice(&bytes.to_le_bytes());
        address.get_mut(..self.address.len())?.copy_from_slice(&self.address);
        Some(out)
    }

    /// None where it is no card.
    pub(super) fn decode(input: &[u8]) -> Option<Self> {
        let rest = input.strip_prefix(MAGIC)?;
        let (board, rest) = rest.split_at_checked(KEY_BYTES)?;
        let decoded = Self { board: PackedKey::decode(board)?, address: counted(rest)? };
        (decoded.encode()?[..] == *input).then_some(decoded)
    }
}

/// Bytes behind their length and four zeros.
fn counted(input: &[u8]) -> Option<Vec<u8>> {
    let (bytes, rest) = input.split_first_chunk()?;
    rest.get(4..)?.get(..u32::from_le_bytes(*bytes) as usize).map(<[u8]>::to_vec)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn cards_are_read_as_written_and_nothing_else_is(
            start: u64,
            key in prop::collection::vec(any::<u8>(), 0..1008),
            address in prop::collection::vec(any::<u8>(), 0..7152),
            changed in 0..CARD_BYTES,
            to: u8,
        ) {
            let board = PackedKey::new(start, key).unwrap();
            prop_assert_eq!(PackedKey::decode(&board.encode()), Some(board.clone()));
            let card = Card { board, address };
            let mut encoded = card.encode().unwrap();
            prop_assert_eq!(Card::decode(&encoded), Some(card));
            prop_assert_eq!(Card::decode(&encoded[..changed]), None);
            encoded[changed] = to;
            if let Some(other) = Card::decode(&encoded) {
                prop_assert_eq!(other.encode(), Some(encoded));
            }
        }
    }

    #[test]
    fn what_has_no_room_is_not_shown() {
        assert_eq!(PackedKey::new(0, vec![1; 1009]), None);
        let board = PackedKey::new(0, vec![1; 1008]).unwrap();
        assert!(Card { board: board.clone(), address: vec![2; 7152] }.encode().is_some());
        assert_eq!(Card { board, address: vec![2; 7153] }.encode(), None);
    }

    #[test]
    fn regions_of_keys_differ_and_are_no_card() {
        let places = [(1, 0), (1, 1), (2, 0), (1 << 32 | 1, 0), (1, u32::MAX)];
        let mut keys: Vec<_> = places.map(key_region).into();
        keys.push(CARD);
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), places.len() + 1);
    }
}
