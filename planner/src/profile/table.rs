//! Times over a grid of query rows and keys, and what lies between.
//!
//! In: a measured grid. Out: the time of any task, linear between four points and beyond the last keys. It never falls
//! when rows or keys grow, which the check demands of the grid and linear pieces keep.

use serde::{Deserialize, Serialize};

use crate::TILE_ROWS;
use crate::digest::Digest;

/// Pass of a kernel.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// O and LSE.
    Forward,
    /// dQ, dK and dV.
    Backward,
}

/// Which keys the rows of a measured task keep.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kept {
    /// All keys before the rows, and of the rows' own keys those up to each row.
    Causal,
    /// All keys: those before the rows, and their own.
    Full,
}

/// Time of one query head's task, by query rows and keys.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// Elements of a head.
    pub head_dim: u16,
    /// Pass.
    pub direction: Direction,
    /// Mask.
    pub kept: Kept,
    /// Query rows, ascending.
    pub rows: Vec<u32>,
    /// Keys beside those of the rows themselves, ascending.
    pub keys: Vec<u32>,
    /// Picoseconds by rows, then keys.
    pub picoseconds: Vec<Vec<u64>>,
}

/// Why a table is refused.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum TableError {
    #[error("{axis} needs two values or more, ascending; correct it")]
    Axis { axis: &'static str },
    #[error("picoseconds is not rows times keys; give one list a row and one time a key")]
    Shape,
    #[error(
        "picoseconds[{row}][{key}] is 0 or beyond 2^60, or less than one with fewer rows or keys; measure again"
    )]
    Falls { row: usize, key: usize },
}

const MOST: u64 = 1 << 60;

impl Table {
    pub(super) fn is_for(&self, head_dim: u16, direction: Direction, kept: Kept) -> bool {
        (self.head_dim, self.direction, self.kept) == (head_dim, direction, kept)
    }

    /// Checks shape and growth.
    pub(super) fn check(&self) -> Result<(), TableError> {
        for (axis, values) in [("rows", &self.rows), ("keys", &self.keys)] {
            if values.len() < 2 || values.windows(2).any(|it| it[0] >= it[1]) {
                return Err(TableError::Axis { axis });
            }
        }
        if self.rows[0] == 0 {
            return Err(TableError::Axis { axis: "rows" });
        }
        let times = &self.picoseconds;
        if times.len() != self.rows.len() || times.iter().any(|it| it.len() != self.keys.len()) {
            return Err(TableError::Shape);
        }
        for (row, all) in times.iter().enumerate() {
            for (key, time) in all.iter().enumerate() {
                let above = row.checked_sub(1).map_or(1, |row| times[row][key]);
                let before = key.checked_sub(1).map_or(1, |key| times[row][key]);
                if *time < above || *time < before || *time > MOST {
                    return Err(TableError::Falls { row, key });
                }
            }
        }
        Ok(())
    }

    /// Time of a task of one query head. Fewer rows or keys than the least of the grid count as those; more rows
    /// than the most take in proportion.
    pub fn picoseconds(&self, rows: u32, keys: u32) -> u64 {
        let (row, key) = (cell(&self.rows, rows), cell(&self.keys, keys));
        let along = |row: usize| {
            let times = (self.picoseconds[row][key], self.picoseconds[row][key + 1]);
            between((times.0.into(), times.1.into()), (self.keys[key], self.keys[key + 1]), keys)
        };
        // Beyond the grid lines of fewer rows may cross those of more.
        let low = (0..=row).map(along).max().unwrap_or(0);
        let high = low.max(along(row + 1));
        let last = self.rows[row + 1];
        let time = if rows > last {
            high * u128::from(rows) / u128::from(last)
        } else {
            between((low, high), (self.rows[row], last), rows)
        };
        u64::try_from(time).unwrap_or(u64::MAX)
    }

    /// Pairs of a task.
    fn pairs(&self, rows: u32, keys: u32) -> u64 {
        let (rows, keys) = (u64::from(rows), u64::from(keys));
        match self.kept {
            Kept::Causal => rows * keys + rows * (rows + 1) / 2,
            Kept::Full => rows * (keys + rows),
        }
    }

    /// Time of a pair in the largest task.
    pub(super) fn pair_femtoseconds(&self) -> u64 {
        let (row, key) = (self.rows.len() - 1, self.keys.len() - 1);
        let pairs = self.pairs(self.rows[row], self.keys[key]).max(1);
        let time = u128::from(self.picoseconds[row][key]) * 1_000 / u128::from(pairs);
        u64::try_from(time).unwrap_or(u64::MAX).max(1)
    }

