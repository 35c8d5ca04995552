//! Sends what is queued for peers, and shares the room for bytes that are asked for among the links.
//!
//! In: links that have something to send, room that has come. Out: requests and messages in the sockets.
//!
//! A link that lacks room takes its turn behind those that lacked it before, and again each time it got some. Where its own window
//! is full it has no turn: what comes over the link makes it restless again.
//!
//! Invariant: while there is no room, no link is looked at because it lacks it.

use super::socket::LinkError;
use super::{Limits, Tcp};
use crate::peer::PeerId;
use crate::provider::Event;

/// A link whose turn is to be settled: it failed, or waits for something else now.
type Sent = (PeerId, u64, Result<(), LinkError>);

impl Tcp {
    /// Sends what is queued for peers, and requests parts as far as windows allow.
    pub(super) fn send(&mut self) {
        let mut sent = Vec::new();
        for token in std::mem::take(&mut self.restless) {
            // All room is for those that wait for it already.
            let room = if self.crowded.is_empty() { self.room() } else { 0 };
            self.send_over(token, room, &mut sent);
        }
        while self.room() > 0
            && let Some(&(turn, token)) = self.crowded.first()
        {
            if self.send_over(token, self.room(), &mut sent) > 0 {
                self.queue_again(turn, token);
            } else if self.crowded.contains(&(turn, token)) {
                break;
            }
        }
        for (peer, token, result) in sent {
            self.settle(peer, token, result);
        }
    }

    /// Bytes that all links together may still ask for.
    fn room(&self) -> u64 {
        self.limits.window_bytes.saturating_sub(self.asked_bytes)
    }

    /// Sends over one link. Returns for how many bytes of the room it has asked.
    fn send_over(&mut self, token: u64, room: u64, sent: &mut Vec<Sent>) -> u64 {
        let Some(link) = self.outgoing.get_mut(&token) else { return 0 };
        let Limits { peer_window_bytes, part_bytes, queued_bytes, .. } = self.limits;
        let before = link.pulls.asked_bytes();
        let result = link.send(room, peer_window_bytes, part_bytes.max(1));
        let asked = link.pulls.asked_bytes() - before;
        self.asked_bytes += asked;
        let lacks_room = matches!(result, Ok(true));
        match link.turn {
            None if lacks_room => {
                self.turns += 1;
                link.turn = Some(self.turns);
                self.crowded.insert((self.turns, token));
            }
            Some(turn) if !lacks_room => {
                link.turn = None;
                self.crowded.remove(&(turn, token));
            }
            None | Some(_) => {}
        }
        if result.is_ok() && link.has_room_again(queued_bytes) {
            self.ledger.events.push(Event::Room { peer: link.peer });
        }
        if result.is_err() || link.has_output() != link.wants_write {
            sent.push((link.peer, token, result.map(drop)));
        }
        asked
    }

    /// A link that lacks more room, after it got some, waits behind all others.
    fn queue_again(&mut self, turn: u64, token: u64) {
        if self.crowded.remove(&(turn, token))
            && let Some(link) = self.outgoing.get_mut(&token)
        {
            self.turns += 1;
            link.turn = Some(self.turns);
            self.crowded.insert((self.turns, token));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::Arc;
    use std::time::Duration;

    use super::super::{Encryption, TcpConfig};
    use super::*;
    use crate::buffer::Buffer;
    use crate::peer::{Piece, RegionKey};
    use crate::provider::{Provider as _, PullRequest};

    fn open(me: PeerId) -> Tcp {
        let (bind, secret, encryption) = (Ipv4Addr::LOCALHOST.into(), [1; 32], Encryption::Off);
        let limits = Limits { window_bytes: 1 << 20, ..Limits::default() };
        Tcp::open(TcpConfig { bind, me, secret, data_version: 1, encryption, limits }).unwrap()
    }

    #[test]
    fn a_round_looks_at_no_link_that_lacks_room() {
        const BYTES: usize = 3 << 20;
        let mut hub = open(PeerId::trainer(0, 0));
        let mut peers: Vec<_> = (0..20).map(|it| open(PeerId::server(it, 0))).collect();
        let mut events = Vec::new();
        for (index, peer) in (0..).zip(&mut peers) {
            peer.publish(RegionKey::default(), Arc::new(Buffer::zeroed(BYTES)));
            hub.connect(PeerId::server(index, 0), &peer.address());
        }
        let links = |it: &[Event]| it.iter().filter(|it| matches!(it, Event::Connected(_))).count();
        while links(&events) < 20 {
            hub.poll(Duration::from_millis(1), &mut events);
            for peer in &mut peers {
                peer.poll(Duration::ZERO, &mut Vec::new());
            }
        }
        for index in 0..20 {
            let (peer, landing) = (PeerId::server(index, 0), hub.land(Buffer::zeroed(BYTES)));
            let pieces = vec![Piece { remote: 0, local: 0, bytes: BYTES as u64 }];
            let (key, patience) = (RegionKey::default(), Duration::from_mins(1));
            hub.pull(PullRequest { peer, key, pieces, landing, patience });
        }
        // The first takes all room; the others ask for what an idle link always may.
        for _ in 0..3 {
            hub.poll(Duration::ZERO, &mut events);
            assert_eq!((hub.room(), hub.crowded.len(), hub.restless.len()), (0, 20, 0));
        }
        let ended = |it: &&Event| matches!(it, Event::Pulled { result: Ok(_), .. });
        while events.iter().filter(ended).count() < 20 {
            hub.poll(Duration::from_millis(1), &mut events);
            for peer in &mut peers {
                peer.poll(Duration::ZERO, &mut Vec::new());
            }
        }
        assert_eq!((hub.asked_bytes, hub.crowded.len(), hub.restless.len()), (0, 0, 0));
    }
}
