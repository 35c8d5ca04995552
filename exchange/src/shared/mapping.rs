//! Maps shared memory, and copies from memory that its owner may write meanwhile: all unsafe code beside that of `src/ucx`.
//!
//! In: lengths, descriptors. Out: [`Arena`]s whose [`Part`]s have one owner each, [`Own`] words to write, [`Foreign`] memory to
//! read. It knows no rows and no keys.
//!
//! Invariants: two parts of an arena share no byte while both live; nobody but the maker of a memory has it mapped to write
//! (`F_SEAL_FUTURE_WRITE`), and nobody makes it shorter (`F_SEAL_SHRINK`), so reading it never faults.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate,
    memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use rustix::process::{Resource, getrlimit};

use super::free::Free;

/// Unit in which arenas are allocated, in bytes: a cache line.
const UNIT_BYTES: usize = 64;
const UNIT_WORDS: usize = UNIT_BYTES / 4;

/// The seals that readers rely on: the memory keeps its length, and only its maker can write it.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);

/// `f_type` of files in memory of ordinary pages.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Mapped memory; unmapped when this is dropped.
#[derive(Debug)]
struct Map {
    /// A page begins here.
    start: NonNull<u64>,
    bytes: usize,
}

// SAFETY: it is an address and a length; what may be done there says whoever holds it.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    fn new(descriptor: BorrowedFd<'_>, bytes: usize, access: ProtFlags) -> io::Result<Self> {
        // SAFETY: the kernel chooses an address where nothing is mapped.
        let start =
            unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, descriptor, 0)? };
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at 0"))?;
        let map = Self { start, bytes };
        // Without this, a core dump would touch, and so commit, all of the memory.
        // SAFETY: it was just mapped, and the advice changes nothing of what is there.
        unsafe { madvise(map.start.as_ptr().cast(), bytes, Advice::LinuxDontDump)? };
        Ok(map)
    }

    /// The word of 64 bits at an index.
    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.bytes / 8, "word {index} of {} bytes", self.bytes);
        // SAFETY: it is inside of the memory, as was just checked.
        let word = unsafe { self.start.as_ptr().cast::<AtomicU64>().add(index) };
        // SAFETY: the memory is mapped as long as `self` lives, begins at a page, and its words are used as atomic ones alone.
        unsafe { &*word }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: this was mapped by `new`, and what borrows from it has ended.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

/// A file in memory that can be sealed. Some machines only allow files that cannot be executed;
/// older ones do not know that flag.
fn memory_file() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let made = match memfd_create("cadre-rows", flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => memfd_create("cadre-rows", flags),
        made => made,
    };
    Ok(made?)
}

/// Memory of this process that other processes can only read. It is zero at first.
#[derive(Debug)]
pub(super) struct Own {
    map: Map,
    descriptor: OwnedFd,
}

impl Own {
    /// `bytes` is above 0.
    pub(super) fn new(bytes: usize) -> io::Result<Self> {
        // The system kills a process that exceeds its limit of file length.
        if let Some(most) = getrlimit(Resource::Fsize).current.filter(|it| *it < bytes as u64) {
            let what = format!(
                "files may have {most} bytes, and {bytes} are needed: raise the limit (ulimit -f)"
            );
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, what));
        }
        let descriptor = memory_file()?;
        ftruncate(&descriptor, bytes as u64)?;
        // It is mapped before the seal, which forbids any later mapping to write.
        let map = Map::new(descriptor.as_fd(), bytes, ProtFlags::READ | ProtFlags::WRITE)?;
        fcntl_add_seals(&descriptor, SEALS | SealFlags::SEAL)?;
        Ok(Self { map, descriptor })
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Writes a word. The caller's fences order it with other writes.
    pub(super) fn store(&self, index: usize, value: u64) {
        self.map.word(index).store(value, Ordering::Relaxed);
    }

    pub(super) fn load(&self, index: usize) -> u64 {
        self.map.word(index).load(Ordering::Relaxed)
    }
}

/// A stretch of this process's memory that others can only read. It stays mapped as long as this lives. It has no accessors for
/// bytes, since devices read it by themselves.
#[derive(Debug)]
pub(crate) struct Stretch {
    of: Mapped,
    at: usize,
    bytes: usize,
}

#[derive(Debug)]
enum Mapped {
    Arena(Arc<Arena>),
    Own(Arc<Own>),
}

