//! The provider that is always there: plain TCP, one thread, no unsafe code.
//!
//! In: [`TcpConfig`]. Out: [`Tcp`], a [`Provider`]. Frames and rules: `docs/exchange.md`.
//!
//! Links are directed. The opener sends its greeting, rings and pull requests; the other side sends nothing but
//! replies. So small messages never queue behind data, and if both sides ring there are two links.
//!
//! ```text
//! door: a stranger ──proved──▶ incoming: their rings and pulls ──▶ events, regions
//! connect ──▶ outgoing: our rings and pulls ──▶ ledger: landings, events
//! ```
//!
//! Peers prove that they know the job's secret when a link opens. With [`Encryption::Off`] the network between them is trusted not to
//! change it afterwards; else the link is encrypted.

mod admit;
mod copied;
mod dial;
mod door;
mod frame;
mod greeting;
mod incoming;
mod landing;
mod ledger;
mod lobby;
mod meeting;
mod opening;
mod outgoing;
mod pull;
mod pulls;
mod replies;
mod room;
mod run;
mod socket;
mod stream;
#[cfg(test)]
mod tests;
mod tls;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll;

use self::door::Stranger;
use self::greeting::Identity;
pub use self::greeting::Purpose;
use self::incoming::{Incoming, Published, Regions};
use self::ledger::Ledger;
use self::lobby::Lobby;
pub use self::meeting::{Caller, GreetError, Greeter, Guest};
use self::outgoing::Outgoing;
pub(crate) use self::pull::Pull;
pub use self::stream::Stream;
pub use self::tls::Encryption;
use self::tls::Tls;
use crate::buffer::Buffer;
use crate::clock::Clock;
use crate::peer::{PeerId, RegionKey, Role};
use crate::provider::{
    Error, Event, LandingId, MAX_MESSAGE_BYTES, Provider, PullError, PullId, PullRequest, RingError,
};
use crate::waker::Waker;

/// How to open a [`Tcp`] provider.
#[derive(Clone, Copy)]
pub struct TcpConfig {
    /// Where to listen, on a free port. With an unspecified address (`0.0.0.0`, `::`) the host in
    /// [`Provider::address`] is to be replaced by one that peers can reach.
    pub bind: IpAddr,
    /// Who we are.
    pub me: PeerId,
    /// What only processes of this job know. Never sent.
    pub secret: [u8; 32],
    /// Planner, exchange and numerics of this build; processes of another one are turned away.
    pub data_version: u32,
    /// Whether links are encrypted; the same in all processes of the job.
    pub encryption: Encryption,
    /// Bounds; the default fits most machines.
    pub limits: Limits,
}

/// Bounds of a provider.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Limits {
    /// Bytes of messages and requests that may wait for one peer.
    pub queued_bytes: usize,
    /// Bytes that may be asked for and not be there, from all peers together. A peer of which nothing is outstanding may
    /// always be asked for 64 KiB.
    pub window_bytes: u64,
    /// Bytes that may be requested from one peer and not be there, so that a stalled peer does not
    /// hold up the others.
    pub peer_window_bytes: u64,
    /// Bytes that a pull asks for at a time; at least 1.
    pub part_bytes: u64,
    /// How long a greeting may take, on both sides, with all tries of the opener.
    pub greeting: Duration,
    /// How long the hello of a stranger may take.
    pub hello: Duration,
    /// How many links may wait at the door that have said no hello, and as many that have not proved theirs. When there are more,
    /// the oldest one of the address that has most is closed.
    pub strangers: usize,
    /// How long the machine of a peer may acknowledge nothing until the link is closed, in whole seconds where nothing is sent;
    /// and how long a peer may read nothing while its buffers are full.
    pub silence: Duration,
}

/// See [`Limits::silence`]: longer than a link is down while cables or switches change.
const SILENCE: Duration = Duration::from_mins(1);

impl Default for Limits {
    fn default() -> Self {
        Self {
            queued_bytes: 8 << 20,
            window_bytes: 64 << 20,
            peer_window_bytes: 16 << 20,
            part_bytes: 1 << 20,
            greeting: Duration::from_secs(5),
            hello: Duration::from_secs(2),
            strangers: 256,
            silence: SILENCE,
        }
    }
}

/// The provider. Dropping it closes every link.
pub struct Tcp {
    identity: Identity,
    limits: Limits,
    address: SocketAddr,
    listener: TcpListener,
    clock: Clock,
    /// Until when nothing is accepted, because the process is out of descriptors.
    deaf_until: Option<Instant>,
    /// Whether that was logged, and the queue of links was not empty since.
    said_deaf: bool,
    epoll: OwnedFd,
    waker: Waker,
    /// Names links in the poll; never used twice.
    next_token: u64,
    strangers: Lobby<Stranger>,
    incoming: BTreeMap<u64, Incoming>,
    outgoing: BTreeMap<u64, Outgoing>,
    peers: BTreeMap<PeerId, Links>,
    newest: BTreeMap<(Role, u16), u32>,
    regions: Regions,
    /// Number of the last publication. Begins at a random number, so that no earlier life of this
    /// process has used it.
    publication: u64,
    ledger: Ledger,
    /// Links that have something to send, or whose own windows have room.
    restless: BTreeSet<u64>,
    /// Links that lack room in the window of all, by their turn.
    crowded: BTreeSet<(u64, u64)>,
    /// Number of turns that were given.
    turns: u64,
    /// Links that are not open yet, by when they began.
    opening: BTreeSet<(Instant, u64)>,
    /// Links that are dialled again, by when.
    resting: BTreeSet<(Instant, u64)>,
    /// Bytes that were asked for over all links and are not here.
    asked_bytes: u64,
    /// Whether the waker was used; read by a provider that polls this one.
    is_called: bool,
}

