//! The plan of slots whose memory binds.
//!
//! In: a problem whose plan without limits does not fit. Out: the best plan found of those that do. The larger a bundle may
//! be, the fewer pieces there are, and the less memory is left beside it; so several limits are tried, the largest first:
//!
//! 1. the plan without limits is bent to each and evened out;
//! 2. where none of these is even, each is repaired by [`MOVES`] small moves, and once more by moves that may be dearer.
//!
//! The first plan that is good enough ends this. The number of moves is given, so the time is bounded.

use super::bend;
use super::bins::Bins;
use super::limits::Limits;
use super::prices::Prices;
use super::twice::made;
use super::{is_better, is_even};
use crate::memory::{check_beside, largest_bundle, memory_of};
use crate::plan::least_work;
use crate::traffic::{Held, smallest_bundle};
use crate::{BundleId, Cuts, Error, Plan, Problem, Slot, TILE_ROWS};

/// Maximum limits of a bundle that are tried.
const TRIED: usize = 6;
/// Each limit is larger than the one before by one part in this many.
const FINER: u64 = 12;
/// A plan within limits is good enough if it moves at most one part in this many more bytes than the plan without limits.
const MORE: u64 = 10;
/// Moves of a repair.
const MOVES: usize = 40_000;
/// At first a move may make the whole dearer by this share of the bytes of a plan without limits.
const WARM: f64 = 0.01;
/// The share of the second repair, over the number of slots.
const HOT: f64 = 4.0;
/// Minimum tiles of a slot, in the mean, for which a repair is tried: with fewer, no plan is even.
const FINE: u64 = 64;
/// No repair is tried where bent slots exceed their memory by more than this share in the mean: it would not help.
const HOPELESS: f64 = 0.125;

/// The best plan that fits the memory of every slot beside a bundle of `beside` bytes of another
/// plan.
pub(super) fn plan_within_memory(
    problem: &Problem,
    digest: u64,
    beside: u64,
) -> Result<Plan, Error> {
    let ample = |it: &Slot| Slot { memory: u64::MAX, ..*it };
    let slots = problem.slots.iter().map(ample).collect();
    // Other tolerances and links are the caller's to try: each of them comes here by itself.
    let ample = Problem { slots, ..problem.clone() };
    let free = made(&ample, &ample, digest)?;
    let mut found = Found { problem, digest, beside, free: &free, best: Err(Error::NoSlot) };
    let limits: Vec<Limits> = reserves(problem, &free, beside)
        .into_iter()
        .map(|it| Limits::with_reserve(it, beside))
        .collect();
    let mut bent = Vec::new();
    for limits in limits {
        match bend::bend(problem, &free, limits) {
            Ok((bins, lacking)) => {
                if let Some(document) = lacking {
                    found.refuse(Error::NoRoom { document });
                }
                if found.is_enough(bend::settle(bins.clone())) {
                    return found.best;
                }
                bent.push(bins);
            }
            Err(error) => found.refuse(error),
        }
    }
    let tiles: u64 = problem.layout.documents().iter().map(|it| u64::from(it.rows)).sum::<u64>()
        / u64::from(TILE_ROWS);
    // Slots that stand by take none of the work.
    let slots = problem.slots.iter().filter(|it| !it.is_standby()).count();
    if found.is_even() || tiles < FINE * slots as u64 {
        return found.best;
    }
    let pulled = {
        let mut bins = Bins::new(problem, Limits::none(), least_work(problem));
        bins.hold(&free);
        Prices::of(&bins).of_all(&bins)
    };
    bent.retain(|it| bend::too_much(it) <= HOPELESS);
    let hot = HOT / slots as f64;
    for warm in [WARM, hot] {
        for bins in &mut bent {
            bend::repair(bins, pulled, MOVES, warm);
            found.is_enough(bend::settle(bins.clone()));
            if found.is_even() {
                return found.best;
            }
        }
    }
    found.best
}

/// The best plan so far.
struct Found<'a> {
    problem: &'a Problem,
    digest: u64,
    beside: u64,
    free: &'a Plan,
    best: Result<Plan, Error>,
}

impl Found<'_> {
    /// Keeps the plan of some bins if it fits and is better than those before; `true` if no further one is needed.
    fn is_enough(&mut self, bins: Bins<'_>) -> bool {
        let plan = bins.into_plan(self.digest).and_then(|it| {
            check_beside(self.problem, &it, self.beside)?;
            Ok(it)
        });
        match (&self.best, plan) {
            (Ok(best), Ok(plan)) if is_better(self.problem, &plan, best) => self.best = Ok(plan),
            (Err(_), Ok(plan)) => self.best = Ok(plan),
            (Err(_), Err(error)) => self.refuse(error),
            (Ok(_), _) => {}
        }
        let free = self.free.bounds().pulled;
        self.best
            .as_ref()
            .is_ok_and(|it| is_even(self.problem, it) && it.bounds().pulled <= free + free / MORE)
    }

    fn is_even(&self) -> bool {
        self.best.as_ref().is_ok_and(|it| is_even(self.problem, it))
    }

    /// Keeps why there is no plan, as it was first found.
    fn refuse(&mut self, error: Error) {
        if self.best == Err(Error::NoSlot) {
            self.best = Err(error);
        }
    }
}

/// Bytes that a bundle may have, the most that leave memory for what slots hold at least, then fewer.
fn reserves(problem: &Problem, free: &Plan, beside: u64) -> Vec<u64> {
    let active = problem.slots.iter().filter(|it| !it.is_standby());
    let most = active.map(|it| it.memory).max().unwrap_or(0);
    let smallest = smallest_bundle(problem, Cuts::Tiles);
    let steps = std::iter::successors(Some(smallest), |it| Some(it + it / FINER + 1));
    let largest = largest_column(problem, free).max(smallest).min(most / 3);
    let mut all: Vec<u64> = steps.take_while(|it| *it < largest).chain([largest]).collect();
    if beside > 0 {
        all.retain(|it| *it < beside);
        all.push(beside);
    }
    let held = Held::of(problem, free.bounds().finish);
    let needed = |it: u64| {
        let phases = held.as_ref().map_or(0, |held| held.phases(Some(it)));
        u128::from(it.max(beside)) + u128::from(phases)
    };
    let least = all.iter().copied().min_by_key(|it| (needed(*it), *it)).unwrap_or(0);
    all.retain(|it| *it == least || (*it > least && needed(*it) <= u128::from(most)));
    let steps = all.len().saturating_sub(1);
    let mut some: Vec<u64> = (0..TRIED).map(|at| all[steps - at * steps / (TRIED - 1)]).collect();
    some.dedup();
    some
}

/// Bytes of the largest bundle of a plan if each had as few heads as may be.
fn largest_column(problem: &Problem, plan: &Plan) -> u64 {
    if !problem.heads_may_part() {
        return largest_bundle(problem, plan);
    }
    let bundles = (0..).map(BundleId).zip(plan.bundles());
    let columns = bundles
        .map(|(id, it)| memory_of(problem, plan, id).most() / (it.kv_heads.len() as u64).max(1));
    columns.max().unwrap_or(0)
}
