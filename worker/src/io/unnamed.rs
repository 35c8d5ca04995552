//! Messages of the protocol from peers that nobody has named to this process.
//!
//! In: what they ring. Out: doorbells of those who were named later. A server may hear a trainer's first doorbell before the header
//! that names the trainer, and a trainer repeats a doorbell only when its phase is late. Everything else comes again with the next
//! heartbeat.
//!
//! Whoever knows the secret may call itself any trainer. So each name has a bound of its own, and only names that the job has count.
//! Of two incarnations of a name the newer one does, as at the exchange, which has shut out the older one by then.
//!
//! Invariant: nothing of an unnamed peer reaches a machine, at most [`MAX_DOORBELLS`] of a trainer of the job are kept, whatever
//! others ring, and none once the trainers are named.

use std::collections::BTreeMap;

use cadre_exchange::PeerId;
use cadre_protocol::{Acks, At, Message};

/// Most doorbells of one trainer that are kept: as many as a server takes of it before their step has begun.
const MAX_DOORBELLS: usize = 16;

/// See the module.
#[derive(Debug)]
pub(super) enum Unnamed {
    /// The trainers are not named yet: doorbells so far, by rank.
    Kept(BTreeMap<u16, Rung>),
    /// The trainers are named: who is unnamed is no member.
    Refused,
}

/// Doorbells of one name.
#[derive(Debug)]
pub(super) struct Rung {
    from: PeerId,
    doorbells: BTreeMap<At, Message>,
}

impl Default for Unnamed {
    fn default() -> Self {
        Self::Kept(BTreeMap::new())
    }
}

impl Unnamed {
    /// An unnamed peer rings, in a job of so many trainers. Out: what it may not say; a server may beat before it is named.
    pub(super) fn ring(
        &mut self,
        from: PeerId,
        trainers: u16,
        message: Message,
    ) -> Option<&'static str> {
        let Message::Doorbell { at, round, acks, digest } = message else { return None };
        match self {
            Self::Kept(kept) if from.index < trainers => {
                let new = || Rung { from, doorbells: BTreeMap::new() };
                let rung = kept.entry(from.index).or_insert_with(new);
                if rung.from.incarnation < from.incarnation {
                    *rung = new();
                }
                let has_room =
                    rung.doorbells.len() < MAX_DOORBELLS || rung.doorbells.contains_key(&at);
                if rung.from == from && has_room {
                    // Of results that nobody has made here yet nothing is acknowledged one by one.
                    let acks = Acks { through: acks.through, works: Vec::new() };
                    let doorbell = Message::Doorbell { at, round, acks, digest };
                    rung.doorbells.insert(at, doorbell);
                }
                None
            }
            Self::Kept(_) | Self::Refused => Some("a doorbell without being a member"),
        }
    }

    /// All trainers were named: what was kept.
    pub(super) fn named(&mut self) -> Vec<(PeerId, Message)> {
        let kept = match std::mem::replace(self, Self::Refused) {
            Self::Kept(kept) => kept,
            Self::Refused => BTreeMap::new(),
        };
        let of = |it: Rung| it.doorbells.into_values().map(move |message| (it.from, message));
        kept.into_values().flat_map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use cadre_protocol::{Round, Work};

    use super::*;

    const TRAINERS: u16 = 2;

    fn doorbell(step: u64, works: usize) -> Message {
        let acks = Acks { through: None, works: vec![(At::new(0, 0), Work(0)); works] };
        Message::Doorbell { at: At::new(step, 0), round: Round(0), acks, digest: step }
    }

    #[test]
    fn doorbells_before_the_trainers_are_named_are_kept_whatever_strangers_ring() {
        let mut unnamed = Unnamed::default();
        // Of all names that there can be, and of a former life of a real one, before the real one and after it.
        let strangers = |unnamed: &mut Unnamed| {
            for index in 0..u16::MAX {
                let ids = [PeerId::trainer(index, 0), PeerId::trainer(index, 4)];
                for from in ids.into_iter().filter(|_| index != 1) {
                    let refused = unnamed.ring(from, TRAINERS, doorbell(7, 0));
                    assert_eq!(refused.is_some(), index >= TRAINERS);
                }
            }
            for step in 0..100 {
                let former = PeerId::trainer(1, 4);
                assert_eq!(unnamed.ring(former, TRAINERS, doorbell(step, 0)), None);
            }
        };
        let from = PeerId::trainer(1, 5);
        strangers(&mut unnamed);
        for step in 0..2 * MAX_DOORBELLS as u64 {
            // More is not kept of it than a server would take.
            assert_eq!(unnamed.ring(from, TRAINERS, doorbell(step, 9)), None);
            let beat = Message::Heartbeat(Box::default());
            assert_eq!(unnamed.ring(from, TRAINERS, beat), None);
        }
        strangers(&mut unnamed);
        let kept = unnamed.named();
        let (own, others): (Vec<_>, Vec<_>) = kept.into_iter().partition(|it| it.0 == from);
        let all: Vec<_> = (0..MAX_DOORBELLS as u64).map(|it| (from, doorbell(it, 0))).collect();
        assert!(own == all, "the first ones, in their order");
        assert!(others == [(PeerId::trainer(0, 4), doorbell(7, 0))], "one name, its newest life");
        assert!(unnamed.ring(from, TRAINERS, doorbell(9, 0)).is_some());
        let beat = Message::Heartbeat(Box::default());
        assert_eq!(unnamed.ring(from, TRAINERS, beat), None);
        assert!(unnamed.named().is_empty());
    }
}
