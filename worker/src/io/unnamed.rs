//! Messages of the protocol from peers that nobody has named to this process.
//!
//! In: what they ring. Out: doorbells of those who were named later. A server may hear a trainer's first doorbell before the header
//! that names the trainer, and a trainer repeats a doorbell only when its phase is late. Everything else comes again with the next
//! heartbeat.
//!
//! Invariant: nothing of an unnamed peer reaches a machine, at most [`MAX_DOORBELLS`] are kept, and none once the trainers are named.

use cadre_exchange::PeerId;
use cadre_protocol::Message;

/// Most doorbells that are kept: those of the first phases, of as many trainers as a job may have.
const MAX_DOORBELLS: usize = 4096;

/// See the module.
#[derive(Debug)]
pub(super) enum Unnamed {
    /// The trainers are not named yet: doorbells so far.
    Kept(Vec<(PeerId, Message)>),
    /// They are: who is unnamed is no member.
    Refused,
}

impl Default for Unnamed {
    fn default() -> Self {
        Self::Kept(Vec::new())
    }
}

impl Unnamed {
    /// An unnamed peer rings. Out: what it may not say; a server may beat before it is named.
    pub(super) fn ring(&mut self, from: PeerId, message: Message) -> Option<&'static str> {
        let doorbell = matches!(message, Message::Doorbell { .. });
        match self {
            Self::Kept(kept) => {
                if doorbell && kept.len() < MAX_DOORBELLS {
                    kept.push((from, message));
                }
                None
            }
            Self::Refused => doorbell.then_some("a doorbell without being a member"),
        }
    }

    /// All trainers were named: what was kept.
    pub(super) fn named(&mut self) -> Vec<(PeerId, Message)> {
        match std::mem::replace(self, Self::Refused) {
            Self::Kept(kept) => kept,
            Self::Refused => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use cadre_protocol::{Acks, At, Heartbeat, Round};

    use super::*;

    #[test]
    fn doorbells_before_the_trainers_are_named_are_kept_up_to_a_bound_and_later_ones_refused() {
        let doorbell = |step| {
            let (round, acks) = (Round(0), Acks::default());
            Message::Doorbell { at: At::new(step, 0), round, acks, digest: 0 }
        };
        let (from, mut unnamed) = (PeerId::trainer(1, 0), Unnamed::default());
        for step in 0..2 * MAX_DOORBELLS as u64 {
            assert_eq!(unnamed.ring(from, doorbell(step)), None);
            assert_eq!(unnamed.ring(from, Message::Heartbeat(Heartbeat::default())), None);
        }
        let kept = unnamed.named();
        let all: Vec<_> = (0..MAX_DOORBELLS as u64).map(|it| (from, doorbell(it))).collect();
        assert!(kept == all, "the first ones, in their order");
        assert!(unnamed.ring(from, doorbell(9)).is_some());
        assert_eq!(unnamed.ring(from, Message::Heartbeat(Heartbeat::default())), None);
        assert!(unnamed.named().is_empty());
    }
}
