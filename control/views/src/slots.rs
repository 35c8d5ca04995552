//! Slots of a job and who fills them.
//!
//! In: servers that register, die, are added or taken away. Out: the slots of a view. Dedicated slots come
//! first in the order of their servers, then those of in-place servers, then slots that were added later;
//! a slot's number never changes, since the bits of a run hang on it.
//!
//! ```text
//!            fill                    vacate
//! vacant ──────────► filled ────────────────────► vacant ──reshape──► gone
//!    ▲                  │ remove                     ▲                  │ fill
//!    │                  ▼                            └──────◄───────────┘
//!    └────append──── removed
//! ```
//!
//! No clock and no IO: time is an argument.

use std::time::Duration;

/// Weight of a slot as long as nothing was learnt about it.
pub const NOMINAL_WEIGHT: u32 = 100;

/// What kind of server computes in a slot.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Kind {
    /// A server process of its own.
    Dedicated,
    /// A library inside a trainer's process.
    InPlace,
}

/// A server as a view offers it.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Server {
    /// Index of a dedicated server; rank of the trainer of an in-place one.
    pub index: u32,
    /// Which start of it.
    pub incarnation: u32,
    /// Address at which it listens, `host:port`.
    pub address: String,
    /// Bytes that it may use for tensors of others.
    pub memory: u64,
    /// Equal ids compute equal bits.
    pub numerics: String,
}

/// A place in a job's plan.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Slot {
    /// Its number.
    pub number: u32,
    /// Part of the work that it gets; 100 is the nominal one.
    pub weight: u32,
    /// What kind of server computes in it.
    pub kind: Kind,
    /// The server that fills it; none while vacant.
    pub server: Option<Server>,
}

/// The slots of one job.
#[derive(Clone, Debug, Default)]
pub struct Slots {
    slots: Vec<Place>,
}

#[derive(Clone, Debug)]
struct Place {
    kind: Kind,
    index: u32,
    weight: u32,
    filler: Filler,
}

#[derive(Clone, Debug)]
enum Filler {
    Here(Server),
    Vacant {
        since: Duration,
    },
    /// Vacant for so long that it is no longer in the view. A server that registers for it brings
    /// it back.
    Gone,
    /// Taken away from the job.
    Removed,
}

impl Slots {
    /// One slot per dedicated server and, in place, one per trainer; all vacant.
    pub fn new(
        servers: impl IntoIterator<Item = u32>,
        in_place_trainers: u32,
        now: Duration,
    ) -> Self {
        let vacant = |kind| {
            move |index| Place {
                kind,
                index,
                weight: NOMINAL_WEIGHT,
                filler: Filler::Vacant { since: now },
            }
        };
        let dedicated = servers.into_iter().map(vacant(Kind::Dedicated));
        let in_place = (0..in_place_trainers).map(vacant(Kind::InPlace));
        Self { slots: dedicated.chain(in_place).collect() }
    }

    /// Continues from a view of another controller, with its slots, their numbers and their
    /// servers. The view does not name the former servers of vacant dedicated slots: `owner`
    /// returns their indices, one slot after the other.
    pub fn adopt(view: &[Slot], mut owner: impl FnMut() -> u32, now: Duration) -> Self {
        let length = view.iter().map(|it| it.number as usize + 1).max().unwrap_or(0);
        let removed =
            Place { kind: Kind::Dedicated, index: u32::MAX, weight: 0, filler: Filler::Removed };
        let mut slots = vec![removed; length];
        let trainers = view.iter().filter(|it| it.kind == Kind::InPlace);
        let mut ranks = (0..trainers.count() as u32).collect::<Vec<_>>();
        for slot in view.iter().filter(|it| it.kind == Kind::InPlace) {
            ranks.retain(|it| slot.server.as_ref().is_none_or(|server| server.index != *it));
        }
        let mut ranks = ranks.into_iter();
        for slot in view {
            let index = match (&slot.server, slot.kind) {
                (Some(server), _) => server.index,
                (None, Kind::Dedicated) => owner(),
                (None, Kind::InPlace) => ranks.next().unwrap_or(u32::MAX),
            };
            let vacant = Filler::Vacant { since: now };
            let filler = slot.server.clone().map_or(vacant, Filler::Here);
            let place = Place { kind: slot.kind, index, weight: slot.weight, filler };
            slots[slot.number as usize] = place;
        }
        Self { slots }
    }

