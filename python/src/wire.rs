//! Types of rows by the names that torch has for them, without its `torch.`.
//!
//! In: a name, or a type. Out: the other, or a refusal.

use cadre_crds::Wire;
use pyo3::PyResult;

use crate::refusal::refused;

/// The type of that name.
pub(crate) fn read(name: &str) -> PyResult<Wire> {
    match name {
        "float32" => Ok(Wire::F32),
        "bfloat16" => Ok(Wire::Bf16),
        other => Err(refused(format!("rows is {other:?}; say \"float32\" or \"bfloat16\""))),
    }
}

/// Its name.
pub(crate) fn name(wire: Wire) -> &'static str {
    match wire {
        Wire::F32 => "float32",
        Wire::Bf16 => "bfloat16",
    }
}
