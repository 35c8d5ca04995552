//! Rows in device memory that a framework of this process lends: their location, and the checks on it.
//!
//! In: addresses, or buffers, with the form of the rows. Out: [`Lent`] and [`LentMut`], for [`super::Ferry`] to copy. It copies nothing.
//!
//! Invariant: rows that were checked lie in memory that the driver knows as the GPU's.

// Functions of the driver are unsafe to call, and foreign addresses are taken on trust.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;

use cudarc::driver::sys;
use half::bf16;

use super::driver::{Gpu, call};
use super::error::Error;
use super::memory::{Buffer, Stream};
use super::tables::Plain;

/// Type of the elements of lent rows.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Element {
    /// 32 bits.
    F32,
    /// 16 bits.
    Bf16,
}

impl Element {
    fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// Rows to read: row-major, the elements of a row side by side.
#[derive(Clone, Copy, Debug)]
pub struct Lent<'a> {
    pub(super) place: Place,
    of: PhantomData<&'a ()>,
}

/// Rows to write. Memory between the rows keeps its values.
#[derive(Debug)]
pub struct LentMut<'a> {
    pub(super) place: Place,
    of: PhantomData<&'a mut ()>,
}

/// Shape of lent rows, and the distance between them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Spread {
    /// How many rows.
    pub rows: usize,
    /// Elements of each.
    pub width: usize,
    /// Elements from the beginning of a row to that of the next.
    pub distance: usize,
}

impl Spread {
    /// Rows without gaps.
    pub fn dense(rows: usize, width: usize) -> Self {
        Self { rows, width, distance: width }
    }

    /// Elements from the first row's beginning to the last row's end.
    fn extent(&self) -> Option<usize> {
        let Self { rows, width, distance } = *self;
        let before = rows.saturating_sub(1).checked_mul(distance)?;
        if rows == 0 { Some(0) } else { before.checked_add(width) }
    }
}

/// Where lent rows lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) address: u64,
    element: Element,
    pub(super) spread: Spread,
}

/// Numbers that rows can be lent of.
pub trait Elements: Plain {
    /// What they are.
    const ELEMENT: Element;
}

impl Elements for f32 {
    const ELEMENT: Element = Element::F32;
}

impl Elements for bf16 {
    const ELEMENT: Element = Element::Bf16;
}

impl<T: Elements> Buffer<T> {
    /// Lends rows of the buffer, from element `at` on. The buffer is freed after every copy. Whoever writes it before a copy is
    /// over changes the rows that are copied.
    ///
    /// # Panics
    ///
    /// Beyond the end.
    pub fn lend(&self, at: usize, spread: Spread) -> Lent<'_> {
        Lent { place: self.place_of(at, spread), of: PhantomData }
    }

    /// As [`Self::lend`], for writing.
    ///
    /// # Panics
    ///
    /// Beyond the end.
    pub fn lend_mut(&mut self, at: usize, spread: Spread) -> LentMut<'_> {
        LentMut { place: self.place_of(at, spread), of: PhantomData }
    }

    fn place_of(&self, at: usize, spread: Spread) -> Place {
        let end = spread.extent().and_then(|it| it.checked_add(at));
        assert!(end.is_some_and(|it| it <= self.len()), "rows are lent inside a buffer");
        Place {
            address: self.address() + (at * size_of::<T>()) as u64,
            element: T::ELEMENT,
            spread,
        }
    }
}

/// Why rows cannot be lent.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LentError {
    /// Rows are not those that were announced.
    #[error(
        "has {rows} rows of {width} elements, not {expected_rows} of {expected_width}; hand over the rows that were announced for it"
    )]
    Shape {
        /// What it has.
        rows: usize,
        /// Elements of its rows.
        width: usize,
        /// Rows that it should have.
        expected_rows: usize,
        /// Elements of these.
        expected_width: usize,
    },
    /// Rows overlap.
    #[error(
        "has rows {distance} elements apart, which are {width} wide; give the distance from a row to the next"
    )]
    Apart {
        /// The distance.
        distance: usize,
        /// Elements of a row.
        width: usize,
    },
    /// Another type is needed.
    #[error("is bf16; hand it over as f32")]
    Dtype,
    /// There is no memory.
    #[error("has the address 0; hand over memory of the GPU, as the framework allocated it")]
    Null,
    /// The address is no multiple of the element's size.
    #[error("lies at {address:#x}, which is no multiple of its elements' {bytes} bytes; align it")]
    Unaligned {
        /// Where it begins.
        address: u64,
        /// Bytes of an element.
        bytes: usize,
    },
    /// The driver does not know the memory.
    #[error(
        "lies at {address:#x}, which is no memory of a GPU; hand over rows of the host as such"
    )]
    NotOnGpu {
        /// Where it begins.
        address: u64,
    },
    /// Another GPU's memory.
    #[error(
        "lies on GPU {found} of this process, and its rank is on GPU {expected}; copy it there first"
    )]
    Elsewhere {
        /// Where it lies.
        found: i32,
        /// Where it should.
        expected: i32,
    },
    /// A recording cannot hold what the host does with the rows.
    #[error(
        "is handed over while its stream is recorded for a graph; leave attention out of the recording"
    )]
    Recorded,
    /// The GPU failed.
    #[error(transparent)]
    Device(#[from] Error),
}

