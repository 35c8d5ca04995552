//! What happens to a tile of scores between the products: forward to P, backward to P and dS.
//!
//! In: scores in units of log 2, as the products left them; with a softcap what it takes the tanh of. Out: probabilities in
//! their place.
//!
//! Invariant: lanes do not mix; a masked score gives exactly 0.
#![allow(unsafe_code)]
#![expect(clippy::inline_always, reason = "inlined into functions compiled for an instruction set")]

use std::f32::consts::LOG2_E;

use super::block::{PANEL, WIDTH, panelled};
use super::lanes::Lanes;

/// The factors that turn products of Q and K into scores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    /// Factor of K when it is staged.
    pub(crate) staged: f32,
    /// The softcap in units of log 2, by which the tanh of a staged product is multiplied.
    pub(crate) cap: Option<f32>,
}

impl Scale {
    /// From the factor of the scores and the softcap that bounds them.
    pub(crate) fn new(scale: f32, softcap: Option<f32>) -> Self {
        let staged = softcap.map_or(scale * LOG2_E, |softcap| scale / softcap);
        Self { staged, cap: softcap.map(|softcap| softcap * LOG2_E) }
    }
}

/// Turns products `[keys, lanes]`, staged for a softcap, into scores in units of log 2: tanh times `factor`.
///
/// Rows of `scores` are `distance` apart.
#[inline(always)]
pub(super) fn cap<L: Lanes>(
    scores: &mut [f32],
    distance: usize,
    (keys, lanes): (usize, usize),
    factor: f32,
) {
    assert!(lanes.is_multiple_of(WIDTH) && lanes <= distance && keys > 0, "whole vectors");
    assert!((keys - 1) * distance + lanes <= scores.len(), "scores are too short");
    for key in 0..keys {
        for lane in (0..lanes).step_by(L::COUNT) {
            // SAFETY: the vector at `key` and `lane` ends within `scores`, asserted above.
            unsafe {
                let at = scores.as_mut_ptr().add(key * distance + lane);
                L::load(at).tanh().mul(L::splat(factor)).store(at);
            }
        }
    }
}

/// State of the online softmax of some query rows, one lane each.
#[derive(Debug)]
pub(crate) struct Running {
    /// Largest score so far, in units of log 2.
    pub(crate) largest: Vec<f32>,
    /// Sum of 2^(score − largest).
    pub(crate) sum: Vec<f32>,
    /// Factor by which the output so far has to be multiplied.
    pub(crate) correction: Vec<f32>,
}

/// Keys that lane or row i attends to, relative to the tile: `[low[i], high[i])`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept<'a> {
    pub(crate) low: &'a [f32],
    pub(crate) high: &'a [f32],
}

/// Turns scores `[keys, lanes]` into probabilities relative to the running maximum, and updates that.
///
/// `kept` is none where nothing is masked. Rows of `scores` are `distance` apart.
#[inline(always)]
pub(super) fn online<L: Lanes>(
    scores: &mut [f32],
    distance: usize,
    (keys, lanes): (usize, usize),
    kept: Option<Kept<'_>>,
    running: &mut Running,
) {
    let Running { largest, sum, correction } = &*running;
    assert!(lanes.is_multiple_of(WIDTH) && lanes <= distance && keys > 0, "whole vectors");
    assert!((keys - 1) * distance + lanes <= scores.len(), "scores are too short");
    assert!(lanes <= largest.len() && lanes <= sum.len() && lanes <= correction.len());
    if let Some(Kept { low, high }) = kept {
        assert!(lanes <= low.len() && lanes <= high.len(), "bounds for every lane");
    }
    let mut lane = 0;
    while lane < lanes {
        // SAFETY: the vectors from `lane` on lie below `lanes`, rows below `keys`: asserted above.
        unsafe {
            // Two vectors together hide the latency of each other's maximum and sum.
            if lane + 2 * L::COUNT <= lanes {
                columns::<L, 2>(scores, distance, (lane, keys), kept, running);
                lane += 2 * L::COUNT;
            } else {
                columns::<L, 1>(scores, distance, (lane, keys), kept, running);
                lane += L::COUNT;
            }
        }
    }
}

/// The online softmax of `V` vectors from `lane` on.
///
/// # Safety
///
/// The vectors lie within all that is handed in, and `keys` rows within `scores`.
#[inline(always)]
unsafe fn columns<L: Lanes, const V: usize>(
    scores: &mut [f32],
    distance: usize,
    (lane, keys): (usize, usize),
    kept: Option<Kept<'_>>,
    running: &mut Running,
) {
    let Running { largest, sum, correction } = running;
    let (least, zero) = (L::splat(f32::NEG_INFINITY), L::splat(0.0));
    // SAFETY: the caller's promise.
    unsafe {
        let load = |from: &[f32]| -> [L; V] {
            std::array::from_fn(|j| L::load(from.as_ptr().add(lane + j * L::COUNT)))
        };
        let scores = scores.as_mut_ptr().add(lane);
        let before = load(largest);
        let mut now = before;
        match kept {
            None => {
                for key in 0..keys {
                    for (j, now) in now.iter_mut().enumerate() {
                        *now = L::load(scores.add(key * distance + j * L::COUNT)).max(*now);
                    }
                }
            }
            Some(Kept { low, high }) => {
                let (low, high) = (load(low), load(high));
                for key in 0..keys {
                    let position = L::splat(key as f32);
                    for (j, now) in now.iter_mut().enumerate() {
                        let at = scores.add(key * distance + j * L::COUNT);
                        let score = position.select_less(low[j], least, L::load(at));
                        let score = position.select_less(high[j], score, least);
                        score.store(at);
                        *now = score.max(*now);
                    }
                }
            }
        }
        // Without a key so far, −∞ − −∞ would be NaN.
        let base = now.map(|now| now.select_less(L::splat(f32::MIN), zero, now));
        let mut total = [zero; V];
        for key in 0..keys {
            for (j, total) in total.iter_mut().enumerate() {
                let at = scores.add(key * distance + j * L::COUNT);
                let p = L::load(at).sub(base[j]).exp2();
                p.store(at);
                *total = total.add(p);
            }
        }
        for j in 0..V {
            let at = lane + j * L::COUNT;
            let factor = before[j].sub(base[j]).exp2();
            factor.store(correction.as_mut_ptr().add(at));
            now[j].store(largest.as_mut_ptr().add(at));
            let sum = sum.as_mut_ptr().add(at);
            L::load(sum).fma(factor, total[j]).store(sum);
        }
    }
}

