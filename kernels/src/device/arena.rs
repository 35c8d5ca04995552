//! Device memory that other processes of this machine may read.
//!
//! In: bytes. Out: an [`Arena`] that is allocated in pieces ([`ArenaMemory`]), and its file descriptor for a peer. From a peer's
//! descriptor: an [`Imported`] arena, to copy from in the order of a stream. An import keeps the memory alive after its owner's
//! process has ended.
//!
//! The exchange passes descriptors between processes; this module does not. Invariant: pieces that live at one time never
//! overlap, and a copy stays inside both its ends.

// Every function of the driver is unsafe to call.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use super::check::Refusal;
use super::driver::{Gpu, call};
use super::error::Error;
use super::memory::Stream;
use super::shelf::Shelf;
use super::slice::{Slice, SliceMut};

const DESCRIPTOR: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// The number of the newest arena.
static LAST: AtomicU64 = AtomicU64::new(0);

/// Contiguous device memory that can be exported. Clones share it.
#[derive(Clone, Debug)]
pub struct Arena(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    number: u64,
    mapping: Mapping,
    shelf: Mutex<Shelf>,
}

/// A piece of an arena. Dropping it frees the piece.
#[derive(Debug)]
pub struct ArenaMemory {
    arena: Arena,
    at: u64,
    bytes: u64,
}

/// An arena of another process, mapped here.
#[derive(Debug)]
pub struct Imported(Mapping);

/// Bytes to copy from an imported arena to a piece of an own one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct CopyPiece {
    /// First byte in the arena.
    pub from: u64,
    /// First byte in the piece.
    pub to: u64,
    /// How many.
    pub bytes: u64,
}

/// Physical memory mapped to an address range.
#[derive(Debug)]
struct Mapping {
    gpu: Gpu,
    handle: sys::CUmemGenericAllocationHandle,
    /// 0 until addresses are reserved.
    address: u64,
    bytes: usize,
    mapped: bool,
}

fn property(gpu: &Gpu) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: DESCRIPTOR,
        location: location(gpu),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn location(gpu: &Gpu) -> sys::CUmemLocation {
    let type_ = sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE;
    sys::CUmemLocation { type_, id: gpu.device() }
}

impl Arena {
    /// An arena of at least `bytes` on `gpu`, with unspecified content.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`], or the driver's.
    pub fn new(gpu: &Gpu, bytes: usize) -> Result<Self, Error> {
        gpu.bind()?;
        let property = property(gpu);
        let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut multiple = 0;
        // SAFETY: writes one number.
        let code = unsafe {
            sys::cuMemGetAllocationGranularity(&raw mut multiple, &raw const property, option)
        };
        call("cuMemGetAllocationGranularity", String::new, code)?;
        let bytes = bytes.max(1).next_multiple_of(multiple.max(1));
        let mut handle = 0;
        // SAFETY: writes a handle, which the mapping releases.
        let code = unsafe { sys::cuMemCreate(&raw mut handle, bytes, &raw const property, 0) };
        if code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let free = gpu.memory()?.0;
            return Err(Error::OutOfMemory { what: "an arena".into(), bytes, free });
        }
        call("cuMemCreate", || format!(", {bytes} bytes for an arena"), code)?;
        let mapping = Mapping::new(gpu, handle, bytes, Access::ReadAndWrite)?;
        let shelf = Mutex::new(Shelf::new(bytes as u64));
        let number = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(Self(Arc::new(Inner { number, mapping, shelf })))
    }

    /// Length in bytes: as asked for, or rounded up.
    pub fn len_bytes(&self) -> usize {
        self.0.mapping.bytes
    }

    /// Exports a file descriptor of the arena, for a peer's [`Imported::new`].
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn export(&self) -> Result<OwnedFd, Error> {
        let Mapping { gpu, handle, .. } = &self.0.mapping;
        gpu.bind()?;
        let mut descriptor: c_int = -1;
        let to: *mut c_int = &raw mut descriptor;
        // SAFETY: for this type of handle the driver writes a new descriptor.
        let code = unsafe { sys::cuMemExportToShareableHandle(to.cast(), *handle, DESCRIPTOR, 0) };
        call("cuMemExportToShareableHandle", String::new, code)?;
        // SAFETY: the driver opened it for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// Takes a piece of `bytes`, with unspecified content.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] where no free piece is as long.
    pub fn take(&self, bytes: u64) -> Result<ArenaMemory, Error> {
        let mut shelf = self.0.shelf.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = shelf.take(bytes) else {
            let (bytes, free) = (bytes as usize, shelf.longest() as usize);
            return Err(Error::OutOfMemory { what: "rows of an arena".into(), bytes, free });
        };
        drop(shelf);
        Ok(ArenaMemory { arena: self.clone(), at, bytes })
    }

    /// Number of the arena in this process. No later arena has the same.
    pub fn number(&self) -> u64 {
        self.0.number
    }
}

