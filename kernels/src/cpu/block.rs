//! The product of two blocks that lie in cache, on vectors of any width.
//!
//! In: A and B in panels of [`PANEL`] columns, so that all distances of the inner loop are constants and a
//! panel of B fills whole cache sets. Out: C, see [`Target`] and [`Into`].
//!
//! ```text
//! panel of B   [k, PANEL]   stays in the first cache while all strips of A go by
//! strip of A   R rows       R · C vectors of sums stay in registers over all of k
//! ```
//!
//! Invariant: an element is one chain of multiply-adds from 0 over k ascending, then one operation with
//! what C held; so its bits depend on its row of A and column of B alone.
#![allow(unsafe_code)]
#![expect(clippy::inline_always, reason = "inlined into functions compiled for an instruction set")]
#![expect(clippy::needless_pass_by_value, reason = "the view of C is made for one product")]

use super::lanes::{Lanes, SQUARE};

/// Columns come in multiples of this: the widest vector.
pub(crate) const WIDTH: usize = 16;

/// Columns of a panel.
pub(crate) const PANEL: usize = 32;

/// A matrix in panels: element (r, c) lies at `(c / PANEL · rows + r) · PANEL + c % PANEL`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Panels<'a> {
    data: &'a [f32],
    rows: usize,
}

impl<'a> Panels<'a> {
    /// Panels of `rows` rows.
    pub(crate) fn new(data: &'a [f32], rows: usize) -> Self {
        Self { data, rows }
    }

    /// The rows from `row` on.
    pub(crate) fn skip_rows(self, row: usize) -> Self {
        Self { data: &self.data[row * PANEL..], rows: self.rows }
    }

    /// The columns from `column` on, the first of a panel.
    pub(crate) fn skip_columns(self, column: usize) -> Self {
        assert!(column.is_multiple_of(PANEL), "views begin at a panel");
        Self { data: &self.data[column * self.rows..], rows: self.rows }
    }

    /// Panics unless the first `rows` rows and `columns` columns lie in the data.
    #[inline(always)]
    fn check(self, rows: usize, columns: usize) {
        if rows > 0 && columns > 0 {
            let last = (columns - 1) / PANEL * self.rows + rows - 1;
            assert!(rows <= self.rows, "rows of two panels must not mix");
            assert!(last * PANEL + (columns - 1) % PANEL < self.data.len(), "a panel is too short");
        }
    }
}

/// Elements that a matrix of `rows` rows and `columns` columns takes in panels.
pub(crate) fn panelled(rows: usize, columns: usize) -> usize {
    columns.div_ceil(PANEL) * PANEL * rows
}

/// The first operand.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Left<'a> {
    /// A as it is.
    Rows(Panels<'a>),
    /// A is stored transposed.
    Columns(Panels<'a>),
}

/// C: rows `row` apart; columns adjacent within a panel, panels `panel` apart.
#[derive(Debug)]
pub(crate) struct Target<'a> {
    data: &'a mut [f32],
    row: usize,
    panel: usize,
}

impl<'a> Target<'a> {
    /// Panels of `rows` rows.
    pub(crate) fn panels(data: &'a mut [f32], rows: usize) -> Self {
        Self { data, row: PANEL, panel: rows * PANEL }
    }

