//! Refuses what the GPU kernels cannot do, before anything is launched.
//!
//! In: heads, scale, tasks, bundles and the lengths and addresses of tensors. Out: nothing, or the first thing that is wrong.
//!
//! What passes here is assumed by lists and kernels, which look at nothing again: rows lie inside their tensors, no two tasks
//! write one row, and every position fits the tables. Values are not looked at.

use std::ops::Range;

use super::family::Family;
use super::plan::{Keys, TaskRows};
use crate::check::{is_softcap, keys_held, positions};
use crate::{Heads, Mask};

/// Why the GPU kernels cannot do a launch.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// No kernel of the GPU's family takes the head dim.
    #[error(
        "head dim {dim} has no GPU kernel here; those for Hopper take 64, 128 and 256, the portable ones (CADRE_GPU_KERNELS) \
         each multiple of 8 up to 256; use such, or the CPU"
    )]
    Dim {
        /// The dimension.
        dim: usize,
    },
    /// Query heads do not divide over KV heads.
    #[error("{query} query heads do not divide over {kv} KV heads; hand in whole KV-head groups")]
    Ratio {
        /// Query heads.
        query: usize,
        /// KV heads.
        kv: usize,
    },
    /// More query heads than lists count.
    #[error("{query} query heads are more than 32768; cut them into launches by KV head")]
    Heads {
        /// Query heads.
        query: usize,
    },
    /// The scale is not above 0.
    #[error(
        "scale {scale} is not a number above 0, which the GPU kernels need; it mostly is dim^-0.5"
    )]
    Scale {
        /// The scale, printed.
        scale: String,
    },
    /// The softcap bounds nothing.
    #[error(
        "softcap {softcap} is not a finite number above 0 that the scale can be divided by; leave it out for none"
    )]
    Softcap {
        /// The softcap, printed.
        softcap: String,
    },
    /// Rows are not bf16.
    #[error(
        "task {task}: {field} is f32, the GPU kernels read bf16; set wire: Bf16, or use the CPU"
    )]
    Dtype {
        /// Index in the launch.
        task: usize,
        /// The field.
        field: &'static str,
    },
    /// A tensor begins where the copy engine cannot read.
    #[error("{field} begins at address {address:#x}, which is no multiple of {multiple}; align it")]
    Alignment {
        /// The tensor.
        field: &'static str,
        /// Address at which the tensor begins.
        address: u64,
        /// Alignment in bytes that the address needs.
        multiple: u64,
    },
    /// A document or tensor is longer than the tables can say.
    #[error("{field} has {rows} rows, the GPU kernels take {most}; cut it")]
    Long {
        /// The tensor or document.
        field: &'static str,
        /// Rows that it has.
        rows: u64,
        /// The most that is taken.
        most: u64,
    },
    /// A tensor is shorter than tasks or bundles say.
    #[error(
        "{field} has {actual} numbers, the tasks reach to {expected}; hand in the whole tensor"
    )]
    Length {
        /// The tensor.
        field: &'static str,
        /// Length that the tasks say.
        expected: usize,
        /// Length handed in.
        actual: usize,
    },
    /// Two tasks or bundles write the same rows.
    #[error("{field} {first} and {second} share row {row}; give each its own")]
    Overlap {
        /// `task` or `bundle`.
        field: &'static str,
        /// Index of one.
        first: usize,
        /// Index of the other.
        second: usize,
        /// The row.
        row: u32,
    },
    /// A copy of rows that the kernel does not do.
    #[error("row copy {copy}: {field} is {value}, {rule}")]
    RowCopy {
        /// Index in the list.
        copy: usize,
        /// The field that is wrong.
        field: &'static str,
        /// Value of the field.
        value: u64,
        /// The rule that the value breaks, and the remedy.
        rule: &'static str,
    },
    /// A bundle is handed in for some of its key tiles.
    #[error(
        "bundle {bundle}: key tiles {tiles:?} of {all} are no launch of their own on the GPU; hand in all"
    )]
    KeyTiles {
        /// Index in the launch.
        bundle: usize,
        /// Key tiles that were handed in.
        tiles: Range<u32>,
        /// How many there are.
        all: u32,
    },
    /// Key tiles are to be cut into more launches than make sense.
    #[error("{launches} launches share the key tiles, {most} are the most; it mostly is 1")]
    Launches {
        /// Launches asked for.
        launches: u32,
        /// The most that are taken.
        most: u32,
    },
    /// Tensors, plan and stream are not all on one GPU.
    #[error("{field} is of GPU {own}, the stream of GPU {stream}; hand in those of one GPU")]
    Gpus {
        /// What it is.
        field: &'static str,
        /// Number of its GPU.
        own: i32,
        /// Number of the stream's GPU.
        stream: i32,
    },
    /// Memory would be freed whose address a graph has.
    #[error(
        "a graph holds addresses of the workspace, so it stays as it is; make another one for {what}"
    )]
    Recorded {
        /// What there is no room for.
        what: &'static str,
    },
    /// Positions, ranges or lengths that no engine takes.
    #[error(transparent)]
    Shape(#[from] crate::Error),
}

/// Positions and rows that an `i32` and the distances of a mask can hold.
const MOST_ROWS: u64 = 1 << 30;

/// Heads, scale and softcap.
pub(super) fn common(
    family: Family,
    heads: Heads,
    scale: f32,
    softcap: Option<f32>,
) -> Result<(), Refusal> {
    let Heads { query, kv, dim } = heads;
    if !family.takes_head_dim(dim) {
        return Err(Refusal::Dim { dim });
    }
    if kv == 0 || query == 0 || !query.is_multiple_of(kv) {
        return Err(Refusal::Ratio { query, kv });
    }
    if query > 1 << 15 {
        return Err(Refusal::Heads { query });
    }
    if !scale.is_finite() || scale <= 0.0 {
        return Err(Refusal::Scale { scale: scale.to_string() });
    }
    if let Some(softcap) = softcap.filter(|it| !is_softcap(*it, scale)) {
        return Err(Refusal::Softcap { softcap: softcap.to_string() });
    }
    Ok(())
}

