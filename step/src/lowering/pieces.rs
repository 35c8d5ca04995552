//! Rows as byte ranges: how wide a row of a tensor is, and which pieces carry some rows.
//!
//! In: tensors, KV-head groups, rows. Out: pieces of an exchange. Which rows a bundle needs is not known here.
//!
//! Invariant: pieces that follow one another at both ends are one.

use cadre_planner::Problem;
use cadre_protocol::Piece;

use super::{HeadRows, Tensor};

/// Bytes of one row of `tensor` under one KV head.
pub(super) fn row_bytes(problem: &Problem, tensor: Tensor) -> u64 {
    let heads = problem.heads;
    let ratio = u64::from(heads.query / heads.kv);
    let (dim, wire) = (u64::from(heads.dim), u64::from(problem.element_bytes));
    match tensor {
        Tensor::Q | Tensor::DOut | Tensor::O | Tensor::DQ => ratio * dim * wire,
        Tensor::K | Tensor::V => dim * wire,
        Tensor::Lse | Tensor::Delta | Tensor::OLse => ratio * 4,
        Tensor::DK | Tensor::DV => dim * 4,
    }
}

/// Rows of `bytes` bytes under one KV head: how many, and under how many KV heads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strip {
    pub(super) bytes: u64,
    pub(super) rows: u32,
    pub(super) kv_heads: usize,
}

/// Adds the pieces that carry a strip from `remote` to `local`, behind byte `area` there. Pieces before `begin` are another tensor's.
pub(super) fn carry(
    (pieces, begin): (&mut Vec<Piece>, usize),
    strip: Strip,
    remote: HeadRows,
    (local, area): (HeadRows, u64),
) {
    let Strip { bytes, rows, kv_heads } = strip;
    for head in 0..kv_heads {
        let remote = remote.of_head(head) * bytes;
        let local = area + local.of_head(head) * bytes;
        let bytes = u64::from(rows) * bytes;
        match pieces[begin..].last_mut() {
            Some(it) if it.remote + it.bytes == remote && it.local + it.bytes == local => {
                it.bytes += bytes;
            }
            Some(_) | None => pieces.push(Piece { remote, local, bytes }),
        }
    }
}
