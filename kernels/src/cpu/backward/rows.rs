//! Blocks of query rows of a bundle: where they are cut, and their workspace.
//!
//! In: a bundle. Out: its [`RowBlock`]s. Edges are counted from the document's start, so a block's products
//! are the same whatever else the bundle has.
//!
//! The workspace of a block holds Q, dO and dQ of one KV head in panels, one after the other: rows are
//! gathered once for all key tiles, and dQ is summed where it is near.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::AtomicU32;

use super::turn::Turn;
use super::{BLOCK, Bundle, LOG2_E};
use crate::cpu::block::{PANEL, panelled};
use crate::cpu::engine::Engine;
use crate::cpu::shared::Shared;
use crate::cpu::stage::{Source, copy, round_up};
use crate::{Heads, Rows, TILE};

/// The query rows that go through the products together: those of the bundle that lie in one block of the document's rows.
pub(super) struct RowBlock {
    /// Part and rows, ascending.
    pieces: Vec<(usize, Range<u32>)>,
    /// Pairs of row and head.
    pub(super) pairs: usize,
    /// Rows of its panels.
    pub(super) stride: usize,
    /// First element of its workspace, counted from the head's.
    space: usize,
    /// Held keys that any of the rows keeps.
    pub(super) keys: Range<u32>,
    /// Tiles of this launch that the rows reach.
    pub(super) tiles: Range<u32>,
    /// For each KV head, the key tile that may add to dQ next.
    pub(super) turn: Vec<AtomicU32>,
}

/// Cuts the query rows of a bundle at edges counted from the document's start. Also returns the elements of workspace that they
/// need.
pub(super) fn row_blocks(bundle: &Bundle<'_>) -> (Vec<RowBlock>, usize) {
    let Heads { query, kv, dim } = bundle.heads;
    let step = (BLOCK / (query / kv)).max(1) as u32;
    let mut pieces: Vec<(usize, Range<u32>)> = Vec::new();
    for (index, part) in bundle.parts.iter().enumerate() {
        let mut start = part.rows.start;
        while start < part.rows.end {
            let end = part.rows.end.min((start / step + 1) * step);
            pieces.push((index, start..end));
            start = end;
        }
    }
    let mut space = 0;
    let blocks = pieces.chunk_by(|a, b| a.1.start / step == b.1.start / step).map(|pieces| {
        let rows: usize = pieces.iter().map(|it| it.1.len()).sum();
        let kept = |rows| {
            let kept = bundle.mask.keys_of(rows, bundle.document_rows);
            kept.start.max(bundle.keys.start)..kept.end.min(bundle.keys.end)
        };
        let mut keys = kept(&pieces[0].1);
        for (_, rows) in &pieces[1..] {
            let kept = kept(rows);
            keys = keys.start.min(kept.start)..keys.end.max(kept.end);
        }
        let Range { start, end } = bundle.tiles;
        let tiles = (keys.start / TILE).max(start)..keys.end.div_ceil(TILE).min(end);
        let pairs = rows * (query / kv);
        let stride = round_up(pairs, 4);
        let turn = (0..kv).map(|_| Turn::unstaged()).collect();
        let block = RowBlock { pieces: pieces.to_vec(), pairs, stride, space, keys, tiles, turn };
        space += 3 * panelled(stride, dim);
        block
    });
    (blocks.collect(), space)
}

impl RowBlock {
    /// Part and row of each query row, in order.
    fn rows(&self) -> impl Iterator<Item = (usize, u32)> {
        self.pieces.iter().flat_map(|(part, rows)| rows.clone().map(move |row| (*part, row)))
    }

    /// Stages Q, dO and the dQ of earlier launches under KV head `head`; `at` is the head's workspace.
    ///
    /// # Safety
    ///
    /// No other unit uses the block's workspace.
    pub(super) unsafe fn stage(
        &self,
        engine: Engine,
        bundle: &Bundle<'_>,
        head: usize,
        space: &Shared<'_, f32>,
        at: usize,
    ) {
        let count = panelled(self.stride, bundle.heads.dim);
        // SAFETY: the caller's promise.
        let space = unsafe { space.piece(at + self.space, 3 * count) };
        let (q, rest) = space.split_at_mut(count);
        let (dout, dq) = rest.split_at_mut(count);
        self.gather(engine, bundle, head, q, |part| bundle.parts[part].q);
        self.gather(engine, bundle, head, dout, |part| bundle.parts[part].dout);
        self.dq_rows(bundle, head, |pair, row| {
            for (panel, from) in row.chunks(PANEL).enumerate() {
                copy(&mut dq[(panel * self.stride + pair) * PANEL..][..from.len()], from);
            }
        });
    }

