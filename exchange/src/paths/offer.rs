//! What an owner offers to readers of its machine: where its door is, and the ticket of its board.
//!
//! In: random words. Out: 64 bytes that are published like rows, under a key of their own, so that only peers that have proved the
//! job's secret read them; and the tickets of arenas.
//!
//! Invariants: a ticket is known only to whoever knows the offer; nobody can lead us to a socket that is no door of rows.

use std::time::Duration;

use crate::door::{Site, Ticket};
use crate::peer::RegionKey;

/// Key of the region that holds the offer. No rows have this key.
pub(super) const OFFER: RegionKey = RegionKey([u32::MAX, 0, 0x7368_6d00, u32::MAX]);

/// How long an owner may think about its offer.
pub(super) const OFFER_PATIENCE: Duration = Duration::from_secs(5);

/// Length of an offer.
pub(super) const OFFER_BYTES: usize = 64;

/// How names of doors begin; hexadecimal digits follow.
const PREFIX: &[u8] = b"cadre-rows-";

/// See the module.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Offer {
    name: [u8; 32],
    ticket: Ticket,
}

impl Offer {
    pub(super) fn new(mut random: impl FnMut() -> [u8; 32]) -> Self {
        // A name that reads as what it is where sockets are listed.
        let mut name = [b'0'; 32];
        name[..PREFIX.len()].copy_from_slice(PREFIX);
        for (digit, random) in name[PREFIX.len()..].iter_mut().zip(random()) {
            *digit = b"0123456789abcdef"[usize::from(random % 16)];
        }
        Self { name, ticket: random() }
    }

    pub(super) fn encode(&self) -> [u8; OFFER_BYTES] {
        let mut out = [0; OFFER_BYTES];
        out[..32].copy_from_slice(&self.name);
        out[32..].copy_from_slice(&self.ticket);
        out
    }

    /// None if the bytes name no such door.
    pub(super) fn decode(input: &[u8]) -> Option<Self> {
        let input: &[u8; OFFER_BYTES] = input.try_into().ok()?;
        let (name, ticket): ([u8; 32], Ticket) = (*input.first_chunk()?, *input.last_chunk()?);
        let digits = name.strip_prefix(PREFIX)?;
        digits.iter().all(u8::is_ascii_hexdigit).then_some(Self { name, ticket })
    }

    pub(super) fn site(&self) -> Site {
        Site::Name(self.name)
    }

    /// Ticket of the board.
    pub(super) fn board(&self) -> Ticket {
        self.ticket
    }

    /// Of an arena.
    pub(super) fn arena(&self, number: u64) -> Ticket {
        *blake3::keyed_hash(&self.ticket, &number.to_le_bytes()).as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offers_are_read_as_written_and_their_tickets_differ() {
        let mut seed = 0;
        let random = || {
            seed += 1;
            [seed; 32]
        };
        let offer = Offer::new(random);
        assert_eq!(Offer::decode(&offer.encode()), Some(offer.clone()));
        assert_eq!(Offer::decode(&offer.encode()[..63]), None);
        for wrong in [*b"/tmp/.X11-unix/X0000000000000000", *b"cadre-rows-00000000000000000000/"] {
            let mut other = offer.encode();
            other[..32].copy_from_slice(&wrong);
            assert_eq!(Offer::decode(&other), None);
        }
        let tickets = [offer.board(), offer.arena(0), offer.arena(1)];
        assert!(tickets[0] != tickets[1] && tickets[1] != tickets[2] && tickets[0] != tickets[2]);
    }

    #[test]
    fn an_offer_of_any_bytes_names_a_door_or_is_none() {
        crate::tests::all("offer", |input, _| {
            if let Some(offer) = Offer::decode(input) {
                assert_eq!(offer.encode(), *input);
                let Site::Name(name) = offer.site() else { panic!("a name") };
                assert!(name.starts_with(PREFIX) && name.is_ascii());
            }
        });
    }
}
