//! Linear layers of a trainer on a GPU: its weights and their gradients stay there for a step.
//!
//! In: the parameters at the start of a step, rows of the host. Out: products, back in memory of the host; at the end of the
//! step the gradients, added to those of the host. Rows that several weights are applied to travel once.
//!
//! It waits for each product. Memory that is short is an error: a product is not divided. Invariant: every weight is the one of
//! the last [`DeviceLinear::begin`].

use std::collections::BTreeMap;
use std::ops::Range;

use super::blas::{ALIGNMENT, Blas, Product, View};
use super::driver::Gpu;
use super::error::Error;
use super::memory::{Buffer, Stream};
use super::slice::{Slice, SliceMut};
use crate::matmul::Accumulate;

/// A weight: where it lies on the GPU, and in the parameters.
#[derive(Clone, Debug)]
struct Place {
    at: usize,
    range: Range<usize>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct DeviceLinear {
    stream: Stream,
    blas: Blas,
    /// By first number in the parameters.
    places: BTreeMap<usize, Place>,
    weights: Buffer<f32>,
    gradients: Buffer<f32>,
    /// Whether the weights of the step are on the GPU.
    begun: bool,
    x: Buffer<f32>,
    dx: Buffer<f32>,
    y: Buffer<f32>,
}

impl DeviceLinear {
    /// For the weights that lie at `matrices` in the parameters.
    pub(crate) fn new(gpu: &Gpu, matrices: &[Range<usize>]) -> Result<Self, Error> {
        let (mut places, mut end) = (BTreeMap::new(), 0);
        for range in matrices {
            places.insert(range.start, Place { at: end, range: range.clone() });
            end += range.len().next_multiple_of(ALIGNMENT / size_of::<f32>());
        }
        Ok(Self {
            stream: Stream::new(gpu)?,
            blas: Blas::new(gpu)?,
            places,
            weights: Buffer::new(gpu, end, "weights")?,
            gradients: Buffer::new(gpu, end, "gradients of weights")?,
            begun: false,
            x: Buffer::new(gpu, 0, "rows")?,
            dx: Buffer::new(gpu, 0, "gradients of rows")?,
            y: Buffer::new(gpu, 0, "rows")?,
        })
    }

    /// Copies the weights of a step to the GPU.
    pub(crate) fn begin(&mut self, parameters: &[f32]) -> Result<(), Error> {
        for Place { at, range } in self.places.values() {
            self.weights.write(&self.stream, *at, &parameters[range.clone()])?;
        }
        let all = self.gradients.len();
        self.gradients.clear(&self.stream, all)?;
        self.begun = true;
        Ok(())
    }

    /// Adds the gradients of the step to `gradients`.
    pub(crate) fn end(&mut self, gradients: &mut [f32]) -> Result<(), Error> {
        let mut sums = Vec::new();
        for Place { at, range } in self.places.values() {
            sums.resize(range.len(), 0.0);
            self.gradients.read(&self.stream, *at, &mut sums)?;
            for (to, sum) in gradients[range.clone()].iter_mut().zip(&sums) {
                *to += sum;
            }
        }
        self.begun = false;
        Ok(())
    }

    /// y = or += x · wᵀ for several weights.
    pub(crate) fn apply(
        &mut self,
        (x, rows): (&[f32], usize),
        outputs: &mut [(&Range<usize>, &mut [f32])],
        accumulate: Accumulate,
    ) -> Result<(), Error> {
        self.x.hold(&self.stream, x, "rows")?;
        let k = x.len() / rows;
        for (range, y) in outputs {
            let n = y.len() / rows;
            if accumulate == Accumulate::Add {
                self.y.hold(&self.stream, y, "rows")?;
            } else {
                self.y.reserve(y.len(), "rows")?;
            }
            let weight = part(&self.weights, self.place(range), n * k);
            let product = Product { m: rows, n, k, a: View::Rows, b: View::Transposed };
            let to = first_mut(&mut self.y, y.len());
            let x = first(&self.x, x.len());
            self.blas.run(&self.stream, product, (x, weight), &to, accumulate)?;
            self.y.read(&self.stream, 0, y)?;
        }
        Ok(())
    }