impl Stretch {
    /// The bytes of an arena from `at` on, at most `bytes`. None where `at` lies behind its end.
    pub(crate) fn of_arena(arena: &Arc<Arena>, at: u64, bytes: usize) -> Option<Self> {
        let length = arena.own.map.bytes;
        let at = usize::try_from(at).ok().filter(|at| *at < length)?;
        Some(Self { of: Mapped::Arena(Arc::clone(arena)), at, bytes: bytes.min(length - at) })
    }

    /// All of a memory.
    pub(super) fn of_own(own: &Arc<Own>) -> Self {
        Self { of: Mapped::Own(Arc::clone(own)), at: 0, bytes: own.map.bytes }
    }

    /// Address of the memory in this process.
    pub(crate) fn address(&self) -> u64 {
        let map = match &self.of {
            Mapped::Arena(arena) => &arena.own.map,
            Mapped::Own(own) => &own.map,
        };
        map.start.as_ptr() as u64 + self.at as u64
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.bytes
    }
}

/// Memory of another process, mapped to be read. Its owner may write it at any time.
#[derive(Debug)]
pub(crate) struct Foreign(Map);

impl Foreign {
    /// Maps it to be read.
    pub(crate) fn new(descriptor: &OwnedFd) -> io::Result<Self> {
        let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        if !fcntl_get_seals(descriptor)?.contains(SEALS) {
            return Err(invalid("the memory is not sealed"));
        }
        // Pages of any other file may be missing when they are read: machines and containers limit huge pages separately.
        if fstatfs(descriptor)?.f_type != TMPFS_MAGIC {
            return Err(invalid("the memory is of no kind that lasts"));
        }
        let bytes = usize::try_from(fstat(descriptor)?.st_size).unwrap_or(0);
        if bytes == 0 {
            return Err(invalid("the memory is empty"));
        }
        Map::new(descriptor.as_fd(), bytes, ProtFlags::READ).map(Self)
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        self.0.bytes as u64
    }

    /// Reads a word. The caller's fences order it with other reads.
    pub(super) fn load(&self, index: usize) -> u64 {
        self.0.word(index).load(Ordering::Relaxed)
    }

    /// Copies the bytes from byte `at` on. Bytes that the owner writes meanwhile may be torn. So the caller checks afterwards
    /// that the region stayed published ([`super::Reading::still`]).
    ///
    /// # Panics
    ///
    /// Where it ends behind the memory.
    pub(crate) fn copy(&self, at: u64, to: &mut [u8]) {
        let end = at.checked_add(to.len() as u64);
        assert!(end.is_some_and(|end| end <= self.len_bytes()), "a copy from behind the memory");
        // SAFETY: it is inside of the memory, as was just checked.
        let from = unsafe { self.0.start.as_ptr().cast::<u8>().add(at as usize) };
        // SAFETY: both are mapped, `to` is ours alone, and it is no part of a memory that is mapped to be read.
        unsafe { racing_copy(from, to.as_mut_ptr(), to.len()) }
    }
}

/// Copies bytes that another process may write meanwhile.
///
/// A plain copy of such bytes would be a data race, of which the language says nothing. So the copy is machine code that the
/// compiler does not see into: any bytes may be in `to` after it, and its reads are neither repeated nor moved. For the machine
/// every byte that is read was written there at some time. Nobody takes the bytes for rows before the second look.
///
/// # Safety
///
/// `from` and `to` are mapped for `bytes` bytes, `to` to be written by this thread alone, and they share none.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
unsafe fn racing_copy(from: *const u8, to: *mut u8, bytes: usize) {
    type Copy = unsafe extern "C" fn(*mut u8, *const u8, usize) -> *mut u8;
    unsafe extern "C" {
        fn memcpy(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8;
    }
    let copy: Copy = memcpy;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: it calls the C library's memcpy by the C convention, whose registers are all given up.
    unsafe {
        std::arch::asm!(
            "call {copy}",
            copy = in(reg) copy,
            inout("rdi") to => _,
            inout("rsi") from => _,
            inout("rdx") bytes => _,
            clobber_abi("C"),
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!(
            "blr {copy}",
            copy = in(reg) copy,
            inout("x0") to => _,
            inout("x1") from => _,
            inout("x2") bytes => _,
            clobber_abi("C"),
        );
    }
}

/// As above, byte by byte.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
unsafe fn racing_copy(from: *const u8, to: *mut u8, bytes: usize) {
    for at in 0..bytes {
        // SAFETY: as the caller promises; a volatile read is done once, as it stands.
        let byte = unsafe { from.add(at).read_volatile() };
        // SAFETY: as the caller promises.
        unsafe { to.add(at).write(byte) }
    }
}

/// A file of shared memory that is allocated in parts.
#[derive(Debug)]
pub(crate) struct Arena {
    /// Names it in this process; never used again.
    pub(crate) number: u64,
    own: Own,
    free: Mutex<Free>,
}

impl Arena {
    /// An arena of at least `bytes`.
    pub(super) fn new(bytes: usize) -> io::Result<Arc<Self>> {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let units = bytes.div_ceil(UNIT_BYTES).max(1);
        let own = Own::new(units * UNIT_BYTES)?;
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(Self { number, own, free: Mutex::new(Free::new(units)) }))
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.own.descriptor()
    }

    /// Allocates a part, with arbitrary content. None if no gap is long enough.
    pub(super) fn take(self: &Arc<Self>, words: usize) -> Option<Part> {
        let units = words.div_ceil(UNIT_WORDS).max(1);
        let unit = self.free.lock().unwrap_or_else(PoisonError::into_inner).take(units)?;
        Some(Part { arena: Arc::clone(self), unit, units, words })
    }
}

/// A part of an arena, with one owner; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Part {
    arena: Arc<Arena>,
    unit: usize,
    units: usize,
    words: usize,
}

