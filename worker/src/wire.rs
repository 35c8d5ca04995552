//! Rows that travelled become f32.
//!
//! In and out: rows in the host's memory. Invariant: nothing is rounded here.

use std::borrow::Cow;

use cadre_crds::Wire;
use cadre_exchange::Buffer;
use cadre_kernels::wire;

/// Rows that travelled, as f32; f32 without a copy.
pub(crate) fn from_wire(kind: Wire, buffer: &Buffer) -> Cow<'_, [f32]> {
    match kind {
        Wire::F32 => Cow::Borrowed(buffer.f32s()),
        Wire::Bf16 => {
            let mut values = vec![0.0; buffer.bf16s().len()];
            wire::to_f32(&mut values, buffer.bf16s());
            Cow::Owned(values)
        }
    }
}
