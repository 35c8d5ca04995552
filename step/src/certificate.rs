//! How far a step's plans are from what no plan could beat.
//!
//! In: a planned step, with the bounds of each plan. Out: a [`Certificate`], over all phases of the step. It proves nothing
//! itself: why a bound holds is the planner's.

use cadre_planner::{Bounds, Least};

use crate::planned::{NanoPlan, PlannedStep};

/// How far a step is above its lower bounds, as fractions: 0 is the best possible, 0.1 is a tenth
/// more. None where no bound is known.
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
    /// The certificate over all phases of a step.
    pub fn of(planned: &PlannedStep) -> Self {
        let all: Vec<(Bounds, Least)> =
            planned.plans.iter().map(|it| (it.plan.bounds(), it.plan.least(&it.problem))).collect();
        let gap = |weight: fn(&NanoPlan) -> u16, of: fn(&(Bounds, Least)) -> (u64, u64)| {
            let (reached, least) = sums(planned, &all, weight, of);
            (least > 0).then(|| reached as f64 / least as f64 - 1.0)
        };
        let finish = gap(NanoPlan::dim, |(it, _)| (it.finish, it.level.max(it.indivisible)));
        Self {
            compute: finish.unwrap_or(0.0).max(0.0),
            link: gap(|_| 1, |(it, least)| (it.link, least.link)),
            bytes: gap(|_| 1, |(it, least)| (it.pulled, least.pulled)),
        }
    }
}

/// What all phases reach together, and its bound, each times the weight of its plan.
fn sums(
    planned: &PlannedStep,
    bounds: &[(Bounds, Least)],
    weight: fn(&NanoPlan) -> u16,
    of: fn(&(Bounds, Least)) -> (u64, u64),
) -> (u128, u128) {
    let plans = planned.plans.iter().zip(bounds).zip(planned.phases_of_plans());
    plans.fold((0, 0), |sum, ((nano, bounds), phases)| {
        let (reached, least) = of(bounds);
        let times = u128::from(phases) * u128::from(weight(nano));
        let all = |it: u64| u128::from(it) * times;
        (sum.0 + all(reached), sum.1 + all(least))
    })
}
