//! A trainer's rows in the type that travels, and back.
//!
//! In and out: rows in the host's memory. Invariant: this is the one place where a trainer's rows are rounded.

use cadre_crds::Wire;
use cadre_exchange::Buffer;
use cadre_kernels::wire;

/// Rows as they travel; f32 without a copy.
pub(crate) fn to_wire(kind: Wire, values: Vec<f32>) -> Buffer {
    match kind {
        Wire::F32 => Buffer::from(values),
        Wire::Bf16 => {
            let mut buffer = Buffer::zeroed(values.len() * 2);
            wire::to_bf16(buffer.bf16s_mut(), &values);
            buffer
        }
    }
}

/// Rows that travelled, as f32; f32 without a copy.
pub(crate) fn from_wire(kind: Wire, buffer: Buffer) -> Vec<f32> {
    match kind {
        Wire::F32 => buffer.into_f32s(),
        Wire::Bf16 => {
            let mut values = vec![0.0; buffer.bf16s().len()];
            wire::to_f32(&mut values, buffer.bf16s());
            values
        }
    }
}