/// Positions of one task or part of a bundle, with the keys of both.
pub(super) fn task(index: usize, mask: Mask, it: &TaskRows, keys: &Keys) -> Result<(), Refusal> {
    let TaskRows { rows, q_row } = it;
    let Keys { document_rows, keys, kv_row } = keys;
    short("a document", u64::from(*document_rows))?;
    positions(index, "rows", rows, *document_rows)?;
    positions(index, "keys", keys, *document_rows)?;
    keys_held(index, mask, rows, keys, *document_rows)?;
    short("q", u64::from(*q_row) + rows.len() as u64)?;
    short("k", u64::from(*kv_row) + keys.len() as u64)
}

/// `field` is on the GPU of the stream that it is used with.
pub(super) fn same_gpu(field: &'static str, own: i32, stream: i32) -> Result<(), Refusal> {
    if own == stream { Ok(()) } else { Err(Refusal::Gpus { field, own, stream }) }
}

pub(super) fn short(field: &'static str, rows: u64) -> Result<(), Refusal> {
    if rows < MOST_ROWS { Ok(()) } else { Err(Refusal::Long { field, rows, most: MOST_ROWS - 1 }) }
}

/// No two of `rows` (first row, count) share a row.
pub(super) fn disjoint(
    field: &'static str,
    rows: impl Iterator<Item = (u32, usize)>,
) -> Result<(), Refusal> {
    let mut sorted: Vec<_> =
        rows.enumerate().filter(|(_, (_, count))| *count > 0).map(|(at, it)| (it, at)).collect();
    sorted.sort_unstable();
    for pair in sorted.windows(2) {
        let (((start, count), first), ((row, _), second)) = (pair[0], pair[1]);
        if start as usize + count > row as usize {
            return Err(Refusal::Overlap { field, first, second, row });
        }
    }
    Ok(())
}

/// A tensor of `actual` numbers at `address` holds `expected` and may be read or written there.
pub(super) fn tensor(
    field: &'static str,
    (address, actual): (u64, usize),
    expected: usize,
    multiple: u64,
) -> Result<(), Refusal> {
    if actual < expected {
        return Err(Refusal::Length { field, expected, actual });
    }
    if !address.is_multiple_of(multiple) || (address == 0 && expected > 0) {
        return Err(Refusal::Alignment { field, address, multiple });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_and_scale_that_have_no_kernel_are_refused() {
        let heads = Heads { query: 8, kv: 2, dim: 128 };
        assert_eq!(common(Family::Hopper, heads, 0.1, None), Ok(()));
        assert_eq!(common(Family::Hopper, heads, 0.1, Some(50.0)), Ok(()));
        let padded = Heads { dim: 96, ..heads };
        assert_eq!(common(Family::Hopper, padded, 0.1, None), Err(Refusal::Dim { dim: 96 }));
        assert_eq!(common(Family::Portable, padded, 0.1, None), Ok(()));
        let ratio = common(Family::Hopper, Heads { kv: 3, ..heads }, 0.1, None);
        assert_eq!(ratio, Err(Refusal::Ratio { query: 8, kv: 3 }));
        let many = Heads { query: 1 << 16, kv: 1 << 15, dim: 64 };
        assert_eq!(common(Family::Hopper, many, 0.1, None), Err(Refusal::Heads { query: 1 << 16 }));
        for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let refused = Refusal::Scale { scale: scale.to_string() };
            assert_eq!(common(Family::Hopper, heads, scale, None), Err(refused));
            let refused = Refusal::Softcap { softcap: scale.to_string() };
            assert_eq!(common(Family::Hopper, heads, 0.1, Some(scale)), Err(refused));
        }
    }

    #[test]
    fn rows_that_do_not_fit_are_refused() {
        let keys = Keys { document_rows: 100, keys: 0..100, kv_row: 0 };
        let check = |rows, keys: &Keys| task(3, Mask::Causal, &TaskRows { rows, q_row: 0 }, keys);
        assert_eq!(check(10..90, &keys), Ok(()));
        let beyond =
            crate::Error::Positions { task: 3, field: "rows", start: 10, end: 101, limit: 100 };
        assert_eq!(check(10..101, &keys), Err(Refusal::Shape(beyond)));
        let late = Keys { keys: 5..100, ..keys.clone() };
        assert!(matches!(
            check(10..90, &late),
            Err(Refusal::Shape(crate::Error::KeysMissing { .. }))
        ));
        let long = Keys { document_rows: 1 << 30, ..keys };
        assert!(matches!(check(10..90, &long), Err(Refusal::Long { field: "a document", .. })));
    }

    #[test]
    fn tensors_and_tasks_that_overlap_or_lie_askew_are_refused() {
        assert_eq!(disjoint("task", [(0, 5), (9, 0), (5, 5)].into_iter()), Ok(()));
        let shared = Refusal::Overlap { field: "task", first: 2, second: 0, row: 4 };
        assert_eq!(disjoint("task", [(4, 5), (20, 5), (0, 5)].into_iter()), Err(shared));
        assert_eq!(tensor("q", (4096, 64), 64, 16), Ok(()));
        let short = Refusal::Length { field: "q", expected: 65, actual: 64 };
        assert_eq!(tensor("q", (4096, 64), 65, 16), Err(short));
        let askew = Refusal::Alignment { field: "q", address: 4098, multiple: 16 };
        assert_eq!(tensor("q", (4098, 64), 64, 16), Err(askew));
    }
}
