//! Rows in memory that other processes may read: room that one owner fills, then parts that everybody reads.
//!
//! In: lengths. Out: a [`Room`] in an arena, written by copies and launches; of it [`Part`]s, whose clones share the memory until
//! the last is dropped. Where no arena has room another is made, so rows of any length find a place while the GPU has memory.
//!
//! It publishes nothing. Invariant: a part is read-only, and what reads it on a stream begins after [`Part::ready_on`].

use std::sync::{Arc, Mutex, PoisonError};

use super::arena::{Arena, ArenaMemory, CopyPiece};
use super::driver::Gpu;
use super::error::Error;
use super::event::Event;
use super::memory::{Slice, SliceMut, Stream};
use super::tables::Plain;

/// Arenas of a process, shared by its threads.
#[derive(Clone, Debug)]
pub struct Rooms {
    gpu: Gpu,
    arenas: Arc<Mutex<Vec<Arena>>>,
    arena_bytes: u64,
}

/// Memory in an arena with one owner.
#[derive(Debug)]
pub struct Room {
    memory: ArenaMemory,
    copying: Vec<Copying>,
}

/// A copy that was put on some stream and may not be over; what it reads stays meanwhile.
#[derive(Debug)]
struct Copying {
    over: Event,
    _from: Part,
}

/// Rows in an arena, or some of them.
#[derive(Clone, Debug)]
pub struct Part {
    room: Arc<Room>,
    at: u64,
    bytes: u64,
}

impl Rooms {
    /// On `gpu`, in arenas of `arena_bytes` or, where more is asked for, as much as that. No memory is taken yet.
    pub fn new(gpu: &Gpu, arena_bytes: u64) -> Self {
        Self { gpu: gpu.clone(), arenas: Arc::default(), arena_bytes }
    }

    /// Their GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// `bytes`, with any bytes in them.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`], or the driver's.
    pub fn take(&self, bytes: u64) -> Result<Room, Error> {
        let mut arenas = self.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        // The arenas of a process are few: each is large.
        if let Some(memory) = arenas.iter().find_map(|it| it.take(bytes).ok()) {
            return Ok(Room { memory, copying: Vec::new() });
        }
        let arena = Arena::new(&self.gpu, self.arena_bytes.max(bytes) as usize)?;
        let memory = arena.take(bytes)?;
        arenas.push(arena);
        Ok(Room { memory, copying: Vec::new() })
    }
}

impl Room {
    /// Where it lies.
    pub fn memory(&self) -> &ArenaMemory {
        &self.memory
    }

    /// Its length.
    pub fn len_bytes(&self) -> u64 {
        self.memory.len_bytes()
    }

    /// Copies bytes of the host to its beginning and waits until they are there.
    ///
    /// # Errors
    ///
    /// More bytes than it has, the driver's, and what went wrong in the stream before.
    pub fn write(&mut self, stream: &Stream, from: &[u8]) -> Result<(), Error> {
        if from.is_empty() {
            return Ok(());
        }
        self.memory.write(stream, from)?;
        stream.wait()
    }

    /// Copies pieces of rows of this process to it, in the order of `stream`; who reads it waits for that by itself.
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
        from.room.memory.copy(stream, &pieces, &self.memory)?;
        self.copying.push(Copying { over: Event::record(stream)?, _from: from.clone() });
        Ok(())
    }

    /// Waits until what was copied to it is there, and lets go of what it came from.
    ///
    /// # Errors
    ///
    /// What went wrong in the streams of the copies.
    pub fn settle(&mut self) -> Result<(), Error> {
        self.copying.drain(..).try_for_each(|it| it.over.wait())
    }

    /// As many whole numbers as it has room for, for a launch to write.
    pub fn slice_mut<T: Plain>(&mut self) -> SliceMut<'_, T> {
        let len = self.len_bytes() as usize / size_of::<T>();
        // SAFETY: memory of this length that nobody else has, since parts are made of what is owned.
        #[allow(unsafe_code)]
        unsafe {
            SliceMut::foreign(self.memory.address(), len)
        }
    }

    /// All of it, to be read from now on. What launches have written is there: they were waited for.
    pub fn share(self) -> Part {
        let bytes = self.len_bytes();
        Part { room: Arc::new(self), at: 0, bytes }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // Its memory is somebody else's from now on. Who cannot wait any more has lost the GPU.
        let _ = self.settle();
    }
}

impl Part {
    /// The memory that it is a part of.
    pub fn memory(&self) -> &ArenaMemory {
        &self.room.memory
    }

    /// First byte in the arena.
    pub fn at(&self) -> u64 {
        self.room.memory.at() + self.at
    }

    /// Its length.
    pub fn len_bytes(&self) -> u64 {
        self.bytes
    }

    /// Some bytes of it.
    ///
    /// # Panics
    ///
    /// Beyond the end.
    #[must_use]
    pub fn part(&self, at: u64, bytes: u64) -> Self {
        assert!(at + bytes <= self.bytes, "a part lies inside its rows");
        Self { room: Arc::clone(&self.room), at: self.at + at, bytes }
    }

    /// As many whole numbers as it has, for launches to read that are put on a stream after [`Self::ready_on`].
    pub fn slice<T: Plain>(&self) -> Slice<'_, T> {
        let len = self.bytes as usize / size_of::<T>();
        // SAFETY: inside the memory, which nobody writes any more.
        #[allow(unsafe_code)]
        unsafe {
            Slice::foreign(self.room.memory.address() + self.at, len)
        }
    }

    /// Lets what is put on `stream` from now on begin when its bytes are there.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn ready_on(&self, stream: &Stream) -> Result<(), Error> {
        self.room.copying.iter().try_for_each(|it| stream.wait_for(&it.over))
    }

    /// Waits for its bytes, and for `stream`, and copies them to the host.
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