    /// Rows of adjacent numbers, `distance` apart.
    pub(crate) fn rows(data: &'a mut [f32], distance: usize) -> Self {
        Self { data, row: distance, panel: PANEL }
    }
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

/// Computes the product on strips of `R` rows by `C` vectors.
#[inline(always)]
pub(super) fn product<L: Lanes, const R: usize, const C: usize>(
    shape: Shape,
    c: Target<'_>,
    a: Left<'_>,
    b: Panels<'_>,
    into: Into<'_>,
) {
    let Shape { m, n, k } = shape;
    if m == 0 || n == 0 {
        return;
    }
    const { assert!(PANEL.is_multiple_of(C * L::COUNT) && L::COUNT <= WIDTH, "panels hold strips") };
    assert!(n.is_multiple_of(WIDTH), "columns come in multiples of {WIDTH}");
    let last = (m - 1) * c.row + (n - 1) / PANEL * c.panel + (n - 1) % PANEL;
    assert!(last < c.data.len(), "C is too short");
    b.check(k, n);
    match a {
        Left::Rows(a) => a.check(m, k),
        Left::Columns(a) => a.check(k, m),
    }
    if let Into::Scale(factors) = into {
        assert!(n <= factors.len(), "a factor per column");
    }
    for column in (0..n).step_by(PANEL) {
        let width = PANEL.min(n - column);
        let mut within = 0;
        while within < width {
            let at = column + within;
            let b = b.data.as_ptr().wrapping_add(column * b.rows + within);
            let c = (c.data.as_mut_ptr().wrapping_add(column / PANEL * c.panel + within), c.row);
            let into = match into {
                Into::Scale(factors) => Into::Scale(&factors[at..]),
                Into::Replace | Into::Add => into,
            };
            // SAFETY: the columns lie within the shape checked above, as do all m rows.
            unsafe {
                if within + C * L::COUNT <= width {
                    rows::<L, R, C>((m, k), c, a, b, into);
                    within += C * L::COUNT;
                } else {
                    rows::<L, R, 1>((m, k), c, a, b, into);
                    within += L::COUNT;
                }
            }
        }
    }
}

/// All m rows of `C` vectors of columns; C and B point to the first of these.
///
/// # Safety
///
/// Rows and columns lie within A, B and C.
#[inline(always)]
unsafe fn rows<L: Lanes, const R: usize, const C: usize>(
    (m, k): (usize, usize),
    (c, distance): (*mut f32, usize),
    a: Left<'_>,
    b: *const f32,
    into: Into<'_>,
) {
    let mut row = 0;
    while row < m {
        // Strips of columns stay inside a panel.
        let (from, end, step) = match a {
            Left::Rows(a) => (a.data.as_ptr().wrapping_add(row * PANEL), m, a.rows * PANEL),
            Left::Columns(a) => {
                let panel = a.data.as_ptr().wrapping_add(row / PANEL * PANEL * a.rows);
                (panel.wrapping_add(row % PANEL), m.min((row / PANEL + 1) * PANEL), 0)
            }
        };
        let c = (c.wrapping_add(row * distance), distance);
        let left = end - row;
        // SAFETY: the strip has at most `left` rows, which the caller promises to lie within A and C.
        unsafe {
            if left >= R {
                strip::<L, R, C>(k, c, (from, step), b, into);
                row += R;
            } else if left >= 8 && R > 8 {
                strip::<L, 8, C>(k, c, (from, step), b, into);
                row += 8;
            } else if left >= 4 && R > 4 {
                strip::<L, 4, C>(k, c, (from, step), b, into);
                row += 4;
            } else {
                strip::<L, 1, C>(k, c, (from, step), b, into);
                row += 1;
            }
        }
    }
}

/// Runs a block for each row below `R`, the row a constant: arrays indexed by it stay in registers.
macro_rules! each_row {
    ($row:ident below $R:ident, $body:block) => {
        each_row!(@ $row $R $body 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $row:ident $R:ident $body:block $($number:literal)*) => {
        $(if $number < $R {
            #[allow(non_upper_case_globals, reason = "reads as the variable that it stands for")]
            const $row: usize = $number;
            $body
        })*
    };
}

/// R rows and C vectors of columns, held in registers over all of k.
///
/// A comes as its first element and the distance of its panels; 0 if rows of A are adjacent in memory.
///
/// # Safety
///
/// Rows, columns and k lie within A, B and C.
#[inline(always)]
unsafe fn strip<L: Lanes, const R: usize, const C: usize>(
    k: usize,
    (c, distance): (*mut f32, usize),
    (a, step): (*const f32, usize),
    b: *const f32,
    into: Into<'_>,
) {
    let mut sums = [[L::splat(0.0); C]; R];
    let (mut a, mut b) = (a, b);
    // SAFETY: indices stay below k, R and C · COUNT, which the caller promises to lie within A, B and C.
    unsafe {
        if step == 0 {
            for _ in 0..k {
                let columns: [L; C] = std::array::from_fn(|j| L::load(b.add(j * L::COUNT)));
                each_row!(row below R, {
                    let left = L::splat(*a.add(row));
                    for j in 0..C {
                        sums[row][j] = left.fma(columns[j], sums[row][j]);
                    }
                });
                a = a.wrapping_add(PANEL);
                b = b.wrapping_add(PANEL);
            }
        } else {
            let mut left_over = k;
            while left_over > 0 {
                let count = left_over.min(PANEL);
                for i in 0..count {
                    let a = a.add(i);
                    let columns: [L; C] = std::array::from_fn(|j| L::load(b.add(j * L::COUNT)));
                    each_row!(row below R, {
                        let left = L::splat(*a.add(row * PANEL));
                        for j in 0..C {
                            sums[row][j] = left.fma(columns[j], sums[row][j]);
                        }
                    });
                    b = b.wrapping_add(PANEL);
                }
                a = a.wrapping_add(step);
                left_over -= count;
            }
        }
        each_row!(row below R, {
            for (j, &sum) in sums[row].iter().enumerate() {
                let c = c.add(row * distance + j * L::COUNT);
                let value = match into {
                    Into::Replace => sum,
                    Into::Add => L::load(c).add(sum),
                    Into::Scale(factors) => {
                        let factor = L::load(factors.as_ptr().add(j * L::COUNT));
                        L::load(c).fma(factor, sum)
                    }
                };
                value.store(c);
            }
        });
    }
}

/// Copies `count` rows of `columns` numbers times `factor` to the first rows of panels of `stride` rows,
/// with zeros up to the end of the last panel; rows of `from` are `distance` apart.
#[inline(always)]
pub(super) fn place<L: Lanes>(
    from: &[f32],
    distance: usize,
    (count, columns): (usize, usize),
    factor: f32,
    to: &mut [f32],
    stride: usize,
) {
    if count == 0 || columns == 0 {
        return;
    }
    assert!((count - 1) * distance + columns <= from.len(), "rows are too short");
    assert!(count <= stride, "rows of two panels must not mix");
    assert!(
        panelled(stride, columns) - (stride - count) * PANEL <= to.len(),
        "panels are too short"
    );
    let whole = columns / L::COUNT * L::COUNT;
    let times = L::splat(factor);
    for row in 0..count {
        for column in (0..whole).step_by(L::COUNT) {
            let at = (column / PANEL * stride + row) * PANEL + column % PANEL;
            // SAFETY: a vector ends within its row and within its panel, which were checked above.
            unsafe {
                let numbers = L::load(from.as_ptr().add(row * distance + column));
                numbers.mul(times).store(to.as_mut_ptr().add(at));
            }
        }
        // The columns behind the last whole vector, and the zeros behind them, lie in one panel.
        let rest = columns.next_multiple_of(PANEL) - whole;
        if rest > 0 {
            let at = (whole / PANEL * stride + row) * PANEL + whole % PANEL;
            let (to, zeros) = to[at..at + rest].split_at_mut(columns - whole);
            let from = &from[row * distance + whole..][..to.len()];
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from * factor);
            zeros.fill(0.0);
        }
    }
}

/// Transposes rows of `columns` numbers, `distance` apart, to columns of rows `stride` apart.
#[inline(always)]
pub(super) fn transpose<L: Lanes>(
    from: &[f32],
    distance: usize,
    (rows, columns): (usize, usize),
    to: &mut [f32],
    stride: usize,
) {
    if rows == 0 || columns == 0 {
        return;
    }
    assert!((rows - 1) * distance + columns <= from.len(), "rows are too short");
    assert!((columns - 1) * stride + rows <= to.len(), "the transpose has no room");
    for row in (0..rows).step_by(SQUARE) {
        for column in (0..columns).step_by(SQUARE) {
            let (start, end) = (row * distance + column, column * stride + row);
            if row + SQUARE <= rows && column + SQUARE <= columns {
                // SAFETY: the square lies within the rows and columns that were checked above.
                unsafe {
                    let (from, to) = (from.as_ptr().add(start), to.as_mut_ptr().add(end));
                    L::transpose(from, to, (distance, stride));
                }
                continue;
            }
            for r in 0..SQUARE.min(rows - row) {
                for c in 0..SQUARE.min(columns - column) {
                    to[end + c * stride + r] = from[start + r * distance + c];
                }
            }
        }
    }
}
