//! What happens to a tile of scores between the products: forward to P, backward to P and dS.
//!
//! In: scores in units of log 2, as the products left them. Out: probabilities in their place.
//!
//! Invariant: lanes do not mix; a masked score gives exactly 0.
#![allow(unsafe_code)]
#![expect(clippy::inline_always, reason = "inlined into functions compiled for an instruction set")]

use super::block::{PANEL, WIDTH, panelled};
use super::lanes::Lanes;

/// State of the online softmax of some query rows, one lane each.
#[derive(Debug)]
pub(crate) struct Running {
    /// Largest score so far, in units of log 2.
    pub(crate) largest: Vec<f32>,
    /// Sum of 2^(score − largest).
    pub(crate) sum: Vec<f32>,
    /// By what the output so far has to be multiplied.
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
}

/// Turns scores into P and dP into dS = scale · P∘(dP − Δ), both `[rows, keys]` in panels of `stride` rows.
#[inline(always)]
pub(super) fn gradient<L: Lanes>(
    (scores, dp): (&mut [f32], &mut [f32]),
    stride: usize,
    (rows, keys): (usize, usize),
    kept: Option<Kept<'_>>,
    sums: RowSums<'_>,
) {
    let RowSums { lse, delta, scale } = sums;
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
                let mut p = L::load(scores).sub(lse).exp2();
                if let Some((low, high)) = bounds {
                    let position = L::load(first.as_ptr()).add(L::splat(key as f32));
                    p = position.select_less(low, zero, p);
                    p = position.select_less(high, p, zero);
                }
                let ds = L::load(dp).sub(delta).mul(scale).mul(p);
                p.store(scores);
                ds.store(dp);
            }
        }
    }
}
