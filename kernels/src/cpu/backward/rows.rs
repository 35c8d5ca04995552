//! Blocks of query rows of a bundle: where they are cut, and how they are staged.
//!
//! In: a bundle. Out: its [`RowBlock`]s, and their rows in scratch. Edges are counted from the document's
//! start, so a block's products are the same whatever else the bundle has.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::AtomicU32;

use super::{BLOCK, Bundle, KEYS, LOG2_E};
use crate::cpu::block::{PANEL, panelled};
use crate::cpu::engine::Engine;
use crate::cpu::stage::{Source, copy, round_up};
use crate::{Heads, TILE};

/// Query rows that go through the products together: those that the bundle has of so many rows of the
/// document.
pub(super) struct RowBlock {
    /// Part and rows, ascending.
    pieces: Vec<(usize, Range<u32>)>,
    /// Held keys that any of the rows keeps.
    pub(super) keys: Range<u32>,
    /// First tile of this launch that the rows reach.
    pub(super) first_tile: u32,
    /// Of each KV head: the tile whose turn it is at dQ.
    pub(super) turn: Vec<AtomicU32>,
}

/// A staged block; matrices in panels of `stride` rows.
#[derive(Default)]
pub(super) struct Staged {
    /// Pairs of query row and head.
    pub(super) pairs: usize,
    pub(super) stride: usize,
    /// `[pairs, dim]`.
    pub(super) q: Vec<f32>,
    pub(super) dout: Vec<f32>,
    pub(super) dq: Vec<f32>,
    /// `[pairs, KEYS]`.
    pub(super) scores: Vec<f32>,
    pub(super) dp: Vec<f32>,
    pub(super) lse: Vec<f32>,
    pub(super) delta: Vec<f32>,
    pub(super) low: Vec<f32>,
    pub(super) high: Vec<f32>,
}

/// Cuts the query rows of a bundle at edges counted from the document's start.
pub(super) fn row_blocks(bundle: &Bundle<'_>) -> Vec<RowBlock> {
    let Heads { query, kv, .. } = bundle.heads;
    let step = (BLOCK / (query / kv)).max(1) as u32;
    let mut blocks: Vec<(u32, RowBlock)> = Vec::new();
    for (index, part) in bundle.parts.iter().enumerate() {
        let mut start = part.rows.start;
        while start < part.rows.end {
            let number = start / step;
            let rows = start..part.rows.end.min((number + 1) * step);
            start = rows.end;
            let kept = bundle.mask.keys_of(&rows, bundle.document_rows);
            let keys = kept.start.max(bundle.keys.start)..kept.end.min(bundle.keys.end);
            match blocks.last_mut() {
                Some((last, block)) if *last == number => {
                    block.keys.end = block.keys.end.max(keys.end);
                    block.pieces.push((index, rows));
                }
                _ => {
                    let (pieces, turn) = (vec![(index, rows)], Vec::new());
                    blocks.push((number, RowBlock { pieces, keys, first_tile: 0, turn }));
                }
            }
        }
    }
    for (_, block) in &mut blocks {
        block.first_tile = (block.keys.start / TILE).max(bundle.tiles.start);
        block.turn = (0..kv).map(|_| AtomicU32::new(block.first_tile)).collect();
    }
    blocks.into_iter().map(|(_, block)| block).collect()
}

impl RowBlock {
    /// Part and row of each query row, in order.
    fn rows(&self) -> impl Iterator<Item = (usize, u32)> {
        self.pieces.iter().flat_map(|(part, rows)| rows.clone().map(move |row| (*part, row)))
    }