    /// Adds the slot of a dedicated server, behind all others; one that was taken away comes back where
    /// it was.
    pub fn append(&mut self, index: u32, now: Duration) {
        let filler = Filler::Vacant { since: now };
        match self.find(Kind::Dedicated, index) {
            Some(place) if matches!(place.filler, Filler::Removed) => place.filler = filler,
            Some(_) => {}
            None => {
                let (kind, weight) = (Kind::Dedicated, NOMINAL_WEIGHT);
                self.slots.push(Place { kind, index, weight, filler });
            }
        }
    }

    /// Takes the slot of a dedicated server away.
    pub fn remove(&mut self, index: u32) {
        if let Some(place) = self.find(Kind::Dedicated, index) {
            place.filler = Filler::Removed;
        }
    }

    /// A server has registered.
    pub fn fill(&mut self, kind: Kind, server: Server) {
        if let Some(place) = self.find(kind, server.index)
            && !matches!(place.filler, Filler::Removed)
        {
            place.filler = Filler::Here(server);
        }
    }

    /// A server is dead or lost; true when its slot is vacant because of that.
    pub fn vacate(&mut self, kind: Kind, index: u32, incarnation: u32, now: Duration) -> bool {
        let Some(place) = self.find(kind, index) else { return false };
        let here =
            matches!(&place.filler, Filler::Here(server) if server.incarnation == incarnation);
        if here {
            place.filler = Filler::Vacant { since: now };
        }
        here
    }

    /// Makes all slots vacant, for an attempt whose servers all start anew. Slots that were taken
    /// away stay so.
    pub fn vacate_all(&mut self, now: Duration) {
        for place in &mut self.slots {
            if !matches!(place.filler, Filler::Removed) {
                place.filler = Filler::Vacant { since: now };
            }
        }
    }

    /// Sets what part of the work a slot gets.
    pub fn weigh(&mut self, kind: Kind, index: u32, weight: u32) {
        if let Some(place) = self.find(kind, index) {
            place.weight = weight;
        }
    }

    /// Takes slots out that have been vacant for `after`, but never the last one. Out: their numbers.
    pub fn reshape(&mut self, now: Duration, after: Duration) -> Vec<u32> {
        let mut left = self.present().count();
        let mut gone = Vec::new();
        for (number, place) in (0_u32..).zip(&mut self.slots) {
            let late = matches!(place.filler, Filler::Vacant { since } if since + after <= now);
            if late && left > 1 {
                place.filler = Filler::Gone;
                left -= 1;
                gone.push(number);
            }
        }
        gone
    }

    /// When [`Self::reshape`] has something to do next.
    pub fn next_reshape(&self, after: Duration) -> Option<Duration> {
        if self.present().count() <= 1 {
            return None;
        }
        let due = self.slots.iter().filter_map(|it| match it.filler {
            Filler::Vacant { since } => Some(since + after),
            Filler::Here(_) | Filler::Gone | Filler::Removed => None,
        });
        due.min()
    }

    /// The slots as the conductor gets them.
    pub fn view(&self) -> Vec<Slot> {
        let slot = |(number, place): (u32, &Place)| Slot {
            number,
            weight: place.weight,
            kind: place.kind,
            server: match &place.filler {
                Filler::Here(server) => Some(server.clone()),
                Filler::Vacant { .. } | Filler::Gone | Filler::Removed => None,
            },
        };
        self.present().map(slot).collect()
    }

    /// Dedicated servers whose slots the job has, present or not, in the order of their slots.
    pub fn dedicated(&self) -> impl Iterator<Item = u32> {
        let has = |it: &&Place| it.kind == Kind::Dedicated && !matches!(it.filler, Filler::Removed);
        self.slots.iter().filter(has).map(|it| it.index)
    }

    fn find(&mut self, kind: Kind, index: u32) -> Option<&mut Place> {
        self.slots.iter_mut().find(|it| it.kind == kind && it.index == index)
    }

