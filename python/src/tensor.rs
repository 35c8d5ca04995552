//! Tensors of PyTorch as rows in memory: address, type and distance, read from the tensor itself.
//!
//! In: a tensor on the CPU whose rows lie at any distance, the elements of a row side by side. Out: [`Tensor`], which lends
//! its rows as slices. A tensor of another type, device or form is refused by name.
//!
//! Invariant: memory is lent only during the call that got the tensor as an argument, which keeps it alive. What other
//! threads of the caller's write into it meanwhile is theirs to answer for, as with every operator of PyTorch.
#![allow(unsafe_code)]

use cadre_worker::session::{Rows, RowsMut};
use half::bf16;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// Tensors that a call is given.
pub(crate) type Given<'py, const N: usize> = [Bound<'py, PyAny>; N];

/// Types of elements.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    F32,
    Bf16,
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    name: &'static str,
    address: usize,
    kind: Kind,
    shape: Vec<usize>,
    /// Elements from the start of a row to that of the next.
    distance: usize,
    /// Elements from the first one to the last.
    elements: usize,
}

/// PyTorch's objects for f32 and bf16, of which there is one each.
fn types(py: Python<'_>) -> PyResult<&'static [Py<PyAny>; 2]> {
    static TYPES: PyOnceLock<[Py<PyAny>; 2]> = PyOnceLock::new();
    TYPES.get_or_try_init(py, || {
        let torch = py.import("torch")?;
        Ok([torch.getattr("float32")?.unbind(), torch.getattr("bfloat16")?.unbind()])
    })
}

impl Tensor {
    /// Reads address, shape and type of `tensor`; messages call it `name`.
    pub(crate) fn new(name: &'static str, tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = tensor.py();
        let refuse = |what: &str| refuse(name, what);
        if !tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
            let device = tensor.getattr(intern!(py, "device"))?;
            return refuse(&format!("is on {device}; hand over a tensor on the CPU"));
        }
        let dtype = tensor.getattr(intern!(py, "dtype"))?;
        let [f32s, bf16s] = types(py)?;
        let (kind, bytes) = if dtype.is(f32s) {
            (Kind::F32, size_of::<f32>())
        } else if dtype.is(bf16s) {
            (Kind::Bf16, size_of::<bf16>())
        } else {
            return refuse(&format!("is {dtype}; use torch.float32 or torch.bfloat16"));
        };
        let shape: Vec<usize> = tensor.getattr(intern!(py, "shape"))?.extract()?;
        let strides: Vec<usize> = tensor.call_method0(intern!(py, "stride"))?.extract()?;
        let Some((&rows, inner)) = shape.split_first() else {
            return refuse("has no dimension; its first one is rows");
        };
        let mut width = 1;
        for (&size, &stride) in inner.iter().zip(&strides[1..]).rev() {
            if size != 1 && stride != width {
                return refuse(
                    "does not have the elements of a row side by side; call contiguous()",
                );
            }
            width *= size;
        }
        let distance = if rows > 1 { strides[0] } else { width };
        if distance < width {
            return refuse("has rows that overlap; call contiguous()");
        }
        let elements = if rows * width == 0 { 0 } else { (rows - 1) * distance + width };
        let address: usize = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
        if !address.is_multiple_of(bytes) {
            return refuse("does not lie on a multiple of its elements' size; clone it");
        }
        Ok(Self { name, address, kind, shape, distance, elements })
    }

    /// Reads one that may be `None`.
    pub(crate) fn optional(
        name: &'static str,
        tensor: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Self>> {
        if tensor.is_none() { Ok(None) } else { Self::new(name, tensor).map(Some) }
    }

    /// Reads several.
    pub(crate) fn all<const N: usize>(
        names: [&'static str; N],
        tensors: &Given<'_, N>,
    ) -> PyResult<[Self; N]> {
        let all: PyResult<Vec<Self>> =
            names.into_iter().zip(tensors).map(|(name, it)| Self::new(name, it)).collect();
        Ok(<[Self; N]>::try_from(all?).expect("there is a tensor for each name"))
    }

    /// Sizes of the dimensions; rows first.
    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub(crate) fn check_shape(&self, expected: &[usize]) -> PyResult<()> {
        if self.shape == expected {
            return Ok(());
        }
        refuse(self.name, &format!("is {:?}, not {expected:?}; give it Q's rows", self.shape))
    }

    /// Rows to read.
    pub(crate) fn rows(&self) -> Rows<'_> {
        match self.kind {
            Kind::F32 => Rows::f32(self.lend()),
            Kind::Bf16 => Rows::bf16(self.lend()),
        }
        .every(self.distance)
    }

    /// Rows to write.
    pub(crate) fn rows_mut(&mut self) -> RowsMut<'_> {
        let distance = self.distance;
        match self.kind {
            Kind::F32 => RowsMut::f32(self.lend_mut()),
            Kind::Bf16 => RowsMut::bf16(self.lend_mut()),
        }
        .every(distance)
    }

    /// As [`Self::rows`], for kernels, which need the rows without gaps.
    pub(crate) fn dense(&self) -> PyResult<cadre_kernels::Rows<'_>> {
        self.check_dense()?;
        Ok(match self.kind {
            Kind::F32 => cadre_kernels::Rows::F32(self.lend()),
            Kind::Bf16 => cadre_kernels::Rows::Bf16(self.lend()),
        })
    }

    /// f32 values, one row behind the other.
    pub(crate) fn f32s(&self) -> PyResult<&[f32]> {
        self.check_f32()?;
        Ok(self.lend())
    }

    /// f32 values to write, one row behind the other.
    pub(crate) fn f32s_mut(&mut self) -> PyResult<&mut [f32]> {
        self.check_f32()?;
        Ok(self.lend_mut())
    }

    fn check_f32(&self) -> PyResult<()> {
        match self.kind {
            Kind::F32 => self.check_dense(),
            Kind::Bf16 => refuse(self.name, "is torch.bfloat16; use torch.float32"),
        }
    }

    fn check_dense(&self) -> PyResult<()> {
        if self.elements == self.shape.iter().product::<usize>() {
            return Ok(());
        }
        refuse(self.name, "is not contiguous; call contiguous()")
    }

    fn lend<T: Element>(&self) -> &[T] {
        assert_eq!(self.kind, T::KIND, "the caller has looked at the type");
        if self.elements == 0 {
            return &[];
        }
        // SAFETY: the tensor said that so many elements of this type lie there, aligned; it lives as long as the call does, and
        // every bit pattern is a value.
        unsafe { std::slice::from_raw_parts(self.address as *const T, self.elements) }
    }

    fn lend_mut<T: Element>(&mut self) -> &mut [T] {
        assert_eq!(self.kind, T::KIND, "the caller has looked at the type");
        if self.elements == 0 {
            return &mut [];
        }
        // SAFETY: as for `lend`; tensors that are written share no memory with another one of the call (`check_apart`).
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut T, self.elements) }
    }

    fn bytes(&self) -> std::ops::Range<usize> {
        let each = if self.kind == Kind::F32 { size_of::<f32>() } else { size_of::<bf16>() };
        self.address..self.address + self.elements * each
    }
}

/// Elements that a tensor lends.
trait Element {
    const KIND: Kind;
}

impl Element for f32 {
    const KIND: Kind = Kind::F32;
}

impl Element for bf16 {
    const KIND: Kind = Kind::Bf16;
}

/// Refuses tensors to write that share memory with each other or with one to read.
pub(crate) fn check_apart(written: &[&Tensor], read: &[&Tensor]) -> PyResult<()> {
    for (at, one) in written.iter().enumerate() {
        for other in written[at + 1..].iter().chain(read) {
            let (a, b) = (one.bytes(), other.bytes());
            if a.start < b.end && b.start < a.end {
                let what = format!("shares memory with {}; give each its own", other.name);
                return refuse(one.name, &what);
            }
        }
    }
    Ok(())
}

fn refuse<T>(name: &str, what: &str) -> PyResult<T> {
    Err(PyValueError::new_err(format!("{name} {what}")))
}
