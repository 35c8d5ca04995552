//! Where peers listen. A message to all looks up each of them, and every message its sender: trainers are found by their rank.
//!
//! Invariant: of each peer one address is kept, the last that was learnt.

use std::collections::BTreeMap;

use cadre_exchange::PeerId;
use cadre_protocol::{Peer, ServerId, TrainerId};

type Known = (PeerId, String);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    /// By rank.
    trainers: Vec<Option<Known>>,
    servers: BTreeMap<ServerId, Known>,
}

impl Addresses {
    /// The exchange's name of a peer, and where it listens.
    pub(super) fn get(&self, peer: Peer) -> Option<&Known> {
        match peer {
            Peer::Trainer(id) => self.trainers.get(usize::from(id.0))?.as_ref(),
            Peer::Server(id) => self.servers.get(&id),
        }
    }

    /// Out: what was known before.
    pub(super) fn insert(&mut self, peer: Peer, known: Known) -> Option<Known> {
        match peer {
            Peer::Trainer(TrainerId(rank)) => {
                let rank = usize::from(rank);
                if self.trainers.len() <= rank {
                    self.trainers.resize(rank + 1, None);
                }
                self.trainers[rank].replace(known)
            }
            Peer::Server(id) => self.servers.insert(id, known),
        }
    }

    /// Forgets a server.
    pub(super) fn remove(&mut self, server: ServerId) {
        self.servers.remove(&server);
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.trainers.iter().flatten().count() + self.servers.len()
    }

    /// All trainers, by rank.
    pub(super) fn trainers(&self) -> impl Iterator<Item = Peer> {
        let known = (0..).map(TrainerId).zip(&self.trainers).filter(|it| it.1.is_some());
        known.map(|it| Peer::Trainer(it.0))
    }

    /// Servers of the name of `id`, whatever their incarnation, the newest last.
    pub(super) fn namesakes(&self, id: ServerId) -> impl Iterator<Item = ServerId> {
        let name = |incarnation| ServerId { incarnation, ..id };
        self.servers.range(name(0)..=name(u32::MAX)).map(|it| *it.0)
    }
}
