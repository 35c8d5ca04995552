//! Matrix products for the trainer's linear layers.
//!
//! In: two [`Matrix`] views with any strides. Out: their product, row-major without gaps.
//!
//! Invariant: the bits of an element depend on its row of A, its column of B and what it is added to;
//! not on threads, other rows and columns, strides, addresses or vector width.

use crate::{Threads, cpu};

/// A view of a matrix: element (r, c) lies at `r·row_stride + c·column_stride`.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) row_stride: usize,
    pub(crate) column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// All of `data`, row-major without gaps.
    ///
    /// # Panics
    ///
    /// When `data` has not `rows · columns` numbers.
    pub fn new(data: &'a [f32], rows: usize, columns: usize) -> Self {
        assert_eq!(data.len(), rows * columns, "a matrix of {rows} rows and {columns} columns");
        Self { data, rows, columns, row_stride: columns, column_stride: 1 }
    }

    /// Rows of `row_stride` numbers each, of which the matrix takes the first `columns`.
    ///
    /// # Panics
    ///
    /// When the last row ends after `data`, or rows overlap.
    pub fn with_stride(data: &'a [f32], rows: usize, columns: usize, row_stride: usize) -> Self {
        assert!(columns <= row_stride, "{columns} columns in rows of {row_stride}");
        let end = if rows == 0 { 0 } else { (rows - 1) * row_stride + columns };
        assert!(end <= data.len(), "the last row ends at {end}, the data at {}", data.len());
        Self { data, rows, columns, row_stride, column_stride: 1 }
    }

    /// The transposed view of the same numbers.
    #[must_use]
    pub fn transposed(self) -> Self {
        let Self { data, rows, columns, row_stride, column_stride } = self;
        let (row_stride, column_stride) = (column_stride, row_stride);
        Self { data, rows: columns, columns: rows, row_stride, column_stride }
    }
}

/// What happens to what C held before.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Accumulate {
    /// C is overwritten.
    Replace,
    /// The product is added to C.
    Add,
}

/// C = A·B or C += A·B; C is `[a.rows, b.columns]`, row-major without gaps.
///
/// Sums of 128 products are taken in order and added to C in order. An empty inner dimension gives 0.
///
/// # Panics
///
/// When the shapes do not fit.
pub fn matmul(
    c: &mut [f32],
    a: Matrix<'_>,
    b: Matrix<'_>,
    accumulate: Accumulate,
    threads: Threads,
) {
    assert_eq!(a.columns, b.rows, "the inner dimensions of a product");
    assert_eq!(c.len(), a.rows * b.columns, "the product has another size");
    cpu::matmul(c, a, b, accumulate, threads);
}
