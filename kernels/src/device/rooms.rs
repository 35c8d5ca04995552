//! Rows in memory that other processes may read: room that one owner fills, then parts that everybody reads.
//!
//! In: lengths. Out: a [`Room`] in an arena, written by copies and launches; of it [`Part`]s, whose clones share the memory until
//! the last is dropped. Where no arena has room another is made, so rows of any length find a place while the GPU has memory. Arenas
//! stay, since peers may have mapped them. The length of one is a power of two, so that rows that become longer step by step find
//! room in those of before: where one room is taken at a time, all arenas together are at most four times the longest one.
//!
//! ```text
//! room ──copies are enqueued on streams──▶ early ──▶ parts: launches may be enqueued behind these copies
//!   └──────copies are over, launches were waited for──────▶ share ──▶ parts
//! ```
//!
//! It publishes nothing. Invariant: what reads a part on a stream begins after [`Part::ready_on`], behind all copies to its room
//! that were enqueued before; and the memory goes back when the last owner is dropped and no copy writes to it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::arena::{Arena, ArenaMemory, CopyPiece};
use super::driver::Gpu;
use super::error::Error;
use super::event::Event;
use super::memory::Stream;
use super::slice::{Slice, SliceMut};
use super::tables::Plain;

/// Arenas of a process, shared by its threads.
#[derive(Clone, Debug)]
pub struct Rooms {
    gpu: Gpu,
    arenas: Arc<Mutex<Vec<Arena>>>,
    arena_bytes: u64,
}

/// Memory in an arena with one owner who writes it.
#[derive(Debug)]
pub struct Room(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    memory: ArenaMemory,
    copying: Mutex<Vec<Copying>>,
}

/// Copies that were enqueued on one stream and may not be over; what they read stays meanwhile.
#[derive(Debug)]
struct Copying {
    over: Arc<Event>,
    from: Vec<Part>,
}

/// Rows in an arena, or some of them.
#[derive(Clone, Debug)]
pub struct Part {
    room: Arc<Inner>,
    at: u64,
    bytes: u64,
}

impl Rooms {
    /// Arenas on `gpu`, of `arena_bytes` each, or longer for longer rows. No memory is allocated yet.
    pub fn new(gpu: &Gpu, arena_bytes: u64) -> Self {
        Self { gpu: gpu.clone(), arenas: Arc::default(), arena_bytes }
    }

    /// The GPU whose memory they are.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Memory of the GPU that the arenas have.
    pub fn len_bytes(&self) -> u64 {
        let arenas = self.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        arenas.iter().map(|it| it.len_bytes() as u64).sum()
    }

    /// A room of `bytes`, with unspecified content.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`], or the driver's.
    pub fn take(&self, bytes: u64) -> Result<Room, Error> {
        let mut arenas = self.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        // A linear search is enough: a process has few arenas, since each is large.
        if let Some(memory) = arenas.iter().find_map(|it| it.take(bytes).ok()) {
            return Ok(Room::of(memory));
        }
        let long = bytes.checked_next_power_of_two().unwrap_or(bytes).max(self.arena_bytes);
        let arena = match Arena::new(&self.gpu, long as usize) {
            // A short arena is better than none.
            Err(Error::OutOfMemory { .. }) => Arena::new(&self.gpu, bytes as usize)?,
            made => made?,
        };
        let memory = arena.take(bytes)?;
        arenas.push(arena);
        Ok(Room::of(memory))
    }
}

/// Message of the panic when an owner writes a room after [`Room::early`] lent it to readers.
const EARLY: &str = "rows that were handed out early are written by copies alone";

impl Room {
    fn of(memory: ArenaMemory) -> Self {
        Self(Arc::new(Inner { memory, copying: Mutex::default() }))
    }

    /// The memory of the arena that the room occupies.
    pub fn memory(&self) -> &ArenaMemory {
        &self.0.memory
    }

    /// Bytes of the room.
    pub fn len_bytes(&self) -> u64 {
        self.memory().len_bytes()
    }

    /// Copies bytes of the host to the beginning of the room and waits until they are there.
    ///
    /// # Errors
    ///
    /// More bytes than it has, the driver's, and what went wrong in the stream before.
    ///
    /// # Panics
    ///
    /// After [`Self::early`].
    pub fn write(&mut self, stream: &Stream, from: &[u8]) -> Result<(), Error> {
        if from.is_empty() {
            return Ok(());
        }
        Arc::get_mut(&mut self.0).expect(EARLY).memory.write(stream, from)?;
        stream.wait()
    }

    /// Copies pieces of a part of this process into the room, in the order of `stream`. A launch
    /// that reads the room waits for this copy without further calls.
    ///
    /// # Errors
    ///
    /// A piece outside of either, before anything is copied; or the driver's.
    pub fn copy(
        &mut self,
        stream: &Stream,
        from: &Part,
        pieces: &[CopyPiece],
    ) -> Result<(), Error> {
        from.ready_on(stream)?;
        let in_room = |it: &CopyPiece| CopyPiece { from: it.from + from.at, ..*it };
        let pieces: Vec<_> = pieces.iter().map(in_room).collect();
        from.room.memory.copy(stream, &pieces, self.memory())?;
        self.0.behind(Arc::new(Event::record(stream)?), Some(from));
        Ok(())
    }

