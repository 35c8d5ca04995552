//! Moves bundles of lost slots to those alive.
//!
//! In: a plan, who executes which bundle now, and which slots are alive. Out: the next
//! [`Assignment`]. Everyone computes it alone from the same `Lost` message, so nothing is sent but
//! the list of slots.
//!
//! Bundles move whole and cuts stay, hence the bits of a step do not depend on what was lost. A
//! bundle whose executor lives never moves.

mod earliest;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use self::earliest::Earliest;
use crate::memory::phase;
use crate::{BundleId, Error, Plan, Problem, RankId, Slot, SlotId, memory_of};

/// The slot that executes each bundle of a plan.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Assignment {
    executors: Vec<Option<SlotId>>,
}

impl Assignment {
    /// Every bundle at the slot that it is planned for.
    pub fn planned(plan: &Plan) -> Self {
        Self { executors: plan.bundles().iter().map(|it| Some(it.slot)).collect() }
    }

    /// The slot that executes a bundle; `None` if no slot was alive, or there is no such bundle.
    pub fn executor(&self, bundle: BundleId) -> Option<SlotId> {
        self.executors.get(bundle.0 as usize).copied().flatten()
    }

    /// Executors by [`BundleId`].
    pub fn executors(&self) -> &[Option<SlotId>] {
        &self.executors
    }

    /// Whether some bundle has no executor.
    pub fn has_gaps(&self) -> bool {
        self.executors.contains(&None)
    }
}

/// Gives every bundle whose executor is `None` or not alive to a slot that is.
///
/// # Flow
///
/// 1. A bundle whose planned slot is alive (again) returns there.
/// 2. The others move, dearest first. Of the slots that reach its rows and whose reserve can hold the bundle, those that
///    would finish within 1/16 of the first to finish are taken, of these the one with the most rows at
///    home, or where links differ the one that what it lacks reaches in the least time, then the lowest number.
///
/// A standby slot takes part if `alive` says so, with weight 100: the caller decides when the pool
/// counts as lost. With no slot alive all such bundles have no executor.
///
/// # Assumptions
///
/// Moved bundles go through a slot's reserve one after the other, so each must fit alone beside two
/// phases of the slot's own plan, and their sum does not matter.
///
/// # Errors
///
/// Lists of another length than the problem's and the plan's, an executor that does not exist, or a
/// bundle that no slot alive can hold, by name.
pub fn reassign(
    problem: &Problem,
    plan: &Plan,
    current: &Assignment,
    alive: &[bool],
) -> Result<Assignment, Error> {
    check_lengths(problem, plan, current, alive)?;
    let is_alive = |slot: SlotId| alive.get(slot.0 as usize) == Some(&true);
    let mut executors = current.executors.clone();
    let mut moved = Vec::new();
    for ((bundle, it), executor) in (0..).map(BundleId).zip(plan.bundles()).zip(&mut executors) {
        *executor = executor.filter(|slot| is_alive(*slot));
        if executor.is_none() {
            *executor = Some(it.slot).filter(|slot| is_alive(*slot));
        }
        if executor.is_none() {
            moved.push((plan.bundle_cost(problem, bundle), bundle));
        }
    }
    if moved.is_empty() || !alive.contains(&true) {
        return Ok(Assignment { executors });
    }

    let mut survivors = Survivors::of(problem, plan, &executors, alive);
    moved.sort_by_key(|&(cost, bundle)| (Reverse(cost), bundle));
    for (cost, bundle) in moved {
        let needed = memory_of(problem, plan, bundle).most();
        let fits = |it: &Survivor| it.reserve >= needed && it.reaches(problem, plan, bundle);
        let Some(earliest) = survivors.earliest(cost, fits) else {
            let document = plan.bundles()[bundle.0 as usize].document;
            return Err(if survivors.all.iter().any(|it| it.reserve >= needed) {
                Error::BundleOutOfReach { bundle, document }
            } else {
                Error::BundleFitsNowhere { bundle, document, needed }
            });
        };
        let latest = earliest + earliest / 16;
        let at_home = rows_at_home(problem, plan, bundle);
        let is_early = |it: &Survivor| it.finish(cost) <= latest && fits(it);
        let best = if problem.links.are_equal() {
            let most = survivors.with_most(&at_home, is_early);
            most.or_else(|| survivors.first_by(latest, cost, fits))
        } else {
            survivors.nearest(problem, &at_home, is_early)
        };
        let best = best.expect("the slot that finishes earliest is one of them");
        survivors.give(best, cost);
        executors[bundle.0 as usize] = Some(survivors.all[best].id);
    }
    Ok(Assignment { executors })
}

