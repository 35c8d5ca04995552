//! The interface between a node and the memory that it moves. A crate that knows a GPU implements it.
//!
//! Invariants: a copy runs on the device by itself; asking whether it is over never blocks; copies end in the order in which
//! they began.

use std::os::fd::OwnedFd;

use crate::peer::Piece;

/// Memory of this machine that processes share by file descriptors, and copies of it.
///
/// Errors are text: a pull that meets one ends as refused.
pub trait Device {
    /// Memory of this process inside an arena, to publish or to land pulls in.
    type Memory;
    /// An arena of another process, mapped here.
    type Imported;
    /// Copies in progress.
    type Copy;
    /// Why the device does not do what it was asked to.
    type Error: std::error::Error;

    /// Position of memory in its arena.
    fn place(&self, memory: &Self::Memory) -> Place;

    /// A descriptor of the arena in which memory lies.
    ///
    /// # Errors
    ///
    /// The device's.
    fn export(&self, memory: &Self::Memory) -> Result<OwnedFd, Self::Error>;

    /// Maps an arena of `bytes` to be read.
    ///
    /// # Errors
    ///
    /// The device's.
    fn import(&self, descriptor: &OwnedFd, bytes: u64) -> Result<Self::Imported, Self::Error>;

    /// Begins to copy; `remote` of the pieces counts from the beginning of the arena. Both ends stay as they are until the copy
    /// is over, and it is over after all that began before it.
    ///
    /// # Errors
    ///
    /// The device's; then nothing is being copied.
    fn copy(
        &mut self,
        from: &Self::Imported,
        to: &Self::Memory,
        pieces: &[Piece],
    ) -> Result<Self::Copy, Self::Error>;

    /// Whether it is over.
    ///
    /// # Errors
    ///
    /// The device's; the copy is over then, too.
    fn is_over(&self, copy: &Self::Copy) -> Result<bool, Self::Error>;
}

/// Position of memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Place {
    /// Names the arena in this process; never used again for another one.
    pub arena: u64,
    /// Length of the arena.
    pub arena_bytes: u64,
    /// First byte in it.
    pub at: u64,
    /// Length of the memory.
    pub bytes: u64,
}
