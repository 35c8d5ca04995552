//! What work costs, in integers.
//!
//! In: the rows of a document and the number of query heads. Out: their cost in units of one kept
//! (query, key) pair of one query head, forward. A table is part of the header, so everybody
//! plans with the same numbers; [`Costs::digest`] names it.
//!
//! What the balance relies on: the cost of a range grows with each tile added to either end, and
//! the ranges of a cut cost what the whole does, but for overheads of tasks and of cut tiles.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::{Document, TILE_ROWS};

/// Overheads and ratios that turn pairs into time.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Costs {
    /// Added for each query tile and query head: the part of diagonal tiles that is computed and
    /// masked.
    pub tile: u32,
    /// Added for each task: decode, launch, reply.
    pub task: u32,
    /// Backward cost as percent of forward cost.
    pub backward_percent: u32,
    /// Longest forward task in rows, so that it may start before all rows of its bundle are
    /// there: a positive multiple of 128.
    pub task_rows: u32,
}

impl Default for Costs {
    /// Half a diagonal tile per tile, 16K pairs per task, backward 2.5 times forward.
    fn default() -> Self {
        Self { tile: 8_128, task: 16_384, backward_percent: 250, task_rows: 2_048 }
    }
}

impl Costs {
    /// Pairs alone, without overheads: what published planners count.
    pub fn pairs_only() -> Self {
        Self { tile: 0, task: 0, ..Self::default() }
    }

    /// Same on every machine for the same table, for ever.
    pub fn digest(&self) -> u64 {
        let mut digest = Digest::new("costs");
        self.encode(&mut digest);
        digest.value()
    }

    /// Backward cost of what costs `forward` forward.
    pub fn backward(&self, forward: u64) -> u64 {
        let cost = u128::from(forward) * u128::from(self.backward_percent) / 100;
        u64::try_from(cost).unwrap_or(u64::MAX)
    }

    pub(crate) fn encode(&self, digest: &mut Digest) {
        let Self { tile, task, backward_percent, task_rows } = *self;
        for part in [tile, task, backward_percent, task_rows] {
            digest.u64(part.into());
        }
    }

    /// Cost of rows that stay together, cut into tasks by [`Costs::tasks`].
    pub(crate) fn rows(&self, document: Document, query_heads: u64, rows: &Range<u32>) -> u64 {
        self.run(document, query_heads, rows, self.task_count(rows))
    }

    /// How many tasks [`Costs::tasks`] cuts rows into.
    pub(crate) fn task_count(&self, rows: &Range<u32>) -> u64 {
        if rows.is_empty() {
            return 0;
        }
        // Cuts lie a whole number of longest tasks behind the tile in which the rows begin.
        let first = rows.start / TILE_ROWS * TILE_ROWS;
        (rows.end - first).div_ceil(self.task_rows).into()
    }

    /// Cost of rows that stay together, cut into tasks at tiles.
    pub(crate) fn run(
        &self,
        document: Document,
        query_heads: u64,
        rows: &Range<u32>,
        tasks: u64,
    ) -> u64 {
        self.wide(document, query_heads, rows) + tasks * u64::from(self.task)
    }

    /// Cost of rows but for their tasks' overhead; wide enough for any document and head count.
    fn wide(&self, document: Document, query_heads: u64, rows: &Range<u32>) -> u64 {
        if rows.is_empty() {
            return 0;
        }
        let tiles = u64::from(rows.end.div_ceil(TILE_ROWS) - rows.start / TILE_ROWS);
        let pairs = document.mask.pairs(document.rows, rows.clone());
        (pairs + tiles * u64::from(self.tile)).saturating_mul(query_heads)
    }

    /// Cuts rows that stay together into tasks: at multiples of the tile, none longer than
    /// `task_rows`.
    pub(crate) fn tasks(&self, rows: Range<u32>) -> impl Iterator<Item = Range<u32>> {
        let longest = self.task_rows;
        let mut start = rows.start;
        std::iter::from_fn(move || {
            (start < rows.end).then(|| {
                let cut = (start + longest) / TILE_ROWS * TILE_ROWS;
                let task = start..cut.min(rows.end);
                start = task.end;
                task
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Mask;

    #[test]
    fn tasks_are_cut_at_tiles_and_never_longer_than_asked() {
        let costs = Costs { task_rows: 256, ..Costs::default() };
        let tasks: Vec<_> = costs.tasks(100..900).collect();
        assert_eq!(tasks, [100..256, 256..512, 512..768, 768..900]);
        assert_eq!(costs.tasks(5..5).count(), 0);
    }

    proptest! {
        #[test]
        fn tasks_are_as_many_as_are_charged(start in 0_u32..1_000, rows in 0_u32..5_000, tiles in 1_u32..20) {
            let costs = Costs { task_rows: tiles * TILE_ROWS, ..Costs::default() };
            let rows = start..start + rows;
            prop_assert_eq!(costs.task_count(&rows), costs.tasks(rows).count() as u64);
        }
    }

    #[test]
    fn cost_is_pairs_of_all_heads_plus_tiles_and_tasks() {
        let costs = Costs { tile: 10, task: 1_000, backward_percent: 250, task_rows: 128 };
        let document = Document { rows: 200, mask: Mask::Causal };
        let pairs = 200 * 201 / 2;
        assert_eq!(costs.rows(document, 4, &(0..200)), (pairs + 2 * 10) * 4 + 2 * 1_000);
        assert_eq!(costs.rows(document, 4, &(7..7)), 0);
        assert_eq!(costs.backward(10), 25);
        assert_eq!(costs.backward(u64::MAX), u64::MAX);
    }

    #[test]
    fn digest_of_the_default_table_is_fixed() {
        assert_eq!(Costs::default().digest(), 17_626_534_265_595_821_514);
        assert_ne!(Costs::default().digest(), Costs::pairs_only().digest());
    }
}
