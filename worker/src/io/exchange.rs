//! The provider of a process: TCP for rows in the host's memory, a node for rows that processes of one machine share on a GPU.
//!
//! In and out: what a [`cadre_exchange::Provider`] takes and gives, with rows as [`Memory`] and [`Room`]. Which of the two it
//! is was decided when the process joined its job; nobody else asks.
//!
//! Invariant: rows live where this moves them, since all room comes from its own [`Place`].

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cadre_exchange::{
    Error, Event, LandingId, Node, NodeConfig, PeerId, Piece, Provider as _, PullId, RegionKey,
    RingError, Tcp, TcpConfig, Waker,
};
use cadre_kernels::device::{self, Gpu, Rooms};

use crate::gpu_memory::{GpuRows, Held};
use crate::memory::{Memory, Place, Room};

/// See the module.
pub enum Exchange {
    /// Through sockets.
    Tcp(Box<Tcp>),
    /// By copies of the GPU, with the place of its rows.
    Node(Box<Node<GpuRows>>, Place),
}

const OTHER: &str = "rows live where their exchange moves them";

/// How rows are to move.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Choice {
    /// Through sockets, from the host's memory.
    #[default]
    Tcp,
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

impl Exchange {
    /// Opens a node for rows on `gpu`; its socket, and those of its peers, are in the folder `sockets`.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn node(tcp: TcpConfig, sockets: &Path, gpu: &Gpu) -> Result<Self, OpenError> {
        let config = NodeConfig { tcp, sockets: sockets.to_owned() };
        let place = Place::on_gpu(&Rooms::new(gpu, ARENA_BYTES))?;
        Ok(Self::Node(Box::new(Node::open(config, GpuRows::new(gpu)?)?), place))
    }

    /// Where rows live.
    pub fn place(&self) -> &Place {
        match self {
            Self::Tcp(_) => &Place::Host,
            Self::Node(_, place) => place,
        }
    }

    /// Over what rows come, for reports.
    pub fn path(&self) -> &'static str {
        match self {
            Self::Tcp(_) => "tcp",
            Self::Node(..) => "node",
        }
    }

    /// As [`cadre_exchange::Provider::address`].
    pub fn address(&self) -> String {
        match self {
            Self::Tcp(it) => it.address(),
            Self::Node(it, _) => it.address(),
        }
    }

    /// As [`cadre_exchange::Provider::connect`].
    pub fn connect(&mut self, peer: PeerId, address: &str) {
        match self {
            Self::Tcp(it) => it.connect(peer, address),
            Self::Node(it, _) => it.connect(peer, address),
        }
    }

    /// As [`cadre_exchange::Provider::publish`].
    pub fn publish(&mut self, key: RegionKey, memory: &Memory) {
        match (self, memory) {
            (Self::Tcp(it), Memory::Host(rows)) => it.publish(key, Arc::clone(rows)),
            (Self::Node(it, _), Memory::Gpu(part)) => {
                it.publish(key, Arc::new(Held::Published(part.clone())));
            }
            (Self::Tcp(_) | Self::Node(..), _) => unreachable!("{OTHER}"),
        }
    }

    /// As [`cadre_exchange::Provider::withdraw`].
    pub fn withdraw(&mut self, key: RegionKey) {
        match self {
            Self::Tcp(it) => drop(it.withdraw(key)),
            Self::Node(it, _) => drop(it.withdraw(key)),
        }
    }

    /// As [`cadre_exchange::Provider::land`], with room of its own place.
    ///
    /// # Errors
    ///
    /// There is no room.
    pub fn land(&mut self, bytes: usize) -> Result<LandingId, device::Error> {
        let room = self.place().room(bytes)?;
        Ok(match (self, room) {
            (Self::Tcp(it), Room::Host(room)) => it.land(room),
            (Self::Node(it, _), Room::Gpu(room)) => it.land(Held::Landing(room)),
            (Self::Tcp(_) | Self::Node(..), _) => unreachable!("{OTHER}"),
        })
    }

    /// Rows of a landing for launches that are put behind the copies to it that were put so far, and behind those of `own`
    /// rows into it. None where rows are there only when their pulls have ended.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn early(
        &mut self,
        landing: LandingId,
        own: &[(Memory, &[Piece])],
    ) -> Result<Option<Memory>, device::Error> {
        let Self::Node(node, place) = self else { return Ok(None) };
        let Some(Held::Landing(room)) = node.landing(landing) else { return Ok(None) };
        for (rows, pieces) in own {
            place.copy_on_gpu(rows, pieces, room)?;
        }
        Ok(Some(Memory::Gpu(room.early())))
    }

    /// As [`cadre_exchange::Provider::take`].
    ///
    /// # Errors
    ///
    /// [`Error::Busy`], [`Error::UnknownLanding`].
    pub fn take(&mut self, landing: LandingId) -> Result<Room, Error> {
        Ok(match self {
            Self::Tcp(it) => Room::Host(it.take(landing)?),
            Self::Node(it, _) => match it.take(landing)? {
                Held::Landing(room) => Room::Gpu(room),
                Held::Published(_) => unreachable!("nothing lands in what was published"),
            },
        })
    }

    /// As [`cadre_exchange::Provider::discard`].
    pub fn discard(&mut self, landing: LandingId) {
        match self {
            Self::Tcp(it) => it.discard(landing),
            Self::Node(it, _) => it.discard(landing),
        }
    }

    /// As [`cadre_exchange::Provider::pull`].
    pub fn pull(
        &mut self,
        peer: PeerId,
        key: RegionKey,
        pieces: Vec<Piece>,
        landing: LandingId,
        deadline: Instant,
    ) -> PullId {
        match self {
            Self::Tcp(it) => it.pull(peer, key, pieces, landing, deadline),
            Self::Node(it, _) => it.pull(peer, key, pieces, landing, deadline),
        }
    }

    /// As [`cadre_exchange::Provider::ring`].
    ///
    /// # Errors
    ///
    /// [`RingError`].
    pub fn ring(&mut self, peer: PeerId, message: &[u8]) -> Result<(), RingError> {
        match self {
            Self::Tcp(it) => it.ring(peer, message),
            Self::Node(it, _) => it.ring(peer, message),
        }
    }

    /// As [`cadre_exchange::Provider::poll`].
    pub fn poll(&mut self, timeout: Duration, events: &mut Vec<Event>) {
        match self {
            Self::Tcp(it) => it.poll(timeout, events),
            Self::Node(it, _) => it.poll(timeout, events),
        }
    }

    /// As [`cadre_exchange::Provider::waker`].
    pub fn waker(&self) -> Waker {
        match self {
            Self::Tcp(it) => it.waker(),
            Self::Node(it, _) => it.waker(),
        }
    }

    /// As [`cadre_exchange::Provider::close`].
    pub fn close(&mut self, peer: PeerId) {
        match self {
            Self::Tcp(it) => it.close(peer),
            Self::Node(it, _) => it.close(peer),
        }
    }
}
