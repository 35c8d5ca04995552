//! Which tiles of queries and keys a mask keeps. The host's lists use it; `cuda/table.cuh` computes the same on the GPU.
//!
//! In: a [`Task`] and a tile. Out: the tiles of the other side, and how many pairs they cost. All positions are rows of the
//! document; tile t of size S covers positions [t·S, (t+1)·S).
//!
//! Invariant: `key_tiles(m)` contains n exactly if `query_tiles(n)` contains m, as on the GPU.

use std::ops::Range;

use super::tables::Task;
use crate::Mask;

/// Distance of a mask side without a limit.
pub(crate) const UNBOUNDED: i32 = 1 << 30;
/// Query rows of a backward tile.
pub(crate) const BACKWARD_ROWS: i32 = 64;

/// Maximum distance of a kept key before and after the row's own position.
pub(crate) fn distances(mask: Mask) -> (i32, i32) {
    match mask {
        Mask::Causal => (UNBOUNDED, 0),
        Mask::Full => (UNBOUNDED, UNBOUNDED),
        Mask::Window { left } => (i32::try_from(left).unwrap_or(UNBOUNDED).min(UNBOUNDED), 0),
    }
}

/// Tiles of `size` positions that touch [first, last].
fn tiles_between(size: i32, first: i32, last: i32) -> Range<i32> {
    if first > last { 0..0 } else { first / size..last / size + 1 }
}

/// Key tiles of `segment` that rows of query tile `q_tile` (of `rows` rows) attend to.
pub(crate) fn key_tiles(
    task: &Task,
    rows: i32,
    keys: i32,
    q_tile: i32,
    segment: &Range<i32>,
) -> Range<i32> {
    let q_first = (q_tile * rows).max(task.q_offset);
    let q_last = ((q_tile + 1) * rows).min(task.q_offset + task.q_rows) - 1;
    let kv_last = task.kv_offset + task.kv_rows - 1;
    if q_first > q_last {
        return 0..0;
    }
    let first = (q_first - task.left).max(task.kv_offset).max(segment.start);
    let last = (q_last + task.right).min(kv_last).min(segment.end - 1);
    tiles_between(keys, first, last)
}

/// Tiles of the task's query rows that keep keys of `key_tile`.
pub(crate) fn query_tiles(task: &Task, rows: i32, keys: i32, key_tile: i32) -> Range<i32> {
    let k_first = (key_tile * keys).max(task.kv_offset);
    let k_last = ((key_tile + 1) * keys).min(task.kv_offset + task.kv_rows) - 1;
    let q_last = task.q_offset + task.q_rows - 1;
    if k_first > k_last {
        return 0..0;
    }
    let first = (k_first - task.right).max(task.q_offset);
    let last = (k_last + task.left).min(q_last);
    tiles_between(rows, first, last)
}

/// Query tiles of `rows` rows that the task's rows touch.
pub(crate) fn own_tiles(task: &Task, rows: i32) -> Range<i32> {
    tiles_between(rows, task.q_offset, task.q_offset + task.q_rows - 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tasks() -> impl Strategy<Value = Task> {
        let masks = prop_oneof![
            Just(Mask::Causal),
            Just(Mask::Full),
            (0_u32..400).prop_map(|left| Mask::Window { left })
        ];
        (masks, 0_i32..500, 0_i32..600, 0_i32..500, 0_i32..600).prop_map(
            |(mask, q_offset, q_rows, kv_offset, kv_rows)| {
                let (left, right) = distances(mask);
                Task { q_rows, q_offset, kv_rows, kv_offset, left, right, ..Task::default() }
            },
        )
    }

    proptest! {
        #[test]
        fn tiles_are_those_of_the_pairs_and_the_same_from_both_sides(task in tasks(), wide in 5_u32..8) {
            let (rows, keys) = (BACKWARD_ROWS, 1_i32 << wide);
            let mut kept = std::collections::BTreeSet::new();
            for q in task.q_offset..task.q_offset + task.q_rows {
                let first = (q - task.left).max(task.kv_offset);
                let last = (q + task.right).min(task.kv_offset + task.kv_rows - 1);
                kept.extend((first..=last).map(|k| (q / rows, k / keys)));
            }
            let by_queries: std::collections::BTreeSet<_> = own_tiles(&task, rows)
                .flat_map(|m| {
                    key_tiles(&task, rows, keys, m, &(0..UNBOUNDED)).map(move |n| (m, n))
                })
                .collect();
            let by_keys: std::collections::BTreeSet<_> = (0..40)
                .flat_map(|n| query_tiles(&task, rows, keys, n).map(move |m| (m, n)))
                .collect();
            prop_assert_eq!(&by_queries, &kept);
            prop_assert_eq!(&by_keys, &kept);
        }
    }
}
