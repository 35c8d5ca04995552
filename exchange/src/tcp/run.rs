//! The poll of the `tcp` provider: waits for sockets, and does what each one is ready for.
//!
//! Flow of one round: send what is queued, end what is late, wait, serve each ready link for one turn.
//!
//! Invariants: a broken rule or link ends the links with that peer and no other; a round never blocks but in
//! the wait, and there no longer than to the next deadline.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::rand::{GetRandomFlags, getrandom};

use super::outgoing::Progress;
use super::socket::LinkError;
use super::{Links, Tcp};
use crate::peer::PeerId;
use crate::provider::{Event, PullError};

/// Tokens of descriptors that are not links.
pub(super) const WAKER: u64 = 0;
pub(super) const LISTENER: u64 = 1;
const DEVICE: u64 = 2;
pub(super) const FIRST_LINK: u64 = 3;

/// Maximum sockets that one wait reports; the others come in the next one.
const READY: usize = 256;

impl Tcp {
    /// Rounds until there is an event, a wake, or the timeout is over.
    pub(super) fn run(&mut self, timeout: Duration) {
        let until = Instant::now().checked_add(timeout);
        let mut woken = false;
        loop {
            self.send();
            self.end_what_is_late(self.clock.now());
            let now = Instant::now();
            let over = until.is_some_and(|it| it <= now);
            let done = woken || over || !self.ledger.events.is_empty();
            let wait = if done { Some(Duration::ZERO) } else { self.sleep(until, now) };
            let ready = self.wait(wait);
            for (token, flags) in ready {
                self.is_called |= token == WAKER;
                woken |= token == WAKER || token == DEVICE;
                self.serve(token, flags);
            }
            if done || woken || !self.ledger.events.is_empty() {
                self.send();
                return;
            }
        }
    }

    /// How long a poll may sleep before something is due.
    fn sleep(&self, until: Option<Instant>, now: Instant) -> Option<Duration> {
        let caller = until.map(|it| it.saturating_duration_since(now));
        let clock = self.clock.now();
        let timer = self.next_timer().map(|it| it.saturating_duration_since(clock));
        caller.into_iter().chain(timer).min()
    }

    fn wait(&self, timeout: Option<Duration>) -> Vec<(u64, EventFlags)> {
        // An instant that overflows is far enough away to wait without a limit.
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
        } else if token == DEVICE {
            // The owner of the device handles it after the poll.
        } else if self.strangers.get_mut(token).is_some() {
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
        } else {
            self.serve_outgoing(token);
        }
    }

    fn serve_outgoing(&mut self, token: u64) {
        let Some(link) = self.outgoing.get_mut(&token) else { return };
        let (peer, asked) = (link.peer, link.pulls.asked_bytes());
        let now = self.clock.now();
        let result = link.advance(&self.identity, nonce, &mut self.ledger, now);
        self.asked_bytes -= asked - link.pulls.asked_bytes();
        if matches!(result, Ok(Progress::Opened)) {
            self.opening.remove(&(link.since, token));
            self.ledger.events.push(Event::Connected(peer));
        }
        self.restless.insert(token);
        match result {
            Ok(_) => self.settle(peer, token, Ok(())),
            Err(error) => {
                if let Err(error) = self.try_again_later(token, error, now) {
                    self.settle(peer, token, Err(error));
                }
            }
        }
    }

    /// After a link's turn: closes the link if it failed, else tells the poll what the link waits for.
    pub(super) fn settle(&mut self, peer: PeerId, token: u64, result: Result<(), LinkError>) {
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

    /// Watches a descriptor that is no link's: a poll ends when it is readable. Closing the descriptor removes it.
    pub(crate) fn watch_device(&self, source: impl AsFd) -> io::Result<()> {
        self.watch(source, DEVICE)
    }

    /// Stops watching a descriptor of a device.
    pub(crate) fn forget_device(&self, source: impl AsFd) {
        // An error means that it was not watched.
        let _ = epoll::delete(&self.epoll, source);
    }

    /// Whether the waker was used since this was asked last.
    pub(crate) fn was_called(&mut self) -> bool {
        std::mem::take(&mut self.is_called)
    }

    pub(super) fn new_token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token - 1
    }

    /// Closes the links with a peer and reports it.
    pub(super) fn fail(&mut self, peer: PeerId, error: &str) {
        self.drop_links(peer, &PullError::PeerFailed);
        self.ledger.events.push(Event::Closed { peer, error: error.to_owned() });
    }

    /// Closes the links with a peer; its pulls end.
    pub(super) fn drop_links(&mut self, peer: PeerId, result: &PullError) {
        let Some(Links { incoming, outgoing }) = self.peers.remove(&peer) else { return };
        incoming.and_then(|it| self.incoming.remove(&it));
        if let Some(token) = outgoing
            && let Some(link) = self.outgoing.remove(&token)
        {
            self.opening.remove(&(link.since, token));
            self.asked_bytes -= link.pulls.asked_bytes();
            if let Some(turn) = link.turn {
                self.crowded.remove(&(turn, token));
            }
            link.pulls.end_all(result, &mut self.ledger);
        }
    }

    /// The next time at which something is late.
    fn next_timer(&self) -> Option<Instant> {
        let opening = self.opening.first().map(|it| it.0 + self.limits.greeting);
        let resting = self.resting.first().map(|it| it.0);
        let timers = [
            self.strangers.next_late(),
            opening,
            resting,
            self.ledger.next_look(),
            self.deaf_until,
        ];
        timers.into_iter().flatten().min()
    }

    /// Ends pulls whose links have brought nothing for too long. What is there already counts first: it may be this process
    /// that stood still.
    fn end_late_pulls(&mut self, now: Instant) {
        while let Some((peer, pull)) = self.ledger.look(now) {
            let deadline = |it: &Self| {
                let link = it.outgoing.get(&it.peers.get(&peer)?.outgoing?)?;
                link.pulls.deadline(pull, link.heard)
            };
            let Some((token, link)) = self.outgoing_to(peer) else { continue };
            if link.is_open() && deadline(self).is_some_and(|it| it <= now) {
                self.serve_outgoing(token);
            }
            let late = deadline(self);
            let Some(link) = self.outgoing.get_mut(&token) else { continue };
            match late {
                Some(deadline) if deadline > now => {
                    link.pulls.look_again(pull, deadline, &mut self.ledger);
                }
                Some(_) => link.pulls.end(pull, PullError::Deadline, &mut self.ledger),
                None => {}
            }
        }
    }

    fn end_what_is_late(&mut self, now: Instant) {
        self.end_late_pulls(now);
        while let Some(token) = self.strangers.late(now) {
            // What it has said already counts first: it may be this process that stood still.
            self.serve_stranger(token);
            if self.strangers.late(now) == Some(token)
                && let Some(stranger) = self.strangers.leave(token)
            {
                self.turn_away(&stranger, &LinkError::Silent.to_string());
            }
        }
        self.dial_again(now);
        let late = |it: &&(Instant, u64)| it.0 + self.limits.greeting <= now;
        for (since, token) in self.opening.iter().take_while(late).copied().collect::<Vec<_>>() {
            self.serve_outgoing(token);
            if self.opening.contains(&(since, token))
                && let Some(link) = self.outgoing.get(&token)
            {
                let (peer, error) = (link.peer, link.silence().to_string());
                self.fail(peer, &error);
            }
        }
        self.hear_again(now);
    }
}

