//! Where the rows of a process live: in the host's memory or, if processes of one machine share a GPU's, there.
//!
//! In: lengths, and rows that a processor has computed. Out: a [`Room`] that its one owner fills, and [`Memory`] that everybody
//! reads; copies from one to the other; and rows in the host's memory for whoever computes there. On the host these are
//! [`Buffer`]s as the exchange moves them, and nothing is copied that need not be.
//!
//! It moves nothing between processes. Invariant: all rows of a process live in one kind of memory.

use std::io;
use std::sync::{Arc, LazyLock, OnceLock};

use cadre_exchange::{Buffer, Piece, Pool};
use cadre_kernels::device::{CopyPiece, Error, Part, Room as GpuRoom, Rooms, Stream};

/// Memory of rows with one owner.
#[derive(Debug)]
pub enum Room {
    /// Of the host.
    Host(Buffer),
    /// Of the GPU.
    Gpu(GpuRoom),
}

/// Rows that nobody writes any more; clones are the same memory.
#[derive(Clone, Debug)]
pub enum Memory {
    /// Of the host.
    Host(Arc<Buffer>),
    /// Of the GPU.
    Gpu(Part),
}

/// Where rows of this process live, for one of its threads.
#[derive(Debug)]
pub enum Place {
    /// In the host's memory.
    Host,
    /// In arenas of the GPU; copies are put on the stream.
    Gpu(Rooms, Stream),
}

/// Memory of landings on the host, and of rows that nobody shares, used again. With `CADRE_POISON` set it is full of what no computation survives, so that tests
/// find a reader of bytes that nobody has written.
static LANDINGS: LazyLock<Arc<Pool>> = LazyLock::new(|| match std::env::var_os("CADRE_POISON") {
    None => Pool::new(),
    Some(_) => Pool::poisoned(),
});

/// Arenas for rows that peers of this machine read, if they do.
static SHARED: OnceLock<Arc<Pool>> = OnceLock::new();

/// Bytes of an arena, more than most processes ever have rows at a time: the machine gives the memory when it is written. More
/// arenas are made as rows need them.
const ARENA_BYTES: usize = 32 << 30;

/// From now on rows on the host lie where peers of this machine can read them. A process does it once.
///
/// # Errors
///
/// The machine gives no shared memory.
pub(crate) fn share_rows() -> io::Result<()> {
    let pool = match std::env::var_os("CADRE_POISON") {
        None => Pool::shared(ARENA_BYTES)?,
        Some(_) => Pool::shared_and_poisoned(ARENA_BYTES)?,
    };
    SHARED.get_or_init(|| pool);
    Ok(())
}

/// Memory on the host for rows that peers are to read, with anything in it.
pub(crate) fn rows(bytes: usize) -> Buffer {
    SHARED.get().unwrap_or_else(|| &LANDINGS).take(bytes)
}

/// The same, zeroed: for sums.
pub(crate) fn zeroed_rows(bytes: usize) -> Buffer {
    match SHARED.get() {
        None => Buffer::zeroed(bytes),
        Some(pool) => {
            let mut rows = pool.take(bytes);
            rows.bytes_mut().fill(0);
            rows
        }
    }
}

/// What a process of one kind of memory never meets.
const OTHER: &str = "all rows of a process live in one kind of memory";

