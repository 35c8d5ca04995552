//! Whom this process knows: where peers listen, and how many they are.
//!
//! In: names and addresses, from the controller and from headers. Out: addresses for links.
//!
//! Invariant: of a server that starts again and again the newest incarnations alone are remembered, and whom a step names.

use cadre_exchange::PeerId;
use cadre_protocol::{Peer, ServerId};

use super::{KEPT_INCARNATIONS, Shared, peer_of};
use crate::io::exchange::Exchange;
use crate::io::output::Output;

impl<P: Exchange> Shared<P> {
    /// Learns where a peer listens. Servers that many others have followed under their name are forgotten.
    pub fn know(&mut self, id: PeerId, address: &str) {
        if address.is_empty() {
            return;
        }
        let peer = peer_of(id);
        // Servers have no links among them.
        let is_linked = [peer, self.me].iter().any(|it| matches!(it, Peer::Trainer(_)));
        let counts = is_linked && peer != self.me && !self.is_named(peer);
        let is_new = self.addresses.insert(peer, (id, address.to_owned())).is_none();
        if counts {
            self.names += 1;
            if let Err(why) = self.provider.allow(self.names) {
                self.outputs.put(Output::Crowded(why.to_string()));
            }
        }
        if is_new && let Peer::Server(newest) = peer {
            self.forget_older(newest);
        }
    }

    /// Whether a peer is known, in whichever incarnation.
    fn is_named(&self, peer: Peer) -> bool {
        match peer {
            Peer::Trainer(_) => self.addresses.get(peer).is_some(),
            Peer::Server(id) => self.addresses.namesakes(id).next().is_some(),
        }
    }

    /// Forgets servers of the name of `id`, but for the newest ones: the one before may not know yet that it was declared lost, and
    /// the conductor tells it so. Whom a step that runs names stays, too.
    fn forget_older(&mut self, id: ServerId) {
        let mut older: Vec<_> = self.addresses.namesakes(id).collect();
        older.truncate(older.len().saturating_sub(KEPT_INCARNATIONS));
        older.retain(|&it| {
            it != id && !self.steps.values().any(|step| step.names(Peer::Server(it)))
        });
        for server in older {
            self.addresses.remove(server);
            self.forget_replaced(Peer::Server(server));
        }
    }

    /// How many peers are remembered: by their addresses, by what they were told, by what they have said.
    pub fn remembered(&self) -> [usize; 3] {
        let [told, heard] = self.telling.peers();
        [self.addresses.len(), told, heard]
    }

    /// The exchange's name of a peer, once it is known where it listens.
    pub fn id_of(&self, peer: Peer) -> Option<PeerId> {
        self.addresses.get(peer).map(|it| it.0)
    }

    /// Where a peer listens, once it is known.
    pub fn address_of(&self, peer: Peer) -> Option<&str> {
        self.addresses.get(peer).map(|it| it.1.as_str())
    }

    /// All other trainers that are known.
    pub fn trainers(&self) -> Vec<Peer> {
        self.addresses.trainers().filter(|it| *it != self.me).collect()
    }
}
