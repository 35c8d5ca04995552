//! What moves the rows of a process, as its IO thread sees it: the best path of each pair for rows in the host's memory, a node for
//! rows that processes of one machine share on a GPU, or what a test puts in their place.
//!
//! In and out: what a [`Provider`] takes and gives, with rows as [`Memory`] and [`Room`]. Which of them it is is a type, chosen once,
//! when the process joins its job ([`Opened`]); nobody else asks.
//!
//! Invariant: rows live where this moves them, since all room comes from its own [`Place`].

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cadre_exchange::{
    Buffer, Error, Event, LandingId, Node, NodeConfig, Path as PeerPath, Paths, PathsConfig,
    PeerId, Piece, Provider, PullId, RegionKey, RingError, Sharing, Tcp, TcpConfig, Waker,
};
use cadre_kernels::device::{self, Gpu, Rooms};

use crate::gpu_memory::{GpuRows, Held};
use crate::memory::{self, Memory, Place, Room};

/// See the module. What is not said here is as [`Provider`] says.
pub trait Exchange {
    /// Where rows live.
    fn place(&self) -> &Place;

    /// Over what rows of a peer come, for reports.
    fn path(&self, peer: PeerId) -> &'static str;

    /// Whether a pull that was interrupted and is asked for again, into the same landing, goes on where it stopped.
    fn resumes(&self) -> bool;

    /// What peers pass to [`Self::connect`].
    fn address(&self) -> String;

    /// Opens the link to a peer, unless there is one.
    fn connect(&mut self, peer: PeerId, address: &str);

    /// Lets peers read rows.
    fn publish(&mut self, key: RegionKey, memory: &Memory);

    /// Ends that.
    fn withdraw(&mut self, key: RegionKey);

    /// Makes a target of pulls, with room of its own place: whatever stands in it.
    ///
    /// # Errors
    ///
    /// There is no room.
    fn land(&mut self, bytes: usize) -> Result<LandingId, device::Error>;

    /// Rows of a landing for launches that are put behind the copies to it that were put so far, and behind those of `own`
    /// rows into it. None where rows are there only when their pulls have ended.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn early(
        &mut self,
        landing: LandingId,
        own: &[(Memory, &[Piece])],
    ) -> Result<Option<Memory>, device::Error>;

    /// Whether rows that have landed can be copied while pulls write others to the same landing.
    fn copies_landed(&self) -> bool {
        false
    }

    /// Copies pieces of a landing to which no pull writes any more; others may write beside them.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownLanding`], also where [`Self::copies_landed`] says no.
    fn copy_landed(
        &self,
        landing: LandingId,
        _pieces: &[Piece],
        _to: &mut Room,
    ) -> Result<(), Error> {
        Err(Error::UnknownLanding { landing })
    }

    /// Whether a copy to a landing that cannot be called back is under way, though its pull has ended.
    fn is_busy(&self, landing: LandingId) -> bool;

    /// Gives landed memory back.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`], [`Error::UnknownLanding`].
    fn take(&mut self, landing: LandingId) -> Result<Room, Error>;

    /// Frees landed memory as soon as no pull writes to it.
    fn discard(&mut self, landing: LandingId);

    /// Copies pieces of a peer's rows into a landing.
    fn pull(
        &mut self,
        peer: PeerId,
        key: RegionKey,
        pieces: Vec<Piece>,
        landing: LandingId,
        patience: Duration,
    ) -> PullId;

    /// The incarnation that the rows of a pull which ended well are of, where no link names their owner: in memory that another
    /// process may have by now. None where the rows are of the peer that was asked.
    fn found(&self, _pull: PullId) -> Option<u32> {
        None
    }

    /// Sends a small message.
    ///
    /// # Errors
    ///
    /// [`RingError`].
    fn ring(&mut self, peer: PeerId, message: &[u8]) -> Result<(), RingError>;

    /// Moves what can be moved, and appends what happened.
    fn poll(&mut self, timeout: Duration, events: &mut Vec<Event>);

    /// Ends a poll from other threads.
    fn waker(&self) -> Waker;

    /// Closes every link with a peer.
    fn close(&mut self, peer: PeerId);
}

const OTHER: &str = "rows live where their exchange moves them";

/// A node with the place of its rows.
pub struct OnGpu {
    node: Node<GpuRows>,
    place: Place,
}

/// What a process has opened when it joined its job.
pub enum Opened {
    /// From the host's memory.
    Paths(Box<Paths>),
    /// By copies of the GPU.
    Node(Box<OnGpu>),
}