impl Place {
    /// In the memory of the GPU that `rooms` are on, with a stream of its own.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn on_gpu(rooms: &Rooms) -> Result<Self, Error> {
        Ok(Self::Gpu(rooms.clone(), Stream::new(rooms.gpu())?))
    }

    /// The same place, for another thread.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn another(&self) -> Result<Self, Error> {
        match self {
            Self::Host => Ok(Self::Host),
            Self::Gpu(rooms, _) => Self::on_gpu(rooms),
        }
    }

    /// Arenas of the GPU, if rows live there.
    pub fn rooms(&self) -> Option<&Rooms> {
        match self {
            Self::Host => None,
            Self::Gpu(rooms, _) => Some(rooms),
        }
    }

    /// Room for `bytes`, with any bytes in it.
    ///
    /// # Errors
    ///
    /// The GPU's memory is short, or the driver's.
    pub fn room(&self, bytes: usize) -> Result<Room, Error> {
        match self {
            Self::Host => Ok(Room::Host(LANDINGS.take(bytes))),
            Self::Gpu(rooms, _) => Ok(Room::Gpu(rooms.take(bytes as u64)?)),
        }
    }

    /// Rows that a processor has computed, where those of this process live; there when this returns.
    ///
    /// # Errors
    ///
    /// As [`Self::room`].
    pub fn hold(&self, rows: Buffer) -> Result<Memory, Error> {
        match self {
            Self::Host => Ok(Memory::Host(Arc::new(rows))),
            Self::Gpu(rooms, stream) => {
                let mut room = rooms.take(rows.len_bytes() as u64)?;
                room.write(stream, rows.bytes())?;
                Ok(Memory::Gpu(room.share()))
            }
        }
    }

    /// Copies pieces of rows of this process. On the GPU the copy goes on by itself; who reads the room waits for it.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn copy(&self, from: &Memory, pieces: &[Piece], to: &mut Room) -> Result<(), Error> {
        match (self, from, to) {
            (Self::Host, Memory::Host(from), Room::Host(to)) => {
                copy(from, pieces, to);
                Ok(())
            }
            (Self::Gpu(..), _, Room::Gpu(to)) => self.copy_on_gpu(from, pieces, to),
            (Self::Host | Self::Gpu(..), _, _) => unreachable!("{OTHER}"),
        }
    }

    /// As [`Self::copy`], where rows live on the GPU.
    ///
    /// # Errors
    ///
    /// As [`Self::copy`].
    ///
    /// # Panics
    ///
    /// Where they live on the host.
    pub fn copy_on_gpu(
        &self,
        from: &Memory,
        pieces: &[Piece],
        to: &mut GpuRoom,
    ) -> Result<(), Error> {
        let (Self::Gpu(_, stream), Memory::Gpu(from)) = (self, from) else {
            unreachable!("{OTHER}")
        };
        let piece = |it: &Piece| CopyPiece { from: it.remote, to: it.local, bytes: it.bytes };
        to.copy(stream, from, &pieces.iter().map(piece).collect::<Vec<_>>())
    }

    /// Rows for whoever computes on the host, who may read them meanwhile.
    ///
    /// # Errors
    ///
    /// The driver's, and what went wrong before they were there.
    pub fn read(&self, memory: &Memory) -> Result<Arc<Buffer>, Error> {
        match (self, memory) {
            (Self::Host, Memory::Host(rows)) => Ok(Arc::clone(rows)),
            (Self::Gpu(_, stream), Memory::Gpu(part)) => Ok(Arc::new(down(stream, part)?)),
            (Self::Host | Self::Gpu(..), _) => unreachable!("{OTHER}"),
        }
    }

    /// As [`Self::read`], of a room that is not needed any more.
    ///
    /// # Errors
    ///
    /// As [`Self::read`].
    pub fn unload(&self, room: Room) -> Result<Buffer, Error> {
        match (self, room) {
            (Self::Host, Room::Host(rows)) => Ok(rows),
            (Self::Gpu(_, stream), Room::Gpu(room)) => down(stream, &room.share()),
            (Self::Host | Self::Gpu(..), _) => unreachable!("{OTHER}"),
        }
    }
}

fn down(stream: &Stream, part: &Part) -> Result<Buffer, Error> {
    let mut rows = LANDINGS.take(part.len_bytes() as usize);
    part.read(stream, rows.bytes_mut())?;
    Ok(rows)
}

/// Copies pieces from one memory of the host to another.
pub(crate) fn copy(from: &Buffer, pieces: &[Piece], to: &mut Buffer) {
    for piece in pieces {
        let from = &from.bytes()[piece.remote as usize..][..piece.bytes as usize];
        to.bytes_mut()[piece.local as usize..][..piece.bytes as usize].copy_from_slice(from);
    }
}

impl Room {
    /// All of it, to be read from now on.
    pub fn share(self) -> Memory {
        match self {
            Self::Host(rows) => Memory::Host(Arc::new(rows)),
            Self::Gpu(room) => Memory::Gpu(room.share()),
        }
    }
}

impl Memory {
    /// How long it is.
    pub fn len_bytes(&self) -> u64 {
        match self {
            Self::Host(rows) => rows.len_bytes() as u64,
            Self::Gpu(part) => part.len_bytes(),
        }
    }

    /// Rows of the host, for kernels that read them there.
    ///
    /// # Panics
    ///
    /// Where rows live on the GPU.
    pub fn on_host(&self) -> &Buffer {
        match self {
            Self::Host(rows) => rows,
            Self::Gpu(_) => unreachable!("{OTHER}"),
        }
    }

    /// Rows of the GPU, for kernels that read them there.
    pub fn on_gpu(&self) -> Option<&Part> {
        match self {
            Self::Host(_) => None,
            Self::Gpu(part) => Some(part),
        }
    }
}
