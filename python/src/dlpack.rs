//! Where a tensor lies, by one call of `DLPack`'s C exchange table, which torch has from 2.10 on: one call for each of a tensor's
//! attributes would take longer than attention of a short document.
//!
//! In: an object of Python's. Out: address, type, sizes and strides of a tensor of torch's; nothing where torch has no such table,
//! or the object is of another class, whose attributes may be its own, or torch cannot say it. Source: `dlpack.h` of `DLPack` 1.3.
//!
//! Invariant: an answer is copied while the caller holds the tensor and Python's lock, so nothing points into it afterwards.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::ptr::NonNull;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// `DLTensor`.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_number: i32,
    dimensions: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// The beginning of `DLPackExchangeAPI`.
#[repr(C)]
struct Table {
    major: u32,
    minor: u32,
    earlier: *const c_void,
    allocate: *const c_void,
    from_object: *const c_void,
    to_object: *const c_void,
    look_at: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int>,
}

/// The version of the table's form.
const TABLE_VERSION: u32 = 1;
/// The table's name as a capsule.
const NAME: *const c_char = c"dlpack_exchange_api".as_ptr();
/// Codes of devices: the host, and memory of the host that a driver has pinned.
const ON_HOST: [i32; 2] = [1, 3];

/// Of elements.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(crate) enum Elements {
    F32,
    Bf16,
    Other,
}

/// See the module.
pub(crate) struct Found {
    pub(crate) is_on_host: bool,
    pub(crate) elements: Elements,
    pub(crate) address: usize,
    pub(crate) shape: Vec<usize>,
    pub(crate) strides: Vec<usize>,
}

/// What torch has: its classes of plain tensors, and the call.
struct Torch {
    classes: [Py<PyType>; 2],
    look_at: unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int,
}

fn torch(py: Python<'_>) -> Option<&'static Torch> {
    static TORCH: PyOnceLock<Option<Torch>> = PyOnceLock::new();
    TORCH.get_or_init(py, || find(py).ok().flatten()).as_ref()
}

fn find(py: Python<'_>) -> PyResult<Option<Torch>> {
    let torch = py.import("torch")?;
    let tensor = torch.getattr("Tensor")?.cast_into::<PyType>()?;
    let parameter = torch.getattr("nn")?.getattr("Parameter")?.cast_into::<PyType>()?;
    let capsule = tensor.getattr("__dlpack_c_exchange_api__")?;
    // SAFETY: the object is alive; what is no capsule of this name is null, with an error that is taken away below.
    let table = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME) };
    let Some(table) = NonNull::new(table.cast::<Table>()) else {
        return Err(PyErr::fetch(py));
    };
    // SAFETY: torch's table is never freed, and every version of it begins so.
    let table = unsafe { table.as_ref() };
    let classes = [tensor.unbind(), parameter.unbind()];
    let look_at = table.look_at.filter(|_| table.major == TABLE_VERSION);
    Ok(look_at.map(|look_at| Torch { classes, look_at }))
}

/// See the module.
pub(crate) fn look_at(object: &Bound<'_, PyAny>) -> Option<Found> {
    let py = object.py();
    let torch = torch(py)?;
    let class = object.get_type();
    if !torch.classes.iter().any(|it| class.is(it)) {
        return None;
    }
    let mut found = DlTensor {
        data: std::ptr::null_mut(),
        device_type: 0,
        device_number: 0,
        dimensions: 0,
        code: 0,
        bits: 0,
        lanes: 0,
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    // SAFETY: the object is a tensor of torch's, and this thread has Python's lock.
    if unsafe { (torch.look_at)(object.as_ptr().cast(), &raw mut found) } != 0 {
        // The attributes say it in torch's words.
        drop(PyErr::take(py));
        return None;
    }
    let count = usize::try_from(found.dimensions).ok()?;
    if count > 0 && (found.shape.is_null() || found.strides.is_null()) {
        return None;
    }
    let numbers = |first: *const i64| -> Option<Vec<usize>> {
        // SAFETY: as many numbers lie there as there are dimensions, as long as the tensor lives.
        (0..count).map(|at| usize::try_from(unsafe { first.add(at).read() }).ok()).collect()
    };
    let elements = match (found.code, found.bits, found.lanes) {
        (2, 32, 1) => Elements::F32,
        (4, 16, 1) => Elements::Bf16,
        _ => Elements::Other,
    };
    Some(Found {
        is_on_host: ON_HOST.contains(&found.device_type),
        elements,
        address: found.data.addr() + usize::try_from(found.byte_offset).ok()?,
        shape: numbers(found.shape)?,
        strides: numbers(found.strides)?,
    })
}