    /// Stages Q, dO, LSE and Δ under KV head `head`.
    pub(super) fn stage(
        &self,
        engine: Engine,
        bundle: &Bundle<'_>,
        staged: &mut Staged,
        head: usize,
    ) {
        let Heads { query, kv, dim } = bundle.heads;
        let group = query / kv;
        let pairs = self.rows().count() * group;
        let stride = round_up(pairs, 4);
        for buffer in [&mut staged.q, &mut staged.dout, &mut staged.dq] {
            grow(buffer, panelled(stride, dim));
        }
        for buffer in [&mut staged.scores, &mut staged.dp] {
            grow(buffer, panelled(stride, KEYS));
        }
        staged.lse.clear();
        staged.delta.clear();
        (staged.pairs, staged.stride) = (pairs, stride);
        let mut pair = 0;
        for (part, rows) in &self.pieces {
            let part = &bundle.parts[*part];
            let first = (rows.start - part.rows.start) as usize * query + head * group;
            for (to, from) in [(&mut staged.q, part.q), (&mut staged.dout, part.dout)] {
                // The heads of a row are adjacent; alone, they are rows `query` heads apart.
                if group == 1 {
                    let source = Source { rows: from, offset: first * dim, distance: query * dim, dim };
                    source.place(engine, rows.len(), 1.0, &mut to[pair * PANEL..], stride);
                    continue;
                }
                for row in 0..rows.len() {
                    let offset = (first + row * query) * dim;
                    let source = Source { rows: from, offset, distance: dim, dim };
                    let to = &mut to[(pair + row * group) * PANEL..];
                    source.place(engine, group, 1.0, to, stride);
                }
            }
            pair += rows.len() * group;
        }
        for (part, row) in self.rows() {
            let part = &bundle.parts[part];
            let first = (row - part.rows.start) as usize * query + head * group;
            for at in first..first + group {
                let lse = part.lse[at];
                let none = lse == f32::NEG_INFINITY;
                staged.lse.push(if none { f32::INFINITY } else { lse * LOG2_E });
                staged.delta.push(part.delta[at]);
            }
        }
    }

    /// Sets the bounds of each pair in `columns` columns from key `start`; true where all are kept.
    pub(super) fn bounds(
        &self,
        bundle: &Bundle<'_>,
        staged: &mut Staged,
        start: u32,
        columns: usize,
    ) -> bool {
        let group = bundle.heads.query / bundle.heads.kv;
        let mut all = true;
        staged.low.clear();
        staged.high.clear();
        for (_, row) in self.rows() {
            let kept = bundle.mask.keys(row, bundle.document_rows);
            let inside =
                |key: u32| (key.min(bundle.keys.end).saturating_sub(start) as usize).min(columns);
            let (low, high) = (inside(kept.start), inside(kept.end));
            all &= low == 0 && high == columns;
            staged.low.extend(std::iter::repeat_n(low as f32, group));
            staged.high.extend(std::iter::repeat_n(high as f32, group));
        }
        all
    }

    /// Copies the block's rows of dQ to scratch; the caller has the turn.
    pub(super) fn load_dq(&self, bundle: &Bundle<'_>, staged: &mut Staged, head: usize) {
        let Staged { dq, stride, .. } = staged;
        self.dq_rows(bundle, head, |pair, row| {
            for (panel, from) in row.chunks(PANEL).enumerate() {
                copy(&mut dq[(panel * *stride + pair) * PANEL..][..from.len()], from);
            }
        });
    }

    /// Copies the block's rows of dQ back; the caller has the turn.
    pub(super) fn store_dq(&self, bundle: &Bundle<'_>, staged: &Staged, head: usize) {
        self.dq_rows(bundle, head, |pair, row| {
            for (panel, to) in row.chunks_mut(PANEL).enumerate() {
                let from = &staged.dq[(panel * staged.stride + pair) * PANEL..];
                copy(to, &from[..to.len()]);
            }
        });
    }

    /// Calls `with` with each pair of the block and its row of dQ, while this unit has the turn.
    fn dq_rows(&self, bundle: &Bundle<'_>, head: usize, mut with: impl FnMut(usize, &mut [f32])) {
        let Heads { query, kv, dim } = bundle.heads;
        let group = query / kv;
        for (index, (part, row)) in self.rows().enumerate() {
            let part = &bundle.parts[part];
            let first = (row - part.rows.start) as usize * query + head * group;
            for of_group in 0..group {
                // SAFETY: the rows of this block and head are written by the unit that has the turn.
                let row = unsafe { part.dq.piece((first + of_group) * dim, dim) };
                with(index * group + of_group, row);
            }
        }
    }
}

fn grow(buffer: &mut Vec<f32>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
}
