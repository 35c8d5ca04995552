//! The poll of the `tcp` provider: waits for sockets, and does what each one is ready for.
//!
//! Flow of one round: send what is queued, end what is late, wait, serve each ready link for one turn.
//!
//! Invariants: a broken rule or link ends the links with that peer and no other; a round never blocks but in
//! the wait, and there no longer than to the next deadline.

use std::io;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::rand::{GetRandomFlags, getrandom};

use super::door::Stranger;
use super::greeting::{GreetingError, Verdict};
use super::incoming::Incoming;
use super::outgoing::{Outgoing, Progress};
use super::socket::{self, LinkError};
use super::{Links, Tcp};
use crate::peer::PeerId;
use crate::provider::{Event, PullError};

/// Tokens of what is not a link.
pub(super) const WAKER: u64 = 0;
pub(super) const LISTENER: u64 = 1;
pub(super) const FIRST_LINK: u64 = 2;

/// Sockets that one wait reports; others have their turn in the next one.
const READY: usize = 64;
/// How long nothing is accepted after the process ran out of descriptors.
const DEAF: Duration = Duration::from_millis(100);

impl Tcp {
    /// Rounds until there is an event, a wake, or the timeout is over.
    pub(super) fn run(&mut self, timeout: Duration) {
        let until = Instant::now().checked_add(timeout);
        let mut woken = false;
        loop {
            self.send();
            self.end_what_is_late(Instant::now());
            let now = Instant::now();
            let over = until.is_some_and(|it| it <= now);
            let done = woken || over || !self.ledger.events.is_empty();
            let wait = if done { Some(now) } else { earliest(until, self.next_timer()) };
            let ready = self.wait(wait.map(|it| it.saturating_duration_since(now)));
            for (token, flags) in ready {
                woken |= token == WAKER;
                self.serve(token, flags);
            }
            if done || woken || !self.ledger.events.is_empty() {
                self.send();
                return;
            }
        }
    }

    fn wait(&self, timeout: Option<Duration>) -> Vec<(u64, EventFlags)> {
        // A time that does not fit is far enough away to wait without one.
        let timeout = timeout.and_then(|it| Timespec::try_from(it).ok());
        let mut room = [MaybeUninit::uninit(); READY];
        match epoll::wait(&self.epoll, &mut room, timeout.as_ref()) {
            Ok((ready, _)) => ready.iter().map(|it| (it.data.u64(), it.flags)).collect(),
            Err(rustix::io::Errno::INTR) => Vec::new(),
            Err(error) => panic!("waiting on our own descriptors: {error}"),
        }
    }

    fn serve(&mut self, token: u64, flags: EventFlags) {
        if token == WAKER {
            self.waker.clear();
        } else if token == LISTENER {
            self.accept();
        } else if self.strangers.contains_key(&token) {
            self.serve_stranger(token);
        } else if let Some(link) = self.incoming.get_mut(&token) {
            let from = link.peer;
            let events = &mut self.ledger.events;
            let mut result = Ok(());
            if flags != EventFlags::OUT {
                result = link.read(|bytes| events.push(Event::Message { from, bytes }));
            }
            let result = result.and_then(|()| link.write(&self.regions));
            self.settle(from, token, result);
        } else if let Some(link) = self.outgoing.get_mut(&token) {
            let peer = link.peer;
            let result = link.advance(&self.identity, nonce, &mut self.ledger).map(|progress| {
                if progress == Progress::Opened {
                    self.ledger.events.push(Event::Connected(peer));
                }
            });
            self.settle(peer, token, result);
        }
    }

    /// After a turn of a link: closes it if it failed, else waits for what it waits for.
    fn settle(&mut self, peer: PeerId, token: u64, result: Result<(), LinkError>) {
        if let Err(error) = result.and_then(|()| self.update_interest(token).map_err(LinkError::Io))
        {
            self.fail(peer, &error.to_string());
        }
    }