impl Opened {
    /// What peers connect to.
    pub fn address(&self) -> String {
        match self {
            Self::Paths(it) => Exchange::address(it.as_ref()),
            Self::Node(it) => it.address(),
        }
    }

    /// Ends a poll from other threads.
    pub fn waker(&self) -> Waker {
        match self {
            Self::Paths(it) => Exchange::waker(it.as_ref()),
            Self::Node(it) => it.waker(),
        }
    }
}

/// How rows are to move.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Choice {
    /// From the host's memory: by shared memory where the peer is of this machine, by RDMA where both have it, else through sockets.
    #[default]
    Auto,
    /// From the host's memory, through sockets.
    Tcp,
    /// From the host's memory, by shared memory alone.
    Shared,
    /// From the host's memory, by UCX alone.
    Ucx,
    /// By copies of the GPU, between processes of one machine.
    Node,
}

/// Bytes of an arena; more are made as rows need them.
const ARENA_BYTES: u64 = 256 << 20;

/// Why a node cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The links.
    #[error(transparent)]
    Links(#[from] Error),
    /// The GPU.
    #[error("the GPU gives no memory to the exchange: {0}")]
    Gpu(#[from] device::Error),
}

impl OnGpu {
    /// Opens a node for rows on `gpu`; its socket, and those of its peers, are in the folder `sockets`.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn open(tcp: TcpConfig, sockets: &Path, gpu: &Gpu) -> Result<Self, OpenError> {
        let config = NodeConfig { tcp, sockets: sockets.to_owned() };
        let place = Place::on_gpu(&Rooms::new(gpu, ARENA_BYTES))?;
        Ok(Self { node: Node::open(config, GpuRows::new(gpu)?)?, place })
    }
}

/// Opens paths for rows in the host's memory, which lie where `sharing` needs them from now on.
///
/// # Errors
///
/// [`Error`].
pub fn open_paths(tcp: TcpConfig, sharing: Sharing) -> Result<Paths, Error> {
    let paths = Paths::open(PathsConfig { tcp, sharing })?;
    if sharing != Sharing::Off {
        match memory::share_rows() {
            Ok(()) => {}
            Err(source) if matches!(sharing, Sharing::Required | Sharing::Ucx(_)) => {
                return Err(Error::Shared { source });
            }
            Err(error) => {
                tracing::info!(%error, "this machine gives no shared memory: peers get rows by tcp");
            }
        }
    }
    Ok(paths)
}

/// A provider of rows in the host's memory.
pub trait OnHost: Provider<Memory = Buffer> {
    /// As [`Exchange::path`].
    fn path_of(&self, peer: PeerId) -> &'static str;

    /// A landing, of which only those bytes may be read to which no pull writes any more.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownLanding`].
    fn landed(&self, landing: LandingId) -> Result<&Buffer, Error>;
}

impl OnHost for Tcp {
    fn path_of(&self, _peer: PeerId) -> &'static str {
        "tcp"
    }

    fn landed(&self, landing: LandingId) -> Result<&Buffer, Error> {
        Self::landed(self, landing)
    }
}

impl OnHost for Paths {
    fn path_of(&self, peer: PeerId) -> &'static str {
        match self.path(peer) {
            PeerPath::Asked | PeerPath::Tcp => "tcp",
            PeerPath::Shared => "shm",
            PeerPath::Ucx => "ucx",
        }
    }

    fn landed(&self, landing: LandingId) -> Result<&Buffer, Error> {
        Self::landed(self, landing)
    }
}

impl<P: OnHost> Exchange for P {
    fn place(&self) -> &Place {
        &Place::Host
    }

