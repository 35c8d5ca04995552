//! The slip: what a reader needs to copy a published region itself. It names the arena, the position in it, and the publication.
//!
//! In: a position in an arena. Out: the 64 bytes that the owner publishes over TCP in place of the rows, and back. No memory is
//! read here.
//!
//! Invariant: no two publications of a process have the same slip, so a reader that finds the slip unchanged after its copy has
//! copied rows that were published all the while.

use crate::door::Ticket;

/// Length of a slip.
pub(super) const SLIP_BYTES: usize = 64;

/// See the module.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Slip {
    /// Names the arena, and is the key to its descriptor.
    pub(super) ticket: Ticket,
    /// Length of the arena.
    pub(super) arena_bytes: u64,
    /// Where in it the region begins.
    pub(super) at: u64,
    /// Length of the region.
    pub(super) bytes: u64,
    /// Counts publications.
    pub(super) publication: u64,
}

impl Slip {
    pub(super) fn encode(&self) -> [u8; SLIP_BYTES] {
        let Self { ticket, arena_bytes, at, bytes, publication } = self;
        let mut out = [0; SLIP_BYTES];
        out[..32].copy_from_slice(ticket);
        for (index, word) in [arena_bytes, at, bytes, publication].into_iter().enumerate() {
            out[32 + 8 * index..][..8].copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// Decodes a slip. None where the region would end behind its arena.
    pub(super) fn decode(input: &[u8]) -> Option<Self> {
        let input: &[u8; SLIP_BYTES] = input.try_into().ok()?;
        let word = |index: usize| {
            let bytes = input[32 + 8 * index..].first_chunk().expect("64 bytes");
            u64::from_le_bytes(*bytes)
        };
        let [arena_bytes, at, bytes, publication] = [word(0), word(1), word(2), word(3)];
        let ticket = *input.first_chunk().expect("64 bytes");
        let slip = Self { ticket, arena_bytes, at, bytes, publication };
        at.checked_add(bytes).filter(|end| *end <= arena_bytes).map(|_| slip)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_read_as_written_and_checked() {
        let slip =
            Slip { ticket: [7; 32], arena_bytes: 4096, at: 256, bytes: 3840, publication: 9 };
        assert_eq!(Slip::decode(&slip.encode()), Some(slip.clone()));
        for wrong in [
            Slip { bytes: 3841, ..slip.clone() },
            Slip { at: u64::MAX, ..slip.clone() },
            Slip { at: 4097, bytes: 0, ..slip.clone() },
        ] {
            assert_eq!(Slip::decode(&wrong.encode()), None, "{wrong:?}");
        }
        assert_eq!(Slip::decode(&slip.encode()[..63]), None);
    }
    #[test]
    fn a_slip_of_any_bytes_is_inside_of_its_arena_or_none() {
        crate::tests::all("slip", |input, _| {
            if let Some(slip) = Slip::decode(input) {
                assert!(slip.at + slip.bytes <= slip.arena_bytes);
                assert_eq!(slip.encode(), *input);
            }
        });
    }
}
