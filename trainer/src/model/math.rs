//! Row-wise arithmetic of the model: norms, SwiGLU, logarithmic loss, and shared rows over threads.
//!
//! In and out: rows in flat slices. Nothing here knows a layer.
//!
//! Invariant: rows are taken in blocks of [`ROWS_AT_ONCE`], sums over rows block by block in order, so the bits
//! do not depend on the number of threads. No function of the system's libm.

use std::sync::Mutex;

use cadre_kernels::Threads;
use cadre_kernels::math::{self, dot};

/// Rows that one thread takes at a time.
const ROWS_AT_ONCE: usize = 64;
/// Added to the mean square under the root.
const EPSILON: f32 = 1e-5;
/// Partial sums of a dot product, so that the compiler may use vectors.
const LANES: usize = 16;

/// Runs `each` on every item, over the threads. Items share nothing, so the order is free.
pub(crate) fn share<T: Send>(threads: Threads, items: Vec<T>, each: impl Fn(T) + Sync) {
    if threads == Threads::ONE {
        items.into_iter().for_each(each);
        return;
    }
    let items: Vec<_> = items.into_iter().map(|it| Mutex::new(Some(it))).collect();
    threads.run(items.len(), |index| {
        let item = items[index].lock().ok().and_then(|mut it| it.take());
        each(item.expect("every unit runs once"));
    });
}

/// y = x / rms(x) · gain, row by row; `factors` gets 1 / rms(x).
pub(super) fn norm(threads: Threads, x: &[f32], gain: &[f32], y: &mut [f32], factors: &mut [f32]) {
    let width = gain.len();
    let rows = y.chunks_mut(width * ROWS_AT_ONCE).zip(x.chunks(width * ROWS_AT_ONCE));
    share(threads, rows.zip(factors.chunks_mut(ROWS_AT_ONCE)).collect(), |((y, x), factors)| {
        let rows = y.chunks_exact_mut(width).zip(x.chunks_exact(width));
        for ((y, x), factor) in rows.zip(factors) {
            *factor = 1.0 / (dot(x, x) / width as f32 + EPSILON).sqrt();
            for ((y, x), gain) in y.iter_mut().zip(x).zip(gain) {
                *y = x * *factor * gain;
            }
        }
    });
}

/// Computes the result of [`norm`] again, from its factors.
pub(super) fn norm_again(
    threads: Threads,
    x: &[f32],
    gain: &[f32],
    factors: &[f32],
    y: &mut [f32],
) {
    let width = gain.len();
    let rows = y.chunks_mut(width * ROWS_AT_ONCE).zip(x.chunks(width * ROWS_AT_ONCE));
    share(threads, rows.zip(factors.chunks(ROWS_AT_ONCE)).collect(), |((y, x), factors)| {
        let rows = y.chunks_exact_mut(width).zip(x.chunks_exact(width));
        for ((y, x), factor) in rows.zip(factors) {
            for ((y, x), gain) in y.iter_mut().zip(x).zip(gain) {
                *y = x * *factor * gain;
            }
        }
    });
}

/// Backward of [`norm`]: adds the gradient of x to dx, and that of the gain to dgain.
pub(super) fn norm_gradient(
    threads: Threads,
    (x, gain, factors): (&[f32], &[f32], &[f32]),
    dy: &[f32],
    dx: &mut [f32],
    dgain: &mut [f32],
) {
    let width = gain.len();
    let mut parts = vec![0.0; width * factors.len().div_ceil(ROWS_AT_ONCE)];
    let rows = dx.chunks_mut(width * ROWS_AT_ONCE).zip(dy.chunks(width * ROWS_AT_ONCE));
    let rows = rows.zip(x.chunks(width * ROWS_AT_ONCE)).zip(factors.chunks(ROWS_AT_ONCE));
    let blocks = rows.zip(parts.chunks_mut(width)).collect();
    share(threads, blocks, |((((dx, dy), x), factors), part)| {
        let rows = dx.chunks_exact_mut(width).zip(dy.chunks_exact(width));
        let mut scaled = vec![0.0; width];
        for (((dx, dy), x), &factor) in rows.zip(x.chunks_exact(width)).zip(factors) {
            for ((scaled, dy), gain) in scaled.iter_mut().zip(dy).zip(gain) {
                *scaled = dy * gain;
            }
            let mean = dot(&scaled, x) * factor * factor * factor / width as f32;
            for (((dx, scaled), x), (part, dy)) in
                dx.iter_mut().zip(&scaled).zip(x).zip(part.iter_mut().zip(dy))
            {
                *dx += scaled * factor - x * mean;
                *part += dy * x * factor;
            }
        }
    });
    for part in parts.chunks_exact(width) {
        for (sum, part) in dgain.iter_mut().zip(part) {
            *sum += part;
        }
    }
}

/// y = gate · sigmoid(gate) · up; rows of `gate_up` are gate then up.
pub(super) fn swiglu(threads: Threads, width: usize, gate_up: &[f32], y: &mut [f32]) {
    let rows = y.chunks_mut(width * ROWS_AT_ONCE).zip(gate_up.chunks(2 * width * ROWS_AT_ONCE));
    share(threads, rows.collect(), |(y, gate_up)| {
        for (y, gate_up) in y.chunks_exact_mut(width).zip(gate_up.chunks_exact(2 * width)) {
            let (gate, up) = gate_up.split_at(width);
            for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
                *y = gate * math::sigmoid(*gate) * up;
            }
        }
    });
}