    fn path(&self, peer: PeerId) -> &'static str {
        self.path_of(peer)
    }

    fn address(&self) -> String {
        Provider::address(self)
    }

    fn resumes(&self) -> bool {
        true
    }

    fn connect(&mut self, peer: PeerId, address: &str) {
        Provider::connect(self, peer, address);
    }

    fn publish(&mut self, key: RegionKey, memory: &Memory) {
        let Memory::Host(rows) = memory else { unreachable!("{OTHER}") };
        Provider::publish(self, key, Arc::clone(rows));
    }

    fn withdraw(&mut self, key: RegionKey) {
        drop(Provider::withdraw(self, key));
    }

    fn land(&mut self, bytes: usize) -> Result<LandingId, device::Error> {
        let Room::Host(room) = Place::Host.room(bytes)? else { unreachable!("{OTHER}") };
        Ok(Provider::land(self, room))
    }

    fn early(
        &mut self,
        _landing: LandingId,
        _own: &[(Memory, &[Piece])],
    ) -> Result<Option<Memory>, device::Error> {
        Ok(None)
    }

    fn copies_landed(&self) -> bool {
        true
    }

    fn copy_landed(
        &self,
        landing: LandingId,
        pieces: &[Piece],
        to: &mut Room,
    ) -> Result<(), Error> {
        let Room::Host(to) = to else { unreachable!("{OTHER}") };
        memory::copy(self.landed(landing)?, pieces, to);
        Ok(())
    }

    fn is_busy(&self, _landing: LandingId) -> bool {
        false
    }

    fn take(&mut self, landing: LandingId) -> Result<Room, Error> {
        Ok(Room::Host(Provider::take(self, landing)?))
    }

    fn discard(&mut self, landing: LandingId) {
        Provider::discard(self, landing);
    }

    fn pull(
        &mut self,
        peer: PeerId,
        key: RegionKey,
        pieces: Vec<Piece>,
        landing: LandingId,
        patience: Duration,
    ) -> PullId {
        Provider::pull(self, peer, key, pieces, landing, patience)
    }

    fn ring(&mut self, peer: PeerId, message: &[u8]) -> Result<(), RingError> {
        Provider::ring(self, peer, message)
    }

    fn poll(&mut self, timeout: Duration, events: &mut Vec<Event>) {
        Provider::poll(self, timeout, events);
    }

    fn waker(&self) -> Waker {
        Provider::waker(self)
    }

    fn close(&mut self, peer: PeerId) {
        Provider::close(self, peer);
    }
}

impl Exchange for OnGpu {
    fn place(&self) -> &Place {
        &self.place
    }

    fn path(&self, _peer: PeerId) -> &'static str {
        "node"
    }

    fn resumes(&self) -> bool {
        false
    }

    fn address(&self) -> String {
        Provider::address(&self.node)
    }

    fn connect(&mut self, peer: PeerId, address: &str) {
        Provider::connect(&mut self.node, peer, address);
    }

    fn publish(&mut self, key: RegionKey, memory: &Memory) {
        let Memory::Gpu(part) = memory else { unreachable!("{OTHER}") };
        self.node.publish(key, Arc::new(Held::Published(part.clone())));
    }

    fn withdraw(&mut self, key: RegionKey) {
        drop(Provider::withdraw(&mut self.node, key));
    }

    fn land(&mut self, bytes: usize) -> Result<LandingId, device::Error> {
        let Room::Gpu(room) = self.place.room(bytes)? else { unreachable!("{OTHER}") };
        Ok(self.node.land(Held::Landing(room)))
    }

    fn early(
        &mut self,
        landing: LandingId,
        own: &[(Memory, &[Piece])],
    ) -> Result<Option<Memory>, device::Error> {
        let Some(Held::Landing(room)) = self.node.landing(landing) else { return Ok(None) };
        for (rows, pieces) in own {
            self.place.copy_on_gpu(rows, pieces, room)?;
        }
        Ok(Some(Memory::Gpu(room.early())))
    }

    fn is_busy(&self, landing: LandingId) -> bool {
        self.node.is_busy(landing)
    }

    fn take(&mut self, landing: LandingId) -> Result<Room, Error> {
        match self.node.take(landing)? {
            Held::Landing(room) => Ok(Room::Gpu(room)),
            Held::Published(_) => unreachable!("nothing lands in what was published"),
        }
    }

    fn discard(&mut self, landing: LandingId) {
        Provider::discard(&mut self.node, landing);
    }

    fn pull(
        &mut self,
        peer: PeerId,
        key: RegionKey,
        pieces: Vec<Piece>,
        landing: LandingId,
        patience: Duration,
    ) -> PullId {
        Provider::pull(&mut self.node, peer, key, pieces, landing, patience)
    }

    fn ring(&mut self, peer: PeerId, message: &[u8]) -> Result<(), RingError> {
        Provider::ring(&mut self.node, peer, message)
    }

    fn poll(&mut self, timeout: Duration, events: &mut Vec<Event>) {
        Provider::poll(&mut self.node, timeout, events);
    }

    fn waker(&self) -> Waker {
        Provider::waker(&self.node)
    }

    fn close(&mut self, peer: PeerId) {
        Provider::close(&mut self.node, peer);
    }
}

#[cfg(test)]
mod tests;
