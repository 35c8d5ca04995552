//! Moves bundles of lost slots to those alive.
//!
//! In: a plan, who executes which bundle now, and which slots are alive. Out: the next
//! [`Assignment`]. Everyone computes it alone from the same `Lost` message, so nothing is sent but
//! the list of slots.
//!
//! Bundles move whole and cuts stay, hence the bits of a step do not depend on what was lost. A
//! bundle whose executor lives never moves.

use std::cmp::Reverse;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::memory::phase;
use crate::{BundleId, Error, Plan, Problem, Slot, SlotId, memory_of};

/// Who executes each bundle of a plan.
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
///    would finish within 1/16 of the first to finish are taken, of these the one with the least
///    bytes to pull, then the lowest number.
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
    let is_alive = |slot: SlotId| alive.get(usize::from(slot.0)) == Some(&true);
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

    let mut survivors = survivors(problem, plan, &executors, alive);
    moved.sort_by_key(|&(cost, bundle)| (Reverse(cost), bundle));
    for (cost, bundle) in moved {
        let it = &plan.bundles()[bundle.0 as usize];
        let needed = memory_of(problem, plan, bundle).most();
        let fits = |survivor: &&mut Survivor| {
            survivor.reserve >= needed && survivor.reaches(problem, plan, bundle)
        };
        let earliest = survivors.iter_mut().filter(fits).map(|to| to.finish(cost)).min();
        let Some(earliest) = earliest else {
            let document = it.document;
            return Err(if survivors.iter().any(|it| it.reserve >= needed) {
                Error::BundleOutOfReach { bundle, document }
            } else {
                Error::BundleFitsNowhere { bundle, document, needed }
            });
        };
        let latest = earliest.saturating_add(earliest / 16);
        let best = survivors
            .iter_mut()
            .filter(fits)
            .filter(|to| to.finish(cost) <= latest)
            .min_by_key(|to| (Reverse(rows_at_home(problem, plan, bundle, to.slot)), to.id))
            .expect("the slot that finishes earliest is one of them");
        best.load += cost;
        executors[bundle.0 as usize] = Some(best.id);
    }
    Ok(Assignment { executors })
}

/// A slot alive, while bundles are given to it.
struct Survivor<'a> {
    id: SlotId,
    slot: &'a Slot,
    /// Cost of what it executes.
    load: u64,
    /// Bytes beside two phases of its own plan.
    reserve: u64,
    /// Places that it cannot reach.
    beyond: Vec<usize>,
}

impl Survivor<'_> {
    fn finish(&self, more: u64) -> u64 {
        self.slot.finish(self.load.saturating_add(more))
    }

    fn reaches(&self, problem: &Problem, plan: &Plan, bundle: BundleId) -> bool {
        let Some(it) = plan.bundle(bundle).filter(|_| !self.beyond.is_empty()) else {
            return true;
        };
        let rows = plan.tasks_of(bundle).iter().map(|task| &task.rows).chain([&it.keys]);
        let mut pieces = rows.flat_map(|rows| problem.layout.locate(it.document, rows.clone()));
        pieces.all(|piece| !self.beyond.contains(&usize::from(piece.rank.0)))
    }
}

fn survivors<'a>(
    problem: &'a Problem,
    plan: &Plan,
    executors: &[Option<SlotId>],
    alive: &[bool],
) -> Vec<Survivor<'a>> {
    let mut loads = vec![0; problem.slots.len()];
    for (bundle, executor) in (0..).map(BundleId).zip(executors) {
        if let Some(slot) = executor {
            loads[usize::from(slot.0)] += plan.bundle_cost(problem, bundle);
        }
    }
    let (places, _) = problem.places();
    let slots = (0..).map(SlotId).zip(&problem.slots).zip(loads).zip(alive);
    slots
        .filter(|(_, alive)| **alive)
        .map(|(((id, slot), load), _)| {
            let own = phase(problem, plan, id).saturating_mul(2);
            let beyond = problem.links.beyond_reach(places[usize::from(id.0)]);
            Survivor { id, slot, load, reserve: slot.memory.saturating_sub(own), beyond }
        })
        .collect()
}

/// How much of a bundle the slot has at home, in heads of one row. Rows that it holds for another
/// bundle do not count: bundles are pulled on their own.
fn rows_at_home(problem: &Problem, plan: &Plan, bundle: BundleId, slot: &Slot) -> u64 {
    let (Some(home), Some(it)) = (slot.home, plan.bundle(bundle)) else {
        return 0;
    };
    let at_home = |rows: &Range<u32>| problem.layout.rows_at(home, it.document, rows);
    let queries: u64 = plan.tasks_of(bundle).iter().map(|task| at_home(&task.rows)).sum();
    let query_heads = problem.heads.query_count(&it.kv_heads);
    queries * query_heads + at_home(&it.keys) * it.kv_heads.len() as u64
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
        if let Some(slot) = executor.filter(|slot| usize::from(slot.0) >= slots) {
            return Err(Error::UnknownSlot { bundle, slot, slots: slots as u32 });
        }
    }
    Ok(())
}
