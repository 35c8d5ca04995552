//! Reports where each warp of a hanging launch waits, for builds of the kernels that record it (`cuda/ptx/watch.cuh`).
//!
//! In: a [`Gpu`] whose kernels were built so ([`Gpu::open_form`]). Out: a [`Watch`] before the launch, and from it, when the
//! kernel has trapped, a [`Told`]: what waited first, and each warp's barrier with its name, number and parity.
//!
//! It sees no kernel that was built otherwise, and nothing of a wait inside a matrix product. Invariant: the memory outlives
//! every launch of the GPU's kernels, because the watch holds the GPU and is freed after it was taken out of the modules.

// Every function of the driver is unsafe to call.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr::NonNull;

use cudarc::driver::sys;

use super::driver::{Gpu, call};
use super::error::Error;

/// Maximum blocks that are watched, and warps of each; equal to those of `watch.cuh`.
const BLOCKS: usize = 160;
const WARPS: usize = 12;
const WORDS: usize = 4 + 4 * BLOCKS * WARPS;

/// Pinned memory that a kernel writes before it traps.
#[derive(Debug)]
pub struct Watch {
    gpu: Gpu,
    host: NonNull<u32>,
}

/// What a kernel reported when one of its waits took too long.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Told {
    /// Block and thread whose wait was too long.
    pub first: (u32, u32),
    /// Warps that wait for something, blocks ascending.
    pub places: Vec<WaitingWarp>,
}

/// A warp and what it waits for.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct WaitingWarp {
    /// Number of its block.
    pub block: u32,
    /// Number inside the block.
    pub warp: u32,
    /// The barrier or turn, by name, with its parity.
    pub waits_for: String,
}

impl Watch {
    /// Lets the kernels of `gpu` tell; none where they were built without.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn new(gpu: &Gpu) -> Result<Option<Self>, Error> {
        let places = gpu.watch_places()?;
        if places.is_empty() {
            return Ok(None);
        }
        let mut host: *mut c_void = std::ptr::null_mut();
        // CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP.
        // SAFETY: writes an address, which `drop` frees.
        let code = unsafe { sys::cuMemHostAlloc(&raw mut host, WORDS * size_of::<u32>(), 3) };
        call("cuMemHostAlloc", || ", the places of warps".to_owned(), code)?;
        let host = NonNull::new(host.cast::<u32>()).expect("the driver gave an address");
        // SAFETY: memory of this size, of which nobody else knows.
        unsafe { host.write_bytes(0, WORDS) };
        let watch = Self { gpu: gpu.clone(), host };
        let mut device: u64 = 0;
        // SAFETY: pinned memory with an address of the device, which is written.
        let code =
            unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut device, host.as_ptr().cast(), 0) };
        call("cuMemHostGetDevicePointer", String::new, code)?;
        watch.tell_modules(device)?;
        Ok(Some(watch))
    }

    /// The report of a kernel; none while no wait took too long. `kernel` says by which table
    /// barriers get their names.
    pub fn told(&self, kernel: &str) -> Option<Told> {
        // SAFETY: inside the memory; the device writes it, so each word is read as it is now.
        let word = |at: usize| unsafe { self.host.as_ptr().add(at).read_volatile() };
        if word(0) != 1 {
            return None;
        }
        let blocks = (word(3) as usize).min(BLOCKS);
        let places = (0..blocks * WARPS).filter_map(|index| {
            let [kind, what, parity, seen] = [0, 1, 2, 3].map(|it| word(4 + 4 * index + it));
            let waits_for = match kind {
                1 => format!("{}, parity {}", barrier(kernel, what), parity & 1),
                2 => format!("named barrier {} ({what}), of {parity} threads", named(kernel, what)),
                3 => format!("turn {what} at dQ, which is at {seen}"),
                _ => return None,
            };
            let (block, warp) = ((index / WARPS) as u32, (index % WARPS) as u32);
            Some(WaitingWarp { block, warp, waits_for })
        });
        Some(Told { first: (word(1), word(2)), places: places.collect() })
    }

    fn tell_modules(&self, device: u64) -> Result<(), Error> {
        for place in self.gpu.watch_places()? {
            // SAFETY: a pointer of the module, and 8 bytes of this frame, which the blocking copy has read.
            let code = unsafe {
                sys::cuMemcpyHtoD_v2(place, (&raw const device).cast(), size_of::<u64>())
            };
            call("cuMemcpyHtoD", || ", to cadre_watch".to_owned(), code)?;
        }
        Ok(())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // After a loss of the GPU the memory is leaked, since the GPU may still write it.
        if self.gpu.bind().is_ok() && self.tell_modules(0).is_ok() {
            // SAFETY: allocated by `new`; no module names it any more.
            let _ = unsafe { sys::cuMemFreeHost(self.host.as_ptr().cast()) };
        }
    }
}

