//! Who is there: the trainers by rank, and the servers that the controller offers for each slot.
//!
//! In: what the controller says. Out: a [`Roster`], a [`View`], and who fills the slots of a header. Which
//! slots a header has is not decided here, but by [`super::Draft`].
//!
//! Invariant: members come one for each slot that was asked about, in the same order, vacant or not.

use cadre_planner::{RankId, Slot};
use cadre_protocol::{Filler, PeerId, ServerId, TrainerId};

use crate::header::{Member, ViewNumber};
use crate::planned::filler;

/// The trainers of a job and their addresses.
#[derive(Clone, Debug)]
pub struct Roster {
    count: usize,
    list: Vec<(PeerId, String)>,
}

impl Roster {
    /// For a job of `trainers` trainers, none of them known yet.
    pub fn new(trainers: u16) -> Self {
        Self { count: trainers.into(), list: Vec::new() }
    }

    /// Learns all of them, by rank.
    pub fn trainers(&mut self, list: Vec<(PeerId, String)>) {
        self.list = list;
    }

    /// Whether all are known.
    pub fn is_complete(&self) -> bool {
        self.list.len() == self.count
    }

    /// All of them, by rank.
    pub fn list(&self) -> Vec<(PeerId, String)> {
        self.list.clone()
    }
}

/// What the controller offers.
#[derive(Clone, Debug)]
pub struct View {
    /// Number of the view.
    pub number: ViewNumber,
    /// By slot.
    pub slots: Vec<Offer>,
}

/// One slot of a view.
#[derive(Clone, Debug)]
pub struct Offer {
    /// Nominal weight.
    pub weight: u32,
    /// Rank of the trainer, for a server in place.
    pub home: Option<u16>,
    /// Memory of the member that fills it.
    pub memory: Option<u64>,
    /// The member that fills it.
    pub member: Option<Member>,
    /// Numerics id of the member that fills it.
    pub numerics: Option<String>,
}

impl View {
    /// Whether a slot is vacant, or no slot is there yet.
    pub fn has_vacancy(&self) -> bool {
        self.slots.is_empty() || self.slots.iter().any(|it| it.member.is_none())
    }

    /// Makes slots vacant whose dedicated servers have another numerics id, and so would compute
    /// other bits; returns a message for each. A rank with another id ends the job itself when it
    /// gets the header, since its slot is always filled.
    pub fn refuse_foreign(&mut self, numerics: &str) -> Vec<String> {
        let mut refused = Vec::new();
        let dedicated = self.slots.iter_mut().enumerate().filter(|it| it.1.home.is_none());
        for (index, offer) in dedicated {
            let other = offer.numerics.as_deref().filter(|it| !it.is_empty() && *it != numerics);
            if let Some(other) = other {
                refused.push(format!(
                    "the server of slot {index} computes with {other:?}, the trainers with {numerics:?}; \
                     the job says reproducible, so the slot stays vacant"
                ));
                offer.member = None;
            }
        }
        refused
    }

    /// Dedicated servers and where they listen.
    pub fn addresses(&self) -> impl Iterator<Item = (PeerId, String)> {
        self.slots.iter().filter_map(|it| match &it.member {
            Some(Member::Server { index, incarnation, address }) => {
                Some((PeerId::server(*index, *incarnation), address.clone()))
            }
            Some(Member::InPlace(_) | Member::Standby(_)) | None => None,
        })
    }

    /// Fillers of the protocol, with the addresses of this view.
    pub fn members(&self, fillers: &[Option<Filler>]) -> Vec<Option<Member>> {
        let server = |id: ServerId| {
            let known = self
                .slots
                .iter()
                .filter_map(|it| it.member.clone())
                .find(|it| filler(it) == Filler::Server(id));
            known.unwrap_or(Member::Server {
                index: id.index,
                incarnation: id.incarnation,
                address: String::new(),
            })
        };
        let member = |it: &Filler| match *it {
            Filler::InPlace(TrainerId(rank)) => Member::InPlace(rank),
            Filler::Standby(TrainerId(rank)) => Member::Standby(rank),
            Filler::Server(id) => server(id),
        };
        fillers.iter().map(|it| it.as_ref().map(member)).collect()
    }

