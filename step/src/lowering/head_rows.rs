//! Head by head: where the rows of a tensor lie, counted in rows of one KV head.
//!
//! In: a layout, tasks, keys. Out: [`HeadRows`], which says where some rows begin under each KV head. A row of one KV head
//! is, of Q, O, dO and dQ, all its query heads; of K, V, dK and dV itself; of LSE and Δ a number for each query head.
//!
//! ```text
//! rows of a rank    | stretch 0: KV head 0, its rows | KV head 1, its rows | … | stretch 1: KV head 0, its rows | …
//! rows of a bundle  | task 0: its first KV head, rows of the task | its next one | … | task 1: …
//! keys of a bundle  | its first KV head, keys | its next one, keys | …
//! ```
//!
//! Invariant: rows that follow one another in a stretch, under one KV head, lie side by side; so do all KV heads of a whole
//! stretch. So some rows under one KV head are one piece, and a whole stretch is one under all of them.

use std::ops::Range;

use cadre_planner::{Layout, Piece, RankId};

/// Where rows that follow one another lie under some KV heads that do.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct HeadRows {
    first: u64,
    distance: u64,
}

impl HeadRows {
    /// From row `offset` of a task of `rows` rows on, in a bundle of `kv_heads` KV heads whose tasks before it have `base` rows.
    pub fn in_task(base: u32, rows: u32, kv_heads: usize, offset: u32) -> Self {
        let first = u64::from(base) * kv_heads as u64 + u64::from(offset);
        Self { first, distance: rows.into() }
    }

    /// From key `offset` of a bundle of `keys` keys on.
    pub fn in_keys(keys: u32, offset: u32) -> Self {
        Self { first: offset.into(), distance: keys.into() }
    }

    /// The first row under KV head `head`, counted from the first that is meant.
    pub fn of_head(self, head: usize) -> u64 {
        self.first + head as u64 * self.distance
    }
}

/// The stretches of all ranks, each of which lies head by head.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Stretches {
    /// KV heads of a row.
    kv_heads: u16,
    /// By rank: the row at which each stretch begins in its stream; then the end of the last one.
    edges: Vec<Vec<u32>>,
}

impl Stretches {
    /// The stretches of a layout whose rows have `kv_heads` KV heads.
    pub(super) fn new(layout: &Layout, kv_heads: u16) -> Self {
        let ranks = (0..layout.ranks().len() as u32).map(RankId);
        let edges = |rank| {
            let starts = layout.pieces_of(rank).map(|(_, it)| it.local.start);
            starts.chain([layout.rank_rows(rank)]).collect()
        };
        Self { kv_heads, edges: ranks.map(edges).collect() }
    }

    /// Where rows that a rank holds lie there, under `kv_heads`. `at` is a stretch, or a part of one.
    pub fn home(&self, at: &Piece, kv_heads: &Range<u16>) -> HeadRows {
        let edges = &self.edges[at.rank.0 as usize];
        let behind = edges.partition_point(|it| *it <= at.local.start);
        let (start, end) = (edges[behind - 1], edges[behind]);
        let distance = u64::from(end - start);
        let first = u64::from(start) * u64::from(self.kv_heads)
            + u64::from(kv_heads.start) * distance
            + u64::from(at.local.start - start);
        HeadRows { first, distance }
    }

    /// KV heads of a row.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads.into()
    }

    /// Rows of each stretch of a rank, in the order of its stream.
    pub fn rows_of(&self, rank: RankId) -> impl Iterator<Item = usize> + '_ {
        let edges = self.edges.get(rank.0 as usize).map_or(&[][..], Vec::as_slice);
        edges.windows(2).map(|it| (it[1] - it[0]) as usize)
    }
}
