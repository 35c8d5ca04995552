//! AdamW with warm-up, cosine schedule and clipping by the global norm.
//!
//! In: parameters and summed gradients, flat. Out: the next parameters; gradients become zero.
//!
//! Does not know of other trainers: all of them do the same update with the same bits.
//!
//! Invariant: sums in a fixed order, no libm: the same bits for any number of threads.

use cadre_kernels::Threads;

use super::model::{Parameters, share, trigonometry};

/// How large the steps are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Greatest learning rate.
    pub peak: f32,
    /// Steps of linear warm-up.
    pub warmup: u64,
    /// Steps of the run: there the rate has fallen to a tenth of the peak.
    pub steps: u64,
}

impl std::fmt::Display for Schedule {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { peak, warmup, steps } = self;
        write!(out, "--lr {peak} after --warmup {warmup}, falling until --steps {steps}")
    }
}

impl Schedule {
    /// Learning rate of `step`, counted from 0.
    pub fn rate(&self, step: u64) -> f32 {
        let peak = f64::from(self.peak);
        if step < self.warmup {
            return (peak * (step + 1) as f64 / self.warmup as f64) as f32;
        }
        let length = self.steps.saturating_sub(self.warmup).max(1);
        let share = (step - self.warmup).min(length) as f64 / length as f64;
        let (cos, _) = trigonometry::cos_sin(share * std::f64::consts::PI);
        (peak * (0.1 + 0.45 * (1.0 + cos))) as f32
    }
}

/// Constants of the update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    /// Schedule of the learning rate.
    pub schedule: Schedule,
    /// Decay of the mean of gradients, and of their squares.
    pub betas: (f32, f32),
    /// Added to the root.
    pub epsilon: f32,
    /// Decoupled decay of matrices; gains of norms are not decayed.
    pub decay: f32,
    /// Greatest global norm of a gradient.
    pub clip: f32,
}

impl Hyper {
    /// The usual constants of small language models.
    pub fn new(schedule: Schedule) -> Self {
        Self { schedule, betas: (0.9, 0.95), epsilon: 1e-8, decay: 0.1, clip: 1.0 }
    }
}

/// The optimizer and its moments.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamW {
    hyper: Hyper,
    first: Vec<f32>,
    second: Vec<f32>,
}

/// What an update did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// Global norm of the gradient before clipping.
    pub norm: f32,
    /// Learning rate.
    pub rate: f32,
}

impl AdamW {
    /// An optimizer that has seen nothing.
    pub fn new(hyper: Hyper, parameters: &Parameters) -> Self {
        let moments = vec![0.0; parameters.len()];
        Self { hyper, first: moments.clone(), second: moments }
    }

    /// An optimizer that goes on with moments from a checkpoint.
    pub fn resume(hyper: Hyper, first: Vec<f32>, second: Vec<f32>) -> Self {
        Self { hyper, first, second }
    }

    /// Means of gradients and of their squares, in the layout of the parameters.
    pub fn moments(&self) -> (&[f32], &[f32]) {
        (&self.first, &self.second)
    }

    /// Does update number `step`, counted from 0; zeroes the gradients. A norm that is not finite
    /// leaves everything as it is, for the caller to refuse.
    pub fn update(
        &mut self,
        step: u64,
        layout: &Parameters,
        values: &mut [f32],
        gradients: &mut [f32],
        threads: Threads,
    ) -> Update {
        let Hyper { schedule, betas: (beta1, beta2), epsilon, decay, clip } = self.hyper;
        let rate = schedule.rate(step);
        let norm = norm(gradients, threads);
        if !norm.is_finite() {
            return Update { norm, rate };
        }
        let clip = if norm > clip { clip / norm } else { 1.0 };
        let bias1 = (1.0 / (1.0 - power(beta1, step + 1))) as f32;
        let bias2 = (1.0 / (1.0 - power(beta2, step + 1))) as f32;
        for tensor in layout.tensors() {
            let range = tensor.range.clone();
            let kept = 1.0 - if tensor.is_vector() { 0.0 } else { rate * decay };
            let of = values[range.clone()].chunks_mut(NUMBERS_AT_ONCE);
            let of = of.zip(gradients[range.clone()].chunks_mut(NUMBERS_AT_ONCE));
            let of = of.zip(self.first[range.clone()].chunks_mut(NUMBERS_AT_ONCE));
            let of = of.zip(self.second[range].chunks_mut(NUMBERS_AT_ONCE));
            share(threads, of.collect(), |(((values, gradients), first), second)| {
                let of = values.iter_mut().zip(gradients).zip(first).zip(second);
                for (((value, gradient), first), second) in of {
                    let clipped = *gradient * clip;
                    *first = beta1 * *first + (1.0 - beta1) * clipped;
                    *second = beta2 * *second + (1.0 - beta2) * clipped * clipped;
                    let step = *first * bias1 / ((*second * bias2).sqrt() + epsilon);
                    *value = *value * kept - rate * step;
                    *gradient = 0.0;
                }
            });
        }
        Update { norm, rate }
    }
}

