//! Attention sinks: a learnt number of each query head that takes part in the softmax as a key without a value.
//!
//! In: O and LSE of rows, sinks. Out: O and LSE with the sinks; in backward their gradient. As it changes a row by one factor it
//! is applied to rows that are done, on whatever engine: kernels without sinks do nothing for it.
//!
//! ```text
//! LSE′ = ln(exp(LSE) + exp(s))     O′ = exp(LSE − LSE′)·O     ds = −Σ exp(s − LSE′)·Δ′  over rows
//! ```
//!
//! Backward takes LSE′ and Δ′ = rowsum(dO∘O′) and is right as it is. Invariant: a row's bits depend on that row and its
//! head's sink alone; the gradient sums rows in order.

use half::bf16;

use crate::RowsMut;
use crate::math::{exp, ln};

/// Applies `sinks`, one a query head (−∞: none), to O `[rows, query heads, dim]` and LSE `[rows, query heads]`.
///
/// # Panics
///
/// When the lengths are not those of whole rows.
pub fn apply_sinks(out: &mut RowsMut<'_>, lse: &mut [f32], sinks: &[f32]) {
    let numbers = match out {
        RowsMut::F32(it) => it.len(),
        RowsMut::Bf16(it) => it.len(),
    };
    assert!(
        !sinks.is_empty()
            && lse.len().is_multiple_of(sinks.len())
            && (lse.is_empty() && numbers == 0 || numbers.is_multiple_of(lse.len())),
        "{numbers} numbers of O and {} of LSE are no rows of {} heads",
        lse.len(),
        sinks.len()
    );
    if lse.is_empty() {
        return;
    }
    let dim = numbers / lse.len();
    for (row, lse) in lse.iter_mut().enumerate() {
        let factor = join(lse, sinks[row % sinks.len()]);
        let at = row * dim..(row + 1) * dim;
        match out {
            RowsMut::F32(it) => it[at].iter_mut().for_each(|o| *o *= factor),
            RowsMut::Bf16(it) => {
                it[at].iter_mut().for_each(|o| *o = bf16::from_f32(o.to_f32() * factor));
            }
        }
    }
}

/// Adds the sink to a row's LSE. Returns the factor of the row's O.
fn join(lse: &mut f32, sink: f32) -> f32 {
    let largest = if *lse > sink { *lse } else { sink };
    if largest == f32::NEG_INFINITY {
        return 0.0;
    }
    let after = largest + ln(exp(*lse - largest) + exp(sink - largest));
    let factor = exp(*lse - after);
    *lse = after;
    factor
}

