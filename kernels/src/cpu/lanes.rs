//! Vectors of f32: one trait, one type an instruction set.
//!
//! In and out: vectors in registers; memory goes through pointers that the caller has bounded.
//!
//! Invariant: every type does the same IEEE operation on every lane, so the width changes no bits. The
//! one exception is [`Lanes::fma`] on a processor without fused multiply-add, which rounds twice.
#![allow(unsafe_code)]
#![expect(clippy::inline_always, reason = "inlined into functions compiled for an instruction set")]

use std::f32::consts::{LN_2, LOG2_E};

/// Rows and columns of the square that [`Lanes::transpose`] takes.
pub(super) const SQUARE: usize = 8;

/// A vector of [`Lanes::COUNT`] numbers.
///
/// The functions of a type may run only where its instruction set is present: they are called from
/// functions that were compiled for it, into which all of them are inlined.
pub(super) trait Lanes: Copy {
    /// Numbers of a vector.
    const COUNT: usize;

    fn splat(x: f32) -> Self;

    /// # Safety
    ///
    /// `from` is valid for reads of `COUNT` numbers.
    unsafe fn load(from: *const f32) -> Self;

    /// # Safety
    ///
    /// `to` is valid for writes of `COUNT` numbers.
    unsafe fn store(self, to: *mut f32);

    fn add(self, other: Self) -> Self;

    fn sub(self, other: Self) -> Self;

    fn mul(self, other: Self) -> Self;

    fn div(self, other: Self) -> Self;

    /// `self · b + c`.
    fn fma(self, b: Self, c: Self) -> Self;

    /// `self > other ? self : other`: `other` where one of them is NaN.
    fn max(self, other: Self) -> Self;

    /// `self < other ? less : otherwise`: `otherwise` where one of them is NaN.
    fn select_less(self, other: Self, less: Self, otherwise: Self) -> Self;

    /// The bits as integers, shifted left by 23: an integer in the low bits becomes an exponent.
    fn shift_to_exponent(self) -> Self;

    /// Transposes a square of [`SQUARE`] rows, `distances.0` apart, to rows `distances.1` apart.
    ///
    /// # Safety
    ///
    /// Both squares are valid, for reads and for writes.
    #[inline(always)]
    unsafe fn transpose(from: *const f32, to: *mut f32, distances: (usize, usize)) {
        for row in 0..SQUARE {
            for column in 0..SQUARE {
                // SAFETY: inside the squares that the caller promises.
                unsafe {
                    *to.add(column * distances.1 + row) = *from.add(row * distances.0 + column);
                }
            }
        }
    }

    /// 2ˣ for x ≤ 1 or so; 0 below −126, NaN from NaN. Relative error below 3e-7.
    #[inline(always)]
    fn exp2(self) -> Self {
        let clamped = Self::splat(-126.0).max(self);
        let shifted = clamped.add(Self::splat(ROUND));
        let f = clamped.sub(shifted.sub(Self::splat(ROUND)));
        let mut p = Self::splat(EXP2[0]);
        for &c in &EXP2[1..] {
            p = p.fma(f, Self::splat(c));
        }
        let y = p.mul(shifted.shift_to_exponent());
        self.select_less(Self::splat(-126.0), Self::splat(0.0), y)
    }

    /// Hyperbolic tangent; NaN from NaN. Relative error below 5e-7.
    #[inline(always)]
    fn tanh(self) -> Self {
        let (zero, one) = (Self::splat(0.0), Self::splat(1.0));
        let size = self.max(zero.sub(self));
        // Far from 0 by e = exp(−2·size), which never overflows; near it the difference of 1 and e would lose digits.
        let e = size.mul(Self::splat(-2.0 * LOG2_E)).exp2();
        let far = one.sub(e).div(one.add(e));
        let square = size.mul(size);
        let mut p = Self::splat(TANH[0]);
        for &c in &TANH[1..] {
            p = p.fma(square, Self::splat(c));
        }
        let near = size.mul(square).fma(p, size);
        let y = size.select_less(Self::splat(NEAR), near, far);
        self.select_less(zero, zero.sub(y), y)
    }
}

/// Added, it rounds to an integer n and leaves n + 127 in the low bits.
const ROUND: f32 = 12_582_912.0 + 127.0;