    /// Members for these slots, which may come from another view; `before` are those that filled
    /// them so far. The rank at home fills a slot with a home. A server of this view keeps the
    /// dedicated slot that it fills, since after a change within a step it would have to begin
    /// anew. A slot that is left gets the server of the same number if view and slots have equally
    /// many; otherwise the next server.
    pub fn fill(&self, slots: &[Slot], before: &[Option<Member>]) -> Vec<Option<Member>> {
        let offers = self.slots.iter().filter(|it| it.home.is_none());
        let mut offers: Vec<_> = offers.map(|it| it.member.clone()).collect();
        let mut filled: Vec<_> = slots.iter().map(at_home).collect();
        let dedicated: Vec<_> = (0..slots.len()).filter(|it| slots[*it].home.is_none()).collect();
        for &slot in &dedicated {
            let now = before.get(slot).and_then(Option::as_ref);
            let goes_on = offers.iter_mut().find(|it| it.is_some() && it.as_ref() == now);
            filled[slot] = goes_on.and_then(Option::take);
        }
        if offers.len() == dedicated.len() {
            for (&slot, offer) in dedicated.iter().zip(&mut offers) {
                if filled[slot].is_none() {
                    filled[slot] = offer.take();
                }
            }
        }
        let mut others = offers.into_iter().flatten();
        for slot in dedicated {
            if filled[slot].is_none() {
                filled[slot] = others.next();
            }
        }
        filled
    }
}

/// The member that fills a slot with a home: the trainer there, in place or standing by.
fn at_home(slot: &Slot) -> Option<Member> {
    let RankId(rank) = slot.home?;
    let rank = rank as u16;
    Some(if slot.is_standby() { Member::Standby(rank) } else { Member::InPlace(rank) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(index: u16, numerics: &str) -> Offer {
        let address = "127.0.0.1:1".into();
        Offer {
            weight: 100,
            home: None,
            memory: Some(1 << 20),
            member: Some(Member::Server { index, incarnation: 0, address }),
            numerics: Some(numerics.into()),
        }
    }

    fn view(slots: Vec<Offer>) -> View {
        View { number: ViewNumber::default(), slots }
    }

    #[test]
    fn servers_of_other_numerics_leave_their_slots_vacant() {
        let in_place =
            Offer { home: Some(0), member: Some(Member::InPlace(0)), ..server(2, "gpu") };
        let mut view = view(vec![server(0, "cpu"), server(1, "gpu"), in_place]);
        let refused = view.refuse_foreign("cpu");
        assert_eq!(refused.len(), 1, "what fills a slot in place stays there: {refused:?}");
        assert!(refused[0].contains("slot 1 computes with \"gpu\""), "{refused:?}");
        assert!(view.slots[0].member.is_some() && view.slots[1].member.is_none());
        assert!(view.has_vacancy());
    }

    #[test]
    fn recorded_slots_are_filled_in_order() {
        let view = view(vec![server(4, "cpu")]);
        let slot = |home: Option<u16>, weight| Slot {
            weight,
            head_start: 0,
            home: home.map(|rank| RankId(rank.into())),
            memory: 1,
        };
        let members = view
            .fill(&[slot(None, 100), slot(Some(1), 100), slot(None, 100), slot(Some(0), 0)], &[]);
        assert!(matches!(members[0], Some(Member::Server { index: 4, .. })));
        assert_eq!(members[1..], [Some(Member::InPlace(1)), None, Some(Member::Standby(0))]);
    }

    #[test]
    fn a_server_keeps_its_slot_when_others_leave_the_view() {
        let view = |indices: &[u16]| view(indices.iter().map(|it| server(*it, "cpu")).collect());
        let slots = vec![Slot { weight: 100, head_start: 0, home: None, memory: 1 }; 4];
        let before = view(&[0, 1, 2, 3]).fill(&slots, &[]);
        let shrunk = view(&[3]).fill(&slots, &before);
        assert_eq!(shrunk, [None, None, None, before[3].clone()]);
        let grown = view(&[7, 3]).fill(&slots, &shrunk);
        assert!(matches!(grown[0], Some(Member::Server { index: 7, .. })), "{grown:?}");
        assert_eq!(grown[1..], [None, None, before[3].clone()]);
        // As many slots, of other numbers.
        let (two, pair) = (&slots[..2], view(&[4, 5]).fill(&slots[..2], &[]));
        let next = view(&[5, 6]).fill(two, &pair);
        assert_eq!(next[1], pair[1]);
        assert!(matches!(next[0], Some(Member::Server { index: 6, .. })), "{next:?}");
    }
}