impl Part {
    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// First byte in the arena.
    pub(crate) fn at(&self) -> u64 {
        (self.unit * UNIT_BYTES) as u64
    }

    fn start(&self) -> *mut u32 {
        // SAFETY: `Free` gives out units that are inside of the arena.
        let start = unsafe { self.arena.own.map.start.as_ptr().add(self.unit * UNIT_BYTES / 8) };
        start.cast()
    }

    pub(crate) fn words(&self) -> &[u32] {
        // SAFETY: `Free` gave these units to this part alone, no other process can write them, they begin at a multiple of 64
        // bytes, and any bits are words. The memory is mapped as long as the arena lives.
        unsafe { std::slice::from_raw_parts(self.start(), self.words) }
    }

    pub(crate) fn words_mut(&mut self) -> &mut [u32] {
        // SAFETY: as above; who has the part alone has its words alone. Readers in other processes copy, and look again.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.words) }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let mut free = self.arena.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.give_back(self.unit, self.units);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn parts_are_read_by_others_and_written_by_nobody_else() {
        let arena = Arena::new(10_000).unwrap();
        let mut parts: Vec<_> = [100, 3, 0, 500].map(|it| arena.take(it).unwrap()).into();
        for (index, part) in parts.iter_mut().enumerate() {
            part.words_mut().fill(index as u32 + 1);
        }
        let descriptor = arena.descriptor().try_clone_to_owned().unwrap();
        let foreign = Foreign::new(&descriptor).unwrap();
        assert_eq!(foreign.len_bytes(), 10_048);
        for (index, part) in parts.iter().enumerate() {
            let mut bytes = vec![0; part.words().len() * 4];
            foreign.copy(part.at(), &mut bytes);
            assert!(bytes.iter().step_by(4).all(|it| *it == index as u8 + 1), "part {index}");
            assert_eq!(bytes, bytemuck::cast_slice::<_, u8>(part.words()));
        }
        // Whoever has the descriptor has no way to write, or to pull the memory away.
        let access = ProtFlags::READ | ProtFlags::WRITE;
        assert!(Map::new(descriptor.as_fd(), 4096, access).is_err());
        assert!(rustix::io::pwrite(&descriptor, &[1], 0).is_err());
        assert!(ftruncate(&descriptor, 0).is_err() && ftruncate(&descriptor, 1 << 20).is_err());
        // What somebody could pull away is not taken.
        let open = memfd_create("open", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&open, 4096).unwrap();
        let refused = Foreign::new(&open).unwrap_err();
        assert_eq!(refused.to_string(), "the memory is not sealed");
        // Nor is memory whose pages the machine may refuse when they are read.
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        if let Ok(large) = memfd_create("large", flags) {
            ftruncate(&large, 1 << 30).unwrap();
            fcntl_add_seals(&large, SEALS).unwrap();
            let refused = Foreign::new(&large).unwrap_err();
            assert_eq!(refused.to_string(), "the memory is of no kind that lasts");
        }
        assert!(arena.take(10_000).is_none());
        drop(parts);
        assert_eq!(arena.take(2_512).unwrap().at(), 0, "all of it is free again");
    }

    #[test]
    #[should_panic(expected = "behind the memory")]
    fn nothing_is_copied_from_behind_the_memory() {
        let arena = Arena::new(64).unwrap();
        let foreign = Foreign::new(&arena.descriptor().try_clone_to_owned().unwrap()).unwrap();
        foreign.copy(60, &mut [0; 5]);
    }
}
