//! The inner procedures, compiled once per instruction set and chosen at run time.
//!
//! In: nothing; the processor is asked once. Out: an [`Engine`], a table of safe functions.
//!
//! Invariant: all engines of one [`Engine::arithmetic`] give the same bits.
#![allow(unsafe_code)]

use std::sync::OnceLock;

use super::block::{self, Into, Left, Panels, Shape, Target};
use super::lanes::Plain;
use super::softmax::{self, Kept, RowSums, Running};

/// Product of two blocks, see [`block::product`].
type Product = fn(Shape, Target<'_>, Left<'_>, Panels<'_>, Into<'_>);
/// Rows into panels, see [`block::place`].
type Place = fn(&[f32], usize, (usize, usize), f32, &mut [f32], usize);
/// Rows and columns swapped, see [`block::transpose`].
type Transpose = fn(&[f32], usize, (usize, usize), &mut [f32], usize);
/// Softcap of a tile, see [`softmax::cap`].
type Cap = fn(&mut [f32], usize, (usize, usize), f32);
/// Online softmax of a tile, see [`softmax::online`].
type Online = fn(&mut [f32], usize, (usize, usize), Option<Kept<'_>>, &mut Running);
/// Gradient of a tile's scores, see [`softmax::gradient`].
type Gradient = fn((&mut [f32], &mut [f32]), usize, (usize, usize), Option<Kept<'_>>, RowSums<'_>);

/// The procedures for one instruction set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Engine {
    /// Instruction set.
    pub(crate) name: &'static str,
    /// Names the arithmetic that the bits depend on.
    pub(crate) arithmetic: &'static str,
    pub(crate) product: Product,
    pub(crate) place: Place,
    pub(crate) transpose: Transpose,
    pub(crate) cap: Cap,
    pub(crate) online: Online,
    pub(crate) gradient: Gradient,
}

impl Engine {
    /// The best one for this processor.
    pub(crate) fn best() -> Self {
        static BEST: OnceLock<Engine> = OnceLock::new();
        *BEST.get_or_init(|| *Self::all().first().expect("the plain engine runs everywhere"))
    }

    /// All engines that this processor can run, the fastest first.
    pub(crate) fn all() -> Vec<Self> {
        let mut engines = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("fma") {
                engines.push(avx512::ENGINE);
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                engines.push(avx2::ENGINE);
            }
        }
        engines.push(plain::ENGINE);
        #[cfg(test)]
        engines.push(fused::ENGINE);
        engines
    }
}

/// A module with the procedures for one vector type and strip size.
macro_rules! engine {
    // Rows by vectors of a strip.
    ($module:ident, $lanes:ty, $rows:literal by $vectors:literal, $name:expr, $arithmetic:expr,
     $($feature:literal)?) => {
        pub(super) mod $module {
            use super::*;

            pub(crate) const ENGINE: Engine = Engine {
                name: $name,
                arithmetic: $arithmetic,
                product: |shape, c, a, b, into| {
                    // SAFETY: `Engine::all` hands an engine out only after asking the processor.
                    unsafe { product(shape, c, a, b, into) }
                },
                place: |from, distance, size, factor, to, stride| {
                    // SAFETY: as above.
                    unsafe { place(from, distance, size, factor, to, stride) }
                },
                transpose: |from, distance, size, to, stride| {
                    // SAFETY: as above.
                    unsafe { transpose(from, distance, size, to, stride) }
                },
                cap: |scores, distance, size, factor| {
                    // SAFETY: as above.
                    unsafe { cap(scores, distance, size, factor) }
                },
                online: |scores, distance, size, kept, running| {
                    // SAFETY: as above.
                    unsafe { online(scores, distance, size, kept, running) }
                },
                gradient: |tiles, stride, size, kept, sums| {
                    // SAFETY: as above.
                    unsafe { gradient(tiles, stride, size, kept, sums) }
                },
            };

            $(#[target_feature(enable = $feature)])?
            unsafe fn product(
                shape: Shape,
                c: Target<'_>,
                a: Left<'_>,
                b: Panels<'_>,
                into: Into<'_>,
            ) {
                block::product::<$lanes, $rows, $vectors>(shape, c, a, b, into);
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn place(
                from: &[f32],
                distance: usize,
                size: (usize, usize),
                factor: f32,
                to: &mut [f32],
                stride: usize,
            ) {
                block::place::<$lanes>(from, distance, size, factor, to, stride);
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn transpose(
                from: &[f32],
                distance: usize,
                size: (usize, usize),
                to: &mut [f32],
                stride: usize,
            ) {
                block::transpose::<$lanes>(from, distance, size, to, stride);
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn cap(
                scores: &mut [f32],
                distance: usize,
                size: (usize, usize),
                factor: f32,
            ) {
                softmax::cap::<$lanes>(scores, distance, size, factor);
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn online(
                scores: &mut [f32],
                distance: usize,
                size: (usize, usize),
                kept: Option<Kept<'_>>,
                running: &mut Running,
            ) {
                softmax::online::<$lanes>(scores, distance, size, kept, running);
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn gradient(
                tiles: (&mut [f32], &mut [f32]),
                stride: usize,
                size: (usize, usize),
                kept: Option<Kept<'_>>,
                sums: RowSums<'_>,
            ) {
                softmax::gradient::<$lanes>(tiles, stride, size, kept, sums);
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
engine!(avx512, super::super::lanes::Avx512, 12 by 2, "avx512f", "fused f32", "avx512f,avx2,fma");
#[cfg(target_arch = "x86_64")]
engine!(avx2, super::super::lanes::Avx2, 6 by 2, "avx2", "fused f32", "avx2,fma");
#[cfg(target_arch = "aarch64")]
engine!(plain, Plain<true>, 4 by 2, "neon", "fused f32",);
#[cfg(not(target_arch = "aarch64"))]
engine!(plain, Plain<false>, 4 by 1, "plain", "f32",);
#[cfg(test)]
engine!(fused, Plain<true>, 3 by 2, "fused in software", "fused f32",);
