//! The part of the C face that has memory of the GPU, for callers without a CUDA runtime.
//!
//! In: sizes, bytes of the host. Out: memory with an address, copies. Invariant: that of the crate.

use std::ffi::c_void;
use std::ptr::NonNull;

use cadre_kernels::device::{Buffer, Gpu, Stream};

use super::{Failed, freed, given, given_mut, guard, listed, null};

/// Bytes of the GPU, with anything in them; null on error.
///
/// # Safety
///
/// `gpu` comes from [`crate::cadre_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_memory(gpu: *const Gpu, bytes: u64) -> *mut Buffer<u8> {
    guard(std::ptr::null_mut(), || {
        // SAFETY: the caller's promise.
        let memory =
            Buffer::new(unsafe { given(gpu, "gpu") }?, bytes as usize, "a caller's tensor")?;
        Ok(Box::into_raw(Box::new(memory)))
    })
}

/// Address of the memory on the GPU.
///
/// # Safety
///
/// `memory` comes from [`cadre_memory`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_memory_address(memory: *const Buffer<u8>) -> u64 {
    // SAFETY: the caller's promise.
    guard(0, || Ok(unsafe { given(memory, "memory") }?.address()))
}

/// Copies bytes of the host to its beginning, behind what the stream does; they are there when this returns.
///
/// # Safety
///
/// `memory` comes from [`cadre_memory`] of `gpu`; at `from` are `bytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_memory_write(
    gpu: *const Gpu,
    memory: *mut Buffer<u8>,
    stream: u64,
    from: *const c_void,
    bytes: u64,
) -> i32 {
    guard(-1, || {
        // SAFETY: the caller's promise.
        let (gpu, memory) = unsafe { (given(gpu, "gpu")?, given_mut(memory, "memory")?) };
        fits(memory, bytes)?;
        // SAFETY: the caller's promise.
        let (stream, from) =
            unsafe { (Stream::foreign(gpu, stream), listed(from.cast::<u8>(), bytes, "from")?) };
        memory.write(&stream, 0, from)?;
        // From pinned memory, which a caller may have, the driver reads later.
        stream.wait()?;
        Ok(0)
    })
}

/// Waits for the stream and copies its beginning to the host.
///
/// # Safety
///
/// `memory` comes from [`cadre_memory`] of `gpu`; at `to` is room for `bytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_memory_read(
    gpu: *const Gpu,
    memory: *const Buffer<u8>,
    stream: u64,
    to: *mut c_void,
    bytes: u64,
) -> i32 {
    guard(-1, || {
        // SAFETY: the caller's promise.
        let (gpu, memory) = unsafe { (given(gpu, "gpu")?, given(memory, "memory")?) };
        fits(memory, bytes)?;
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::foreign(gpu, stream) };
        let to = NonNull::new(to.cast::<u8>()).ok_or_else(|| null("to"))?;
        // SAFETY: the caller's promise.
        let to = unsafe { std::slice::from_raw_parts_mut(to.as_ptr(), bytes as usize) };
        memory.read(&stream, 0, to)?;
        Ok(0)
    })
}

/// Gives memory back; what runs with it is waited for.
///
/// # Safety
///
/// `memory` comes from [`cadre_memory`], or is null, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_memory_free(memory: *mut Buffer<u8>) {
    // SAFETY: the caller's promise.
    unsafe { freed(memory) };
}

fn fits(memory: &Buffer<u8>, bytes: u64) -> Result<(), Failed> {
    let all = memory.len_bytes();
    if bytes > all {
        return Err(
            format!("{bytes} bytes do not fit memory of {all}; copy no more than it has").into()
        );
    }
    Ok(())
}