/// What the gradient of a score needs of each row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowSums<'a> {
    /// LSE in units of log 2; +∞ for a row without gradient.
    pub(crate) lse: &'a [f32],
    /// Δ.
    pub(crate) delta: &'a [f32],
    /// Factor of the scores.
    pub(crate) scale: f32,
    /// See [`Scale::cap`].
    pub(crate) cap: Option<f32>,
}

/// Turns scores into P and dP into dS = scale · P∘(dP − Δ), both `[rows, keys]` in panels of `stride` rows.
///
/// With a softcap `scores` are what it takes the tanh of, and dS has the factor 1 − tanh².
#[inline(always)]
pub(super) fn gradient<L: Lanes>(
    tiles: (&mut [f32], &mut [f32]),
    stride: usize,
    size: (usize, usize),
    kept: Option<Kept<'_>>,
    sums: RowSums<'_>,
) {
    // There are two loops, so that the one without a softcap pays nothing for it.
    match sums.cap {
        None => gradients::<L, false>(tiles, stride, size, kept, sums),
        Some(_) => gradients::<L, true>(tiles, stride, size, kept, sums),
    }
}

#[inline(always)]
fn gradients<L: Lanes, const CAPPED: bool>(
    (scores, dp): (&mut [f32], &mut [f32]),
    stride: usize,
    (rows, keys): (usize, usize),
    kept: Option<Kept<'_>>,
    sums: RowSums<'_>,
) {
    let RowSums { lse, delta, scale, cap } = sums;
    let (cap, one) = (L::splat(cap.unwrap_or(1.0)), L::splat(1.0));
    assert!(keys.is_multiple_of(WIDTH) && rows > 0 && rows <= stride, "whole vectors");
    let end = panelled(stride, keys);
    assert!(end <= scores.len() && end <= dp.len(), "scores are too short");
    let first: [f32; WIDTH] = std::array::from_fn(|lane| lane as f32);
    let (zero, scale) = (L::splat(0.0), L::splat(scale));
    for row in 0..rows {
        let (lse, delta) = (L::splat(lse[row]), L::splat(delta[row]));
        let bounds = kept.map(|it| (L::splat(it.low[row]), L::splat(it.high[row])));
        for key in (0..keys).step_by(L::COUNT) {
            let at = (key / PANEL * stride + row) * PANEL + key % PANEL;
            // SAFETY: the vector at `row` and `key` ends within `end`, asserted above.
            unsafe {
                let scores = scores.as_mut_ptr().add(at);
                let dp = dp.as_mut_ptr().add(at);
                let (mut score, mut slope) = (L::load(scores), one);
                if CAPPED {
                    let capped = score.tanh();
                    (score, slope) = (capped.mul(cap), one.sub(capped.mul(capped)));
                }
                let mut p = score.sub(lse).exp2();
                if let Some((low, high)) = bounds {
                    let position = L::load(first.as_ptr()).add(L::splat(key as f32));
                    p = position.select_less(low, zero, p);
                    p = position.select_less(high, p, zero);
                }
                let mut ds = L::load(dp).sub(delta).mul(scale).mul(p);
                if CAPPED {
                    ds = ds.mul(slope);
                }
                p.store(scores);
                ds.store(dp);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::WIDTH;
    use crate::cpu::engine::Engine;

    #[test]
    fn the_tanh_of_a_softcap_is_right_on_every_instruction_set() {
        const ROWS: usize = 4000;
        let rows = ROWS * WIDTH;
        let exponents = |it: usize| (it as f32 / rows as f32 * 30.0 - 25.0).exp2();
        let sign = |it: usize| if it.is_multiple_of(3) { -1.0 } else { 1.0 };
        let inputs: Vec<f32> = (0..rows).map(|it| sign(it) * exponents(it)).collect();
        let engines = Engine::all();
        for engine in &engines {
            let mut capped = inputs.clone();
            (engine.cap)(&mut capped, WIDTH, (ROWS, WIDTH), 2.0);
            for (&x, &y) in inputs.iter().zip(&capped) {
                let right = 2.0 * f64::from(x).tanh();
                let error = (f64::from(y) / right - 1.0).abs();
                assert!(error < 5e-7, "{}: tanh {x} is off by {error:e}", engine.name);
            }
            let of = |x| {
                let mut row = [x; WIDTH];
                (engine.cap)(&mut row, WIDTH, (1, WIDTH), 2.0);
                row[WIDTH - 1]
            };
            assert!(of(f32::NAN).is_nan());
            let ends = [of(0.0), of(f32::INFINITY), of(-f32::INFINITY)];
            assert_eq!(ends.map(f32::to_bits), [0.0, 2.0, -2.0].map(f32::to_bits));
        }
    }
}