/// A provider is opened in one thread and polled in another.
const _: fn() = || {
    fn sent_between_threads<T: Send>() {}
    sent_between_threads::<Tcp>();
};

/// The links with one peer, by token.
#[derive(Clone, Copy, Debug, Default)]
struct Links {
    incoming: Option<u64>,
    outgoing: Option<u64>,
}

impl Tcp {
    /// Listens on a free port.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] when the address is not of this machine, or the process is out of descriptors.
    pub fn open(config: TcpConfig) -> Result<Self, Error> {
        Self::open_at(config, Clock::system())
    }

    /// As [`Self::open`], with deadlines by `clock`.
    ///
    /// # Errors
    ///
    /// As [`Self::open`].
    pub fn open_at(config: TcpConfig, clock: Clock) -> Result<Self, Error> {
        let TcpConfig { bind, me, secret, data_version, encryption, limits } = config;
        let (purpose, tls) = (Purpose::Exchange, Tls::of(encryption));
        let identity = Identity { me, secret, data_version, purpose, tls };
        Self::listen(bind, identity, limits, clock)
            .map_err(|source| Error::Open { address: bind.to_string(), source })
    }

    fn listen(
        bind: IpAddr,
        identity: Identity,
        limits: Limits,
        clock: Clock,
    ) -> std::io::Result<Self> {
        let listener = socket::listen(bind)?;
        let [a, b, c, d, e, f, g, h, ..] = run::nonce();
        let tcp = Self {
            identity,
            limits,
            address: listener.local_addr()?,
            listener,
            clock,
            deaf_until: None,
            said_deaf: false,
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            waker: Waker::new()?,
            next_token: run::FIRST_LINK,
            strangers: Lobby::new(limits.strangers, limits.hello, limits.greeting),
            incoming: BTreeMap::new(),
            outgoing: BTreeMap::new(),
            peers: BTreeMap::new(),
            newest: BTreeMap::new(),
            regions: Regions::new(),
            publication: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            ledger: Ledger::default(),
            restless: BTreeSet::new(),
            crowded: BTreeSet::new(),
            turns: 0,
            opening: BTreeSet::new(),
            resting: BTreeSet::new(),
            asked_bytes: 0,
            is_called: false,
        };
        tcp.watch(&tcp.waker, run::WAKER)?;
        tcp.watch(&tcp.listener, run::LISTENER)?;
        Ok(tcp)
    }

    /// The memory of a landing, while pulls may write to it. Bytes of pulls that succeeded do not
    /// change.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownLanding`].
    pub fn landed(&self, landing: LandingId) -> Result<&Buffer, Error> {
        self.ledger.landed(landing)
    }

    /// The link that we opened to a peer, with its token.
    fn outgoing_to(&mut self, peer: PeerId) -> Option<(u64, &mut Outgoing)> {
        let token = self.peers.get(&peer)?.outgoing?;
        self.outgoing.get_mut(&token).map(|it| (token, it))
    }
}

impl Provider for Tcp {
    type Memory = Buffer;

    fn address(&self) -> String {
        self.address.to_string()
    }

    fn connect(&mut self, peer: PeerId, address: &str) {
        self.connect_at(peer, address, self.clock.now());
    }

    fn publish(&mut self, key: RegionKey, memory: Arc<Buffer>) {
        self.announce(key, memory);
    }

    fn withdraw(&mut self, key: RegionKey) -> Option<Arc<Buffer>> {
        self.regions.remove(&key).map(|it| it.memory)
    }

    fn land(&mut self, memory: Buffer) -> LandingId {
        self.ledger.land(memory)
    }

    fn take(&mut self, landing: LandingId) -> Result<Buffer, Error> {
        self.ledger.take(landing)
    }

    fn is_busy(&self, _landing: LandingId) -> bool {
        false
    }

    fn discard(&mut self, landing: LandingId) {
        self.ledger.discard(landing);
    }

    fn pull(&mut self, request: PullRequest) -> PullId {
        let (id, pull) = self.claim(&request);
        if let Some(pull) = pull {
            self.send_pull(pull);
        }
        id
    }

    fn ring(&mut self, peer: PeerId, message: &[u8]) -> Result<(), RingError> {
        if message.len() > MAX_MESSAGE_BYTES {
            return Err(RingError::TooLong { bytes: message.len() });
        }
        let limit = self.limits.queued_bytes;
        let (token, link) = self.outgoing_to(peer).ok_or(RingError::NotConnected { peer })?;
        link.ring(message, limit)?;
        self.restless.insert(token);
        Ok(())
    }

    fn poll(&mut self, timeout: Duration, events: &mut Vec<Event>) {
        self.run(timeout);
        events.append(&mut self.ledger.events);
    }

    fn waker(&self) -> Waker {
        self.waker.clone()
    }

    fn close(&mut self, peer: PeerId) {
        self.drop_links(peer, &PullError::Cancelled);
    }
}

impl Drop for Tcp {
    /// Writes what the sockets still take, so that a last message is not lost.
    fn drop(&mut self) {
        self.send();
    }
}
