//! Opens links to peers.
//!
//! In: peers and their addresses. Out: links that are being opened. A peer that has no room, since strangers crowd its port, closes a
//! link without a word: that is no broken link, and it is dialled again after a pause.
//!
//! Invariant: an opening link has opened or failed when the time for a greeting is over, however often it was dialled.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};

use super::Tcp;
use super::greeting::GreetingError;
use super::outgoing::Outgoing;
use super::socket::{self, LinkError, Silence};
use super::stream::Stream;
use crate::peer::PeerId;

const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// Maximum doublings of the pause between two tries.
const MOST_DOUBLINGS: u32 = 5;

impl Tcp {
    /// As [`Provider::connect`](crate::Provider::connect), but dials no earlier than at `at`. The link counts as being opened until
    /// then.
    pub(crate) fn connect_at(&mut self, peer: PeerId, address: &str, at: Instant) {
        if self.outgoing_to(peer).is_some() {
            return;
        }
        if let Err(error) = self.dial(peer, address, at) {
            self.fail(peer, &error);
        }
    }

    /// Begins to connect, or to wait for that.
    fn dial(&mut self, peer: PeerId, address: &str, at: Instant) -> Result<(), String> {
        let newest = self.newest.get(&(peer.role, peer.index)).copied().unwrap_or(0);
        if newest > peer.incarnation {
            return Err(GreetingError::Stale { peer, newest }.to_string());
        }
        self.retire_older(peer);
        let target: SocketAddr =
            address.parse().map_err(|_| format!("address {address:?} is not IP:PORT"))?;
        let refused = |error: io::Error| format!("cannot connect to {address}: {error}");
        let (token, now) = (self.new_token(), self.clock.now());
        let link = if at > now {
            let stream = socket::undialled(target).map_err(refused)?;
            let stream = Stream::opener(stream, self.identity.tls.as_ref());
            let mut link = Outgoing::new((peer, target), stream, at);
            link.rest();
            self.resting.insert((at, token));
            link
        } else {
            let stream = self.open_stream(target, token).map_err(refused)?;
            Outgoing::new((peer, target), stream, now)
        };
        self.opening.insert((link.since, token));
        self.outgoing.insert(token, link);
        self.peers.entry(peer).or_default().outgoing = Some(token);
        Ok(())
    }

    fn open_stream(&self, target: SocketAddr, token: u64) -> io::Result<Stream> {
        let stream = socket::dial(target, Silence::OfProcess(self.limits.silence))?;
        let stream = Stream::opener(stream, self.identity.tls.as_ref());
        let flags = EventFlags::IN | EventFlags::OUT;
        epoll::add(&self.epoll, &stream, EventData::new_u64(token), flags)?;
        Ok(stream)
    }

    /// Handles a failed link. It is dialled again if there is time and the peer closed it without a word, as a peer does while
    /// strangers take all its places.
    ///
    /// # Errors
    ///
    /// Why it is not dialled again.
    pub(super) fn try_again_later(
        &mut self,
        token: u64,
        error: LinkError,
        now: Instant,
    ) -> Result<(), LinkError> {
        let Some(link) = self.outgoing.get_mut(&token) else { return Err(error) };
        if !link.was_turned_away(&error) {
            return Err(error);
        }
        tracing::debug!("{} has no room for a link now: {error}", link.peer);
        // The link keeps its socket until there is another.
        epoll::delete(&self.epoll, &link.stream).map_err(|it| LinkError::Io(it.into()))?;
        let pause = FIRST_PAUSE * (1 << link.tries().min(MOST_DOUBLINGS));
        link.rest_again();
        if now + pause >= link.since + self.limits.greeting {
            return Err(link.silence());
        }
        self.resting.insert((now + pause, token));
        Ok(())
    }

    /// Whether the link to a peer waits to be dialled.
    #[cfg(test)]
    pub(crate) fn is_resting(&self, peer: PeerId) -> bool {
        let token = self.peers.get(&peer).and_then(|it| it.outgoing);
        token.is_some_and(|token| self.resting.iter().any(|it| it.1 == token))
    }

    /// Dials the links again whose pause is over.
    pub(super) fn dial_again(&mut self, now: Instant) {
        while let Some(&(at, token)) = self.resting.first()
            && at <= now
        {
            self.resting.pop_first();
            // A link that was closed meanwhile has no token any more.
            let Some((peer, target)) = self.outgoing.get(&token).map(|it| (it.peer, it.target))
            else {
                continue;
            };
            match self.open_stream(target, token) {
                Ok(stream) => {
                    if let Some(link) = self.outgoing.get_mut(&token) {
                        link.try_again(stream);
                    }
                }
                Err(error) => self.fail(peer, &format!("cannot connect to {target}: {error}")),
            }
        }
    }
}
