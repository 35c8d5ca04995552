//! What a trainer knows of its links, found by what is due and by who fills a slot.
//!
//! In: changes of a link, and who fills the slots now. Out: the links on which something is due. What is due is said elsewhere
//! ([`super::links`]).
//!
//! Invariant: an event looks at its own link and at those that are due, not at all of them; a link with a process that fills no
//! slot is let go when nothing is due on it.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use crate::settings::MAX_DOUBLINGS;
use crate::{At, Nanos, Peer, Work};

/// What is to be said to a peer.
#[derive(Debug, Default)]
pub(super) struct Link {
    pub(super) acks: Vec<(At, Work)>,
    pub(super) ack_due: Option<Nanos>,
    pub(super) resend: Option<Nanos>,
    /// Times it was said again since something was heard.
    tries: u32,
    /// First and last break since something was heard.
    pub(super) broken: Option<(Nanos, Nanos)>,
    /// Since when it has not answered what was said again.
    pub(super) asked: Option<Nanos>,
}

impl Link {
    fn deadline(&self) -> Option<Nanos> {
        [self.ack_due, self.resend].into_iter().flatten().min()
    }

    pub(super) fn mended(&mut self) {
        self.asked = None;
        self.broken = None;
        self.tries = 0;
    }

    /// Plans to say everything again, after a wait that doubles with every try.
    pub(super) fn say_again_later(&mut self, now: Nanos, first: Nanos) {
        if self.resend.is_none() {
            self.resend = Some(now.after(Nanos(first.0 << self.tries.min(MAX_DOUBLINGS))));
            self.tries += 1;
        }
    }
}

/// All links of a trainer.
#[derive(Debug, Default)]
pub(super) struct Links {
    all: BTreeMap<Peer, Link>,
    /// Links on which something is due, and when.
    due: BTreeSet<(Nanos, Peer)>,
    /// Who fills a slot in a step that is not over.
    fillers: BTreeSet<Peer>,
    /// Links with anybody else.
    others: BTreeSet<Peer>,
}

impl Links {
    /// The link with a peer, if there is one.
    pub(super) fn get(&self, peer: Peer) -> Option<&Link> {
        self.all.get(&peer)
    }

    /// Changes the link with a peer; makes it, if there is none.
    pub(super) fn change<T>(&mut self, peer: Peer, change: impl FnOnce(&mut Link) -> T) -> T {
        if let Entry::Vacant(unknown) = self.all.entry(peer) {
            unknown.insert(Link::default());
            if !self.fillers.contains(&peer) {
                self.others.insert(peer);
            }
        }
        self.change_known(peer, change).expect("it was just made")
    }

    /// Changes the link with a peer, if there is one.
    pub(super) fn change_known<T>(
        &mut self,
        peer: Peer,
        change: impl FnOnce(&mut Link) -> T,
    ) -> Option<T> {
        let link = self.all.get_mut(&peer)?;
        let before = link.deadline();
        let changed = change(link);
        let after = link.deadline();
        if before != after {
            before.map(|it| self.due.remove(&(it, peer)));
            after.map(|it| self.due.insert((it, peer)));
        }
        Some(changed)
    }

    pub(super) fn remove(&mut self, peer: Peer) {
        if let Some(due) = self.all.remove(&peer).and_then(|it| it.deadline()) {
            self.due.remove(&(due, peer));
        }
        self.others.remove(&peer);
    }

    /// This process was paused: what lasts does so as long as if there had been no pause.
    pub(super) fn paused(&mut self, pause: Nanos) {
        for link in self.all.values_mut() {
            link.asked = link.asked.map(|it| it.after(pause));
            link.broken = link.broken.map(|(first, last)| (first.after(pause), last.after(pause)));
        }
    }

    /// Who fills the slots of all steps from now on.
    pub(super) fn filled(&mut self, fillers: BTreeSet<Peer>) {
        self.others = self.all.keys().filter(|it| !fillers.contains(it)).copied().collect();
        self.fillers = fillers;
    }

    /// Whether a process fills a slot in a step that is not over.
    pub(super) fn fills(&self, peer: Peer) -> bool {
        self.fillers.contains(&peer)
    }

    /// Forgets the links on which nothing is due with processes that fill no slot.
    pub(super) fn let_go(&mut self) {
        let all = &mut self.all;
        self.others.retain(|peer| {
            let owes = all.get(peer).is_some_and(|it| it.deadline().is_some());
            if !owes {
                all.remove(peer);
            }
            owes
        });
    }

    /// Links on which something is due, in the order of peers.
    pub(super) fn due(&self, now: Nanos) -> BTreeSet<Peer> {
        self.due.iter().take_while(|it| it.0 <= now).map(|it| it.1).collect()
    }

    pub(super) fn next_deadline(&self) -> Option<Nanos> {
        self.due.first().map(|it| it.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ServerId, TrainerId};

    fn peer(it: u64) -> Peer {
        if it == 0 {
            return Peer::Trainer(TrainerId(0));
        }
        Peer::Server(ServerId { index: it as u16, incarnation: 0 })
    }

    /// What is found by the indexes is what a walk over all links finds, whatever was done to them.
    #[test]
    fn a_link_is_found_when_something_is_due_and_kept_while_it_is_or_its_peer_fills_a_slot() {
        let (mut links, mut fillers) = (Links::default(), BTreeSet::new());
        let mut state = 1_u64;
        let mut draw = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        let (mut found, mut let_go) = (0, 0);
        for step in 0..5_000 {
            let (it, at) = (peer(draw(5)), Nanos(draw(50)));
            match draw(12) {
                0..3 => {
                    links.change(it, |it| it.ack_due.get_or_insert(at).0);
                }
                3..6 => links.change(it, |it| it.resend = Some(at)),
                6..8 => {
                    links.change_known(it, |it| (it.resend, it.ack_due) = (None, None));
                }
                8 => {
                    links.change_known(it, Link::mended);
                }
                9 => links.remove(it),
                10 => {
                    fillers = (0..draw(4)).map(|_| peer(draw(5))).collect();
                    links.filled(fillers.clone());
                }
                _ => {
                    let before = links.all.len();
                    let kept =
                        |it: &(&Peer, &Link)| fillers.contains(it.0) || it.1.deadline().is_some();
                    let kept: Vec<_> = links.all.iter().filter(kept).map(|it| *it.0).collect();
                    links.let_go();
                    assert!(links.all.keys().eq(&kept), "step {step}");
                    let_go += before - kept.len();
                }
            }
            for now in (0..50).map(Nanos) {
                let due = |it: &(&Peer, &Link)| it.1.deadline().is_some_and(|it| it <= now);
                let due: Vec<_> = links.all.iter().filter(due).map(|it| *it.0).collect();
                found += due.len();
                assert!(links.due(now).into_iter().eq(due), "step {step}");
            }
            let next = links.all.values().filter_map(Link::deadline).min();
            assert_eq!(links.next_deadline(), next, "step {step}");
            assert!((0..5).all(|it| links.fills(peer(it)) == fillers.contains(&peer(it))));
        }
        assert!(found > 1_000 && let_go > 100, "{found} were due, {let_go} were let go");
    }
}
