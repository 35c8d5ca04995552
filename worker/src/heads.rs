//! A rank's rows head by head, as they lie where peers read and write them, and row by row, as models have them.
//!
//! In: the stretches of a rank and the KV heads of its rows. Out: rows turned one way or the other ([`HeadByHead::turn`],
//! [`HeadByHead::back`]), and which row a number of turned rows is of. The form is that of
//! [`cadre_step::lowering::Stretches`].
//!
//! Invariant: numbers are copied, or rounded one by one, and none is left out.

use cadre_planner::RankId;
use cadre_step::planned::NanoPlan;

/// See the module.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct HeadByHead {
    /// Rows of each stretch.
    stretches: Vec<usize>,
    kv_heads: usize,
}

impl HeadByHead {
    /// For stretches of these numbers of rows, with `kv_heads` KV heads each.
    pub(crate) fn new(stretches: Vec<usize>, kv_heads: usize) -> Self {
        Self { stretches, kv_heads }
    }

    /// For the rows of a rank in a nano-batch.
    pub(crate) fn of(nano: &NanoPlan, rank: RankId) -> Self {
        let stretches = nano.lists.stretches();
        Self::new(stretches.rows_of(rank).collect(), stretches.kv_heads())
    }

    /// How many rows there are.
    pub(crate) fn rows(&self) -> usize {
        self.stretches.iter().sum()
    }

    /// Gives each part of each of `rows` under one KV head to `copy`, with its place in turned rows. All rows are `width` wide.
    pub(crate) fn turn<'a, From: 'a, To>(
        &self,
        rows: impl Iterator<Item = &'a [From]>,
        to: &mut [To],
        width: usize,
        copy: impl Fn(&mut [To], &[From]),
    ) {
        let part = width / self.kv_heads;
        if part == 0 {
            return;
        }
        let (mut rows, mut rest) = (rows, to);
        for &count in &self.stretches {
            let (stretch, behind) = rest.split_at_mut(count * width);
            rest = behind;
            for (index, row) in rows.by_ref().take(count).enumerate() {
                for (head, from) in row.chunks_exact(part).enumerate() {
                    copy(&mut stretch[(head * count + index) * part..][..part], from);
                }
            }
        }
    }

    /// The inverse: writes transposed rows back to `rows`, row by row. Whether `copy` says so of every part.
    pub(crate) fn back<'a, From, To: 'a>(
        &self,
        from: &[From],
        rows: impl Iterator<Item = &'a mut [To]>,
        width: usize,
        copy: impl Fn(&mut [To], &[From]) -> bool,
    ) -> bool {
        let part = width / self.kv_heads;
        let mut all = true;
        if part == 0 {
            return all;
        }
        let (mut rows, mut rest) = (rows, from);
        for &count in &self.stretches {
            let (stretch, behind) = rest.split_at(count * width);
            rest = behind;
            for (index, row) in rows.by_ref().take(count).enumerate() {
                for (head, to) in row[..width].chunks_exact_mut(part).enumerate() {
                    all &= copy(to, &stretch[(head * count + index) * part..][..part]);
                }
            }
        }
        all
    }

    /// Row and KV head of a number of turned rows that are `width` wide.
    pub(crate) fn place_of(&self, number: usize, width: usize) -> (usize, usize) {
        let (mut row, mut left) = (0, number / (width / self.kv_heads));
        for &count in &self.stretches {
            if left < count * self.kv_heads {
                return (row + left % count, left / count);
            }
            left -= count * self.kv_heads;
            row += count;
        }
        (row, 0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rows_turned_and_turned_back_are_the_same_and_each_number_knows_its_row(
            stretches in prop::collection::vec(1_usize..9, 0..5),
            kv_heads in 1_usize..5,
            part in 1_usize..4,
            odd in 0_usize..200,
        ) {
            let (form, width) = (HeadByHead { stretches, kv_heads }, kv_heads * part);
            let rows: Vec<usize> = (0..form.rows() * width).collect();
            let mut turned = vec![usize::MAX; rows.len()];
            form.turn(rows.chunks(width), &mut turned, width, |to, from| to.copy_from_slice(from));
            for (number, &value) in turned.iter().enumerate() {
                let (row, head) = form.place_of(number, width);
                prop_assert_eq!((row, head), (value / width, value % width / part));
            }
            // Rows under one head are consecutive.
            let mut first = 0;
            for &count in &form.stretches {
                for head in 0..kv_heads {
                    for row in 0..count {
                        let value = (first + row) * width + head * part;
                        let at = first * width + (head * count + row) * part;
                        prop_assert_eq!(turned[at], value);
                    }
                }
                first += count;
            }
            let mut back = vec![usize::MAX; rows.len()];
            let all = form.back(&turned, back.chunks_mut(width), width, |to, from| {
                to.copy_from_slice(from);
                !from.contains(&odd)
            });
            prop_assert_eq!(&back, &rows);
            prop_assert_eq!(all, !rows.contains(&odd), "of any part");
        }
    }
}