/// The gradient of the sinks: of LSE′ and Δ′, `[rows, query heads]`.
///
/// # Panics
///
/// When the lengths are not those of whole rows.
pub fn sink_gradient(lse: &[f32], delta: &[f32], sinks: &[f32]) -> Vec<f32> {
    assert!(
        lse.len() == delta.len() && !sinks.is_empty() && lse.len().is_multiple_of(sinks.len()),
        "{} LSE and {} Δ are no rows of {} heads",
        lse.len(),
        delta.len(),
        sinks.len()
    );
    let mut gradient = vec![0.0; sinks.len()];
    let rows = lse.chunks_exact(sinks.len()).zip(delta.chunks_exact(sinks.len()));
    for (lse, delta) in rows {
        for (head, sum) in gradient.iter_mut().enumerate() {
            // A row without keys and without a sink has no gradient.
            if lse[head] > f32::NEG_INFINITY {
                *sum -= exp(sinks[head] - lse[head]) * delta[head];
            }
        }
    }
    gradient
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{self, Document};
    use crate::{Backward, BackwardRows, Forward, Heads, Mask, Rows, Threads, backward, forward};

    const HEADS: Heads = Heads { query: 2, kv: 1, dim: 8 };
    const ROWS: u32 = 70;

    fn numbers(seed: usize, count: usize) -> Vec<f32> {
        (0..count).map(|it| (((seed + it) * 7919 % 101) as f32 - 50.0) / 40.0).collect()
    }

    fn close(what: &str, ours: &[f32], expected: &[f64]) {
        let largest = expected.iter().fold(0.0_f64, |most, it| most.max(it.abs()));
        for (a, b) in ours.iter().zip(expected) {
            assert!((f64::from(*a) - b).abs() <= 2e-5 * largest, "{what}: {a} {b}");
        }
        assert_eq!(ours.len(), expected.len());
    }

    #[test]
    fn rows_and_gradients_with_sinks_are_those_of_f64() {
        let width = HEADS.query * HEADS.dim;
        let [q, dout] = [1, 300].map(|seed| numbers(seed, ROWS as usize * width));
        let [k, v] = [100, 200].map(|seed| numbers(seed, ROWS as usize * HEADS.dim));
        let (heads, mask, scale, softcap) = (HEADS, Mask::Causal, 0.3, None);
        let (document_rows, rows, keys) = (ROWS, 0..ROWS, 0..ROWS);
        let [q, dout, k, v] = [&q, &dout, &k, &v].map(|it| &it[..]);
        let document = Document { heads, mask, scale, softcap, document_rows, rows, keys, q, k, v };
        for sinks in [[0.7, -2.0], [f32::NEG_INFINITY, 9.0]] {
            let right = reference::forward_with_sinks(&document, &sinks);
            let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; ROWS as usize * HEADS.query]);
            let task = Forward {
                heads: HEADS,
                mask: Mask::Causal,
                scale: 0.3,
                softcap: None,
                document_rows: ROWS,
                rows: 0..ROWS,
                keys: 0..ROWS,
                q: Rows::F32(q),
                k: Rows::F32(k),
                v: Rows::F32(v),
                out: RowsMut::F32(&mut out),
                lse: &mut lse,
            };
            forward(&mut [task], Threads::ONE).unwrap();
            apply_sinks(&mut RowsMut::F32(&mut out), &mut lse, &sinks);
            close("O", &out, &right.out);
            close("LSE", &lse, &right.lse);

            let (expected, of_sinks) = reference::backward_with_sinks(&document, &sinks, dout);
            let delta: Vec<f32> = (out.chunks_exact(HEADS.dim).zip(dout.chunks_exact(HEADS.dim)))
                .map(|(o, d)| o.iter().zip(d).map(|(o, d)| o * d).sum())
                .collect();
            let (mut dq, mut dk, mut dv) =
                (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; k.len()]);
            let part = BackwardRows {
                rows: 0..ROWS,
                q: Rows::F32(q),
                dout: Rows::F32(dout),
                lse: &lse,
                delta: &delta,
                dq: &mut dq,
            };
            let bundle = Backward {
                heads: HEADS,
                mask: Mask::Causal,
                scale: 0.3,
                softcap: None,
                document_rows: ROWS,
                keys: 0..ROWS,
                k: Rows::F32(k),
                v: Rows::F32(v),
                parts: vec![part],
                dk: &mut dk,
                dv: &mut dv,
                key_tiles: 0..crate::key_tiles(&(0..ROWS)),
            };
            backward(&mut [bundle], Threads::ONE).unwrap();
            close("dQ", &dq, &expected.dq);
            close("dK", &dk, &expected.dk);
            close("dV", &dv, &expected.dv);
            close("ds", &sink_gradient(&lse, &delta, &sinks), &of_sinks);
        }
    }

    #[test]
    fn a_row_without_keys_is_its_sink_and_without_either_nothing() {
        let (mut out, mut lse) = ([0.0; 4], [f32::NEG_INFINITY; 2]);
        apply_sinks(&mut RowsMut::F32(&mut out), &mut lse, &[1.5, f32::NEG_INFINITY]);
        assert_eq!((out, lse), ([0.0; 4], [1.5, f32::NEG_INFINITY]));
        let gradient = sink_gradient(&lse, &[2.0, 3.0], &[1.5, f32::NEG_INFINITY]);
        assert_eq!(gradient, [-2.0, 0.0]);
        apply_sinks(&mut RowsMut::Bf16(&mut []), &mut [], &[1.0]);
    }
}
