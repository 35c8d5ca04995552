//! A provider for memory that processes of one machine share: a pull is a copy that the device does by itself.
//!
//! In: [`NodeConfig`] and a [`Device`], whose memory lies in arenas. Out: [`Node`], a [`Provider`]. Links, greetings, messages and
//! deadlines are those of [`Tcp`], which carries no rows here: under the key of a region it publishes a slip that says where the
//! rows are.
//!
//! ```text
//! reader                                         owner
//!   look: pull the slip            ── tcp ──▶      published?  no: gone
//!   its arena is unknown: ask      ── door ──▶     descriptor, once per arena
//!   copy on the device                             (notices nothing)
//!   look again: the same slip?     ── tcp ──▶      still published?  no: gone
//! ```
//!
//! The second look is what makes reuse safe: an owner may withdraw and write its memory again at any time, and whoever copied
//! meanwhile learns it before it takes the bytes for rows. A reader that was stopped for an hour harms nobody: it never writes.
//!
//! Differences from TCP: a copy that has begun cannot be called back, so after [`Provider::close`] and after a deadline a landing
//! is busy until its copy is over. An arena that was published once lives until the node is dropped.
//!
//! Invariant: a pull counts only if its region was published from before the copy began until after it was over.

mod device;
mod landings;
mod outstanding;
mod pulls;
mod slip;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::rand::{GetRandomFlags, getrandom};

pub use self::device::{Device, Place};
use self::landings::Landings;
use self::outstanding::Outstanding;
use self::pulls::{Import, Pull};
use self::slip::Slip;
use crate::buffer::Buffer;
use crate::door::{Asker, Door, Site, Ticket};
use crate::peer::{PeerId, RegionKey, Role};
use crate::provider::{
    Error, Event, LandingId, MAX_PIECES, Provider, PullError, PullId, PullRequest, RingError,
};
use crate::tcp::{Tcp, TcpConfig};
use crate::waker::Waker;

/// Longest sleep of a poll while copies are in progress, since their ends wake nothing.
const COPYING: Duration = Duration::from_micros(50);

/// How to open a [`Node`].
#[derive(Clone)]
pub struct NodeConfig {
    /// Settings of the links.
    pub tcp: TcpConfig,
    /// A folder that all processes of the job on this machine see, and no other user may enter.
    pub sockets: PathBuf,
}

/// Called once when a pull ends, with whether its rows have landed. It opens the gate that a stream of the GPU waits at.
pub type WhenEnded = Box<dyn FnOnce(bool) + Send>;

/// See the module.
pub struct Node<D: Device> {
    device: D,
    tcp: Tcp,
    door: Door,
    /// The socket of the door.
    path: PathBuf,
    /// Tickets of own arenas.
    tickets: BTreeMap<u64, Ticket>,
    regions: BTreeMap<RegionKey, Arc<D::Memory>>,
    publications: u64,
    landings: Landings<D::Memory>,
    /// The socket of each peer's door.
    doors: BTreeMap<PeerId, PathBuf>,
    imports: BTreeMap<(PeerId, Ticket), Import<D>>,
    /// Fetches descriptors of arenas; each request carries the arena's length.
    asker: Asker<((PeerId, Ticket), u64)>,
    last_pull: u64,
    pulls: Outstanding<D>,
    /// Pulls of slips, by their identity in `tcp`, with the pull of rows that each belongs to.
    looks: BTreeMap<PullId, PullId>,
    calls: BTreeMap<PullId, WhenEnded>,
    /// When a pull from each peer last made progress.
    moved: BTreeMap<PeerId, Instant>,
    events: Vec<Event>,
}

impl<D: Device> Node<D> {
    /// Listens on a free port, and at a socket in the folder.
    ///
    /// # Errors
    ///
    /// [`Error::Open`].
    pub fn open(config: NodeConfig, device: D) -> Result<Self, Error> {
        let NodeConfig { tcp, sockets } = config;
        let PeerId { role, index, incarnation } = tcp.me;
        let role = match role {
            Role::Trainer => "trainer",
            Role::Server => "server",
        };
        let path = sockets.join(format!("{role}-{index}-{incarnation}.sock"));
        let tcp = Tcp::open(tcp)?;
        let door = Door::open(Site::File(path.clone()))
            .map_err(|source| Error::Open { address: path.display().to_string(), source })?;
        let asker = Asker::new(tcp.waker());
        Ok(Self {
            device,
            tcp,
            door,
            path,
            tickets: BTreeMap::new(),
            regions: BTreeMap::new(),
            publications: 0,
            landings: Landings::default(),
            doors: BTreeMap::new(),
            imports: BTreeMap::new(),
            asker,
            last_pull: 0,
            pulls: Outstanding::default(),
            looks: BTreeMap::new(),
            calls: BTreeMap::new(),
            moved: BTreeMap::new(),
            events: Vec::new(),
        })
    }

    /// Calls `call` when `pull` has ended, at the latest at its deadline if the node is polled; at once if it has already, as for
    /// a pull that was refused. A node that is dropped drops it uncalled.
    pub fn when_ended(&mut self, pull: PullId, call: WhenEnded) {
        if self.pulls.get(pull).is_some_and(Pull::is_open) {
            self.calls.insert(pull, call);
        } else {
            // The result is known as long as the pull's event was not returned.
            let ended = |event: &Event| matches!(event, Event::Pulled { pull: it, result } if *it == pull && result.is_ok());
            call(self.events.iter().any(ended));
        }
    }