/// Numbers that one thread takes at a time.
const NUMBERS_AT_ONCE: usize = 1 << 14;

fn norm(values: &[f32], threads: Threads) -> f32 {
    let mut sums = vec![0.0_f64; values.len().div_ceil(NUMBERS_AT_ONCE)];
    share(threads, values.chunks(NUMBERS_AT_ONCE).zip(&mut sums).collect(), |(values, sum)| {
        for values in values.chunks(256) {
            let mut lanes = [0.0_f32; 16];
            for (index, value) in values.iter().enumerate() {
                lanes[index % 16] += value * value;
            }
            *sum += lanes.iter().map(|&it| f64::from(it)).sum::<f64>();
        }
    });
    sums.iter().sum::<f64>().sqrt() as f32
}

/// `base` to the power of `exponent`, by squaring.
fn power(base: f32, mut exponent: u64) -> f64 {
    let (mut square, mut power) = (f64::from(base), 1.0);
    while exponent > 0 {
        if exponent & 1 == 1 {
            power *= square;
        }
        square *= square;
        exponent >>= 1;
    }
    power
}

#[cfg(test)]
mod tests {
    use cadre_worker::session::Kind;

    use super::super::model::{Config, Stack};
    use super::*;

    #[test]
    fn the_rate_rises_then_falls_to_a_tenth() {
        let schedule = Schedule { peak: 1.0, warmup: 4, steps: 104 };
        let rates: Vec<_> = [0, 3, 4, 54, 104, 500].map(|step| schedule.rate(step)).into();
        let expected = [0.25, 1.0, 1.0, 0.55, 0.1, 0.1];
        assert!(rates.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{rates:?}");
        assert!(Schedule { peak: 1.0, warmup: 0, steps: 0 }.rate(0).is_finite());
    }

    fn layout() -> Parameters {
        let config = Config::preset("tiny").unwrap();
        let stack = Stack::alike(Kind::causal(config.heads()), 2).unwrap();
        Parameters::new(&config, &stack)
    }

    #[test]
    fn updates_follow_the_formula_and_not_the_threads() {
        let layout = layout();
        let schedule = Schedule { peak: 0.1, warmup: 0, steps: 10 };
        let hyper = Hyper { clip: f32::INFINITY, ..Hyper::new(schedule) };
        let run = |threads| {
            let mut values = layout.initial(1);
            let mut optimizer = AdamW::new(hyper, &layout);
            for step in 0..3 {
                let mut gradients: Vec<_> =
                    (0..layout.len()).map(|it| ((it + step) % 7) as f32 - 3.0).collect();
                optimizer.update(step as u64, &layout, &mut values, &mut gradients, threads);
                assert!(gradients.iter().all(|&it| it == 0.0));
            }
            values
        };
        let values = run(Threads::ONE);
        assert_eq!(values, run(Threads::new(3)));
        let index = layout.tensors()[0].range.start + 11;
        let (mut value, mut first, mut second) = (f64::from(layout.initial(1)[index]), 0.0, 0.0);
        for step in 0..3 {
            let gradient = ((index + step) % 7) as f64 - 3.0;
            first = 0.9 * first + 0.1 * gradient;
            second = 0.95 * second + 0.05 * gradient * gradient;
            let (bias1, bias2) =
                (1.0 - 0.9_f64.powi(step as i32 + 1), 1.0 - 0.95_f64.powi(step as i32 + 1));
            let rate = f64::from(schedule.rate(step as u64));
            value -= rate * (first / bias1 / ((second / bias2).sqrt() + 1e-8) + 0.1 * value);
        }
        assert!((f64::from(values[index]) - value).abs() < 1e-4, "{} {value}", values[index]);
    }

    #[test]
    fn a_gradient_that_is_not_finite_changes_nothing() {
        let layout = layout();
        let mut optimizer =
            AdamW::new(Hyper::new(Schedule { peak: 0.1, warmup: 0, steps: 1 }), &layout);
        let (mut values, mut gradients) = (layout.initial(1), vec![1.0; layout.len()]);
        gradients[5] = f32::NAN;
        let update = optimizer.update(0, &layout, &mut values, &mut gradients, Threads::ONE);
        assert!(update.norm.is_nan());
        assert_eq!(values, layout.initial(1));
    }
}