/// A living slot to which bundles are being given.
struct Survivor<'a> {
    id: SlotId,
    slot: &'a Slot,
    /// Cost of what it executes.
    load: u64,
    /// Bytes beside two phases of its own plan.
    reserve: u64,
    /// Places that it cannot reach.
    beyond: Rc<[usize]>,
    /// In the network.
    place: usize,
}

impl Survivor<'_> {
    fn finish(&self, more: u64) -> u64 {
        self.slot.finish(self.load + more)
    }

    /// Speed of the slot in percent; standby counts as 100.
    fn weight(&self) -> u32 {
        if self.slot.is_standby() { 100 } else { self.slot.weight }
    }

    /// When it finishes, times its weight and exact.
    fn time(&self) -> u128 {
        let head_start = u128::from(self.slot.head_start) * u128::from(self.weight());
        head_start + 100 * u128::from(self.load)
    }

    fn reaches(&self, problem: &Problem, plan: &Plan, bundle: BundleId) -> bool {
        let Some(it) = plan.bundle(bundle).filter(|_| !self.beyond.is_empty()) else {
            return true;
        };
        let rows = plan.tasks_of(bundle).iter().map(|task| &task.rows).chain([&it.keys]);
        let mut pieces = rows.flat_map(|rows| problem.layout.locate(it.document, rows.clone()));
        pieces.all(|piece| self.beyond.binary_search(&(piece.rank.0 as usize)).is_err())
    }
}

/// Slots that are alive, indexed by speed and by rank.
struct Survivors<'a> {
    /// By slot.
    all: Vec<Survivor<'a>>,
    /// By rank: the slots in place there.
    at: BTreeMap<RankId, Vec<usize>>,
    /// By weight: slots of equal speed keep their order of finishing when each gets the same work
    /// on top.
    alike: BTreeMap<u32, Earliest>,
}

impl<'a> Survivors<'a> {
    fn of(problem: &'a Problem, plan: &Plan, executors: &[Option<SlotId>], alive: &[bool]) -> Self {
        let mut loads = vec![0; problem.slots.len()];
        for (bundle, executor) in (0..).map(BundleId).zip(executors) {
            if let Some(slot) = executor {
                loads[slot.0 as usize] += plan.bundle_cost(problem, bundle);
            }
        }
        let (places, _) = problem.places();
        let beyond = problem.links.beyond_reach();
        let mut all = Vec::new();
        let mut at: BTreeMap<RankId, Vec<usize>> = BTreeMap::new();
        let mut alike: BTreeMap<u32, Vec<(u128, usize)>> = BTreeMap::new();
        for (id, slot) in (0..).map(SlotId).zip(&problem.slots) {
            let index = id.0 as usize;
            if !alive[index] {
                continue;
            }
            let own = phase(problem, plan, id).saturating_mul(2);
            let (load, reserve) = (loads[index], slot.memory.saturating_sub(own));
            let place = places[index];
            let beyond = beyond.get(place).cloned().unwrap_or_default();
            let it = Survivor { id, slot, load, reserve, beyond, place };
            if let Some(home) = slot.home {
                at.entry(home).or_default().push(all.len());
            }
            alike.entry(it.weight()).or_default().push((it.time(), all.len()));
            all.push(it);
        }
        let alike = alike.into_iter().map(|(weight, times)| (weight, Earliest::of(times)));
        Self { all, at, alike: alike.collect() }
    }

    /// The earliest finish with `cost` on top, over the slots for which `fits` holds.
    fn earliest(&self, cost: u64, fits: impl Fn(&Survivor) -> bool) -> Option<u64> {
        let fits = |at: usize| fits(&self.all[at]);
        let first = self.alike.values().filter_map(|it| it.first(fits));
        first.map(|at| self.all[at].finish(cost)).min()
    }

