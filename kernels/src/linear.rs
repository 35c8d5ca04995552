//! Linear layers of a trainer: by the CPU's products, or by cuBLASLt on its GPU.
//!
//! In: parameters in one flat buffer, rows of f32. Out: x · wᵀ, and the gradients of x and w; w is `[out, in]`, a range of the
//! parameters. A step is between [`Linear::begin`] and [`Linear::end`]: on a GPU the weights go there at the beginning, and
//! their gradients come back at the end.
//!
//! Nothing here knows a model. Invariant: on the CPU the bits are those of [`matmul`], product by product in the order of the
//! calls; on a GPU, f32 as well, they agree within rounding and are the same whenever a step is repeated with one library.

use std::ops::Range;

use crate::device::linear::DeviceLinear;
use crate::device::{self, blas_version};
use crate::matmul::{Accumulate, Matrix, matmul};
use crate::{Choice, Engine, Threads};

/// See the module.
#[derive(Debug)]
pub struct Linear {
    threads: Threads,
    gpu: Option<Box<DeviceLinear>>,
    /// Why there is no GPU although the process has one.
    without: Option<device::Error>,
}

/// Rows of the host, row-major without gaps.
#[derive(Clone, Copy, Debug)]
pub struct LinearRows<'a> {
    numbers: &'a [f32],
    count: usize,
}

impl<'a> LinearRows<'a> {
    /// `count` rows of `numbers`.
    ///
    /// # Panics
    ///
    /// Where they do not divide, or there is none.
    pub fn new(numbers: &'a [f32], count: usize) -> Self {
        assert!(
            count > 0 && numbers.len().is_multiple_of(count),
            "{} numbers in {count} rows",
            numbers.len()
        );
        Self { numbers, count }
    }
}

impl Linear {
    /// On the CPU.
    pub fn cpu(threads: Threads) -> Self {
        Self { threads, gpu: None, without: None }
    }

    /// Where `engine` computes: on its GPU, if it has one and cuBLASLt is there. `matrices` are the weights' ranges.
    ///
    /// # Errors
    ///
    /// Where `choice` demands the GPU: why cuBLASLt does not work. Otherwise the CPU stands in, and
    /// [`Self::description`] says why.
    pub fn choose(
        choice: Choice,
        engine: &Engine,
        threads: Threads,
        matrices: &[Range<usize>],
    ) -> Result<Self, device::Error> {
        let Some(gpu) = engine.gpu() else { return Ok(Self::cpu(threads)) };
        match DeviceLinear::new(gpu, matrices) {
            Ok(gpu) => Ok(Self { gpu: Some(Box::new(gpu)), ..Self::cpu(threads) }),
            Err(error) if choice == Choice::Gpu => Err(error),
            Err(error) => Ok(Self { without: Some(error), ..Self::cpu(threads) }),
        }
    }

    /// What computes, in words, for a log.
    pub fn description(&self) -> String {
        match (&self.gpu, &self.without) {
            (Some(_), _) => format!("GPU, f32, cuBLASLt {}", blas_version()),
            (None, Some(why)) => format!("CPU: {why}"),
            (None, None) => "CPU".to_owned(),
        }
    }

    /// Begins a step with these parameters; its products use no others.
    ///
    /// # Errors
    ///
    /// The GPU's.
    pub fn begin(&mut self, parameters: &[f32]) -> Result<(), device::Error> {
        self.gpu.as_mut().map_or(Ok(()), |gpu| gpu.begin(parameters))
    }

    /// Ends a step: all gradients of weights are in `gradients` now.
    ///
    /// # Errors
    ///
    /// The GPU's.
    pub fn end(&mut self, gradients: &mut [f32]) -> Result<(), device::Error> {
        self.gpu.as_mut().map_or(Ok(()), |gpu| gpu.end(gradients))
    }

    /// y `[rows, out]` = or += x `[rows, in]` · wᵀ for each weight, in their order.
    ///
    /// # Errors
    ///
    /// The GPU's.
    pub fn apply(
        &mut self,
        parameters: &[f32],
        x: LinearRows<'_>,
        outputs: &mut [(&Range<usize>, &mut [f32])],
        accumulate: Accumulate,
    ) -> Result<(), device::Error> {
        let LinearRows { numbers: x, count } = x;
        if let Some(gpu) = &mut self.gpu {
            return gpu.apply((x, count), outputs, accumulate);
        }
        for (range, y) in outputs {
            let (inner, outer) = (x.len() / count, y.len() / count);
            let w = Matrix::new(&parameters[(*range).clone()], outer, inner).transposed();
            matmul(y, Matrix::new(x, count, inner), w, accumulate, self.threads);
        }
        Ok(())
    }

    /// dx `[rows, in]` = dy `[rows, out]` · w.
    ///
    /// # Errors
    ///
    /// The GPU's.
    pub fn rows_gradient(
        &mut self,
        parameters: &[f32],
        dy: LinearRows<'_>,
        weight: &Range<usize>,
        dx: &mut [f32],
    ) -> Result<(), device::Error> {
        if let Some(gpu) = &mut self.gpu {
            return gpu.rows_gradient((dy.numbers, dy.count), weight, dx);
        }
        self.add_rows(&parameters[weight.clone()], dy, dx, Accumulate::Replace);
        Ok(())
    }

    /// dw `[out, in]` += dyᵀ · x, for the range `weight` of `gradients`.
    ///
    /// # Errors
    ///
    /// The GPU's.
    pub fn weight_gradient(
        &mut self,
        gradients: &mut [f32],
        dy: &[f32],
        x: LinearRows<'_>,
        weight: &Range<usize>,
    ) -> Result<(), device::Error> {
        if let Some(gpu) = &mut self.gpu {
            return gpu.weight_gradient((dy, x.numbers, x.count), weight);
        }
        self.add_weight(&mut gradients[weight.clone()], dy, x);
        Ok(())
    }

    /// dx and dw of weights that were applied to the same rows x; `inputs` are their dy, and dx sums over them in order.
    ///
    /// # Errors
    ///
    /// The GPU's.
    pub fn gradients(
        &mut self,
        (parameters, gradients): (&[f32], &mut [f32]),
        x: LinearRows<'_>,
        inputs: &[(&Range<usize>, &[f32])],
        dx: &mut [f32],
    ) -> Result<(), device::Error> {
        if let Some(gpu) = &mut self.gpu {
            return gpu.gradients((x.numbers, x.count), inputs, dx);
        }
        let mut accumulate = Accumulate::Replace;
        for &(weight, dy) in inputs {
            self.add_weight(&mut gradients[weight.clone()], dy, x);
            let dy = LinearRows { numbers: dy, count: x.count };
            self.add_rows(&parameters[weight.clone()], dy, dx, accumulate);
            accumulate = Accumulate::Add;
        }
        Ok(())
    }

    fn add_rows(&self, w: &[f32], dy: LinearRows<'_>, dx: &mut [f32], accumulate: Accumulate) {
        let LinearRows { numbers: dy, count } = dy;
        let (inner, outer) = (dx.len() / count, dy.len() / count);
        let w = Matrix::new(w, outer, inner);
        matmul(dx, Matrix::new(dy, count, outer), w, accumulate, self.threads);
    }

    fn add_weight(&self, dw: &mut [f32], dy: &[f32], x: LinearRows<'_>) {
        let LinearRows { numbers: x, count } = x;
        let (inner, outer) = (x.len() / count, dy.len() / count);
        let dy = Matrix::new(dy, count, outer).transposed();
        matmul(dw, dy, Matrix::new(x, count, inner), Accumulate::Add, self.threads);
    }
}