    fn update_interest(&mut self, token: u64) -> io::Result<()> {
        let (stream, wants, has) = if let Some(link) = self.incoming.get_mut(&token) {
            let has = link.has_output();
            (&link.stream, &mut link.wants_write, has)
        } else if let Some(link) = self.outgoing.get_mut(&token) {
            let has = link.has_output();
            (&link.stream, &mut link.wants_write, has)
        } else {
            return Ok(());
        };
        if *wants != has {
            *wants = has;
            let flags = if has { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
            epoll::modify(&self.epoll, stream, EventData::new_u64(token), flags)?;
        }
        Ok(())
    }

    /// Watches for input.
    pub(super) fn watch(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, source, EventData::new_u64(token), EventFlags::IN)?)
    }

    /// Sends what is queued for every peer.
    pub(super) fn send(&mut self) {
        let asked: u64 = self.outgoing.values().map(Outgoing::sent_bytes).sum();
        let mut room = self.limits.window_bytes.saturating_sub(asked);
        let mut results = Vec::new();
        for (&token, link) in &mut self.outgoing {
            let before = link.sent_bytes();
            let result = link.send(room, self.limits.peer_window_bytes);
            room = room.saturating_sub(link.sent_bytes() - before);
            if result.is_err() || link.has_output() != link.wants_write {
                results.push((link.peer, token, result));
            }
        }
        for (peer, token, result) in results {
            self.settle(peer, token, result);
        }
    }

    /// Takes in strangers, as many as wait.
    fn accept(&mut self) {
        loop {
            let (stream, address) = match self.listener.accept() {
                Ok(stranger) => stranger,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept links: raise the limit of open files");
                    self.listen_again_at(Instant::now() + DEAF);
                    return;
                }
            };
            if self.strangers.len() >= self.limits.strangers {
                self.strangers.pop_first();
            }
            let token = self.new_token();
            let ready = socket::prepare(&stream).and_then(|()| self.watch(&stream, token));
            match ready {
                Ok(()) => {
                    let stranger = Stranger::new(stream, address, Instant::now());
                    self.strangers.insert(token, stranger);
                }
                Err(error) => tracing::debug!(%address, %error, "a link broke before its greeting"),
            }
        }
    }

    fn listen_again_at(&mut self, at: Instant) {
        // A descriptor may be free again as soon as a stranger is turned away.
        self.strangers.pop_first();
        if self.deaf_until.is_none() && epoll::delete(&self.epoll, &self.listener).is_ok() {
            self.deaf_until = Some(at);
        }
    }

    fn serve_stranger(&mut self, token: u64) {
        let Some(mut stranger) = self.strangers.remove(&token) else { return };
        match stranger.advance(&self.identity, nonce) {
            Ok(None) => drop(self.strangers.insert(token, stranger)),
            Ok(Some(peer)) => self.admit(token, peer, stranger),
            Err(LinkError::Ended) if !stranger.has_spoken() => {}
            Err(LinkError::Ended) => {
                self.refuse(&stranger, "it left before it proved that it knows the job's secret");
            }
            Err(error) => self.refuse(&stranger, &error.to_string()),
        }
    }

    fn refuse(&mut self, stranger: &Stranger, reason: &str) {
        let (from, reason) = (stranger.address.to_string(), reason.to_owned());
        self.ledger.events.push(Event::Refused { from, reason });
    }

    /// The stranger has proved to be `peer`.
    fn admit(&mut self, token: u64, peer: PeerId, stranger: Stranger) {
        let newest = self.newest.get(&(peer.role, peer.index)).copied().unwrap_or(0);
        if newest > peer.incarnation {
            // It may not read the verdict; the link ends all the same.
            let _ = socket::write_whole(&stranger.stream, &Verdict::Stale { newest }.encode());
            let error = GreetingError::Stale { peer, newest };
            return self.refuse(&stranger, &error.to_string());
        }
        self.retire_older(peer);
        if self.peers.get(&peer).is_some_and(|it| it.incoming.is_some()) {
            self.fail(peer, "the peer opened a new link in place of its old one");
        }
        if let Err(error) = socket::write_whole(&stranger.stream, &Verdict::Welcome.encode()) {
            return self.refuse(&stranger, &error.to_string());
        }
        self.peers.entry(peer).or_default().incoming = Some(token);
        self.incoming.insert(token, Incoming::new(peer, stranger.stream));
    }

    /// Closes what is left of older incarnations.
    fn retire_older(&mut self, peer: PeerId) {
        self.newest.insert((peer.role, peer.index), peer.incarnation);
        let first = PeerId { incarnation: 0, ..peer };
        let older: Vec<_> = self.peers.range(first..peer).map(|(&it, _)| it).collect();
        for older in older {
            self.fail(older, &format!("{peer} has taken its place"));
        }
    }

    /// Begins to connect.
    pub(super) fn dial(&mut self, peer: PeerId, address: &str) -> Result<(), String> {
        let newest = self.newest.get(&(peer.role, peer.index)).copied().unwrap_or(0);
        if newest > peer.incarnation {
            return Err(GreetingError::Stale { peer, newest }.to_string());
        }
        self.retire_older(peer);
        let target: SocketAddr =
            address.parse().map_err(|_| format!("address {address:?} is not IP:PORT"))?;
        let refused = |error: io::Error| format!("cannot connect to {address}: {error}");
        let stream = socket::dial(target).map_err(refused)?;
        let token = self.new_token();
        let flags = EventFlags::IN | EventFlags::OUT;
        epoll::add(&self.epoll, &stream, EventData::new_u64(token), flags)
            .map_err(|error| refused(error.into()))?;
        self.outgoing.insert(token, Outgoing::new(peer, stream, Instant::now()));
        self.peers.entry(peer).or_default().outgoing = Some(token);
        Ok(())
    }

    fn new_token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token - 1
    }

    /// Closes the links with a peer and says so.
    pub(super) fn fail(&mut self, peer: PeerId, error: &str) {
        self.drop_links(peer, &PullError::PeerFailed);
        self.ledger.events.push(Event::Closed { peer, error: error.to_owned() });
    }

    /// Closes the links with a peer; its pulls end.
    pub(super) fn drop_links(&mut self, peer: PeerId, result: &PullError) {
        let Some(Links { incoming, outgoing }) = self.peers.remove(&peer) else { return };
        incoming.and_then(|it| self.incoming.remove(&it));
        if let Some(link) = outgoing.and_then(|it| self.outgoing.remove(&it)) {
            link.end(result, &mut self.ledger);
        }
    }

    /// The next time at which something is late.
    fn next_timer(&self) -> Option<Instant> {
        let strangers = self.strangers.values().map(|it| it.since);
        let opening = self.outgoing.values().filter(|it| !it.is_open()).map(|it| it.since);
        let greeting = strangers.chain(opening).min().map(|it| it + self.limits.greeting);
        earliest(earliest(greeting, self.ledger.next_deadline()), self.deaf_until)
    }

    fn end_what_is_late(&mut self, now: Instant) {
        while let Some((peer, pull)) = self.ledger.expire(now) {
            let token = self.peers.get(&peer).and_then(|it| it.outgoing);
            if let Some(link) = token.and_then(|it| self.outgoing.get_mut(&it)) {
                link.expire(pull, &mut self.ledger);
            }
        }
        let late = |since: Instant| since + self.limits.greeting <= now;
        let strangers: Vec<u64> =
            self.strangers.iter().filter(|(_, it)| late(it.since)).map(|(&it, _)| it).collect();
        let opening: Vec<PeerId> = self
            .outgoing
            .values()
            .filter(|it| !it.is_open() && late(it.since))
            .map(|it| it.peer)
            .collect();
        for token in strangers {
            if let Some(stranger) = self.strangers.remove(&token)
                && stranger.has_spoken()
            {
                self.refuse(&stranger, &LinkError::Silent.to_string());
            }
        }
        for peer in opening {
            self.fail(peer, &LinkError::Silent.to_string());
        }
        if self.deaf_until.is_some_and(|it| it <= now)
            && self.watch(&self.listener, LISTENER).is_ok()
        {
            self.deaf_until = None;
        }
    }
}

fn earliest(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    a.into_iter().chain(b).min()
}

/// Words that were never said before.
fn nonce() -> [u8; 32] {
    let mut nonce = [0; 32];
    let filled = getrandom(&mut nonce, GetRandomFlags::empty());
    assert_eq!(filled, Ok(nonce.len()), "the kernel has 32 random bytes");
    nonce
}