    /// The lowest slot for which `fits` holds and that finishes by `latest` with `cost` on top.
    fn first_by(&self, latest: u64, cost: u64, fits: impl Fn(&Survivor) -> bool) -> Option<usize> {
        let fits = |at: usize| self.all[at].finish(cost) <= latest && fits(&self.all[at]);
        let lowest = self.alike.iter().filter_map(|(weight, it)| {
            // `finish` rounds down.
            let beyond = (u128::from(latest) + 1) * u128::from(*weight);
            it.lowest_below(beyond.saturating_sub(100 * u128::from(cost)), fits)
        });
        lowest.min()
    }

    /// Among the slots at the ranks of `at_home` for which `good` holds, the one with the most rows
    /// at home; on a tie the lowest number.
    fn with_most(
        &self,
        at_home: &BTreeMap<RankId, u64>,
        good: impl Fn(&Survivor) -> bool,
    ) -> Option<usize> {
        let there = at_home.iter().flat_map(|(rank, rows)| {
            let slots = self.at.get(rank).map_or(&[][..], Vec::as_slice);
            slots.iter().map(move |at| (Reverse(*rows), *at))
        });
        there.filter(|it| good(&self.all[it.1])).min().map(|it| it.1)
    }

    /// Among the slots for which `good` holds, the one to which what it lacks of the rows of `ranks` takes the least time, then the
    /// lowest number.
    fn nearest(
        &self,
        problem: &Problem,
        ranks: &BTreeMap<RankId, u64>,
        good: impl Fn(&Survivor) -> bool,
    ) -> Option<usize> {
        let time = |it: &Survivor| -> u128 {
            let ways = ranks.iter().map(|(rank, rows)| {
                let price = problem.links.price(rank.0 as usize, it.place);
                u128::from(*rows) * u128::from(price)
            });
            ways.sum()
        };
        let all = self.all.iter().enumerate().filter(|it| good(it.1));
        all.map(|(at, it)| (time(it), at)).min().map(|it| it.1)
    }

    /// Adds work to one of the slots.
    fn give(&mut self, at: usize, cost: u64) {
        let it = &mut self.all[at];
        it.load += cost;
        let (weight, time) = (it.weight(), it.time());
        if let Some(alike) = self.alike.get_mut(&weight) {
            alike.set(at, time);
        }
    }
}

/// How much of a bundle each rank has, in heads of one row, but for those that have nothing. Rows that a slot there holds for
/// another bundle do not count: bundles are pulled on their own.
fn rows_at_home(problem: &Problem, plan: &Plan, bundle: BundleId) -> BTreeMap<RankId, u64> {
    let mut at_home = BTreeMap::new();
    let Some(it) = plan.bundle(bundle) else {
        return at_home;
    };
    let mut add = |rows: Range<u32>, heads: u64| {
        for piece in problem.layout.locate(it.document, rows) {
            *at_home.entry(piece.rank).or_insert(0) += piece.rows.len() as u64 * heads;
        }
    };
    let query_heads = problem.heads.query_count(&it.kv_heads);
    plan.runs_of(bundle).for_each(|run| add(run.rows, query_heads));
    add(it.keys.clone(), it.kv_heads.len() as u64);
    at_home
}

fn check_lengths(
    problem: &Problem,
    plan: &Plan,
    current: &Assignment,
    alive: &[bool],
) -> Result<(), Error> {
    let given = problem.digest();
    if plan.problem_digest() != given {
        return Err(Error::OtherProblem { planned: plan.problem_digest(), given });
    }
    let slots = problem.slots.len();
    let lengths = [
        ("list of slots alive", alive.len(), slots),
        ("assignment", current.executors.len(), plan.bundles().len()),
    ];
    for (what, found, expected) in lengths {
        if found != expected {
            let (found, expected) = (found as u64, expected as u64);
            return Err(Error::Mismatch { what, found, expected });
        }
    }
    for (bundle, executor) in (0..).map(BundleId).zip(&current.executors) {
        if let Some(slot) = executor.filter(|slot| slot.0 as usize >= slots) {
            return Err(Error::UnknownSlot { bundle, slot, slots: slots as u32 });
        }
    }
    Ok(())
}
