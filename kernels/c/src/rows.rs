//! The part of the C face that copies rows.
//!
//! In: addresses and lists of copies. Out: launches on the caller's stream. Invariant: that of the crate.

use cadre_kernels::device::{Error, Gpu, Refusal, RowCopier, RowCopy, Stream};

use super::{Tensor, freed, given, given_mut, guard, listed};

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
        let stream = unsafe { Stream::foreign(given(gpu, "gpu")?, stream) };
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
    guard(-1, || {
        // SAFETY: the caller's promise.
        let (rows, it, lines) = unsafe {
            let lines = listed(lines, count, "lines")?;
            (given_mut(rows, "rows")?, listed(tensors, 2, "tensors")?, lines)
        };
        let copies = lines.iter().enumerate().map(copy).collect::<Result<Vec<_>, _>>()?;
        // SAFETY: the caller's promise, for each tensor.
        let memories = unsafe { (it[0].read(), it[1].write()) };
        rows.put(memories, &copies)?;
        Ok(0)
    })
}

/// A copy of a caller's, with its index.
fn copy((index, it): (usize, &RowLine)) -> Result<RowCopy, Error> {
    let RowLine { from, to, rows, bytes, from_stride, to_stride } = *it;
    let rows = u32::try_from(rows).map_err(|_| {
        let rule = "which is above 4294967295; cut the copy";
        Refusal::RowCopy { copy: index, field: "rows", value: rows, rule }
    })?;
    Ok(RowCopy { from, to, rows, bytes, from_stride, to_stride })
}

/// Ends what puts copies; work that uses it is waited for.
///
/// # Safety
///
/// `rows` comes from [`cadre_rows_open`] and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_rows_free(rows: *mut RowCopier) {
    // SAFETY: the caller's promise.
    unsafe { freed(rows) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_beyond_32_bits_are_refused_and_not_cut() {
        let line = |rows| RowLine { from: 0, to: 0, rows, bytes: 4, from_stride: 4, to_stride: 4 };
        assert_eq!(copy((0, &line(5))).map(|it| it.rows), Ok(5));
        let said = copy((3, &line((1 << 32) + 5))).unwrap_err().to_string();
        assert!(said.contains("4294967301") && said.contains("cut the copy"), "{said}");
    }
}
