//! exp, ln, sigmoid and sums of products of our own: the same bits on every machine, and they vectorise.
//!
//! In: f32. Out: f32. No libm, no table, no branch: multiply, add, and bit moves alone, each rounded by
//! IEEE rules. No fused multiply-add either, so that processors without one agree.

/// eˣ. Relative error below 2e-7 where the result is normal; below −87.3 it is 0, above 88.7 +∞.
#[inline]
pub fn exp(x: f32) -> f32 {
    // x = n·ln 2 + r, |r| ≤ ln 2 / 2; ln 2 in two parts, the first with trailing zeros so that n·it is exact.
    let clamped = if x < -88.0 { -88.0 } else { x };
    let clamped = if clamped > 89.0 { 89.0 } else { clamped };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * 0.693_359_4;
    let r = r - n * -2.121_944_4e-4;
    let mut p = 1.984_126_9e-4;
    for c in [1.388_888_9e-3, 8.333_333e-3, 4.166_666_6e-2, 1.666_666_7e-1, 0.5, 1.0, 1.0] {
        p = p * r + c;
    }
    // 2ⁿ in two halves, since n = 128 alone does not fit an exponent.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    let power = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
    let y = p * power(half) * power(n - half);
    let y = if x < -87.336_54 { 0.0 } else { y };
    let y = if x > 88.722_84 { f32::INFINITY } else { y };
    if x.is_nan() { x } else { y }
}

/// Natural logarithm. Relative error below 2e-7; 0 gives −∞, a negative number NaN, denormals count as 0.
#[inline]
pub fn ln(x: f32) -> f32 {
    // x = m·2ⁿ with m in [√½, √2); ln m = 2·artanh(s), s = (m − 1)/(m + 1).
    let bits = x.to_bits();
    let offset = bits.wrapping_sub(SQRT_HALF);
    let n = (offset as i32 >> 23) as f32;
    let m = f32::from_bits((offset & 0x007f_ffff) + SQRT_HALF);
    let f = m - 1.0;
    let s = f / (2.0 + f);
    let z = s * s;
    // Even and odd part of the fdlibm polynomial for (ln(1+s) − ln(1−s))/s − 2.
    let w = z * z;
    let odd = z * (0.666_666_6 + w * 0.284_987_87);
    let even = w * (0.400_009_72 + w * 0.242_790_79);
    let remainder = odd + even;
    let half = 0.5 * f * f;
    let y = n * 0.693_138_1 - ((half - (s * (half + remainder) + n * 9.058_001e-6)) - f);
    let y = if x < f32::MIN_POSITIVE { f32::NEG_INFINITY } else { y };
    let y = if x == f32::INFINITY { x } else { y };
    if x < 0.0 || x.is_nan() { f32::NAN } else { y }
}

/// 1/(1 + e⁻ˣ).
#[inline]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Sum of the products of two rows of one length: in 16 sums side by side, which are added one after the other, then the rest.
#[inline]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a.zip(b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f32>() + rest
}

/// Sums that are kept side by side, so that the loop vectorises; fixed, since they order the additions.
const LANES: usize = 16;
/// Added and taken away again, it rounds to the nearest integer, which then lies in the low bits.
const ROUND: f32 = 12_582_912.0;
/// Bits of √½.
const SQRT_HALF: u32 = 0x3f35_04f3;

#[cfg(test)]
mod tests {
    use super::*;

    fn worst(of: fn(f32) -> f32, exact: fn(f64) -> f64, inputs: impl Iterator<Item = f32>) -> f64 {
        inputs.fold(0.0, |worst, x| {
            let exact = exact(f64::from(x));
            f64::max(worst, (f64::from(of(x)) - exact).abs() / exact.abs().max(1e-30))
        })
    }

    #[test]
    fn errors_are_those_promised() {
        let steps = (0..2_000_000).map(|i| i as f32 / 2_000_000.0);
        let exp_error = worst(exp, f64::exp, steps.clone().map(|x| x * 175.0 - 87.0));
        assert!(exp_error < 2e-7, "exp {exp_error:e}");
        let near_one = steps.clone().map(|x| x * 4.0 + 1e-3);
        let ln_error = worst(ln, f64::ln, near_one.chain(steps.clone().map(|x| 1e30 * x + 1e-30)));
        assert!(ln_error < 2e-7, "ln {ln_error:e}");
        let exact = |x: f64| 1.0 / (1.0 + (-x).exp());
        let sigmoid_error = worst(sigmoid, exact, steps.map(|x| x * 100.0 - 50.0));
        assert!(sigmoid_error < 4e-7, "sigmoid {sigmoid_error:e}");
    }

    #[test]
    fn special_values_are_those_of_mathematics() {
        assert_eq!(exp(0.0).to_bits(), 1.0_f32.to_bits());
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert!(
            exp(f32::INFINITY).is_infinite() && exp(88.7).is_finite() && exp(f32::NAN).is_nan()
        );
        assert_eq!(ln(1.0).to_bits(), 0);
        assert!(ln(0.0) == f32::NEG_INFINITY && ln(f32::INFINITY) == f32::INFINITY);
        assert!(ln(-1.0).is_nan() && ln(f32::NAN).is_nan());
        assert!(sigmoid(f32::NEG_INFINITY) == 0.0 && (sigmoid(100.0) - 1.0).abs() < 1e-9);
    }
}