/// Refuses a stream of the lender that is being recorded: its work does not run.
///
/// # Errors
///
/// [`LentError::Recorded`], or the driver's.
pub fn check_lender(behind: &Stream) -> Result<(), LentError> {
    if behind.records()? { Err(LentError::Recorded) } else { Ok(()) }
}

impl Place {
    /// Refuses rows that are not `rows` rows of `width` elements in memory of `gpu`.
    fn check(&self, gpu: &Gpu, rows: usize, width: usize) -> Result<(), LentError> {
        let Self { address, element, spread } = *self;
        let distance = spread.distance;
        if (spread.rows, spread.width) != (rows, width) {
            let (expected_rows, expected_width) = (rows, width);
            let Spread { rows, width, .. } = spread;
            return Err(LentError::Shape { rows, width, expected_rows, expected_width });
        }
        if rows > 1 && distance < width {
            return Err(LentError::Apart { distance, width });
        }
        if rows * width == 0 {
            return Ok(());
        }
        if address == 0 {
            return Err(LentError::Null);
        }
        if !address.is_multiple_of(element.bytes() as u64) {
            return Err(LentError::Unaligned { address, bytes: element.bytes() });
        }
        let expected = gpu.device();
        match device_of(gpu, address)? {
            None => Err(LentError::NotOnGpu { address }),
            Some(found) if found != expected => Err(LentError::Elsewhere { found, expected }),
            Some(_) => Ok(()),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.spread.rows * self.row()
    }

    /// Bytes of one row.
    pub(super) fn row(&self) -> usize {
        self.spread.width * self.element.bytes()
    }

    /// Bytes from one row to the next; unspecified for a single row.
    pub(super) fn pitch(&self) -> usize {
        self.spread.distance.max(self.spread.width) * self.element.bytes()
    }
}

/// The GPU that the memory at `address` belongs to. None if the driver does not know it as device memory.
fn device_of(gpu: &Gpu, address: u64) -> Result<Option<i32>, Error> {
    use sys::CUpointer_attribute_enum as Attribute;
    gpu.bind()?;
    let attribute = |which| {
        let mut value: c_int = 0;
        // SAFETY: writes one number about an address, whatever lies there.
        let code = unsafe {
            sys::cuPointerGetAttribute((&raw mut value).cast::<c_void>(), which, address)
        };
        if code == sys::CUresult::CUDA_ERROR_INVALID_VALUE {
            return Ok(None);
        }
        call("cuPointerGetAttribute", String::new, code).map(|()| Some(value))
    };
    let kind = attribute(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE)?;
    if kind != Some(sys::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE as c_int) {
        return Ok(None);
    }
    attribute(Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
}

impl Lent<'_> {
    /// Rows of f32.
    ///
    /// # Safety
    ///
    /// The address is memory of a GPU that holds the rows. Until the copy of them is over nobody writes or frees it. An address
    /// that the driver does not know is refused.
    pub unsafe fn f32(address: u64, spread: Spread) -> Self {
        Self { place: Place { address, element: Element::F32, spread }, of: PhantomData }
    }

    /// Rows of bf16.
    ///
    /// # Safety
    ///
    /// As [`Self::f32`].
    pub unsafe fn bf16(address: u64, spread: Spread) -> Self {
        Self { place: Place { address, element: Element::Bf16, spread }, of: PhantomData }
    }

    /// Type of its elements.
    pub fn element(&self) -> Element {
        self.place.element
    }

    /// Refuses what is not `rows` rows of `width` elements in memory of `gpu`.
    ///
    /// # Errors
    ///
    /// [`LentError`].
    pub fn check(&self, gpu: &Gpu, rows: usize, width: usize) -> Result<(), LentError> {
        self.place.check(gpu, rows, width)
    }
}

impl LentMut<'_> {
    /// As [`Lent::f32`].
    ///
    /// # Safety
    ///
    /// The address is memory of a GPU with room for the rows. Until the copy to it is over nobody else touches or frees it. An
    /// address that the driver does not know is refused.
    pub unsafe fn f32(address: u64, spread: Spread) -> Self {
        Self { place: Place { address, element: Element::F32, spread }, of: PhantomData }
    }

    /// As [`Lent::bf16`].
    ///
    /// # Safety
    ///
    /// As [`Self::f32`].
    pub unsafe fn bf16(address: u64, spread: Spread) -> Self {
        Self { place: Place { address, element: Element::Bf16, spread }, of: PhantomData }
    }

    /// Bytes of its rows, one behind the other.
    pub fn len_bytes(&self) -> usize {
        self.place.bytes()
    }

    /// The same rows, to look at their form.
    pub fn as_lent(&self) -> Lent<'_> {
        Lent { place: self.place, of: PhantomData }
    }
}
