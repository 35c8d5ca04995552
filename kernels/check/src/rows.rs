//! The part of the C face that copies rows.
//!
//! In: addresses and lists of copies. Out: launches on the caller's stream. Invariant: that of the crate.

use cadre_kernels::device::{Gpu, RowCopier, RowCopy, Stream};

use super::{Tensor, guard};

/// A copy of rows, in bytes; see [`RowCopy`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RowLine {
    from: u64,
    to: u64,
    rows: u64,
    bytes: u64,
    from_stride: u64,
    to_stride: u64,
}

/// What puts copies of rows on a stream of the GPU; null on error.
///
/// # Safety
///
/// `gpu` comes from [`crate::cadre_open`]; the stream lives until [`cadre_rows_free`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_rows_open(gpu: *const Gpu, stream: u64) -> *mut RowCopier {
    guard(std::ptr::null_mut(), || {
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::foreign(&*gpu, stream) };
        Ok(Box::into_raw(Box::new(RowCopier::new(stream)?)))
    })
}

/// Puts `count` copies on the stream. Tensors: source and target, with their bytes.
///
/// # Safety
///
/// `rows` comes from [`cadre_rows_open`]; `lines` are `count`; both tensors lie where they say until the stream is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_rows_copy(
    rows: *mut RowCopier,
    tensors: *const Tensor,
    lines: *const RowLine,
    count: u64,
) -> i32 {
    // SAFETY: the caller's promise.
    let (rows, it, lines) = unsafe {
        let lines = std::slice::from_raw_parts(lines, count as usize);
        (&mut *rows, std::slice::from_raw_parts(tensors, 2), lines)
    };
    guard(-1, || {
        let copy = |it: &RowLine| {
            let RowLine { from, to, rows, bytes, from_stride, to_stride } = *it;
            RowCopy { from, to, rows: rows as u32, bytes, from_stride, to_stride }
        };
        let copies: Vec<_> = lines.iter().map(copy).collect();
        // SAFETY: the caller's promise, for each tensor.
        let memories = unsafe { (it[0].read(), it[1].write()) };
        rows.put(memories, &copies).map(|()| 0)
    })
}

/// Ends what puts copies; work that uses it is waited for.
///
/// # Safety
///
/// `rows` comes from [`cadre_rows_open`] and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_rows_free(rows: *mut RowCopier) {
    // SAFETY: the caller's promise.
    drop(unsafe { Box::from_raw(rows) });
}
