//! Rows that travelled become rows of a caller, and whether they are finite is seen on the way.
//!
//! In: rows in the host's memory, in the job's wire type. Out: the same in the caller's type. One pass: what was just read is
//! looked at while it is still near the processor.
//!
//! Invariant: nothing is rounded but f32 for a caller that wants bf16.

use std::borrow::Cow;

use cadre_crds::Wire;
use cadre_exchange::Buffer;
use cadre_kernels::wire;
use half::bf16;

/// Rows that travelled, or were summed here.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Values<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

impl<'a> Values<'a> {
    /// What a buffer holds.
    pub(crate) fn of(kind: Wire, buffer: &'a Buffer) -> Self {
        match kind {
            Wire::F32 => Self::F32(buffer.f32s()),
            Wire::Bf16 => Self::Bf16(buffer.bf16s()),
        }
    }

    /// As f32; f32 without a copy.
    pub(crate) fn wide(self) -> Cow<'a, [f32]> {
        match self {
            Self::F32(values) => Cow::Borrowed(values),
            Self::Bf16(values) => {
                let mut wide = vec![0.0; values.len()];
                wire::to_f32(&mut wide, values);
                Cow::Owned(wide)
            }
        }
    }
}

/// Numbers that are widened at a time.
const WIDENED_AT_ONCE: usize = 256;

/// Numbers that are copied and looked at while the processor has them.
const COPIED_AT_ONCE: usize = 32;

/// Copies; whether all of it is finite.
///
/// A loop that does not stop would be compiled into a copy of all and a second reading of all.
pub(crate) fn copy(to: &mut [f32], from: &[f32]) -> bool {
    let length = to.len().min(from.len());
    let (to, from) = (&mut to[..length], &from[..length]);
    let pieces = to.as_chunks_mut::<COPIED_AT_ONCE>().0.iter_mut();
    let mut done = 0;
    for (to, from) in pieces.zip(from.as_chunks::<COPIED_AT_ONCE>().0) {
        *to = *from;
        if !is_finite(from) {
            break;
        }
        done += COPIED_AT_ONCE;
    }
    to[done..].copy_from_slice(&from[done..]);
    is_finite(&from[done..])
}

/// Rounds; whether all of it was finite before.
pub(crate) fn narrow(to: &mut [bf16], from: &[f32]) -> bool {
    wire::to_bf16(to, from);
    is_finite(from)
}

/// Widens; whether all of it is finite.
pub(crate) fn widen(to: &mut [f32], from: &[bf16]) -> bool {
    wire::to_f32(to, from);
    is_finite(to)
}

/// Copies as by way of f32; whether all of it is finite.
pub(crate) fn copy_bf16(to: &mut [bf16], from: &[bf16]) -> bool {
    let mut wide = [0.0; WIDENED_AT_ONCE];
    let pieces = to.chunks_mut(WIDENED_AT_ONCE).zip(from.chunks(WIDENED_AT_ONCE));
    pieces.fold(true, |all, (to, from)| {
        let wide = &mut wide[..from.len()];
        let is_finite = widen(wide, from);
        wire::to_bf16(to, wide);
        is_finite && all
    })
}

fn is_finite(values: &[f32]) -> bool {
    values.iter().fold(0, |any, it| any | not_finite(*it)) == 0
}

/// 0 for a finite number: what is not is no zero when it is taken from itself, but NaN.
#[allow(clippy::eq_op, reason = "it is not 0 of every number")]
fn not_finite(value: f32) -> u32 {
    (value - value).to_bits()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_copied_has_its_bits_and_what_is_not_finite_is_seen(
            mut bits in prop::collection::vec(any::<u32>(), 1..600),
            tame in any::<bool>(),
        ) {
            if tame {
                for it in &mut bits {
                    *it &= !0x4000_4000;
                }
            }
            let from: Vec<f32> = bits.iter().map(|it| f32::from_bits(*it)).collect();
            let half: Vec<bf16> = bits.iter().map(|it| bf16::from_bits(*it as u16)).collect();
            let bits_of = |it: &[f32]| it.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
            let halves_of = |it: &[bf16]| it.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
            let (mut to, mut to_half) = (vec![0.0; from.len()], vec![bf16::ZERO; from.len()]);
            let wide: Vec<f32> = half.iter().map(|it| it.to_f32()).collect();
            let [all, all_half] = [&from, &wide].map(|it| it.iter().all(|it| it.is_finite()));

            prop_assert_eq!(copy(&mut to, &from), all);
            prop_assert_eq!(bits_of(&to), &bits[..]);
            prop_assert_eq!(narrow(&mut to_half, &from), all);
            let rounded: Vec<bf16> = from.iter().map(|it| bf16::from_f32(*it)).collect();
            prop_assert_eq!(halves_of(&to_half), halves_of(&rounded));
            prop_assert_eq!(widen(&mut to, &half), all_half);
            let mut exact = vec![0.0; from.len()];
            wire::to_f32(&mut exact, &half);
            prop_assert_eq!(bits_of(&to), bits_of(&exact));
            prop_assert_eq!(copy_bf16(&mut to_half, &half), all_half);
            let again: Vec<bf16> = exact.iter().map(|it| bf16::from_f32(*it)).collect();
            prop_assert_eq!(halves_of(&to_half), halves_of(&again));
        }
    }
}
