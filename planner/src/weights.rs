//! Weights of slots, learnt from how long they take.
//!
//! In: what a slot's work was expected to take and took. Out: its weight, in steps of one percent. It changes only when
//! the estimate leaves its step by more than half a step, so that scatter changes no plan.
//!
//! A pure function of reports, used by the controller: for jobs that say `reproducible` it is not used at all.

use serde::{Deserialize, Serialize};

/// The estimate is kept in thousandths of a percent.
const FINE: i64 = 1_000;
/// Each report counts as one part in this many of the estimate: an old value has half its weight after about ten reports.
const MEMORY: i64 = 16;
/// Least and most weight that is learnt, in percent: a server beyond is broken, not slow.
const RANGE: (i64, i64) = (10, 400);

/// The estimated speed of a slot.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Learnt {
    /// The weight that headers state.
    pub weight: u32,
    /// The estimate, in thousandths of a percent.
    estimate: i64,
    /// Reports so far, up to the memory.
    reports: i64,
}

impl Learnt {
    /// Begins with a weight, 100 for a nominal slot.
    pub fn new(weight: u32) -> Self {
        Self { weight, estimate: i64::from(weight) * FINE, reports: 0 }
    }

    /// Takes a report: nanoseconds that the slot's work was expected to take at weight 100, and took.
    /// Reports of no work change nothing.
    pub fn report(&mut self, expected: u64, observed: u64) {
        if expected == 0 || observed == 0 {
            return;
        }
        let speed = i128::from(expected) * i128::from(100 * FINE) / i128::from(observed);
        let (least, most) = (i128::from(RANGE.0 * FINE), i128::from(RANGE.1 * FINE));
        let speed = speed.clamp(least, most) as i64;
        // The mean of the first reports, then one that forgets.
        self.reports = (self.reports + 1).min(MEMORY);
        self.estimate += (speed - self.estimate) / self.reports;
        let beyond = (self.estimate - i64::from(self.weight) * FINE).abs();
        // The weight covers half a percent on either side. It changes only when the estimate is
        // another half percent away, so that it does not flicker.
        if self.reports >= MEMORY / 2 && beyond > FINE {
            self.weight = ((self.estimate + FINE / 2) / FINE) as u32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Noise in percent of a percent, uniform within ±3 %.
    fn noise(state: &mut u64) -> i64 {
        *state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        i64::try_from((*state >> 33) % 601).expect("it is small") - 300
    }

    #[test]
    fn slots_lastingly_apart_are_evened_within_two_percent_despite_noise() {
        let speeds: Vec<f64> = (0..64).map(|slot| 0.97 + 0.06 * f64::from(slot) / 63.0).collect();
        for seed in 1..=20 {
            let mut state = seed;
            let mut learnt = vec![Learnt::new(100); speeds.len()];
            let mut changes = 0;
            for step in 0..200 {
                for (it, speed) in learnt.iter_mut().zip(&speeds) {
                    let observed = 1e9 / speed * (1.0 + noise(&mut state) as f64 / 10_000.0);
                    let before = it.weight;
                    it.report(1_000_000_000, observed as u64);
                    changes += u32::from(step >= 50 && it.weight != before);
                }
                if step >= 50 {
                    // A slot gets work by its weight and takes it by its speed.
                    let times =
                        learnt.iter().zip(&speeds).map(|(it, speed)| f64::from(it.weight) / speed);
                    let times: Vec<f64> = times.collect();
                    let mean = times.iter().sum::<f64>() / times.len() as f64;
                    let most = times.iter().copied().fold(0.0, f64::max);
                    assert!(most / mean <= 1.02, "seed {seed}, step {step}: {}", most / mean);
                }
            }
            // 150 steps of 64 slots.
            assert!(changes < 150, "seed {seed}: {changes} changes at constant speed");
        }
    }

    #[test]
    fn a_slot_that_turns_slow_is_found_and_one_that_is_steady_left() {
        let mut it = Learnt::new(100);
        for _ in 0..100 {
            it.report(1_000, 1_009);
        }
        assert_eq!(it.weight, 100);
        for _ in 0..60 {
            it.report(1_000, 1_250);
        }
        assert!((79..=81).contains(&it.weight), "{it:?}");
        let before = it;
        it.report(0, 5);
        it.report(5, 0);
        assert_eq!(it, before);
        it.report(u64::MAX, 1);
        it.report(1, u64::MAX);
        assert!(it.weight >= 10 && it.weight <= 400);
    }
}
