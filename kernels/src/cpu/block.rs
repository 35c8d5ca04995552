//! The product of two blocks that lie in cache, on vectors of any width.
//!
//! In: A `[m, k]` with one adjacent direction, B `[k, n]` with adjacent columns, n a multiple of
//! [`WIDTH`]. Out: C `[m, n]` with adjacent columns, see [`Into`].
//!
//! Invariant: an element is one chain of multiply-adds from 0 over k ascending, then one operation with
//! what C held; so its bits depend on its row of A and column of B alone.
#![allow(unsafe_code)]
#![expect(clippy::inline_always, reason = "inlined into functions compiled for an instruction set")]
#![expect(clippy::needless_pass_by_value, reason = "a pair of slice and distance is one argument")]

use super::lanes::Lanes;

/// Columns come in multiples of this: the widest vector.
pub(crate) const WIDTH: usize = 16;

/// Which direction of A is adjacent in memory; the other one's distance.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Left {
    /// Element (r, i) lies at `r·distance + i`.
    RowMajor(usize),
    /// Element (r, i) lies at `i·distance + r`.
    ColumnMajor(usize),
}

/// Where the product goes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Into<'a> {
    /// C = AB.
    Replace,
    /// C += AB.
    Add,
    /// C = C·s + AB with a factor s per column.
    Scale(&'a [f32]),
}

/// Rows, columns and inner dimension of a product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
}

/// Computes the product; `c` and `b` come with the distance of their rows.
#[inline(always)]
pub(super) fn product<
    L: Lanes,
    const R: usize,
    const C: usize,
    const R2: usize,
    const C2: usize,
>(
    shape: Shape,
    c: (&mut [f32], usize),
    a: (&[f32], Left),
    b: (&[f32], usize),
    into: Into<'_>,
) {
    let Shape { m, n, k } = shape;
    if m == 0 || n == 0 {
        return;
    }
    assert!(n.is_multiple_of(WIDTH), "columns come in multiples of {WIDTH}");
    assert!(n <= c.1 && (m - 1) * c.1 + n <= c.0.len(), "C is too short");
    if k > 0 {
        let a_end = match a.1 {
            Left::RowMajor(distance) => (m - 1) * distance + k,
            Left::ColumnMajor(distance) => (k - 1) * distance + m,
        };
        assert!(a_end <= a.0.len(), "A is too short");
        assert!(n <= b.1 && (k - 1) * b.1 + n <= b.0.len(), "B is too short");
    }
    if let Into::Scale(factors) = into {
        assert!(n <= factors.len(), "a factor per column");
    }
    let (c, ldc, a, ldb) = ((c.0.as_mut_ptr()), c.1, (a.0.as_ptr(), a.1), b.1);
    let mut column = 0;
    while column < n {
        let b = (b.0.as_ptr().wrapping_add(column), ldb);
        // SAFETY: the columns lie within the shape asserted above, as do all m rows.
        unsafe {
            if column + C * L::COUNT <= n {
                rows::<L, R, C>((m, k), column, (c, ldc), a, b, into);
                column += C * L::COUNT;
            } else if column + C2 * L::COUNT <= n {
                rows::<L, R2, C2>((m, k), column, (c, ldc), a, b, into);
                column += C2 * L::COUNT;
            } else {
                rows::<L, R2, 1>((m, k), column, (c, ldc), a, b, into);
                column += L::COUNT;
            }
        }
    }
}

/// All m rows of some columns.
///
/// # Safety
///
/// Rows and columns lie within A, B and C; B points to the first of the columns.
#[inline(always)]
unsafe fn rows<L: Lanes, const R: usize, const C: usize>(
    (m, k): (usize, usize),
    column: usize,
    c: (*mut f32, usize),
    a: (*const f32, Left),
    b: (*const f32, usize),
    into: Into<'_>,
) {
    let mut row = 0;
    // SAFETY: strips stay below row m, the rest is the caller's promise.
    unsafe {
        while row + R <= m {
            strip::<L, R, C>(k, Corner { row, column }, c, a, b, into);
            row += R;
        }
        while row < m {
            strip::<L, 1, C>(k, Corner { row, column }, c, a, b, into);
            row += 1;
        }
    }
}

#[derive(Clone, Copy)]
struct Corner {
    row: usize,
    column: usize,
}

/// R rows and C vectors of columns, held in registers over all of k.
///
/// # Safety
///
/// The strip lies within C, its rows within A, its columns within B; B points to its first column.
#[inline(always)]
unsafe fn strip<L: Lanes, const R: usize, const C: usize>(
    k: usize,
    at: Corner,
    c: (*mut f32, usize),
    a: (*const f32, Left),
    b: (*const f32, usize),
    into: Into<'_>,
) {
    let mut sums = [[L::splat(0.0); C]; R];
    // SAFETY: indices stay below k, R and C · COUNT, which the caller promises to lie within A and B.
    unsafe {
        match a.1 {
            Left::RowMajor(distance) => {
                let a = a.0.add(at.row * distance);
                for i in 0..k {
                    let columns: [L; C] =
                        std::array::from_fn(|j| L::load(b.0.add(i * b.1 + j * L::COUNT)));
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let left = L::splat(*a.add(r * distance + i));
                        for (sum, &column) in sums.iter_mut().zip(&columns) {
                            *sum = left.fma(column, *sum);
                        }
                    }
                }
            }
            Left::ColumnMajor(distance) => {
                let a = a.0.add(at.row);
                for i in 0..k {
                    let columns: [L; C] =
                        std::array::from_fn(|j| L::load(b.0.add(i * b.1 + j * L::COUNT)));
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let left = L::splat(*a.add(i * distance + r));
                        for (sum, &column) in sums.iter_mut().zip(&columns) {
                            *sum = left.fma(column, *sum);
                        }
                    }
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (j, &sum) in sums.iter().enumerate() {
                let c = c.0.add((at.row + r) * c.1 + at.column + j * L::COUNT);
                let value = match into {
                    Into::Replace => sum,
                    Into::Add => L::load(c).add(sum),
                    Into::Scale(factors) => {
                        let factor = L::load(factors.as_ptr().add(at.column + j * L::COUNT));
                        L::load(c).fma(factor, sum)
                    }
                };
                value.store(c);
            }
        }
    }
}
