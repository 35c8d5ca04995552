//! Memory of this process's GPU for the exchange between processes of one machine.
//!
//! In: a [`Gpu`]. Out: a [`Device`] for [`cadre_exchange::Node`]: descriptors of arenas, arenas of peers, copies on a stream of
//! its own, so that they run beside kernels. [`GpuMemory`] takes pieces of arenas as they are; [`GpuMoves`], which workers use, room
//! to land in and parts to read.
//!
//! Pulls of many small pieces, as the rows of some heads are, go as one launch ([`PieceCopier`]) instead of a copy each.
//!
//! It moves nothing by itself. Invariant: a copy is over when the event behind it is; who reads the landing on another stream
//! waits for that, as readers of a [`Room`] do, or for a gate that is opened when the pull ends.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use cadre_exchange::{Device, Piece, Place};
use cadre_kernels::device::{
    ArenaMemory, CopyPiece, Error, Event, Gpu, Imported, Part, PieceCopier, Room, Stream,
};

/// See the module.
#[derive(Debug)]
pub struct GpuMemory {
    gpu: Gpu,
    copier: PieceCopier,
}

impl GpuMemory {
    /// Copies run on a new stream of `gpu`.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn new(gpu: &Gpu) -> Result<Self, Error> {
        // Where copies are launches, those of attention must not keep them waiting one after the other.
        Ok(Self { gpu: gpu.clone(), copier: PieceCopier::new(Stream::urgent(gpu)?)? })
    }
}

impl Device for GpuMemory {
    type Memory = ArenaMemory;
    type Imported = Imported;
    type Copy = Event;
    type Error = Error;

    fn place(&self, memory: &ArenaMemory) -> Place {
        let arena = memory.arena();
        Place {
            arena: arena.number(),
            arena_bytes: arena.len_bytes() as u64,
            at: memory.at(),
            bytes: memory.len_bytes(),
        }
    }

    fn export(&self, memory: &ArenaMemory) -> Result<OwnedFd, Error> {
        memory.arena().export()
    }

    fn import(&self, descriptor: &OwnedFd, bytes: u64) -> Result<Imported, Error> {
        Imported::new(&self.gpu, descriptor, bytes as usize)
    }

    fn copy(
        &mut self,
        from: &Imported,
        to: &ArenaMemory,
        pieces: &[Piece],
    ) -> Result<Event, Error> {
        let piece = |it: &Piece| CopyPiece { from: it.remote, to: it.local, bytes: it.bytes };
        let pieces: Vec<_> = pieces.iter().map(piece).collect();
        self.copier.copy(from, &pieces, to)?;
        Event::record(self.copier.stream())
    }

    fn is_over(&self, copy: &Event) -> Result<bool, Error> {
        copy.is_over()
    }
}

/// Memory that the exchange of a worker holds.
#[derive(Debug)]
pub enum Held {
    /// Pulls land here.
    Landing(Room),
    /// Peers read this.
    Published(Part),
}

/// Why rows are not copied.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MoveError {
    /// The GPU does not.
    #[error(transparent)]
    Gpu(#[from] Error),
    /// The target is no landing.
    #[error("rows that peers read are no place to land in")]
    Published,
}

/// A [`GpuMemory`] for rows as workers hold them.
#[derive(Debug)]
pub struct GpuMoves(GpuMemory);

impl GpuMoves {
    /// As [`GpuMemory::new`].
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn new(gpu: &Gpu) -> Result<Self, Error> {
        GpuMemory::new(gpu).map(Self)
    }
}

impl Device for GpuMoves {
    type Memory = Held;
    type Imported = Imported;
    type Copy = Arc<Event>;
    type Error = MoveError;

    fn place(&self, memory: &Held) -> Place {
        match memory {
            Held::Landing(room) => self.0.place(room.memory()),
            Held::Published(part) => {
                let (at, bytes) = (part.at(), part.len_bytes());
                Place { at, bytes, ..self.0.place(part.memory()) }
            }
        }
    }

    fn export(&self, memory: &Held) -> Result<OwnedFd, MoveError> {
        Ok(match memory {
            Held::Landing(room) => self.0.export(room.memory()),
            Held::Published(part) => self.0.export(part.memory()),
        }?)
    }

    fn import(&self, descriptor: &OwnedFd, bytes: u64) -> Result<Imported, MoveError> {
        Ok(self.0.import(descriptor, bytes)?)
    }

    fn copy(
        &mut self,
        from: &Imported,
        to: &Held,
        pieces: &[Piece],
    ) -> Result<Arc<Event>, MoveError> {
        let room = match to {
            Held::Landing(room) => room,
            Held::Published(_) => return Err(MoveError::Published),
        };
        let over = Arc::new(self.0.copy(from, room.memory(), pieces)?);
        room.copied_behind(Arc::clone(&over));
        Ok(over)
    }

    fn is_over(&self, copy: &Arc<Event>) -> Result<bool, MoveError> {
        Ok(self.0.is_over(copy)?)
    }
}