    /// The memory of a landing while pulls write to it: for work that is enqueued behind their copies ([`Event::Begun`]), and for
    /// bytes that no pull writes. None if it was taken or discarded.
    pub fn landing(&mut self, landing: LandingId) -> Option<&mut D::Memory> {
        self.landings.open(landing)
    }

    /// The slip of a region, with a ticket that the door accepts.
    fn slip(&mut self, memory: &D::Memory) -> Result<Slip, D::Error> {
        let Place { arena, arena_bytes, at, bytes } = self.device.place(memory);
        let ticket = if let Some(ticket) = self.tickets.get(&arena) {
            *ticket
        } else {
            let ticket = random();
            self.door.show(ticket, self.device.export(memory)?);
            self.tickets.insert(arena, ticket);
            ticket
        };
        self.publications += 1;
        Ok(Slip { ticket, arena_bytes, at, bytes, publication: self.publications })
    }
}

impl<D: Device> Provider for Node<D> {
    type Memory = D::Memory;

    fn address(&self) -> String {
        format!("{}@{}", self.tcp.address(), self.path.display())
    }

    fn connect(&mut self, peer: PeerId, address: &str) {
        let Some((address, path)) = address.split_once('@') else {
            let error = format!(
                "address {address:?} is not IP:PORT@SOCKET: run all workers of a job on one machine with one exchange"
            );
            return self.events.push(Event::Closed { peer, error });
        };
        self.doors.insert(peer, path.into());
        self.tcp.connect(peer, address);
    }

    fn publish(&mut self, key: RegionKey, memory: Arc<D::Memory>) {
        match self.slip(&memory) {
            Ok(slip) => {
                let mut buffer = Buffer::zeroed(slip::SLIP_BYTES);
                buffer.bytes_mut().copy_from_slice(&slip.encode());
                self.tcp.publish(key, Arc::new(buffer));
                self.regions.insert(key, memory);
            }
            Err(why) => {
                // Pulls find it gone.
                let reason = format!("region {key} cannot be published: {why}");
                self.withdraw(key);
                self.events.push(Event::Broken { reason });
            }
        }
    }

    fn withdraw(&mut self, key: RegionKey) -> Option<Arc<D::Memory>> {
        self.tcp.withdraw(key);
        self.regions.remove(&key)
    }

    fn land(&mut self, memory: D::Memory) -> LandingId {
        let bytes = self.device.place(&memory).bytes;
        self.landings.land(memory, bytes)
    }

    fn take(&mut self, landing: LandingId) -> Result<D::Memory, Error> {
        self.landings.take(landing)
    }

    fn is_busy(&self, landing: LandingId) -> bool {
        self.landings.is_busy(landing)
    }

    fn discard(&mut self, landing: LandingId) {
        self.landings.discard(landing);
    }

    fn pull(&mut self, request: PullRequest) -> PullId {
        self.last_pull += 1;
        let id = PullId(self.last_pull);
        let pieces = &request.pieces;
        let reserved = if pieces.len() > MAX_PIECES {
            Err(format!("{} pieces are above {MAX_PIECES}", pieces.len()))
        } else {
            self.landings.reserve(request.landing, pieces)
        };
        match reserved {
            Ok(()) => self.begin(id, Pull::new(request)),
            Err(reason) => {
                let result = Err(PullError::Refused { reason });
                self.events.push(Event::Pulled { pull: id, result });
            }
        }
        id
    }

    fn ring(&mut self, peer: PeerId, message: &[u8]) -> Result<(), RingError> {
        self.tcp.ring(peer, message)
    }

    fn poll(&mut self, timeout: Duration, events: &mut Vec<Event>) {
        let until = Instant::now().checked_add(timeout);
        let mut news = Vec::new();
        loop {
            self.advance();
            let now = Instant::now();
            let left = until.map_or(Duration::MAX, |it| it.saturating_duration_since(now));
            let done = !self.events.is_empty() || left.is_zero();
            // Polls the links also when there is news already: queued messages have to be sent now, not at the caller's next
            // poll.
            let sleep = if done { Duration::ZERO } else { left.min(self.rest(now)) };
            self.tcp.poll(sleep, &mut news);
            // Also where nothing of what came with it is the caller's.
            let woken = self.tcp.was_called();
            for event in news.drain(..) {
                self.take_in(event);
            }
            if done || woken {
                self.advance();
                break;
            }
        }
        events.append(&mut self.events);
    }

    fn waker(&self) -> Waker {
        self.tcp.waker()
    }

    fn close(&mut self, peer: PeerId) {
        self.tcp.close(peer);
        self.end_all(peer, &PullError::Cancelled);
    }
}

/// A random ticket.
fn random() -> Ticket {
    let mut ticket = [0; 32];
    let filled = getrandom(&mut ticket, GetRandomFlags::empty());
    assert_eq!(filled, Ok(ticket.len()), "the kernel has 32 random bytes");
    ticket
}

#[cfg(test)]
mod tests;
