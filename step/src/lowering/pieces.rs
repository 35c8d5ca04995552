//! Rows as byte ranges: how wide a row of a tensor is, and which pieces carry some rows.
//!
//! In: tensors, KV-head groups, rows. Out: pieces of an exchange, and bytes by trainer. Which rows a bundle
//! needs is not known here.
//!
//! Invariant: parts of different KV heads of a row do not overlap, and together they are the row.

use std::ops::Range;

use cadre_planner::{BundleId, Layout, Plan, Problem};
use cadre_protocol::Piece;
use cadre_protocol::TrainerId;

use super::Tensor;

/// Bytes of one row of a tensor, at its trainer and in a bundle's KV-head group.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowBytes {
    /// Row of all heads.
    pub(super) whole: u64,
    /// Where the group begins in it.
    pub(super) offset: u64,
    /// The group's part.
    pub(super) part: u64,
}

/// Bytes of one row of `tensor`: of all heads, and of the group `kv_heads`.
pub(super) fn row(problem: &Problem, kv_heads: &Range<u16>, tensor: Tensor) -> RowBytes {
    let heads = problem.heads;
    let ratio = u64::from(heads.query / heads.kv);
    let (dim, wire) = (u64::from(heads.dim), u64::from(problem.element_bytes));
    let per_kv_head = match tensor {
        Tensor::Q | Tensor::DOut | Tensor::O | Tensor::DQ => ratio * dim * wire,
        Tensor::K | Tensor::V => dim * wire,
        Tensor::Lse | Tensor::Delta | Tensor::OLse => ratio * 4,
        Tensor::DK | Tensor::DV => dim * 4,
    };
    RowBytes {
        whole: u64::from(heads.kv) * per_kv_head,
        offset: u64::from(kv_heads.start) * per_kv_head,
        part: u64::from(kv_heads.end - kv_heads.start) * per_kv_head,
    }
}

/// From a trainer's rows `local` to the rows of a landing area that begin at `first`.
pub(super) fn gather(
    pieces: &mut Vec<Piece>,
    row: RowBytes,
    local: &Range<u32>,
    first: u32,
    area: u64,
) {
    let to = |index: u32| area + u64::from(first + index) * row.part;
    let from = |index: u32| u64::from(local.start + index) * row.whole + row.offset;
    strips(pieces, row, local.end - local.start, from, to);
}

/// From the rows of a result that begin at `first` to a trainer's rows `local`.
pub(super) fn scatter(
    pieces: &mut Vec<Piece>,
    row: RowBytes,
    first: u32,
    local: &Range<u32>,
    area: u64,
) {
    let from = |index: u32| u64::from(first + index) * row.part;
    let to = |index: u32| area + u64::from(local.start + index) * row.whole + row.offset;
    strips(pieces, row, local.end - local.start, from, to);
}

/// One piece for all rows where a row is whole, one for each where a group is cut out of it.
fn strips(
    pieces: &mut Vec<Piece>,
    row: RowBytes,
    rows: u32,
    from: impl Fn(u32) -> u64,
    to: impl Fn(u32) -> u64,
) {
    if row.part == row.whole {
        let bytes = u64::from(rows) * row.part;
        pieces.push(Piece { remote: from(0), local: to(0), bytes });
    } else {
        let piece = |index| Piece { remote: from(index), local: to(index), bytes: row.part };
        pieces.extend((0..rows).map(piece));
    }
}

/// Bytes of a task's results by home trainer.
pub(super) fn forward_bytes(problem: &Problem, plan: &Plan, task: usize) -> Vec<(TrainerId, u64)> {
    let task = &plan.tasks()[task];
    let row_bytes = row(problem, &task.kv_heads, Tensor::O).part
        + row(problem, &task.kv_heads, Tensor::OLse).part;
    by_home(&problem.layout, [(task.document, task.rows.clone(), row_bytes)])
}

/// Bytes of a bundle's results by home trainer.
pub(super) fn backward_bytes(
    problem: &Problem,
    plan: &Plan,
    bundle: BundleId,
) -> Vec<(TrainerId, u64)> {
    let tasks = plan.tasks_of(bundle);
    let bundle = &plan.bundles()[bundle.0 as usize];
    let dq = row(problem, &bundle.kv_heads, Tensor::DQ).part;
    let parts = 2 * row(problem, &bundle.kv_heads, Tensor::DK).part;
    let rows = tasks.iter().map(|it| (it.document, it.rows.clone(), dq));
    by_home(&problem.layout, rows.chain([(bundle.document, bundle.keys.clone(), parts)]))
}

fn by_home(
    layout: &Layout,
    ranges: impl IntoIterator<Item = (cadre_planner::DocumentId, Range<u32>, u64)>,
) -> Vec<(TrainerId, u64)> {
    let mut homes = std::collections::BTreeMap::new();
    for (document, rows, row_bytes) in ranges {
        for at in layout.locate(document, rows) {
            let bytes = u64::from(at.rows.end - at.rows.start) * row_bytes;
            *homes.entry(TrainerId(at.rank.0)).or_insert(0) += bytes;
        }
    }
    homes.into_iter().collect()
}
