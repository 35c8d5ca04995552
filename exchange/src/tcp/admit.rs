//! Lets peers in: accepts links, hears greetings, turns strangers away.
//!
//! In: connections to our port. Out: links of peers that have proved who they are, and refusals. Who has to wait, and who loses
//! its place to others, says the [lobby](super::lobby).
//!
//! Invariant: a stranger that has not proved that it belongs to the job changes nothing here.

use std::io;
use std::time::{Duration, Instant};

use rustix::event::epoll;

use super::Tcp;
use super::door::Stranger;
use super::greeting::{GreetingError, Verdict};
use super::incoming::Incoming;
use super::run::{LISTENER, nonce};
use super::socket::{self, LinkError, Silence};
use super::stream::Stream;
use crate::peer::PeerId;
use crate::provider::Event;

/// How long nothing is accepted after the process ran out of descriptors.
const DEAF: Duration = Duration::from_millis(100);
/// Pause while too many strangers have sent a hello and not yet a proof.
const CROWD: Duration = Duration::from_millis(5);
/// Maximum links that are accepted before peers are served.
const TURN_LINKS: usize = 256;
/// Links that are accepted before peers are served, where each needs a TLS handshake.
const TURN_HANDSHAKES: usize = 32;
const CROWDED: &str = "too many links waited that had proved nothing, and it was the oldest";
const LEFT: &str = "it left before it proved that it knows the job's secret";

impl Tcp {
    /// Accepts waiting links and reads their first bytes: a peer sends its hello at once.
    pub(super) fn accept(&mut self) {
        let turn = if self.identity.tls.is_some() { TURN_HANDSHAKES } else { TURN_LINKS };
        for _ in 0..turn {
            if self.strangers.is_crowded(self.clock.now()) {
                return self.rest_ears(CROWD);
            }
            let (stream, address) = match self.listener.accept() {
                Ok(stranger) => stranger,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.said_deaf = false;
                    return;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => {
                    if !std::mem::replace(&mut self.said_deaf, true) {
                        tracing::warn!(%error, "cannot accept links: raise the limit of open files");
                    }
                    // A descriptor may be free again as soon as a stranger is turned away.
                    drop(self.strangers.drop_silent());
                    return self.rest_ears(DEAF);
                }
            };
            let (token, now) = (self.new_token(), self.clock.now());
            let ready = socket::prepare(&stream, Silence::OfProcess(self.limits.silence))
                .and_then(|()| self.watch(&stream, token));
            match ready {
                Ok(()) => {
                    let stream = Stream::acceptor(stream, self.identity.tls.as_ref());
                    let stranger = Stranger::new(stream, address);
                    if let Some(other) = self.strangers.enter(token, stranger, address.ip(), now) {
                        self.turn_away(&other, CROWDED);
                    }
                    self.serve_stranger(token);
                }
                Err(error) => tracing::debug!(%address, %error, "a link broke before its greeting"),
            }
        }
    }

    /// Pauses accepting links; new ones wait in the kernel's queue.
    fn rest_ears(&mut self, pause: Duration) {
        if self.deaf_until.is_none() && epoll::delete(&self.epoll, &self.listener).is_ok() {
            self.deaf_until = Some(self.clock.now() + pause);
        }
    }

    /// Accepts links again after the pause, or after another one where the system does not watch the port yet.
    pub(super) fn hear_again(&mut self, now: Instant) {
        if self.deaf_until.is_some_and(|it| it <= now) {
            let watched = self.watch(&self.listener, LISTENER);
            self.deaf_until = watched.is_err().then(|| now + DEAF);
        }
    }

    pub(super) fn serve_stranger(&mut self, token: u64) {
        let Some(stranger) = self.strangers.get_mut(token) else { return };
        let advanced = stranger.advance(&self.identity, nonce);
        if matches!(advanced, Ok(None)) {
            if stranger.has_greeted()
                && let Some(other) = self.strangers.greeted(token)
            {
                self.turn_away(&other, CROWDED);
            }
            return;
        }
        let Some(stranger) = self.strangers.leave(token) else { return };
        match advanced {
            Ok(Some(peer)) => self.admit(token, peer, stranger),
            Err(LinkError::Ended) => self.turn_away(&stranger, LEFT),
            Err(error) => self.refuse(&stranger, &error.to_string()),
            Ok(None) => {}
        }
    }

    /// Closes a stranger's link. One that has said nothing is a probe of the port, not worth a word.
    pub(super) fn turn_away(&mut self, stranger: &Stranger, reason: &str) {
        if stranger.has_spoken() {
            self.refuse(stranger, reason);
        }
    }

    fn refuse(&mut self, stranger: &Stranger, reason: &str) {
        let (from, reason) = (stranger.address.to_string(), reason.to_owned());
        self.ledger.events.push(Event::Refused { from, reason });
    }

    /// The stranger has proved to be `peer`.
    fn admit(&mut self, token: u64, peer: PeerId, mut stranger: Stranger) {
        let newest = self.newest.get(&(peer.role, peer.index)).copied().unwrap_or(0);
        if newest > peer.incarnation {
            // The stranger may not read the verdict; the link ends in any case.
            let _ = socket::write_whole(&mut stranger.stream, &Verdict::Stale { newest }.encode());
            let error = GreetingError::Stale { peer, newest };
            return self.refuse(&stranger, &error.to_string());
        }
        self.retire_older(peer);
        if self.peers.get(&peer).is_some_and(|it| it.incoming.is_some()) {
            self.fail(peer, "the peer opened a new link in place of its old one");
        }
        if let Err(error) = socket::write_whole(&mut stranger.stream, &Verdict::Welcome.encode()) {
            return self.refuse(&stranger, &error.to_string());
        }
        self.peers.entry(peer).or_default().incoming = Some(token);
        self.incoming.insert(token, Incoming::new(peer, stranger.stream));
    }

    /// Closes the links of older incarnations of a peer.
    pub(super) fn retire_older(&mut self, peer: PeerId) {
        self.newest.insert((peer.role, peer.index), peer.incarnation);
        let first = PeerId { incarnation: 0, ..peer };
        let older: Vec<_> = self.peers.range(first..peer).map(|(&it, _)| it).collect();
        for older in older {
            self.fail(older, &format!("{peer} has taken its place"));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::super::{Encryption, Limits, TcpConfig};
    use super::*;
    use crate::clock::Clock;

    #[test]
    fn a_port_that_cannot_be_watched_again_is_tried_after_a_pause() {
        let (clock, hand) = Clock::driven();
        let (bind, me, limits) =
            (Ipv4Addr::LOCALHOST.into(), PeerId::server(0, 0), Limits::default());
        let (secret, encryption) = ([1; 32], Encryption::Off);
        let config = TcpConfig { bind, me, secret, data_version: 1, encryption, limits };
        let mut tcp = Tcp::open_at(config, clock.clone()).unwrap();
        tcp.rest_ears(DEAF);
        // What is watched already is refused.
        tcp.watch(&tcp.listener, LISTENER).unwrap();
        hand.advance(DEAF);
        tcp.hear_again(clock.now());
        assert_eq!(tcp.deaf_until, Some(clock.now() + DEAF), "a poll would not sleep");
        epoll::delete(&tcp.epoll, &tcp.listener).unwrap();
        hand.advance(DEAF);
        tcp.hear_again(clock.now());
        assert_eq!(tcp.deaf_until, None);
    }
}