/// The mbarrier of a kernel at `place` bytes of its shared memory: the order of the fields of `Shared` in `forward.cuh` and
/// `backward.cuh`.
fn barrier(kernel: &str, place: u32) -> String {
    let parts: Vec<&str> = kernel.split('_').collect();
    let dim: u32 = parts.get(2).and_then(|it| it.parse().ok()).unwrap_or(0);
    let (first, names): (u32, Vec<(&str, u32)>) = match parts.get(1) {
        Some(&"forward") => {
            let (keys, stages) = (if dim == 256 { 64 } else { 128 }, if dim == 64 { 4 } else { 2 });
            let ring = |name| (name, stages);
            let names = vec![("q_full", 1), ("q_empty", 1), ring("k_full"), ring("k_empty")];
            let first = 256 * dim + stages * 4 * keys * dim;
            (first, [names, vec![ring("v_full"), ring("v_empty")]].concat())
        }
        Some(&"backward") => {
            let by_columns = dim == 256;
            let (keys, outs) = if by_columns { (64, 1) } else { (128, 2) };
            let tiles = 2 * keys * dim * 2 + (2 + outs) * 64 * dim * 2;
            let scores = 2 * keys * 64 * 2 + 2 * if by_columns { keys * 64 * 2 } else { 16 };
            let sums = 64 * dim * 4 / if by_columns { 2 } else { 1 };
            // LSE, Δ, and two steps of 8 words.
            let first = tiles + scores + sums + 2 * 2 * 64 * 4 + 2 * 32;
            let names = vec![("kv_full", 1), ("kv_empty", 1), ("q_full", 2), ("q_empty", 2)];
            (first, [names, vec![("dout_full", outs), ("dout_empty", outs)]].concat())
        }
        _ => (0, Vec::new()),
    };
    let mut index = place.wrapping_sub(first) / 8;
    for (name, count) in names {
        if place >= first && index < count {
            return if count == 1 { name.to_owned() } else { format!("{name}[{index}]") };
        }
        index = index.wrapping_sub(count);
    }
    format!("the mbarrier at byte {place}")
}

/// A named barrier of a kernel, as its header calls it.
fn named(kernel: &str, id: u32) -> &'static str {
    match (kernel.contains("forward"), id) {
        (_, 0) => "all threads",
        (true, 1 | 2) => "kTurn",
        (true, 3 | 4) => "kCleared",
        (false, 1) => "kExchange",
        (false, 2 | 3) => "kDqFull",
        (false, 4 | 5) => "kDqEmpty",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cubins::CUBINS;

    /// The last barrier and the number behind it end where the block's shared memory does, but for its alignment.
    #[test]
    fn barriers_lie_where_the_kernels_shared_memory_ends() {
        for cubin in CUBINS {
            for kernel in ["forward", "backward"] {
                for dim in [64, 128, 256] {
                    let name = format!("cadre_{kernel}_{dim}");
                    let Some([_, shared, _, _]) = cubin.constant(&format!("{name}_launch")) else {
                        continue;
                    };
                    let known = |place: u32| !barrier(&name, place).starts_with("the mbarrier");
                    let all: Vec<u32> =
                        (0..shared as u32).step_by(8).filter(|it| known(*it)).collect();
                    let end = all.last().expect("it has barriers") + 8 + 4;
                    assert_eq!(end.next_multiple_of(1024), shared as u32, "{name}");
                }
            }
        }
    }

    #[test]
    fn barriers_have_the_names_of_their_fields() {
        assert_eq!(barrier("cadre_forward_64", 147_456), "q_full");
        assert_eq!(barrier("cadre_forward_64_softcap", 147_456 + 8 * 7), "k_empty[1]");
        assert_eq!(barrier("cadre_forward_128", 12), "the mbarrier at byte 12");
        assert_eq!(barrier("cadre_merge", 0), "the mbarrier at byte 0");
        assert_eq!(named("cadre_backward_256", 3), "kDqFull");
    }
}
