//! Slots of the pool and who fills them.
//!
//! In: servers that register, die or are added. Out: the slots of a view. Dedicated slots come first
//! in the order of their servers, then those of in-place servers, then slots that were added later;
//! a slot's number never changes, since the bits of a run hang on it.
//!
//! ```text
//!            fill                    vacate
//! vacant ──────────► filled ────────────────────► vacant ──reshape──► gone
//!                                                    ▲                  │ fill
//!                                                    └──────◄───────────┘
//! ```
//!
//! No clock and no IO: time is an argument.

use std::time::Duration;

use cadre_control::proto::{Kind, Server, Slot};

/// Weight of a slot as long as nothing was learnt about it.
const NOMINAL_WEIGHT: u32 = 100;

/// The slots of one job.
#[derive(Clone, Debug)]
pub(crate) struct Slots {
    slots: Vec<Place>,
}

#[derive(Clone, Debug)]
struct Place {
    kind: Kind,
    index: u16,
    filler: Filler,
}

#[derive(Clone, Debug)]
enum Filler {
    Here(Server),
    Vacant {
        since: Duration,
    },
    /// Vacant for so long that the view no longer has the slot.
    Gone,
}

impl Slots {
    /// One slot per dedicated server and, in place, one per trainer; all vacant.
    pub(crate) fn new(servers: u16, in_place_trainers: u16, now: Duration) -> Self {
        let vacant =
            |kind| move |index| Place { kind, index, filler: Filler::Vacant { since: now } };
        let dedicated = (0..servers).map(vacant(Kind::Dedicated));
        let in_place = (0..in_place_trainers).map(vacant(Kind::InPlace));
        Self { slots: dedicated.chain(in_place).collect() }
    }

    /// Appends the slot of an added dedicated server.
    pub(crate) fn append(&mut self, index: u16, now: Duration) {
        let filler = Filler::Vacant { since: now };
        self.slots.push(Place { kind: Kind::Dedicated, index, filler });
    }

    /// A server has registered.
    pub(crate) fn fill(&mut self, kind: Kind, server: Server) {
        let index = server.index;
        if let Some(place) =
            self.slots.iter_mut().find(|it| it.kind == kind && u32::from(it.index) == index)
        {
            place.filler = Filler::Here(server);
        }
    }

    /// A server is dead or lost; true when its slot is vacant because of that.
    pub(crate) fn vacate(
        &mut self,
        kind: Kind,
        index: u16,
        incarnation: u32,
        now: Duration,
    ) -> bool {
        for place in self.slots.iter_mut().filter(|it| it.kind == kind && it.index == index) {
            if matches!(&place.filler, Filler::Here(server) if server.incarnation == incarnation) {
                place.filler = Filler::Vacant { since: now };
                return true;
            }
        }
        false
    }

    /// All servers start anew; every slot is back.
    pub(crate) fn vacate_all(&mut self, now: Duration) {
        for place in &mut self.slots {
            place.filler = Filler::Vacant { since: now };
        }
    }

    /// Takes slots out that have been vacant for `after`, but never the last one. Out: their numbers.
    pub(crate) fn reshape(&mut self, now: Duration, after: Duration) -> Vec<u32> {
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
    pub(crate) fn next_reshape(&self, after: Duration) -> Option<Duration> {
        if self.present().count() <= 1 {
            return None;
        }
        let due = self.slots.iter().filter_map(|it| match it.filler {
            Filler::Vacant { since } => Some(since + after),
            Filler::Here(_) | Filler::Gone => None,
        });
        due.min()
    }

    /// The slots as the conductor gets them.
    pub(crate) fn view(&self) -> Vec<Slot> {
        let slot = |(number, place): (u32, &Place)| Slot {
            slot: number,
            weight: NOMINAL_WEIGHT,
            kind: place.kind.into(),
            server: match &place.filler {
                Filler::Here(server) => Some(server.clone()),
                Filler::Vacant { .. } | Filler::Gone => None,
            },
        };
        self.present().map(slot).collect()
    }

    fn present(&self) -> impl Iterator<Item = (u32, &Place)> {
        let numbered = (0_u32..).zip(&self.slots);
        numbered.filter(|(_, place)| !matches!(place.filler, Filler::Gone))
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

    /// `D1.0` is incarnation 0 of dedicated server 1, `I0.-` a vacant slot of trainer 0.
    fn written(slots: &Slots) -> String {
        let text = |slot: Slot| {
            let kind = if slot.kind() == Kind::Dedicated { "D" } else { "I" };
            let who =
                slot.server.map_or("-".into(), |it| format!("{}.{}", it.index, it.incarnation));
            format!("{}:{kind}{who}", slot.slot)
        };
        slots.view().into_iter().map(text).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn dedicated_slots_come_first_and_added_ones_last() {
        let mut slots = Slots::new(2, 2, seconds(0));
        slots.append(2, seconds(1));
        slots.fill(Kind::InPlace, server(1, 0));
        slots.fill(Kind::Dedicated, server(2, 0));
        slots.fill(Kind::Dedicated, server(1, 4));
        assert_eq!(written(&slots), "0:D- 1:D1.4 2:I- 3:I1.0 4:D2.0");
    }

    #[test]
    fn a_late_death_does_not_empty_the_slot_of_the_replacement() {
        let mut slots = Slots::new(1, 0, seconds(0));
        slots.fill(Kind::Dedicated, server(0, 1));
        assert!(!slots.vacate(Kind::Dedicated, 0, 0, seconds(1)));
        assert_eq!(written(&slots), "0:D0.1");
        assert!(slots.vacate(Kind::Dedicated, 0, 1, seconds(1)));
        assert_eq!(written(&slots), "0:D-");
    }

    #[test]
    fn a_slot_leaves_when_vacant_for_too_long_and_returns_under_its_number() {
        let mut slots = Slots::new(2, 0, seconds(0));
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
}
