//! A C face of the GPU kernels: what `bench/gpu` calls through ctypes, on tensors that PyTorch holds.
//!
//! In: plain numbers and device addresses. Out: handles, 0 for success and −1 for an error whose words [`cadre_error`] has.
//! One thread calls at a time. Nothing else of Cadre is in here, and nothing of Cadre calls it.
//!
//! Invariant: no panic leaves a function, and what does not fit is refused as in the Rust face.

// Pointers of the caller are taken on trust.
#![allow(unsafe_code)]

pub mod rows;
pub mod watch;

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use cadre_kernels::device::{
    BackwardBundle, BackwardPlan, BackwardTensors, Event, ForwardPlan, ForwardTask, ForwardTensors,
    Gpu, Keys, Order, QueryGradients, Shape, Slice, SliceMut, Stream, TaskRows,
};
use cadre_kernels::{Heads, Mask};

thread_local! {
    static ERROR: RefCell<CString> = RefCell::default();
    static UUID: RefCell<CString> = RefCell::default();
}

/// Words of the last error of this thread; valid until the next one.
#[unsafe(no_mangle)]
pub extern "C" fn cadre_error() -> *const c_char {
    ERROR.with_borrow(|it| it.as_ptr())
}

/// Runs `body`; null or −1 (what `failed` says) with words for [`cadre_error`] if it fails or panics.
fn guard<T>(failed: T, body: impl FnOnce() -> Result<T, cadre_kernels::device::Error>) -> T {
    let words = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(done)) => return done,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "a panic; its words are on stderr".to_owned(),
    };
    ERROR.set(CString::new(words.replace('\0', " ")).unwrap_or_default());
    failed
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

/// Opens a GPU with the kernels loaded; null on error.
#[unsafe(no_mangle)]
pub extern "C" fn cadre_open(ordinal: u32) -> *mut Gpu {
    guard(std::ptr::null_mut(), || Ok(Box::into_raw(Box::new(Gpu::open(ordinal as usize)?))))
}

/// How many multiprocessors it has.
///
/// # Safety
///
/// `gpu` comes from [`cadre_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_processors(gpu: *const Gpu) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { &*gpu }.processors()
}

/// Which GPU it is, as nvidia-smi has it; valid until the next call of this thread.
///
/// # Safety
///
/// `gpu` comes from [`cadre_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_uuid(gpu: *const Gpu) -> *const c_char {
    // SAFETY: the caller's promise.
    UUID.set(CString::new(unsafe { &*gpu }.uuid()).unwrap_or_default());
    UUID.with_borrow(|it| it.as_ptr())
}

/// Waits until what is on a stream now is done, so long; 1 if it is not, −1 if something on the stream went wrong.
///
/// # Safety
///
/// `gpu` comes from [`cadre_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_wait(gpu: *const Gpu, stream: u64, milliseconds: u64) -> i32 {
    guard(-1, || {
        // SAFETY: the caller's promise.
        let event = Event::record(&unsafe { Stream::foreign(&*gpu, stream) })?;
        let end = Instant::now() + Duration::from_millis(milliseconds);
        while !event.is_over()? {
            if Instant::now() > end {
                // To free it could wait for what does not end.
                std::mem::forget(event);
                return Ok(1);
            }
            std::thread::yield_now();
        }
        Ok(0)
    })
}

/// Makes a forward plan of `count` lines on a stream of the GPU; null on error.
///
/// # Safety
///
/// `gpu` comes from [`cadre_open`]; `lines` are `count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_forward_plan(
    gpu: *const Gpu,
    stream: u64,
    shape: LaunchShape,
    lines: *const TaskLine,
    count: u64,
) -> *mut ForwardPlan {
    // SAFETY: the caller's promise.
    let (gpu, lines) = unsafe { (&*gpu, std::slice::from_raw_parts(lines, count as usize)) };
    guard(std::ptr::null_mut(), || {
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::foreign(gpu, stream) };
        let task =
            |it: &TaskLine| ForwardTask { mask: it.mask(), keys: it.keys(), rows: it.rows() };
        let tasks: Vec<_> = lines.iter().map(task).collect();
        Ok(Box::into_raw(Box::new(ForwardPlan::new(&stream, shape.shape(), &tasks)?)))
    })
}

/// Puts a forward launch on a stream. Tensors: Q, K, V, O (bf16), LSE (f32).
///
/// # Safety
///
/// `plan` comes from [`cadre_forward_plan`]; the five tensors lie where they say until the stream is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_forward_run(
    gpu: *const Gpu,
    plan: *mut ForwardPlan,
    stream: u64,
    tensors: *const Tensor,
) -> i32 {
    // SAFETY: the caller's promise.
    let (gpu, plan, it) = unsafe { (&*gpu, &mut *plan, std::slice::from_raw_parts(tensors, 5)) };
    guard(-1, || {
        // SAFETY: the caller's promise, for the stream and each tensor.
        let (stream, tensors) = unsafe {
            let [q, k, v] = [it[0].read(), it[1].read(), it[2].read()];
            let tensors = ForwardTensors { q, k, v, out: it[3].write(), lse: it[4].write() };
            (Stream::foreign(gpu, stream), tensors)
        };
        plan.run(&stream, tensors).map(|()| 0)
    })
}

