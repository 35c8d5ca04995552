//! Δ = rowsum(dO ∘ O), the input of backward that is computed from the forward result.
//!
//! In: dO and O, `[rows, heads, dim]`. Out: a number per row and head. `FlashAttention` computes it in a kernel of its
//! own before the backward (Dao, 2023, algorithm 2).
//!
//! Invariant: the bits of a number depend on its row and head alone, not on the number of threads.

use std::sync::Mutex;

use crate::Threads;
use crate::math::dot;

/// Heads of rows that one thread takes at a time.
const BLOCK: usize = 1024;

/// Δ of all rows and heads.
///
/// # Panics
///
/// When `dim` is 0, or the lengths differ.
pub fn delta(threads: Threads, dim: usize, dout: &[f32], out: &[f32]) -> Vec<f32> {
    assert_eq!(dout.len(), out.len(), "dO and O differ in length");
    let mut delta = vec![0.0; out.len() / dim];
    let each = |delta: &mut [f32], dout: &[f32], out: &[f32]| {
        let rows = dout.chunks_exact(dim).zip(out.chunks_exact(dim));
        for (delta, (dout, out)) in delta.iter_mut().zip(rows) {
            *delta = dot(dout, out);
        }
    };
    if threads == Threads::ONE {
        each(&mut delta, dout, out);
        return delta;
    }
    let rows = dout.chunks(dim * BLOCK).zip(out.chunks(dim * BLOCK));
    let blocks: Vec<_> = delta.chunks_mut(BLOCK).zip(rows).map(|it| Mutex::new(Some(it))).collect();
    threads.run(blocks.len(), |index| {
        let block = blocks[index].lock().ok().and_then(|mut it| it.take());
        let (delta, (dout, out)) = block.expect("every block is taken once");
        each(delta, dout, out);
    });
    delta
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delta_is_the_sum_of_products_with_any_number_of_threads() {
        let value = |index: usize, step: usize| ((index * step) % 23) as f32 / 8.0 - 1.25;
        for (dim, heads) in [(1, 3), (8, 5), (24, 2100), (64, 1), (80, 0)] {
            let dout: Vec<f32> = (0..dim * heads).map(|it| value(it, 7)).collect();
            let out: Vec<f32> = (0..dim * heads).map(|it| value(it, 11)).collect();
            let one = delta(Threads::ONE, dim, &dout, &out);
            assert_eq!(one.len(), heads);
            for (head, delta) in one.iter().enumerate() {
                let range = head * dim..(head + 1) * dim;
                let exact: f64 = dout[range.clone()]
                    .iter()
                    .zip(&out[range])
                    .map(|(a, b)| f64::from(*a) * f64::from(*b))
                    .sum();
                assert!((f64::from(*delta) - exact).abs() < 1e-3, "head {head} of dim {dim}");
            }
            let two = Threads::new(2);
            let bits = |it: &[f32]| it.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&delta(two, dim, &dout, &out)), bits(&one));
        }
    }
}