/// Words that were never said before.
pub(super) fn nonce() -> [u8; 32] {
    let mut nonce = [0; 32];
    let filled = getrandom(&mut nonce, GetRandomFlags::empty());
    assert_eq!(filled, Ok(nonce.len()), "the kernel has 32 random bytes");
    nonce
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::Arc;

    use super::super::{Encryption, Limits, TcpConfig};
    use super::*;
    use crate::buffer::Buffer;
    use crate::peer::{Piece, RegionKey};
    use crate::provider::{Provider as _, PullRequest};

    fn open(me: PeerId) -> Tcp {
        let (bind, limits) = (Ipv4Addr::LOCALHOST.into(), Limits::default());
        let (secret, encryption) = ([1; 32], Encryption::Off);
        Tcp::open(TcpConfig { bind, me, secret, data_version: 1, encryption, limits })
            .expect("loopback is there")
    }

    #[test]
    fn a_round_looks_at_no_link_that_has_nothing_to_do() {
        let trainer = PeerId::trainer(0, 0);
        let mut hub = open(trainer);
        let mut peers: Vec<_> = (0..20).map(|it| open(PeerId::server(it, 0))).collect();
        let mut events = Vec::new();
        for (index, peer) in (0..).zip(&mut peers) {
            peer.publish(RegionKey::default(), Arc::new(Buffer::zeroed(3 << 20)));
            peer.connect(trainer, &hub.address());
            hub.connect(PeerId::server(index, 0), &peer.address());
            let landing = hub.land(Buffer::zeroed(3 << 20));
            let pieces = vec![Piece { remote: 0, local: 0, bytes: 3 << 20 }];
            let (key, patience) = (RegionKey::default(), Duration::from_mins(1));
            let id = PeerId::server(index, 0);
            hub.pull(PullRequest { peer: id, key, pieces, landing, patience });
            peer.ring(trainer, b"here").expect("it is being opened");
        }
        let count = |events: &[Event]| {
            let counts = |it: &&Event| matches!(it, Event::Pulled { .. } | Event::Message { .. });
            events.iter().filter(counts).count()
        };
        while count(&events) < 40 {
            hub.poll(Duration::from_millis(1), &mut events);
            for peer in &mut peers {
                peer.poll(Duration::ZERO, &mut Vec::new());
            }
        }
        hub.poll(Duration::ZERO, &mut events);
        assert_eq!((hub.incoming.len(), hub.outgoing.len()), (20, 20), "{events:?}");
        assert!(hub.restless.is_empty() && hub.opening.is_empty());
        assert_eq!((hub.asked_bytes, hub.next_timer()), (0, None));
        // One that is rung is the only one.
        hub.ring(PeerId::server(7, 0), b"you").expect("there is room");
        assert_eq!(hub.restless.len(), 1);
    }
}
