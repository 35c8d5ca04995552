//! Where the rows of a process live: in the host's memory or, if processes of one machine share a GPU's, there.
//!
//! In: lengths, and rows that a processor has computed. Out: room that its one owner fills, and [`Memory`] that everybody
//! reads; copies from one to the other; and rows in the host's memory for whoever computes there. On the host these are
//! [`Buffer`]s as the exchange moves them ([`HostRows`], [`Host`]), and nothing is copied that need not be; on the GPU parts of
//! its arenas ([`GpuRows`], [`OnGpu`]).
//!
//! It moves nothing between processes. Invariant: all rows of a process live in one kind of memory, which is a type: it is chosen
//! where the process joins its job, and nobody else asks.

use std::fmt::Debug;
use std::io;
use std::sync::{Arc, LazyLock, OnceLock};

use cadre_exchange::{Buffer, Piece, Pool};
use cadre_kernels::device::{CopyPiece, Error, Part, Room as GpuRoom, Rooms, Stream};

use crate::launch::{AtOnce, Flying, Launcher};

/// Rows that nobody writes any more; clones are the same memory.
pub trait Memory: Clone + Debug + Send + Sync + 'static {
    /// Memory of rows with one owner.
    type Room: Debug + Send + 'static;
    /// Where they live, for one thread.
    type Place: Place<Memory = Self>;
    /// What computes on them.
    type Launcher: Launcher<Memory = Self>;

    /// All of a room, to be read from now on.
    fn share(room: Self::Room) -> Self;

    /// How long it is.
    fn len_bytes(&self) -> u64;
}

/// Where rows of a process live, for one of its threads.
pub trait Place: Debug + Send + Sized + 'static {
    /// Rows there.
    type Memory: Memory<Place = Self>;

    /// The same place, for another thread.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn another(&self) -> Result<Self, Error>;

    /// Room for `bytes`, with any bytes in it.
    ///
    /// # Errors
    ///
    /// The GPU's memory is short, or the driver's.
    fn room(&self, bytes: usize) -> Result<<Self::Memory as Memory>::Room, Error>;

    /// Rows that a processor has computed, where those of this process live; there when this returns.
    ///
    /// # Errors
    ///
    /// As [`Self::room`].
    fn hold(&self, rows: Buffer) -> Result<Self::Memory, Error>;

    /// Copies pieces of rows of this process into the room. On the GPU the copy runs on a stream; a
    /// launch that reads the room waits for it.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn copy(
        &self,
        from: &Self::Memory,
        pieces: &[Piece],
        to: &mut <Self::Memory as Memory>::Room,
    ) -> Result<(), Error>;

    /// The rows in memory of the host, for threads that read them.
    ///
    /// # Errors
    ///
    /// The driver's, and what went wrong before they were there.
    fn read(&self, memory: &Self::Memory) -> Result<Arc<Buffer>, Error>;

    /// As [`Self::read`], of a room that is not needed any more.
    ///
    /// # Errors
    ///
    /// As [`Self::read`].
    fn unload(&self, room: <Self::Memory as Memory>::Room) -> Result<Buffer, Error>;
}

/// Rows in the host's memory.
pub type HostRows = Arc<Buffer>;

/// In the host's memory.
#[derive(Clone, Copy, Debug)]
pub struct Host;

/// Rows in an arena of the GPU.
pub type GpuRows = Part;

/// In arenas of the GPU; copies are put on a stream of this thread's.
#[derive(Debug)]
pub struct OnGpu {
    rooms: Rooms,
    stream: Stream,
}

/// Idle memory of landings on the host, and of rows that are not shared. With `CADRE_POISON` it is
/// filled with NaN, so that tests find reads of unwritten bytes.
static LANDINGS: LazyLock<Arc<Pool>> = LazyLock::new(|| match std::env::var_os("CADRE_POISON") {
    None => Pool::new(),
    Some(_) => Pool::poisoned(),
});

/// Arenas for rows that peers of this machine read, if they do.
static SHARED: OnceLock<Arc<Pool>> = OnceLock::new();

/// Arenas for landings, where network cards write them: memory that is registered once is to stay.
static LANDED: OnceLock<Arc<Pool>> = OnceLock::new();

/// Addresses of an arena, more than the rows of most processes: the machine provides the memory
/// when it is written. More arenas are made as rows need them.
const ARENA_BYTES: usize = 32 << 30;

/// From now on, rows on the host lie in memory that peers of this machine can read. Called once in
/// a process.
///
/// # Errors
///
/// The machine gives no shared memory.
pub(crate) fn share_rows() -> io::Result<()> {
    let pool = arenas()?;
    SHARED.get_or_init(|| pool);
    Ok(())
}