/// Coefficients of 2ᶠ on [−½, ½], the highest first: lnᵏ2 / k!, degree 6, error 1.2e-7.
const EXP2: [f32; 7] =
    [1.540_353e-4, 1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 0.240_226_5, LN_2, 1.0];

/// Below it tanh is a polynomial.
const NEAR: f32 = 0.625;

/// Coefficients of (tanh x / x − 1) / x² in x² for x below [`NEAR`], the highest first: interpolated at Chebyshev's nodes,
/// degree 5, error of tanh 5e-9.
const TANH: [f32; 6] =
    [2.292_744_8e-3, -8.343_945e-3, 2.176_892e-2, -5.395_926e-2, 0.133_333_04, -0.333_333_34];

/// Eight numbers in plain Rust; with or without fused multiply-add.
#[derive(Clone, Copy)]
pub(super) struct Plain<const FUSED: bool>([f32; 8]);

impl<const FUSED: bool> Plain<FUSED> {
    #[inline(always)]
    fn zip(self, other: Self, of: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| of(self.0[i], other.0[i])))
    }
}

impl<const FUSED: bool> Lanes for Plain<FUSED> {
    const COUNT: usize = 8;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([x; 8])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller promises `COUNT` readable numbers; an array of f32 asks no more alignment.
        Self(unsafe { from.cast::<[f32; 8]>().read() })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller promises `COUNT` writable numbers; an array of f32 asks no more alignment.
        unsafe { to.cast::<[f32; 8]>().write(self.0) }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }

    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        Self(std::array::from_fn(|i| {
            if FUSED { self.0[i].mul_add(b.0[i], c.0[i]) } else { self.0[i] * b.0[i] + c.0[i] }
        }))
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn select_less(self, other: Self, less: Self, otherwise: Self) -> Self {
        Self(std::array::from_fn(
            |i| {
                if self.0[i] < other.0[i] { less.0[i] } else { otherwise.0[i] }
            },
        ))
    }

    #[inline(always)]
    fn shift_to_exponent(self) -> Self {
        Self(self.0.map(|x| f32::from_bits(x.to_bits() << 23)))
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    #![allow(clippy::wildcard_imports, reason = "a prefix on every name is namespace enough")]

    use std::arch::x86_64::*;

    use super::{Lanes, SQUARE};

    /// 16 numbers; needs `avx512f` and `avx512dq`.
    #[derive(Clone, Copy)]
    pub(in crate::cpu) struct Avx512(__m512);

    /// 8 numbers; needs `avx2` and `fma`.
    #[derive(Clone, Copy)]
    pub(in crate::cpu) struct Avx2(__m256);

    /// Implements a vector type. The two operations in which AVX2 and AVX-512 differ in kind are given by the caller.
    macro_rules! lanes {
        ($type:ident, $count:literal, $splat:ident, $load:ident, $store:ident, $add:ident, $sub:ident,
         $mul:ident, $div:ident, $fma:ident, $max:ident, $select:item, $shift:item) => {
            impl Lanes for $type {
                const COUNT: usize = $count;

                #[inline(always)]
                fn splat(x: f32) -> Self {
                    // SAFETY: runs only where the instruction set is present, see the trait.
                    Self(unsafe { $splat(x) })
                }

                #[inline(always)]
                unsafe fn load(from: *const f32) -> Self {
                    // SAFETY: as above; the caller promises `COUNT` readable numbers, the load is unaligned.
                    Self(unsafe { $load(from) })
                }

                #[inline(always)]
                unsafe fn store(self, to: *mut f32) {
                    // SAFETY: as above; the caller promises `COUNT` writable numbers, the store is unaligned.
                    unsafe { $store(to, self.0) }
                }

                #[inline(always)]
                fn add(self, other: Self) -> Self {
                    // SAFETY: runs only where the instruction set is present, see the trait.
                    Self(unsafe { $add(self.0, other.0) })
                }

                #[inline(always)]
                fn sub(self, other: Self) -> Self {
                    // SAFETY: runs only where the instruction set is present, see the trait.
                    Self(unsafe { $sub(self.0, other.0) })
                }

                #[inline(always)]
                fn mul(self, other: Self) -> Self {
                    // SAFETY: runs only where the instruction set is present, see the trait.
                    Self(unsafe { $mul(self.0, other.0) })
                }

                #[inline(always)]
                fn div(self, other: Self) -> Self {
                    // SAFETY: runs only where the instruction set is present, see the trait.
                    Self(unsafe { $div(self.0, other.0) })
                }

                #[inline(always)]
                fn fma(self, b: Self, c: Self) -> Self {
                    // SAFETY: runs only where the instruction set is present, see the trait.
                    Self(unsafe { $fma(self.0, b.0, c.0) })
                }

                #[inline(always)]
                fn max(self, other: Self) -> Self {
                    // SAFETY: runs only where the instruction set is present, see the trait.
                    Self(unsafe { $max(self.0, other.0) })
                }

                #[inline(always)]
                unsafe fn transpose(from: *const f32, to: *mut f32, distances: (usize, usize)) {
                    // SAFETY: both types' instruction sets hold AVX2; the rest is the caller's promise.
                    unsafe { transpose(from, to, distances) }
                }

                #[inline(always)]
                $select

                #[inline(always)]
                $shift
            }
        };
    }

    /// [`Lanes::transpose`] in three rounds: pairs of rows, of pairs, of halves.
    ///
    /// # Safety
    ///
    /// As there; needs `avx2`.
    #[inline(always)]
    unsafe fn transpose(from: *const f32, to: *mut f32, distances: (usize, usize)) {
        // SAFETY: inside the squares that the caller promises.
        unsafe {
            let rows: [__m256; SQUARE] =
                std::array::from_fn(|row| _mm256_loadu_ps(from.add(row * distances.0)));
            let pairs: [__m256; SQUARE] = std::array::from_fn(|i| {
                let (a, b) = (rows[i / 2 * 2], rows[i / 2 * 2 + 1]);
                if i % 2 == 0 { _mm256_unpacklo_ps(a, b) } else { _mm256_unpackhi_ps(a, b) }
            });
            let fours: [__m256; SQUARE] = std::array::from_fn(|i| {
                let (a, b) = (pairs[i / 4 * 4 + i % 4 / 2], pairs[i / 4 * 4 + i % 4 / 2 + 2]);
                let low = _mm256_shuffle_ps::<0b01_00_01_00>(a, b);
                if i % 2 == 0 { low } else { _mm256_shuffle_ps::<0b11_10_11_10>(a, b) }
            });
            for i in 0..SQUARE / 2 {
                let (a, b) = (fours[i], fours[i + SQUARE / 2]);
                let halves =
                    [_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b)];
                _mm256_storeu_ps(to.add(i * distances.1), halves[0]);
                _mm256_storeu_ps(to.add((i + SQUARE / 2) * distances.1), halves[1]);
            }
        }
    }

    lanes!(
        Avx512,
        16,
        _mm512_set1_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_add_ps,
        _mm512_sub_ps,
        _mm512_mul_ps,
        _mm512_div_ps,
        _mm512_fmadd_ps,
        _mm512_max_ps,
        fn select_less(self, other: Self, less: Self, otherwise: Self) -> Self {
            // SAFETY: runs only where the instruction set is present, see the trait.
            Self(unsafe {
                let mask = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, other.0);
                _mm512_mask_blend_ps(mask, otherwise.0, less.0)
            })
        },
        fn shift_to_exponent(self) -> Self {
            // SAFETY: runs only where the instruction set is present, see the trait.
            Self(unsafe {
                _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(self.0)))
            })
        }
    );

    lanes!(
        Avx2,
        8,
        _mm256_set1_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_add_ps,
        _mm256_sub_ps,
        _mm256_mul_ps,
        _mm256_div_ps,
        _mm256_fmadd_ps,
        _mm256_max_ps,
        fn select_less(self, other: Self, less: Self, otherwise: Self) -> Self {
            // SAFETY: runs only where the instruction set is present, see the trait.
            Self(unsafe {
                let mask = _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, other.0);
                _mm256_blendv_ps(otherwise.0, less.0, mask)
            })
        },
        fn shift_to_exponent(self) -> Self {
            // SAFETY: runs only where the instruction set is present, see the trait.
            Self(unsafe {
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(self.0)))
            })
        }
    );
}
