//! bf16 storage: rows to f32 and back.
//!
//! In: a slice. Out: a slice of the same length. To bf16 rounds to nearest even; NaN stays NaN, and what
//! is too large for bf16 becomes infinite. Plain loops over integers, so that they vectorise.

use half::bf16;

/// Rounds `from` to bf16.
///
/// # Panics
///
/// When the lengths differ.
pub fn to_bf16(to: &mut [bf16], from: &[f32]) {
    assert_eq!(to.len(), from.len(), "rows to convert differ in length");
    for (to, from) in to.iter_mut().zip(from) {
        *to = round(*from);
    }
}

/// Widens `from` to f32, exactly.
///
/// # Panics
///
/// When the lengths differ.
pub fn to_f32(to: &mut [f32], from: &[bf16]) {
    assert_eq!(to.len(), from.len(), "rows to convert differ in length");
    for (to, from) in to.iter_mut().zip(from) {
        *to = f32::from_bits(u32::from(from.to_bits()) << 16);
    }
}

/// `bf16::from_f32` without its branch: adds half a step, less one where that would round a tie to odd.
fn round(from: f32) -> bf16 {
    let bits = from.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    let quiet = (bits >> 16) as u16 | 0x40;
    bf16::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 { quiet } else { rounded })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rounds_ties_to_even_and_keeps_the_special_values() {
        let tie = |bits: u32| round(f32::from_bits(bits)).to_bits();
        assert_eq!(tie(0x3f80_8000), 0x3f80);
        assert_eq!(tie(0x3f81_8000), 0x3f82);
        assert_eq!(round(f32::NEG_INFINITY), bf16::NEG_INFINITY);
        assert_eq!(round(f32::MAX), bf16::INFINITY);
        assert!(round(f32::from_bits(0x7f80_0001)).is_nan());
        assert_eq!(round(-0.0).to_bits(), 0x8000);
    }

    proptest! {
        #[test]
        fn agrees_with_the_library_of_the_type(bits: u32) {
            let from = f32::from_bits(bits);
            prop_assert_eq!(round(from).to_bits(), bf16::from_f32(from).to_bits());
        }

        #[test]
        fn widening_is_exact(bits: u16) {
            let (from, mut to) = (bf16::from_bits(bits), [0.0]);
            to_f32(&mut to, &[from]);
            let exact = from.to_f32();
            prop_assert!(to[0].to_bits() == exact.to_bits() || (to[0].is_nan() && exact.is_nan()));
        }
    }
}
