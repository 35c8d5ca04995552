//! The exchange of rows that processes of one machine share on a GPU: a [`Node`] whose copies are the GPU's.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cadre_exchange::{
    Error, Event, LandingId, Node, NodeConfig, PeerId, Piece, Provider, PullId, PullRequest,
    RegionKey, RingError, TcpConfig, Waker,
};
use cadre_kernels::device::{self, Gpu, Room, Rooms};

use super::Exchange;
use super::opening::{ByNode, Open, OpenError};
use crate::gpu_memory::{GpuMoves, Held};
use crate::memory::{GpuRows, OnGpu, Place as _};

/// Bytes of an arena; more are made as rows need them.
const ARENA_BYTES: u64 = 256 << 20;

/// A node with the place of its rows.
pub struct ByGpu {
    node: Node<GpuMoves>,
    place: OnGpu,
}

impl ByGpu {
    /// Opens a node for rows on `gpu`; its socket, and those of its peers, are in the folder `sockets`.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn open(tcp: TcpConfig, sockets: &Path, gpu: &Gpu) -> Result<Self, OpenError> {
        let config = NodeConfig { tcp, sockets: sockets.to_owned() };
        let place = OnGpu::new(&Rooms::new(gpu, ARENA_BYTES))?;
        Ok(Self { node: Node::open(config, GpuMoves::new(gpu)?)?, place })
    }
}

impl Open for ByNode<'_> {
    type Exchange = ByGpu;

    fn open(self, links: TcpConfig) -> Result<ByGpu, OpenError> {
        ByGpu::open(links, self.sockets, self.gpu)
    }
}

impl Exchange for ByGpu {
    type Memory = GpuRows;

    fn place(&self) -> &OnGpu {
        &self.place
    }

    fn path(&self, _peer: PeerId) -> Option<&'static str> {
        Some("node")
    }

    fn resumes(&self) -> bool {
        false
    }

    fn address(&self) -> String {
        Provider::address(&self.node)
    }

    fn allow(&self, peers: u64) -> Result<(), Error> {
        cadre_exchange::allow_links(peers)
    }

    fn connect(&mut self, peer: PeerId, address: &str) {
        Provider::connect(&mut self.node, peer, address);
    }

    fn publish(&mut self, key: RegionKey, memory: &GpuRows) {
        self.node.publish(key, Arc::new(Held::Published(memory.clone())));
    }

    fn withdraw(&mut self, key: RegionKey) {
        drop(Provider::withdraw(&mut self.node, key));
    }

    fn land(&mut self, bytes: usize) -> Result<LandingId, device::Error> {
        Ok(self.node.land(Held::Landing(self.place.room(bytes)?)))
    }

    fn early(
        &mut self,
        landing: LandingId,
        own: &[(GpuRows, &[Piece])],
    ) -> Result<Option<GpuRows>, device::Error> {
        let Some(Held::Landing(room)) = self.node.landing(landing) else { return Ok(None) };
        for (rows, pieces) in own {
            self.place.copy(rows, pieces, room)?;
        }
        Ok(Some(room.early()))
    }

    fn is_busy(&self, landing: LandingId) -> bool {
        self.node.is_busy(landing)
    }

    fn take(&mut self, landing: LandingId) -> Result<Room, Error> {
        match self.node.take(landing)? {
            Held::Landing(room) => Ok(room),
            Held::Published(_) => unreachable!("nothing lands in what was published"),
        }
    }

    fn discard(&mut self, landing: LandingId) {
        Provider::discard(&mut self.node, landing);
    }

    fn pull(&mut self, request: PullRequest) -> PullId {
        Provider::pull(&mut self.node, request)
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
