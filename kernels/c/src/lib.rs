//! A C face of the GPU kernels, for programs that are not Cadre; `include/cadre_attention.h` says what each call does.
//!
//! In: plain numbers and device addresses. Out: handles, 0 for success and −1 for an error whose words [`cadre_error`] has.
//! Nothing else of Cadre is in here. The check on GPU machines (`bench/gpu`) calls it too, and what the header leaves out is
//! for the check alone.
//!
//! Invariant: no panic leaves a function, the calling thread keeps its current context, and what does not fit is refused as in the
//! Rust face.

// Pointers of the caller are taken on trust.
#![allow(unsafe_code)]

pub mod memory;
pub mod plans;
pub mod rows;
pub mod watch;

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use cadre_kernels::device::{
    CallersContext, Event, Gpu, Keys, Shape, Slice, SliceMut, Stream, TaskRows,
};
use cadre_kernels::{Heads, Mask};

/// What callers were compiled against: rises with each change of a signature or a structure of the header.
const ABI: u32 = 1;

/// Pause between two polls of a stream.
const PAUSE: Duration = Duration::from_micros(20);

thread_local! {
    static ERROR: RefCell<CString> = RefCell::default();
    static UUID: RefCell<CString> = RefCell::default();
}

/// Words of the last error of this thread; valid until the next one.
#[unsafe(no_mangle)]
pub extern "C" fn cadre_error() -> *const c_char {
    // A thread that ends has none any more.
    ERROR.try_with(|it| it.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Why a call failed; its text is what [`cadre_error`] returns.
type Failed = Box<dyn std::error::Error>;

/// Runs `body`. If it fails or panics, returns `failed` (null or −1) and keeps the reason for
/// [`cadre_error`]. Restores the caller's CUDA context.
fn guard<T>(failed: T, body: impl FnOnce() -> Result<T, Failed>) -> T {
    let kept = AssertUnwindSafe(|| {
        let _kept = CallersContext::keep();
        body()
    });
    let words = match catch_unwind(kept) {
        Ok(Ok(done)) => return done,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "a panic; its words are on stderr".to_owned(),
    };
    let words = CString::new(words.replace('\0', " ")).unwrap_or_default();
    // A thread that ends has no place for them.
    let _ = ERROR.try_with(|it| it.replace(words));
    failed
}

/// What a caller's handle points at.
///
/// # Safety
///
/// `handle` is null or points at a `T` that lives as long as `'a`.
unsafe fn given<'a, T>(handle: *const T, what: &str) -> Result<&'a T, Failed> {
    // SAFETY: the caller's promise.
    unsafe { handle.as_ref() }.ok_or_else(|| null(what))
}

/// As [`given`], to change the value.
///
/// # Safety
///
/// `handle` is null or points at a `T` that lives as long as `'a` and nobody else uses.
unsafe fn given_mut<'a, T>(handle: *mut T, what: &str) -> Result<&'a mut T, Failed> {
    // SAFETY: the caller's promise.
    unsafe { handle.as_mut() }.ok_or_else(|| null(what))
}

/// A caller's list.
///
/// # Safety
///
/// At `list` are `count` of `T` that live as long as `'a`, or it is null.
unsafe fn listed<'a, T>(list: *const T, count: u64, what: &str) -> Result<&'a [T], Failed> {
    if count == 0 {
        return Ok(&[]);
    }
    if list.is_null() {
        return Err(null(what));
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(list, count as usize) })
}

fn null(what: &str) -> Failed {
    format!("{what} is null; hand in what the call that made it gave, if that succeeded").into()
}

/// How a launch is shaped.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LaunchShape {
    query_heads: u32,
    kv_heads: u32,
    dim: u32,
    /// Keys of a canonical segment; 0: those of every job.
    segment: u32,
    /// Blocks at most; 0: all processors.
    blocks: u32,
    /// Backward: 1 sums dQ in one order.
    fixed_order: u32,
    /// Backward: launches that share out the key tiles.
    launches: u32,
    scale: f32,
    /// 0: none.
    softcap: f32,
}

/// A task, or a part of a bundle; parts of a bundle follow each other.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TaskLine {
    /// 0: full; 1: causal; n + 2: a window of n keys before the row.
    mask: u32,
    document_rows: u32,
    rows_begin: u32,
    rows_end: u32,
    q_row: u32,
    keys_begin: u32,
    keys_end: u32,
    kv_row: u32,
    /// Backward: row in dK and dV of the bundle's first key.
    dkv_row: u32,
    /// Backward: number of the bundle.
    bundle: u32,
}

/// Addresses and lengths in numbers of the tensors of a launch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    address: u64,
    len: u64,
}