    /// Copies the block's rows of an input into panels.
    fn gather<'a>(
        &self,
        engine: Engine,
        bundle: &Bundle<'_>,
        head: usize,
        to: &mut [f32],
        of: impl Fn(usize) -> Rows<'a>,
    ) {
        let Heads { query, kv, dim } = bundle.heads;
        let group = query / kv;
        let mut pair = 0;
        for (part, rows) in &self.pieces {
            let from = of(*part);
            let first =
                (rows.start - bundle.parts[*part].rows.start) as usize * query + head * group;
            // The heads of a row are adjacent; alone, they are `query` rows apart.
            let (times, count, distance) =
                if group == 1 { (1, rows.len(), query * dim) } else { (rows.len(), group, dim) };
            for index in 0..times {
                let offset = (first + index * query) * dim;
                let to = &mut to[(pair + index * count) * PANEL..];
                let source = Source { rows: from, offset, distance, dim };
                source.place(engine, count, 1.0, to, self.stride);
            }
            pair += rows.len() * group;
        }
    }

    /// The staged Q and dO.
    ///
    /// # Safety
    ///
    /// The rows are staged, and no unit writes them.
    pub(super) unsafe fn inputs<'a>(
        &self,
        bundle: &Bundle<'_>,
        space: &'a Shared<'_, f32>,
        at: usize,
    ) -> (&'a [f32], &'a [f32]) {
        let count = panelled(self.stride, bundle.heads.dim);
        // SAFETY: the caller's promise.
        unsafe { space.read(at + self.space, 2 * count) }.split_at(count)
    }

    /// The sums of dQ.
    ///
    /// # Safety
    ///
    /// The caller has the turn.
    #[expect(clippy::mut_from_ref, reason = "exclusiveness is the caller's promise")]
    pub(super) unsafe fn dq<'a>(
        &self,
        bundle: &Bundle<'_>,
        space: &'a Shared<'_, f32>,
        at: usize,
    ) -> &'a mut [f32] {
        let count = panelled(self.stride, bundle.heads.dim);
        // SAFETY: the caller's promise.
        unsafe { space.piece(at + self.space + 2 * count, count) }
    }

    /// Writes the rows of dQ.
    ///
    /// # Safety
    ///
    /// The caller has the turn.
    pub(super) unsafe fn finish(
        &self,
        bundle: &Bundle<'_>,
        head: usize,
        space: &Shared<'_, f32>,
        at: usize,
    ) {
        // SAFETY: the caller's promise.
        let dq = unsafe { self.dq(bundle, space, at) };
        self.dq_rows(bundle, head, |pair, row| {
            for (panel, to) in row.chunks_mut(PANEL).enumerate() {
                copy(to, &dq[(panel * self.stride + pair) * PANEL..][..to.len()]);
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

    /// LSE in units of log 2, +∞ for a row without gradient, and Δ, of each pair.
    pub(super) fn sums(
        &self,
        bundle: &Bundle<'_>,
        head: usize,
        lse: &mut Vec<f32>,
        delta: &mut Vec<f32>,
    ) {
        let Heads { query, kv, .. } = bundle.heads;
        let group = query / kv;
        lse.clear();
        delta.clear();
        for (part, row) in self.rows() {
            let part = &bundle.parts[part];
            let first = (row - part.rows.start) as usize * query + head * group;
            let none = |it: f32| if it == f32::NEG_INFINITY { f32::INFINITY } else { it * LOG2_E };
            lse.extend(part.lse[first..first + group].iter().map(|&it| none(it)));
            delta.extend(&part.delta[first..first + group]);
        }
    }

    /// Sets the range of keys that each pair keeps, among `columns` columns from key `start`. True if every pair keeps all of
    /// them.
    pub(super) fn bounds(
        &self,
        bundle: &Bundle<'_>,
        (low, high): (&mut Vec<f32>, &mut Vec<f32>),
        start: u32,
        columns: usize,
    ) -> bool {
        let group = bundle.heads.query / bundle.heads.kv;
        let mut all = true;
        low.clear();
        high.clear();
        for (_, row) in self.rows() {
            let kept = bundle.mask.keys(row, bundle.document_rows);
            let inside =
                |key: u32| (key.min(bundle.keys.end).saturating_sub(start) as usize).min(columns);
            let (first, end) = (inside(kept.start), inside(kept.end));
            all &= first == 0 && end == columns;
            low.extend(std::iter::repeat_n(first as f32, group));
            high.extend(std::iter::repeat_n(end as f32, group));
        }
        all
    }
}