    fn present(&self) -> impl Iterator<Item = (u32, &Place)> {
        let numbered = (0_u32..).zip(&self.slots);
        numbered.filter(|(_, it)| !matches!(it.filler, Filler::Gone | Filler::Removed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    fn server(index: u32, incarnation: u32) -> Server {
        Server { index, incarnation, ..Server::default() }
    }

    /// `D1.0` is incarnation 0 of dedicated server 1, `I-` a vacant slot of a trainer.
    fn written(slots: &Slots) -> String {
        let text = |slot: Slot| {
            let kind = if slot.kind == Kind::Dedicated { "D" } else { "I" };
            let who =
                slot.server.map_or("-".into(), |it| format!("{}.{}", it.index, it.incarnation));
            format!("{}:{kind}{who}", slot.number)
        };
        slots.view().into_iter().map(text).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn dedicated_slots_come_first_and_added_ones_last() {
        let mut slots = Slots::new(0..2, 2, seconds(0));
        slots.append(2, seconds(1));
        slots.fill(Kind::InPlace, server(1, 0));
        slots.fill(Kind::Dedicated, server(2, 0));
        slots.fill(Kind::Dedicated, server(1, 4));
        assert_eq!(written(&slots), "0:D- 1:D1.4 2:I- 3:I1.0 4:D2.0");
    }

    #[test]
    fn a_late_death_does_not_empty_the_slot_of_the_replacement() {
        let mut slots = Slots::new(0..1, 0, seconds(0));
        slots.fill(Kind::Dedicated, server(0, 1));
        assert!(!slots.vacate(Kind::Dedicated, 0, 0, seconds(1)));
        assert_eq!(written(&slots), "0:D0.1");
        assert!(slots.vacate(Kind::Dedicated, 0, 1, seconds(1)));
        assert_eq!(written(&slots), "0:D-");
    }

    #[test]
    fn a_slot_leaves_when_vacant_for_too_long_and_returns_under_its_number() {
        let mut slots = Slots::new(0..2, 0, seconds(0));
        slots.fill(Kind::Dedicated, server(0, 0));
        slots.fill(Kind::Dedicated, server(1, 0));
        slots.vacate(Kind::Dedicated, 0, 0, seconds(5));
        assert_eq!(slots.next_reshape(seconds(10)), Some(seconds(15)));
        assert_eq!(slots.reshape(seconds(14), seconds(10)), Vec::<u32>::new());
        assert_eq!(slots.reshape(seconds(15), seconds(10)), [0]);
        assert_eq!(written(&slots), "1:D1.0");
        slots.vacate(Kind::Dedicated, 1, 0, seconds(16));
        assert_eq!(
            slots.reshape(seconds(99), seconds(10)),
            Vec::<u32>::new(),
            "the last one stays"
        );
        assert_eq!(slots.next_reshape(seconds(10)), None);
        slots.fill(Kind::Dedicated, server(0, 1));
        assert_eq!(written(&slots), "0:D0.1 1:D-");
    }

    #[test]
    fn a_slot_taken_away_is_empty_for_all_until_it_is_given_back() {
        let mut slots = Slots::new([3, 5], 1, seconds(0));
        slots.fill(Kind::Dedicated, server(5, 0));
        slots.remove(5);
        slots.fill(Kind::Dedicated, server(5, 0));
        slots.vacate_all(seconds(1));
        assert_eq!(written(&slots), "0:D- 2:I-");
        assert_eq!(slots.dedicated().collect::<Vec<_>>(), [3]);
        slots.append(5, seconds(2));
        slots.append(9, seconds(2));
        slots.fill(Kind::Dedicated, server(5, 1));
        assert_eq!(written(&slots), "0:D- 1:D5.1 2:I- 3:D-");
    }

    #[test]
    fn an_adopted_view_is_offered_again_slot_for_slot() {
        let mut slots = Slots::new([0, 1, 4], 2, seconds(0));
        slots.fill(Kind::Dedicated, server(4, 2));
        slots.fill(Kind::InPlace, server(0, 0));
        slots.weigh(Kind::Dedicated, 4, 87);
        slots.remove(0);
        let view = slots.view();
        let mut adopted = Slots::adopt(&view, || 1, seconds(0));
        assert_eq!(adopted.view(), view);
        adopted.fill(Kind::InPlace, server(1, 0));
        adopted.fill(Kind::Dedicated, server(1, 7));
        assert_eq!(written(&adopted), "1:D1.7 2:D4.2 3:I0.0 4:I1.0");
    }
}