/// From dy of [`swiglu`]: `gate_up` becomes its gradient, dy becomes y.
pub(super) fn swiglu_gradient(threads: Threads, width: usize, gate_up: &mut [f32], dy: &mut [f32]) {
    let rows =
        dy.chunks_mut(width * ROWS_AT_ONCE).zip(gate_up.chunks_mut(2 * width * ROWS_AT_ONCE));
    share(threads, rows.collect(), |(dy, gate_up)| {
        for (dy, gate_up) in dy.chunks_exact_mut(width).zip(gate_up.chunks_exact_mut(2 * width)) {
            let (gate, up) = gate_up.split_at_mut(width);
            for ((dy, gate), up) in dy.iter_mut().zip(gate).zip(up) {
                let sigmoid = math::sigmoid(*gate);
                let silu = *gate * sigmoid;
                let dgate = *dy * *up * sigmoid * (1.0 + *gate * (1.0 - sigmoid));
                let dup = *dy * silu;
                *dy = silu * *up;
                (*gate, *up) = (dgate, dup);
            }
        }
    });
}

/// Logits become their gradient of `share · loss`; returns the summed loss of the rows that have a
/// target, in nats. Rows without target get zeros.
pub(super) fn cross_entropy(
    threads: Threads,
    vocabulary: usize,
    logits: &mut [f32],
    targets: &[Option<u32>],
    weight: f32,
) -> f64 {
    let mut losses = vec![0.0_f64; targets.len().div_ceil(ROWS_AT_ONCE)];
    let blocks = logits.chunks_mut(vocabulary * ROWS_AT_ONCE).zip(targets.chunks(ROWS_AT_ONCE));
    share(threads, blocks.zip(&mut losses).collect(), |((logits, targets), loss)| {
        for (logits, target) in logits.chunks_exact_mut(vocabulary).zip(targets) {
            let Some(target) = target else {
                logits.fill(0.0);
                continue;
            };
            let target = *target as usize;
            let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let chosen = logits[target];
            for logit in logits.iter_mut() {
                *logit = math::exp(*logit - greatest);
            }
            let sum = sum(logits);
            for logit in logits.iter_mut() {
                *logit *= weight / sum;
            }
            logits[target] -= weight;
            *loss += f64::from(math::ln(sum) + (greatest - chosen));
        }
    });
    losses.iter().sum()
}

fn sum(values: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest: f32 = chunks.remainder().iter().sum();
    for chunk in chunks {
        for (sum, value) in sums.iter_mut().zip(chunk) {
            *sum += value;
        }
    }
    sums.iter().sum::<f32>() + rest
}

/// Splits rows, and the values that belong to each row, into blocks, for callers with row-wise work of their own.
pub(super) fn blocks<'a, T>(
    rows: &'a mut [f32],
    width: usize,
    beside: &'a [T],
) -> Vec<(&'a mut [f32], &'a [T])> {
    rows.chunks_mut(width * ROWS_AT_ONCE).zip(beside.chunks(ROWS_AT_ONCE)).collect()
}

/// Cosine and sine of `x` ≥ 0, and powers, in f64 by polynomials: the same bits on every machine.
pub(crate) mod trigonometry {
    /// (cos x, sin x), exact to 1e-12 for 0 ≤ x ≤ 10⁶, to x · 1e-16 beyond.
    pub(crate) fn cos_sin(x: f64) -> (f64, f64) {
        // x = n · π/2 + r, |r| ≤ π/4; π/2 in three parts of 33 bits, so that n · part is exact.
        let n = (x * std::f64::consts::FRAC_2_PI).round();
        let r = ((x - n * 1.570_796_326_734_125_6) - n * 6.077_100_506_303_966e-11)
            - n * 2.022_266_248_795_950_7e-21;
        let (r2, quadrant) = (r * r, n as i64 & 3);
        let (mut sin, mut cos) = (0.0, 0.0);
        for step in (1..=9).rev() {
            let k = f64::from(2 * step);
            sin = -r2 / (k * (k + 1.0)) * (1.0 + sin);
            cos = -r2 / ((k - 1.0) * k) * (1.0 + cos);
        }
        let (sin, cos) = (r * (1.0 + sin), 1.0 + cos);
        match quadrant {
            0 => (cos, sin),
            1 => (-sin, cos),
            2 => (-cos, -sin),
            _ => (sin, -cos),
        }
    }

    /// e to the power of `x`, |x| ≤ 32.
    pub(crate) fn exp(x: f64) -> f64 {
        let r = x / 64.0;
        let series = (1..=18).rev().fold(0.0, |sum, k| r / f64::from(k) * (1.0 + sum));
        (0..6).fold(1.0 + series, |power, _| power * power)
    }
}

#[cfg(test)]
mod tests {
    use super::trigonometry::{cos_sin, exp};

    #[test]
    fn own_functions_agree_with_the_systems() {
        for step in 0..200_000_u32 {
            let x = f64::from(step) * f64::from(step) * 0.000_025;
            let (cos, sin) = cos_sin(x);
            assert!((cos - x.cos()).abs() < 1e-12 && (sin - x.sin()).abs() < 1e-12, "{x}");
        }
        for step in -100..=100 {
            let x = f64::from(step) * 0.1;
            assert!((exp(x) / x.exp() - 1.0).abs() < 1e-13, "{x}");
        }
    }
}
