//! How far a step's plans are from what no plan could beat.
//!
//! In: a planned step, with the bounds of each plan. Out: a [`Certificate`], over all phases of the step. It proves nothing
//! itself: why a bound holds is the planner's.

use cadre_planner::Bounds;

use crate::planned::PlannedStep;

/// By what part a step is above its bounds: 0 is the best there is, 0.1 is a tenth more. None where no bound is known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Certificate {
    /// When the last slot of each phase finishes, by the cost model.
    pub compute: f64,
    /// Time of the busiest link of each phase.
    pub link: Option<f64>,
    /// Bytes of Q, K and V that slots pull.
    pub bytes: Option<f64>,
}

impl Certificate {
    /// Of all phases of a step.
    pub fn of(planned: &PlannedStep) -> Self {
        let gap = |of: fn(&Bounds) -> (u64, u64)| {
            let (reached, least) = sums(planned, of);
            (least > 0).then(|| reached as f64 / least as f64 - 1.0)
        };
        Self {
            compute: gap(|it| (it.finish, it.level.max(it.indivisible))).unwrap_or(0.0).max(0.0),
            link: gap(|it| (it.link, it.least_link)),
            bytes: gap(|it| (it.pulled, it.least_pulled)),
        }
    }
}

/// What all phases reach together, and its bound.
fn sums(planned: &PlannedStep, of: fn(&Bounds) -> (u64, u64)) -> (u128, u128) {
    planned.plans.iter().zip(planned.phases_of_plans()).fold((0, 0), |sum, (nano, phases)| {
        let (reached, least) = of(&nano.plan.bounds());
        let all = |it: u64| u128::from(it) * u128::from(phases);
        (sum.0 + all(reached), sum.1 + all(least))
    })
}