    /// dx = dy · w.
    pub(crate) fn rows_gradient(
        &mut self,
        (dy, rows): (&[f32], usize),
        range: &Range<usize>,
        dx: &mut [f32],
    ) -> Result<(), Error> {
        self.y.hold(&self.stream, dy, "gradients of rows")?;
        self.dx.reserve(dx.len(), "gradients of rows")?;
        self.add_rows((dy.len(), dx.len(), rows), range, Accumulate::Replace)?;
        self.dx.read(&self.stream, 0, dx)
    }

    /// dw += dyᵀ · x.
    pub(crate) fn weight_gradient(
        &mut self,
        (dy, x, rows): (&[f32], &[f32], usize),
        range: &Range<usize>,
    ) -> Result<(), Error> {
        self.x.hold(&self.stream, x, "rows")?;
        self.y.hold(&self.stream, dy, "gradients of rows")?;
        self.add_weight((dy.len(), x.len(), rows), range)
    }

    /// dx and dw of several weights that were applied to the same rows; dx sums over them.
    pub(crate) fn gradients(
        &mut self,
        (x, rows): (&[f32], usize),
        inputs: &[(&Range<usize>, &[f32])],
        dx: &mut [f32],
    ) -> Result<(), Error> {
        self.x.hold(&self.stream, x, "rows")?;
        self.dx.reserve(dx.len(), "gradients of rows")?;
        let mut accumulate = Accumulate::Replace;
        for (range, dy) in inputs {
            self.y.hold(&self.stream, dy, "gradients of rows")?;
            self.add_weight((dy.len(), x.len(), rows), range)?;
            self.add_rows((dy.len(), dx.len(), rows), range, accumulate)?;
            accumulate = Accumulate::Add;
        }
        self.dx.read(&self.stream, 0, dx)
    }

    /// Writes or adds the product of the held gradient and the weight to `dx`.
    fn add_rows(
        &mut self,
        (dy, dx, rows): (usize, usize, usize),
        range: &Range<usize>,
        accumulate: Accumulate,
    ) -> Result<(), Error> {
        let (n, k) = (dx / rows, dy / rows);
        let weight = part(&self.weights, self.place(range), n * k);
        let product = Product { m: rows, n, k, a: View::Rows, b: View::Rows };
        let to = first_mut(&mut self.dx, dx);
        self.blas.run(&self.stream, product, (first(&self.y, dy), weight), &to, accumulate)
    }

    /// Adds the product of the held gradient and the held rows to the weight's gradient.
    fn add_weight(
        &mut self,
        (dy, x, rows): (usize, usize, usize),
        range: &Range<usize>,
    ) -> Result<(), Error> {
        let (m, n) = (dy / rows, x / rows);
        let at = self.place(range);
        let product = Product { m, n, k: rows, a: View::Transposed, b: View::Rows };
        let operands = (first(&self.y, dy), first(&self.x, x));
        let to = self.gradients.slice_mut().part(at, m * n);
        self.blas.run(&self.stream, product, operands, &to, Accumulate::Add)
    }

    fn place(&self, range: &Range<usize>) -> usize {
        assert!(self.begun, "a step begins before its products");
        let place = self.places.get(&range.start).filter(|it| it.range == *range);
        place.expect("a weight that was named when the layers were made").at
    }
}

impl Buffer<f32> {
    /// Copies `rows` to the GPU, into a buffer that grows as needed.
    fn hold(&mut self, stream: &Stream, rows: &[f32], what: &str) -> Result<(), Error> {
        self.reserve(rows.len(), what)?;
        self.write(stream, 0, rows)
    }
}

fn first(buffer: &Buffer<f32>, len: usize) -> Slice<'_, f32> {
    part(buffer, 0, len)
}

fn part(buffer: &Buffer<f32>, at: usize, len: usize) -> Slice<'_, f32> {
    buffer.slice().part(at, len)
}

fn first_mut(buffer: &mut Buffer<f32>, len: usize) -> SliceMut<'_, f32> {
    buffer.slice_mut().part(0, len)
}