impl ArenaMemory {
    /// The arena.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// First byte in the arena.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.bytes
    }

    /// Address of the first byte, for [`super::Slice::foreign`] and for frameworks.
    pub fn address(&self) -> u64 {
        self.arena.0.mapping.address + self.at
    }

    /// Copies bytes of the host into the piece, in the order of `stream`. The host's bytes have been read when this returns.
    ///
    /// # Errors
    ///
    /// More bytes than it has, or the driver's.
    pub fn write(&mut self, stream: &Stream, from: &[u8]) -> Result<(), Error> {
        self.inside("rows", from.len() as u64)?;
        self.gpu().bind()?;
        // SAFETY: inside the piece; the source is no pinned memory, so the driver has read it when it returns.
        let code = unsafe {
            sys::cuMemcpyHtoDAsync_v2(
                self.address(),
                from.as_ptr().cast(),
                from.len(),
                stream.handle(),
            )
        };
        call("cuMemcpyHtoD", || stream.after(), code)
    }

    /// Waits for `stream` and copies the piece's bytes from byte `at` on to the host.
    ///
    /// # Errors
    ///
    /// More bytes than it has, the driver's, and what went wrong in the stream before.
    pub fn read(&self, stream: &Stream, at: u64, to: &mut [u8]) -> Result<(), Error> {
        self.inside("rows", at.saturating_add(to.len() as u64))?;
        stream.wait()?;
        // SAFETY: inside the piece; a blocking copy of bytes.
        let code =
            unsafe { sys::cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), self.address() + at, to.len()) };
        call("cuMemcpyDtoH", || stream.after(), code)
    }

    /// Copies pieces of this memory to other memory of this process, in the order of `stream`.
    ///
    /// # Errors
    ///
    /// A piece outside of either, before anything is copied; or the driver's.
    pub fn copy(&self, stream: &Stream, pieces: &[CopyPiece], to: &Self) -> Result<(), Error> {
        copy(stream, (self.address(), self.bytes, "rows"), pieces, to)
    }

    /// The whole piece, for a launch that writes bytes that nobody else touches meanwhile.
    pub(super) fn landing(&self) -> SliceMut<'_, u8> {
        // SAFETY: memory of this length; who reads or writes a landing meanwhile waits for the stream.
        unsafe { SliceMut::foreign(self.address(), self.bytes as usize) }
    }

    fn gpu(&self) -> &Gpu {
        &self.arena.0.mapping.gpu
    }

    fn inside(&self, field: &'static str, bytes: u64) -> Result<(), Error> {
        if bytes <= self.bytes {
            return Ok(());
        }
        let (expected, actual) = (bytes as usize, self.bytes as usize);
        Err(Refusal::Length { field, expected, actual }.into())
    }
}

impl Drop for ArenaMemory {
    fn drop(&mut self) {
        let mut shelf = self.arena.0.shelf.lock().unwrap_or_else(PoisonError::into_inner);
        shelf.give_back(self.at, self.bytes);
    }
}

impl Imported {
    /// Maps an arena of `bytes` that a peer exported, on the same GPU or on one that can reach it. The mapping is read-only where
    /// the driver supports that.
    ///
    /// # Errors
    ///
    /// The driver's: no memory behind the descriptor, or of another length.
    pub fn new(gpu: &Gpu, descriptor: &OwnedFd, bytes: usize) -> Result<Self, Error> {
        gpu.bind()?;
        let mut handle = 0;
        let word = descriptor.as_raw_fd() as usize as *mut c_void;
        // SAFETY: the driver takes the number of a descriptor in place of a pointer, and keeps a reference of its own.
        let code =
            unsafe { sys::cuMemImportFromShareableHandle(&raw mut handle, word, DESCRIPTOR) };
        call("cuMemImportFromShareableHandle", String::new, code)?;
        Ok(Self(Mapping::new(gpu, handle, bytes, Access::Read)?))
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.0.bytes as u64
    }