/// Applies sinks behind a forward launch. Tensors: sinks (f32, one a query head), O (bf16), LSE (f32).
///
/// # Safety
///
/// `plan` comes from [`cadre_forward_plan`]; the three tensors lie where they say until the stream is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_forward_sink(
    gpu: *const Gpu,
    plan: *mut ForwardPlan,
    stream: u64,
    tensors: *const Tensor,
) -> i32 {
    // SAFETY: the caller's promise.
    let (gpu, plan, it) = unsafe { (&*gpu, &mut *plan, std::slice::from_raw_parts(tensors, 3)) };
    guard(-1, || {
        // SAFETY: the caller's promise, for the stream and each tensor.
        let (stream, sinks, rows) =
            unsafe { (Stream::foreign(gpu, stream), it[0].read(), (it[1].write(), it[2].write())) };
        plan.sink(&stream, sinks, rows).map(|()| 0)
    })
}

/// Pairs of query and key in the tiles that a plan multiplies.
///
/// # Safety
///
/// `plan` comes from [`cadre_forward_plan`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_forward_tile_pairs(plan: *const ForwardPlan) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { &*plan }.tile_pairs()
}

/// Ends a forward plan; work that uses it is waited for.
///
/// # Safety
///
/// `plan` comes from [`cadre_forward_plan`] and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_forward_free(plan: *mut ForwardPlan) {
    // SAFETY: the caller's promise.
    drop(unsafe { Box::from_raw(plan) });
}

/// Makes a backward plan of `count` lines on a stream of the GPU; null on error.
///
/// # Safety
///
/// `gpu` comes from [`cadre_open`]; `lines` are `count`, those of a bundle side by side.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_backward_plan(
    gpu: *const Gpu,
    stream: u64,
    shape: LaunchShape,
    lines: *const TaskLine,
    count: u64,
) -> *mut BackwardPlan {
    // SAFETY: the caller's promise.
    let (gpu, lines) = unsafe { (&*gpu, std::slice::from_raw_parts(lines, count as usize)) };
    guard(std::ptr::null_mut(), || {
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::foreign(gpu, stream) };
        let bundle = |lines: &[TaskLine]| BackwardBundle {
            mask: lines[0].mask(),
            keys: lines[0].keys(),
            dkv_row: lines[0].dkv_row,
            parts: lines.iter().map(TaskLine::rows).collect(),
        };
        let bundles: Vec<_> = lines.chunk_by(|a, b| a.bundle == b.bundle).map(bundle).collect();
        let order = if shape.fixed_order != 0 { Order::Fixed } else { Order::Arrival };
        let plan = BackwardPlan::new(&stream, shape.shape(), &bundles, order, shape.launches)?;
        Ok(Box::into_raw(Box::new(plan)))
    })
}

/// Puts backward launches on a stream. Tensors: Q, dO, K, V (bf16), LSE, Δ, dQ, dK, dV (f32); with `narrow` dQ is bf16.
///
/// # Safety
///
/// `plan` comes from [`cadre_backward_plan`]; the nine tensors lie where they say until the stream is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_backward_run(
    gpu: *const Gpu,
    plan: *mut BackwardPlan,
    stream: u64,
    tensors: *const Tensor,
    narrow: u32,
) -> i32 {
    // SAFETY: the caller's promise.
    let (gpu, plan, it) = unsafe { (&*gpu, &mut *plan, std::slice::from_raw_parts(tensors, 9)) };
    guard(-1, || {
        // SAFETY: the caller's promise, for the stream and each tensor.
        let (stream, tensors) = unsafe {
            let tensors = BackwardTensors {
                q: it[0].read(),
                dout: it[1].read(),
                k: it[2].read(),
                v: it[3].read(),
                lse: it[4].read(),
                delta: it[5].read(),
                dq: match narrow {
                    0 => QueryGradients::F32(it[6].write()),
                    _ => QueryGradients::Bf16(it[6].write()),
                },
                dk: it[7].write(),
                dv: it[8].write(),
            };
            (Stream::foreign(gpu, stream), tensors)
        };
        plan.run(&stream, tensors).map(|()| 0)
    })
}

/// Ends a backward plan; work that uses it is waited for.
///
/// # Safety
///
/// `plan` comes from [`cadre_backward_plan`] and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_backward_free(plan: *mut BackwardPlan) {
    // SAFETY: the caller's promise.
    drop(unsafe { Box::from_raw(plan) });
}
