//! The slots of the run and their occupants, as messages of the control service.
//!
//! In: servers that register, die or are added. Out: the slots of a view. What happens to them is decided
//! by [`cadre_views::Slots`], for this controller and the operator alike.

use std::time::Duration;

use cadre_control::proto::{Kind, Server, Slot};

/// The slots of one job.
#[derive(Clone, Debug)]
pub(crate) struct Slots(cadre_views::Slots);

impl Slots {
    /// One slot per dedicated server and, in place, one per trainer; all vacant.
    pub(crate) fn new(servers: u16, in_place_trainers: u16, now: Duration) -> Self {
        Self(cadre_views::Slots::new(0..u32::from(servers), in_place_trainers.into(), now))
    }

    /// Appends the slot of an added dedicated server.
    pub(crate) fn append(&mut self, index: u16, now: Duration) {
        self.0.append(index.into(), now);
    }

    /// A server has registered.
    pub(crate) fn fill(&mut self, kind: Kind, server: Server) {
        let Server { index, incarnation, exchange_address, memory_bytes, numerics_id } = server;
        let server = cadre_views::Server {
            index,
            incarnation,
            address: exchange_address,
            memory: memory_bytes,
            numerics: numerics_id,
        };
        self.0.fill(of(kind), server);
    }

    /// Makes the slot of a dead or lost server vacant. True if it was not vacant before.
    pub(crate) fn vacate(
        &mut self,
        kind: Kind,
        index: u16,
        incarnation: u32,
        now: Duration,
    ) -> bool {
        self.0.vacate(of(kind), index.into(), incarnation, now)
    }

    /// Makes all slots vacant and restores removed ones: all servers start anew.
    pub(crate) fn vacate_all(&mut self, now: Duration) {
        self.0.vacate_all(now);
    }

    /// Removes slots that have been vacant for `after`, but never the last one. Returns their numbers.
    pub(crate) fn reshape(&mut self, now: Duration, after: Duration) -> Vec<u32> {
        self.0.reshape(now, after)
    }

    /// Time at which [`Self::reshape`] next has a slot to remove.
    pub(crate) fn next_reshape(&self, after: Duration) -> Option<Duration> {
        self.0.next_reshape(after)
    }

    /// The slots of the view for the conductor.
    pub(crate) fn view(&self) -> Vec<Slot> {
        let server = |it: cadre_views::Server| Server {
            index: it.index,
            incarnation: it.incarnation,
            exchange_address: it.address,
            memory_bytes: it.memory,
            numerics_id: it.numerics,
        };
        let slot = |it: cadre_views::Slot| Slot {
            slot: it.number,
            weight: it.weight,
            kind: match it.kind {
                cadre_views::Kind::Dedicated => Kind::Dedicated,
                cadre_views::Kind::InPlace => Kind::InPlace,
            }
            .into(),
            server: it.server.map(server),
        };
        self.0.view().into_iter().map(slot).collect()
    }
}

fn of(kind: Kind) -> cadre_views::Kind {
    match kind {
        Kind::InPlace => cadre_views::Kind::InPlace,
        Kind::Dedicated | Kind::Unspecified => cadre_views::Kind::Dedicated,
    }
}