    /// Copies pieces of the arena to `to`, in the order of `stream`.
    ///
    /// # Errors
    ///
    /// A piece outside of either, before anything is copied; or the driver's.
    pub fn copy(
        &self,
        stream: &Stream,
        pieces: &[CopyPiece],
        to: &ArenaMemory,
    ) -> Result<(), Error> {
        copy(stream, self.place(), pieces, to)
    }

    /// The whole arena, for launches to read.
    pub(super) fn slice(&self) -> Slice<'_, u8> {
        // SAFETY: mapped as long as `self`; whether its owner writes it meanwhile is for whoever copied to find out.
        unsafe { Slice::foreign(self.0.address, self.0.bytes) }
    }

    /// Address, length, name.
    pub(super) fn place(&self) -> (u64, u64, &'static str) {
        (self.0.address, self.len_bytes(), "an arena")
    }
}

/// Copies pieces to `to` from the memory with this address, length and name.
fn copy(
    stream: &Stream,
    (address, length, field): (u64, u64, &'static str),
    pieces: &[CopyPiece],
    to: &ArenaMemory,
) -> Result<(), Error> {
    holds((address, length, field), pieces, to)?;
    to.gpu().bind()?;
    for &CopyPiece { from, to: at, bytes } in pieces.iter().filter(|it| it.bytes > 0) {
        let (from, at) = (address + from, to.address() + at);
        // SAFETY: inside both, as checked; who reads or writes the landing meanwhile waits for the stream.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(at, from, bytes as usize, stream.handle()) };
        call("cuMemcpyDtoD", || stream.after(), code)?;
    }
    Ok(())
}

/// Checks that pieces lie inside the memory with this length and name, and inside `to`.
pub(super) fn holds(
    (_, length, field): (u64, u64, &'static str),
    pieces: &[CopyPiece],
    to: &ArenaMemory,
) -> Result<(), Error> {
    for &CopyPiece { from, to: at, bytes } in pieces {
        to.inside("a landing", at.saturating_add(bytes))?;
        if from.saturating_add(bytes) > length {
            let (expected, actual) = (from.saturating_add(bytes) as usize, length as usize);
            return Err(Refusal::Length { field, expected, actual }.into());
        }
    }
    Ok(())
}

#[derive(Clone, Copy, Eq, PartialEq)]
enum Access {
    Read,
    ReadAndWrite,
}

impl Mapping {
    /// Takes over `handle`.
    fn new(
        gpu: &Gpu,
        handle: sys::CUmemGenericAllocationHandle,
        bytes: usize,
        access: Access,
    ) -> Result<Self, Error> {
        use sys::CUmemAccess_flags_enum as Flags;
        let mut it = Self { gpu: gpu.clone(), handle, address: 0, bytes, mapped: false };
        // SAFETY: writes an address; `drop` frees it.
        let code = unsafe { sys::cuMemAddressReserve(&raw mut it.address, bytes, 0, 0, 0) };
        call("cuMemAddressReserve", || format!(", {bytes} bytes"), code)?;
        // SAFETY: reserved addresses of this length; `drop` unmaps them.
        let code = unsafe { sys::cuMemMap(it.address, bytes, 0, handle, 0) };
        call("cuMemMap", || format!(", {bytes} bytes"), code)?;
        it.mapped = true;
        let allow = |flags| {
            let access = sys::CUmemAccessDesc { location: location(gpu), flags };
            // SAFETY: mapped addresses of this length.
            unsafe { sys::cuMemSetAccess(it.address, bytes, &raw const access, 1) }
        };
        if access == Access::Read
            && allow(Flags::CU_MEM_ACCESS_FLAGS_PROT_READ) == sys::CUresult::CUDA_SUCCESS
        {
            return Ok(it);
        }
        let code = allow(Flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        call("cuMemSetAccess", String::new, code).map(|()| it)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.gpu.bind().is_err() {
            return;
        }
        // SAFETY: mapped, reserved and created or imported by `new`'s caller; who copies waits before it drops.
        unsafe {
            if self.mapped {
                let _ = sys::cuMemUnmap(self.address, self.bytes);
            }
            if self.address != 0 {
                let _ = sys::cuMemAddressFree(self.address, self.bytes);
            }
            let _ = sys::cuMemRelease(self.handle);
        }
    }
}
