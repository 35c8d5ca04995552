//! Tensors of PyTorch as rows in memory: address, type and distance, read from the tensor itself.
//!
//! In: a tensor whose rows lie at any distance, the elements of a row side by side, and on which side its memory is. Out: [`Tensor`],
//! which lends its rows as slices, or as rows of a GPU. A tensor of another type, device or form is refused by name.
//!
//! Invariant: memory of the host is lent only during the call that got the tensor as an argument, which keeps it alive; that of a GPU
//! until the caller's stream is behind the session's copies, before which PyTorch does not use it again. What other threads of the
//! caller's write into it meanwhile is theirs to answer for, as with every operator of PyTorch.
#![allow(unsafe_code)]

use cadre_kernels::device::tables::Plain;
use cadre_kernels::device::{Gpu, Lent, LentMut, Slice, SliceMut, Spread};
use cadre_worker::session::{PerHead, PerHeadMut, Rows, RowsMut};
use half::bf16;
use pyo3::Borrowed;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;

use crate::dlpack::{self, Elements, Found};
use crate::refusal::refused;

/// Tensors that a call is given.
pub(crate) type Given<'py, const N: usize> = [Bound<'py, PyAny>; N];

/// Types of elements.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    F32,
    Bf16,
}

/// Where memory of tensors is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Side {
    Host,
    /// The driver says whether that is so, when rows are lent.
    Gpu,
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    name: &'static str,
    side: Side,
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

/// What a tensor says of itself.
struct Seen {
    kind: Kind,
    shape: Vec<usize>,
    /// None: it is contiguous.
    strides: Option<Vec<usize>>,
    address: usize,
}

/// Whether Q, K and V are plainly such as attention takes: see the stub. One call in place of twenty for attributes.
#[pyfunction]
pub(crate) fn are_usual(q: &Bound<'_, PyAny>, k: &Bound<'_, PyAny>, v: &Bound<'_, PyAny>) -> bool {
    let seen = [q, k, v].map(|it| seen(Side::Host, it));
    let [Some(q), Some(k), Some(v)] = seen else { return false };
    let same = q.kind == k.kind && k.kind == v.kind && k.shape == v.shape;
    same && q.shape.len() == 3 && k.shape.len() == 3 && q.shape[2] == k.shape[2]
}

/// By one call; None where the attributes have to say it, or why it is refused.
fn seen(side: Side, tensor: &Bound<'_, PyAny>) -> Option<Seen> {
    let Found { is_on_host, elements, address, shape, strides } = dlpack::look_at(tensor)?;
    let kind = match elements {
        Elements::F32 => Kind::F32,
        Elements::Bf16 => Kind::Bf16,
        Elements::Other => return None,
    };
    (is_on_host || side == Side::Gpu).then_some(Seen {
        kind,
        shape,
        strides: Some(strides),
        address,
    })
}

fn seen_by_attributes(name: &str, side: Side, tensor: &Bound<'_, PyAny>) -> PyResult<Seen> {
    let py = tensor.py();
    if side == Side::Host && !tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
        let device = tensor.getattr(intern!(py, "device"))?;
        return refuse(name, &format!("is on {device}; hand over a tensor on the CPU"));
    }
    let dtype = tensor.getattr(intern!(py, "dtype"))?;
    let [f32s, bf16s] = types(py)?;
    let kind = if dtype.is(f32s) {
        Kind::F32
    } else if dtype.is(bf16s) {
        Kind::Bf16
    } else {
        return refuse(name, &format!("is {dtype}; use torch.float32 or torch.bfloat16"));
    };
    let shape = numbers(&tensor.getattr(intern!(py, "shape"))?)?;
    // Most are contiguous, and that question takes less time than that for all strides.
    let is_dense = tensor.call_method0(intern!(py, "is_contiguous"))?.is_truthy()?;
    let strides = || numbers(&tensor.call_method0(intern!(py, "stride"))?);
    let strides = if is_dense { None } else { Some(strides()?) };
    let address: usize = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
    Ok(Seen { kind, shape, strides, address })
}

impl Kind {
    /// Of an element.
    fn bytes(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
            Self::Bf16 => size_of::<bf16>(),
        }
    }
}

impl Tensor {
    /// Reads where `tensor` lies; `name` is what a refusal calls it.
    pub(crate) fn new(name: &'static str, side: Side, tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let refuse = |what: &str| refuse(name, what);
        let Seen { kind, shape, strides, address } = match seen(side, tensor) {
            Some(it) => it,
            None => seen_by_attributes(name, side, tensor)?,
        };
        let bytes = kind.bytes();
        let Some((&rows, inner)) = shape.split_first() else {
            return refuse("has no dimension; its first one is rows");
        };
        let width: usize = inner.iter().product();
        let mut distance = width;
        if let Some(strides) = strides {
            let mut dense = 1;
            for (&size, &stride) in inner.iter().zip(&strides[1..]).rev() {
                if size != 1 && stride != dense && rows * width > 0 {
                    return refuse(
                        "does not have the elements of a row side by side; call contiguous()",
                    );
                }
                dense *= size;
            }
            if rows > 1 && width > 0 {
                distance = strides[0];
            }
            if distance < width {
                return refuse("has rows that overlap; call contiguous()");
            }
        }
        let elements = if rows * width == 0 { 0 } else { (rows - 1) * distance + width };
        if address == 0 && elements > 0 {
            return refuse(
                "has no memory: it was freed (resize_(0)), or it is zeros that autograd makes (clone those)",
            );
        }
        if !address.is_multiple_of(bytes) {
            return refuse("does not lie on a multiple of its elements' size; clone it");
        }
        Ok(Self { name, side, address, kind, shape, distance, elements })
    }