/// From now on, landings on the host lie in memory that stays. Called once in a process.
///
/// # Errors
///
/// As [`share_rows`].
pub(crate) fn keep_landings() -> io::Result<()> {
    let pool = arenas()?;
    LANDED.get_or_init(|| pool);
    Ok(())
}

fn arenas() -> io::Result<Arc<Pool>> {
    match std::env::var_os("CADRE_POISON") {
        None => Pool::shared(ARENA_BYTES),
        Some(_) => Pool::shared_and_poisoned(ARENA_BYTES),
    }
}

/// Memory on the host for rows that peers are to read, with anything in it.
pub(crate) fn rows(bytes: usize) -> Buffer {
    SHARED.get().unwrap_or_else(|| &LANDINGS).take(bytes)
}

/// As above, zeroed: for sums.
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

impl Memory for HostRows {
    type Room = Buffer;
    type Place = Host;
    type Launcher = AtOnce;

    fn share(room: Buffer) -> Self {
        Arc::new(room)
    }

    fn len_bytes(&self) -> u64 {
        Buffer::len_bytes(self) as u64
    }
}

impl Place for Host {
    type Memory = HostRows;

    fn another(&self) -> Result<Self, Error> {
        Ok(Self)
    }

    fn room(&self, bytes: usize) -> Result<Buffer, Error> {
        Ok(landing(bytes))
    }

    fn hold(&self, rows: Buffer) -> Result<HostRows, Error> {
        Ok(Arc::new(rows))
    }

    fn copy(&self, from: &HostRows, pieces: &[Piece], to: &mut Buffer) -> Result<(), Error> {
        copy(from, pieces, to);
        Ok(())
    }

    fn read(&self, memory: &HostRows) -> Result<Arc<Buffer>, Error> {
        Ok(Arc::clone(memory))
    }

    fn unload(&self, room: Buffer) -> Result<Buffer, Error> {
        Ok(room)
    }
}

impl Memory for GpuRows {
    type Room = GpuRoom;
    type Place = OnGpu;
    type Launcher = Flying;

    fn share(room: GpuRoom) -> Self {
        room.share()
    }

    fn len_bytes(&self) -> u64 {
        Part::len_bytes(self)
    }
}

impl OnGpu {
    /// In the memory of the GPU that `rooms` are on, with a stream of its own.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn new(rooms: &Rooms) -> Result<Self, Error> {
        Ok(Self { rooms: rooms.clone(), stream: Stream::new(rooms.gpu())? })
    }

    /// Arenas that rows lie in.
    pub fn rooms(&self) -> &Rooms {
        &self.rooms
    }

    fn down(&self, part: &Part) -> Result<Buffer, Error> {
        let mut rows = landing(Memory::len_bytes(part) as usize);
        part.read(&self.stream, rows.bytes_mut())?;
        Ok(rows)
    }
}

impl Place for OnGpu {
    type Memory = GpuRows;

    fn another(&self) -> Result<Self, Error> {
        Self::new(&self.rooms)
    }

    fn room(&self, bytes: usize) -> Result<GpuRoom, Error> {
        self.rooms.take(bytes as u64)
    }

    fn hold(&self, rows: Buffer) -> Result<GpuRows, Error> {
        let mut room = self.rooms.take(rows.len_bytes() as u64)?;
        room.write(&self.stream, rows.bytes())?;
        Ok(room.share())
    }

    fn copy(&self, from: &GpuRows, pieces: &[Piece], to: &mut GpuRoom) -> Result<(), Error> {
        let piece = |it: &Piece| CopyPiece { from: it.remote, to: it.local, bytes: it.bytes };
        to.copy(&self.stream, from, &pieces.iter().map(piece).collect::<Vec<_>>())
    }

    fn read(&self, memory: &GpuRows) -> Result<Arc<Buffer>, Error> {
        Ok(Arc::new(self.down(memory)?))
    }

    fn unload(&self, room: GpuRoom) -> Result<Buffer, Error> {
        self.down(&room.share())
    }
}

/// Memory on the host for rows of others, with anything in it.
pub(crate) fn landing(bytes: usize) -> Buffer {
    LANDED.get().unwrap_or_else(|| &LANDINGS).take(bytes)
}

/// Copies pieces from one memory of the host to another.
pub(crate) fn copy(from: &Buffer, pieces: &[Piece], to: &mut Buffer) {
    for piece in pieces {
        let from = &from.bytes()[piece.remote as usize..][..piece.bytes as usize];
        to.bytes_mut()[piece.local as usize..][..piece.bytes as usize].copy_from_slice(from);
    }
}