    /// Registers a copy into [`Self::memory`] that the caller has enqueued on a stream; the event
    /// `over` marks its end. Whatever reads the room waits for that event. The caller registers
    /// copies on one stream in the order in which it enqueued them.
    pub fn copied_behind(&self, over: Arc<Event>) {
        self.0.behind(over, None);
    }

    /// Waits for all copies into the room, then releases the parts that they read.
    ///
    /// # Errors
    ///
    /// What went wrong in the streams of the copies.
    pub fn settle(&mut self) -> Result<(), Error> {
        self.0.settle()
    }

    /// The whole room as elements of `T`, for a launch to write. Bytes that do not fill an element
    /// are left out.
    ///
    /// # Panics
    ///
    /// After [`Self::early`].
    pub fn slice_mut<T: Plain>(&mut self) -> SliceMut<'_, T> {
        let len = self.len_bytes() as usize / size_of::<T>();
        let memory = &Arc::get_mut(&mut self.0).expect(EARLY).memory;
        // SAFETY: memory of this length that nobody else has, as was just looked at.
        #[allow(unsafe_code)]
        unsafe {
            SliceMut::foreign(memory.address(), len)
        }
    }

    /// The whole room, readable before its copies have ended. A launch that reads it waits for the
    /// copies that are enqueued by then ([`Part::ready_on`]). A copy that is enqueued later must
    /// write other bytes, or bytes whose readers' results will be discarded.
    pub fn early(&self) -> Part {
        Part { room: Arc::clone(&self.0), at: 0, bytes: self.len_bytes() }
    }

    /// The whole room, for readers; nobody writes it any more. The caller has waited for the
    /// launches that wrote it.
    pub fn share(self) -> Part {
        self.early()
    }
}

impl Inner {
    fn copying(&self) -> MutexGuard<'_, Vec<Copying>> {
        self.copying.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers the newest copy of each stream. Keeps the sources of the earlier copies too, since
    /// these may still run.
    fn behind(&self, over: Arc<Event>, from: Option<&Part>) {
        let mut copying = self.copying();
        let from = from.cloned();
        match copying.iter_mut().find(|it| it.over.is_of_stream_of(&over)) {
            Some(it) => {
                it.over = over;
                it.from.extend(from);
            }
            None => copying.push(Copying { over, from: Vec::from_iter(from) }),
        }
    }

    fn settle(&self) -> Result<(), Error> {
        let copying = std::mem::take(&mut *self.copying());
        copying.into_iter().try_for_each(|it| it.over.wait())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The arena may hand this memory to another owner now, so copies into it must end first. If
        // waiting fails, the GPU is lost and nothing copies any more.
        let _ = self.settle();
    }
}

impl Part {
    /// The memory of the arena that the part belongs to.
    pub fn memory(&self) -> &ArenaMemory {
        &self.room.memory
    }

    /// First byte in the arena.
    pub fn at(&self) -> u64 {
        self.room.memory.at() + self.at
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether both are parts of one room: then they are ready after the same copies.
    pub fn is_of_room_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.room, &other.room)
    }

    /// Some of its bytes.
    ///
    /// # Panics
    ///
    /// Beyond the end.
    #[must_use]
    pub fn part(&self, at: u64, bytes: u64) -> Self {
        assert!(at + bytes <= self.bytes, "a part lies inside its rows");
        Self { room: Arc::clone(&self.room), at: self.at + at, bytes }
    }

    /// A view as whole elements of `T`, for launches that are enqueued on a stream after [`Self::ready_on`].
    pub fn slice<T: Plain>(&self) -> Slice<'_, T> {
        let len = self.bytes as usize / size_of::<T>();
        // SAFETY: inside the memory, which only copies may still write: readers are behind these.
        #[allow(unsafe_code)]
        unsafe {
            Slice::foreign(self.room.memory.address() + self.at, len)
        }
    }

    /// Makes work that is enqueued on `stream` from now on wait for the bytes of this part.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn ready_on(&self, stream: &Stream) -> Result<(), Error> {
        self.room.copying().iter().try_for_each(|it| stream.wait_for(&it.over))
    }

    /// Waits for the part's bytes, and for `stream`, and copies them to the host.
    ///
    /// # Errors
    ///
    /// More bytes than it has, the driver's, and what went wrong in the stream before.
    pub fn read(&self, stream: &Stream, to: &mut [u8]) -> Result<(), Error> {
        if to.is_empty() {
            return Ok(());
        }
        self.ready_on(stream)?;
        self.room.memory.read(stream, self.at, to)
    }
}