    /// Reads one that may be `None`.
    pub(crate) fn optional(
        name: &'static str,
        side: Side,
        tensor: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Self>> {
        if tensor.is_none() { Ok(None) } else { Self::new(name, side, tensor).map(Some) }
    }

    /// Reads several.
    pub(crate) fn all<const N: usize>(
        names: [&'static str; N],
        side: Side,
        tensors: &Given<'_, N>,
    ) -> PyResult<[Self; N]> {
        let all: PyResult<Vec<Self>> =
            names.into_iter().zip(tensors).map(|(name, it)| Self::new(name, side, it)).collect();
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

    /// Rows on a GPU to read.
    pub(crate) fn lent(&self) -> Lent<'_> {
        let (address, spread) = self.place();
        match self.kind {
            // SAFETY: the caller of the operator keeps the tensor until its stream is behind the copy, and PyTorch uses memory again
            // in the order of that stream; the session asks the driver what lies there.
            Kind::F32 => unsafe { Lent::f32(address, spread) },
            // SAFETY: as above.
            Kind::Bf16 => unsafe { Lent::bf16(address, spread) },
        }
    }

    /// Rows on a GPU to write.
    pub(crate) fn lent_mut(&mut self) -> LentMut<'_> {
        let (address, spread) = self.place();
        match self.kind {
            // SAFETY: as for `lent`; tensors that are written share no memory with another one of the call (`check_apart`).
            Kind::F32 => unsafe { LentMut::f32(address, spread) },
            // SAFETY: as above.
            Kind::Bf16 => unsafe { LentMut::bf16(address, spread) },
        }
    }

    /// Refuses memory that the driver does not know as that of `gpu`.
    pub(crate) fn check_on(&self, gpu: &Gpu) -> PyResult<()> {
        let (_, Spread { rows, width, .. }) = self.place();
        let found = self.lent().check(gpu, rows, width);
        found.or_else(|why| refuse(self.name, &why.to_string()))
    }

    /// Elements on a GPU, one row behind the other, for launches.
    pub(crate) fn slice<T: Element + Plain>(&self) -> PyResult<Slice<'_, T>> {
        self.check_elements::<T>()?;
        // SAFETY: as for `lent`; launches read in the order of the caller's stream.
        Ok(unsafe { Slice::foreign(self.address as u64, self.elements) })
    }

    /// The same to write.
    pub(crate) fn slice_mut<T: Element + Plain>(&mut self) -> PyResult<SliceMut<'_, T>> {
        self.check_elements::<T>()?;
        // SAFETY: as for `lent_mut`; launches write in the order of the caller's stream.
        Ok(unsafe { SliceMut::foreign(self.address as u64, self.elements) })
    }

    fn check_elements<T: Element>(&self) -> PyResult<()> {
        match (self.kind, T::KIND) {
            (Kind::F32, Kind::F32) | (Kind::Bf16, Kind::Bf16) => self.check_dense(),
            (Kind::Bf16, Kind::F32) => refuse(self.name, "is torch.bfloat16; use torch.float32"),
            (Kind::F32, Kind::Bf16) => refuse(self.name, "is torch.float32; use torch.bfloat16"),
        }
    }

    fn place(&self) -> (u64, Spread) {
        let (rows, width) = (self.shape[0], self.shape[1..].iter().product());
        (self.address as u64, Spread { rows, width, distance: self.distance })
    }

    /// The same for kernels, one row behind the other.
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

    /// The same, as a session takes them.
    pub(crate) fn per_head(&self) -> PyResult<PerHead<'_>> {
        self.f32s().map(PerHead::f32)
    }

    /// The same, as a session writes them.
    pub(crate) fn per_head_mut(&mut self) -> PyResult<PerHeadMut<'_>> {
        self.f32s_mut().map(PerHeadMut::f32)
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
        assert_eq!(self.side, Side::Host, "rows on a GPU are lent to the session alone");
        if self.elements == 0 {
            return &[];
        }
        // SAFETY: the tensor said that so many elements of this type lie there, aligned; it lives as long as the call does, and
        // every bit pattern is a value.
        unsafe { std::slice::from_raw_parts(self.address as *const T, self.elements) }
    }

    fn lend_mut<T: Element>(&mut self) -> &mut [T] {
        assert_eq!(self.kind, T::KIND, "the caller has looked at the type");
        assert_eq!(self.side, Side::Host, "rows on a GPU are lent to the session alone");
        if self.elements == 0 {
            return &mut [];
        }
        // SAFETY: as for `lend`; tensors that are written share no memory with another one of the call (`check_apart`).
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut T, self.elements) }
    }

    fn bytes(&self) -> std::ops::Range<usize> {
        self.address..self.address + self.elements * self.kind.bytes()
    }
}

/// Elements that a tensor lends.
pub(crate) trait Element {
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

/// Numbers of a tuple of Python's.
fn numbers(tuple: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    tuple.cast::<PyTuple>()?.iter_borrowed().map(Borrowed::extract).collect()
}

fn refuse<T>(name: &str, what: &str) -> PyResult<T> {
    Err(refused(format!("{name} {what}")))
}