impl TaskLine {
    fn mask(&self) -> Mask {
        match self.mask {
            0 => Mask::Full,
            1 => Mask::Causal,
            left => Mask::Window { left: left - 2 },
        }
    }

    fn keys(&self) -> Keys {
        let keys = self.keys_begin..self.keys_end;
        Keys { document_rows: self.document_rows, keys, kv_row: self.kv_row }
    }

    fn rows(&self) -> TaskRows {
        TaskRows { rows: self.rows_begin..self.rows_end, q_row: self.q_row }
    }
}

impl LaunchShape {
    fn shape(&self) -> Shape {
        let heads = Heads {
            query: self.query_heads as usize,
            kv: self.kv_heads as usize,
            dim: self.dim as usize,
        };
        let mut shape = Shape::new(heads, self.scale);
        if self.segment > 0 {
            shape.segment = self.segment;
        }
        shape.blocks = (self.blocks > 0).then_some(self.blocks);
        shape.softcap = (self.softcap != 0.0).then_some(self.softcap);
        shape
    }
}

impl Tensor {
    /// # Safety
    ///
    /// As [`Slice::foreign`].
    unsafe fn read<T: cadre_kernels::device::tables::Plain>(&self) -> Slice<'static, T> {
        // SAFETY: the caller's promise.
        unsafe { Slice::foreign(self.address, self.len as usize) }
    }

    /// # Safety
    ///
    /// As [`SliceMut::foreign`].
    unsafe fn write<T: cadre_kernels::device::tables::Plain>(&self) -> SliceMut<'static, T> {
        // SAFETY: the caller's promise.
        unsafe { SliceMut::foreign(self.address, self.len as usize) }
    }
}

/// `CADRE_ABI` of the header that belongs to this library.
#[unsafe(no_mangle)]
pub extern "C" fn cadre_abi() -> u32 {
    ABI
}

/// Opens a GPU with the kernels loaded; null on error.
#[unsafe(no_mangle)]
pub extern "C" fn cadre_open(ordinal: u32) -> *mut Gpu {
    guard(std::ptr::null_mut(), || Ok(Box::into_raw(Box::new(Gpu::open(ordinal as usize)?))))
}

/// Lets a GPU go; plans, workspaces and memory that still are there keep it open.
///
/// # Safety
///
/// `gpu` comes from [`cadre_open`], or is null, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_close(gpu: *mut Gpu) {
    // SAFETY: the caller's promise.
    unsafe { freed(gpu) };
}

/// How many multiprocessors it has; 0 on error.
///
/// # Safety
///
/// `gpu` comes from [`cadre_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_processors(gpu: *const Gpu) -> u32 {
    // SAFETY: the caller's promise.
    guard(0, || Ok(unsafe { given(gpu, "gpu") }?.processors()))
}

/// Which GPU it is, as nvidia-smi has it; valid until the next call of this thread. Null on error.
///
/// # Safety
///
/// `gpu` comes from [`cadre_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_uuid(gpu: *const Gpu) -> *const c_char {
    guard(std::ptr::null(), || {
        // SAFETY: the caller's promise.
        UUID.set(CString::new(unsafe { given(gpu, "gpu") }?.uuid())?);
        Ok(UUID.with_borrow(|it| it.as_ptr()))
    })
}

/// Waits at most `milliseconds` for the work that is on a stream now. Returns 0 when it is done, 1
/// when it is not, −1 when something on the stream failed.
///
/// # Safety
///
/// `gpu` comes from [`cadre_open`]; `stream` is one of its context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_wait(gpu: *const Gpu, stream: u64, milliseconds: u64) -> i32 {
    guard(-1, || {
        // SAFETY: the caller's promise.
        let gpu = unsafe { given(gpu, "gpu") }?;
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::foreign(gpu, stream) };
        // The stream is polled before an event is recorded: a caller that polls in a loop would
        // otherwise wait for a new event each time.
        if stream.is_done()? {
            return Ok(0);
        }
        if milliseconds == 0 {
            return Ok(1);
        }
        let event = Event::record(&stream)?;
        // None: longer than a clock counts.
        let end = Instant::now().checked_add(Duration::from_millis(milliseconds));
        while !event.is_over()? {
            if end.is_some_and(|end| Instant::now() > end) {
                return Ok(1);
            }
            std::thread::sleep(PAUSE);
        }
        Ok(0)
    })
}

/// Frees what a call gave as a handle; null is nothing.
///
/// # Safety
///
/// It is one of `T`, or null, and is not used again.
unsafe fn freed<T>(handle: *mut T) {
    if !handle.is_null() {
        guard((), || {
            // SAFETY: the caller's promise.
            drop(unsafe { Box::from_raw(handle) });
            Ok(())
        });
    }
}