    /// Pairs that a tile costs beyond its own: the median over the grid, from tiles of a task of few keys to one of many.
    pub(super) fn tile_pairs(&self) -> u64 {
        let pair = u128::from(self.pair_femtoseconds());
        let mut extra: Vec<u64> = Vec::new();
        for (row, &rows) in self.rows.iter().enumerate() {
            for (key, &keys) in self.keys.iter().enumerate() {
                let all = u128::from(self.picoseconds[row][key]) * 1_000 / pair;
                let beyond = all.saturating_sub(self.pairs(rows, keys).into());
                let beyond = beyond / u128::from(rows.div_ceil(TILE_ROWS));
                extra.push(u64::try_from(beyond).unwrap_or(u64::MAX));
            }
        }
        extra.sort_unstable();
        extra[extra.len() / 2]
    }

    pub(super) fn encode(&self, digest: &mut Digest) {
        let Self { head_dim, direction, kept, rows, keys, picoseconds } = self;
        digest.u32s([(*head_dim).into(), *direction as u32, *kept as u32]);
        digest.u32s([rows.len() as u32, keys.len() as u32]);
        rows.iter().chain(keys).for_each(|it| digest.u64((*it).into()));
        picoseconds.iter().flatten().for_each(|it| digest.u64(*it));
    }
}

/// The cell of an axis that a value is in, or the last for one beyond.
fn cell(axis: &[u32], value: u32) -> usize {
    axis.partition_point(|it| *it <= value).clamp(1, axis.len() - 1) - 1
}

/// The line through two points; level before the first.
fn between((low, high): (u128, u128), (from, to): (u32, u32), value: u32) -> u128 {
    let done = u128::from(value.saturating_sub(from));
    low + high.saturating_sub(low) * done / u128::from(to - from)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn axis() -> impl Strategy<Value = Vec<u32>> {
        prop::collection::btree_set(1_u32..100_000, 2..6).prop_map(|it| it.into_iter().collect())
    }

    fn tables() -> impl Strategy<Value = Table> {
        (axis(), axis(), prop::collection::vec(0_u64..1_000_000, 36)).prop_map(
            |(rows, keys, steps)| {
                let mut picoseconds = vec![vec![1_u64; keys.len()]; rows.len()];
                for row in 0..rows.len() {
                    for key in 0..keys.len() {
                        let above = row.checked_sub(1).map_or(1, |row| picoseconds[row][key]);
                        let before = key.checked_sub(1).map_or(1, |key| picoseconds[row][key]);
                        picoseconds[row][key] = above.max(before) + steps[row * 6 + key];
                    }
                }
                let (direction, kept) = (Direction::Forward, Kept::Causal);
                Table { head_dim: 64, direction, kept, rows, keys, picoseconds }
            },
        )
    }

    proptest! {
        #[test]
        fn times_meet_the_grid_and_never_fall(
            table in tables(),
            rows in (1_u32..200_000, 0_u32..1_000),
            keys in (0_u32..200_000, 0_u32..1_000),
        ) {
            prop_assert_eq!(table.check(), Ok(()));
            for (row, rows) in table.rows.iter().enumerate() {
                for (key, keys) in table.keys.iter().enumerate() {
                    prop_assert_eq!(table.picoseconds(*rows, *keys), table.picoseconds[row][key]);
                }
            }
            // Whole picoseconds are cut twice.
            let less = table.picoseconds(rows.0, keys.0);
            prop_assert!(less <= table.picoseconds(rows.0 + rows.1, keys.0 + keys.1) + 1);
        }
    }

    #[test]
    fn tables_that_fall_or_have_holes_are_refused() {
        let good = Table {
            head_dim: 64,
            direction: Direction::Backward,
            kept: Kept::Full,
            rows: vec![128, 256],
            keys: vec![128, 1_024],
            picoseconds: vec![vec![10, 20], vec![10, 30]],
        };
        assert_eq!(good.check(), Ok(()));
        let refused = |change: &dyn Fn(&mut Table), expected: TableError| {
            let mut table = good.clone();
            change(&mut table);
            assert_eq!(table.check(), Err(expected));
        };
        refused(&|it| it.rows = vec![128], TableError::Axis { axis: "rows" });
        refused(&|it| it.rows[0] = 0, TableError::Axis { axis: "rows" });
        refused(&|it| it.keys[1] = 128, TableError::Axis { axis: "keys" });
        refused(&|it| it.picoseconds.truncate(1), TableError::Shape);
        refused(&|it| it.picoseconds[1][0] = 9, TableError::Falls { row: 1, key: 0 });
        refused(&|it| it.picoseconds[0][0] = 0, TableError::Falls { row: 0, key: 0 });
    }
}
