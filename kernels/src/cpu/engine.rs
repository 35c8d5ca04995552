//! The three inner procedures, compiled once per instruction set and chosen at run time.
//!
//! In: nothing; the processor is asked once. Out: an [`Engine`], a table of safe functions.
//!
//! Invariant: all engines of one [`Engine::arithmetic`] give the same bits.
#![allow(unsafe_code)]

use std::sync::OnceLock;

use super::block::{self, Into, Left, Shape};
use super::lanes::Plain;
use super::softmax::{self, Kept, RowSums, Running};

/// Product of two blocks, see [`block::product`].
type Product = fn(Shape, (&mut [f32], usize), (&[f32], Left), (&[f32], usize), Into<'_>);
/// Online softmax of a tile, see [`softmax::online`].
type Online = fn(&mut [f32], usize, (usize, usize), Option<Kept<'_>>, &mut Running);
/// Gradient of a tile's scores, see [`softmax::gradient`].
type Gradient = fn((&mut [f32], &mut [f32]), usize, (usize, usize), Option<Kept<'_>>, RowSums<'_>);

/// The procedures for one instruction set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Engine {
    /// Instruction set.
    pub(crate) name: &'static str,
    /// What the bits depend on.
    pub(crate) arithmetic: &'static str,
    pub(crate) product: Product,
    pub(crate) online: Online,
    pub(crate) gradient: Gradient,
}

impl Engine {
    /// The best one for this processor.
    pub(crate) fn best() -> Self {
        static BEST: OnceLock<Engine> = OnceLock::new();
        *BEST.get_or_init(|| *Self::all().first().expect("the plain engine runs everywhere"))
    }

    /// All that this processor can run, the best first.
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

/// A module with the three procedures for one vector type and strip size.
macro_rules! engine {
    // Rows by vectors of a strip, and of a narrower one where columns run out.
    ($module:ident, $lanes:ty, $rows:literal by $vectors:literal or $rows2:literal by $vectors2:literal,
     $name:expr, $arithmetic:expr,
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
                online: |scores, distance, size, kept, running| {
                    // SAFETY: as above.
                    unsafe { online(scores, distance, size, kept, running) }
                },
                gradient: |tiles, distance, size, kept, sums| {
                    // SAFETY: as above.
                    unsafe { gradient(tiles, distance, size, kept, sums) }
                },
            };

            $(#[target_feature(enable = $feature)])?
            unsafe fn product(
                shape: Shape,
                c: (&mut [f32], usize),
                a: (&[f32], Left),
                b: (&[f32], usize),
                into: Into<'_>,
            ) {
                block::product::<$lanes, $rows, $vectors, $rows2, $vectors2>(shape, c, a, b, into);
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
                distance: usize,
                size: (usize, usize),
                kept: Option<Kept<'_>>,
                sums: RowSums<'_>,
            ) {
                softmax::gradient::<$lanes>(tiles, distance, size, kept, sums);
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
engine!(avx512, super::super::lanes::Avx512, 4 by 4 or 8 by 2, "avx512f", "fused f32", "avx512f,avx2,fma");
#[cfg(target_arch = "x86_64")]
engine!(avx2, super::super::lanes::Avx2, 2 by 4 or 4 by 2, "avx2", "fused f32", "avx2,fma");
#[cfg(target_arch = "aarch64")]
engine!(plain, Plain<true>, 4 by 2 or 4 by 1, "neon", "fused f32",);
#[cfg(not(target_arch = "aarch64"))]
engine!(plain, Plain<false>, 2 by 2 or 2 by 1, "plain", "f32",);
#[cfg(test)]
engine!(fused, Plain<true>, 3 by 2 or 3 by 1, "fused in software", "fused f32",);
