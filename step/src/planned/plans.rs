//! The plans of a step: which there are, what fits together, what memory they ask for.
//!
//! In: a [`Header`]. Out: a plan for each nano-batch and kind of layers that some phase runs. It lowers nothing.
//!
//! Invariant: every slot that a plan gives work has the memory that [`needed`] says.

use std::cmp::Reverse;

use cadre_planner::{
    Costs, Error, Plan, Problem, SlotId, SlotMemory, check_beside, largest_bundle, memory_of_slots,
    plan, plan_at_home, plan_beside,
};

use super::wire_bytes;
use crate::header::{Header, KvHeads, Placement};
use crate::layers::{Kind, Layers};
use crate::packing::Packing;
use crate::turns::Which;

/// Most plans of a step: each has a shape of the protocol for each direction, and a `u16` numbers the shapes.
pub(crate) const MAX_PLANS: usize = u16::MAX as usize / 2;

/// Most slots of a job: the protocol numbers them by 16 bits.
const MAX_SLOTS: usize = u16::MAX as usize;

/// A step with more plans than can be numbered.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "{nanos} nano-batches and {kinds} kinds of layers have more than {MAX_PLANS} plans; make nano-batches longer and fewer"
)]
pub struct TooManyPlans {
    /// Nano-batches of a step.
    pub nanos: usize,
    /// Kinds of layers.
    pub kinds: usize,
}

/// Whether the plans of a step can be numbered: one for each of its nano-batches and kinds of
/// layers.
///
/// # Errors
///
/// [`TooManyPlans`].
pub fn check_plans(nanos: usize, layers: &Layers) -> Result<(), TooManyPlans> {
    let kinds = layers.kinds().len();
    if nanos.saturating_mul(kinds) > MAX_PLANS {
        Err(TooManyPlans { nanos, kinds })
    } else {
        Ok(())
    }
}

/// Maximum limits for the largest bundle that are tried, each an eighth less than the one before.
const MAX_SMALLER_LIMITS: usize = 10;
/// Maximum plans that are made within memory for one step, under all limits together: each may take a second.
const MAX_PLANS_ANEW: usize = 1_024;

/// By nano-batch and then by kind of layers: whether the step has such a phase.
pub(super) fn has_phases(header: &Header) -> Vec<bool> {
    let kinds = header.layers.kinds().len();
    let mut has = vec![false; header.nanos.len() * kinds];
    // What goes backward has gone forward.
    for turn in header.turns.list() {
        for &nano in &turn.nanos {
            let of_nano = &mut has[usize::from(nano) * kinds..][..kinds];
            match &turn.layers {
                Which::All => of_nano.fill(true),
                Which::Only(some) => {
                    for &layer in some {
                        of_nano[header.layers.number_of(layer.into())] = true;
                    }
                }
            }
        }
    }
    has
}

/// The plans of a step, by nano-batch and then by kind of layers, without those that no phase runs. Workers and `cadre plan -f`
/// both plan here. Each slot has the memory that [`needed`] says. The header's turns must fit its layers and nano-batches.
///
/// # Errors
///
/// The planner's.
///
/// # Panics
///
/// The header has other numbers of costs than of kinds.
pub fn plans(header: &Header) -> Result<Vec<(Problem, Plan)>, Error> {
    if header.slots.len() > MAX_SLOTS {
        let (count, most) = (header.slots.len() as u64, MAX_SLOTS as u64);
        return Err(Error::TooMany { things: "slots of a job", count, most });
    }
    let kinds = header.layers.kinds();
    assert_eq!(header.costs.len(), kinds.len(), "each kind of layers has its costs");
    let kinds = || kinds.iter().zip(&header.costs);
    let all =
        header.nanos.iter().flat_map(|nano| kinds().map(move |(kind, costs)| (nano, kind, costs)));
    let problems = all.zip(has_phases(header)).filter(|it| it.1).map(|it| it.0);
    let planned = problems.map(|(nano, kind, costs)| {
        let problem = problem(header, nano, (*kind, *costs))?;
        let plan = match header.placement {
            Placement::Pool => plan(&problem),
            Placement::Local => plan_at_home(&problem),
        };
        Ok((problem, plan?))
    });
    let mut plans = planned.collect::<Result<Vec<_>, _>>()?;
    match header.placement {
        Placement::Pool => fit_together(&mut plans, plan_beside)?,
        Placement::Local => check_memory(&plans)?,
    }
    Ok(plans)
}

/// Bytes that each slot needs for a step of these plans: twice its largest phase, and the largest bundle of all, since that may move
/// there. A slot to which no plan gives work needs nothing: it takes over the bundles that it can hold. A server checks the same
/// of the shapes that are made of the plans, and ends if it has less.
pub fn needed<'a>(plans: impl IntoIterator<Item = (&'a Problem, &'a Plan)>) -> Vec<u64> {
    let mut slots: Vec<SlotMemory> = Vec::new();
    let mut reserve = 0;
    for (problem, plan) in plans {
        slots.resize(problem.slots.len(), SlotMemory::default());
        for (slot, of_plan) in slots.iter_mut().zip(memory_of_slots(problem, plan)) {
            slot.phase = slot.phase.max(of_plan.phase);
            reserve = of_plan.reserve.max(reserve);
        }
    }
    let needed = |it: SlotMemory| SlotMemory { reserve, ..it }.needed();
    slots.into_iter().map(|it| if it.phase > 0 { needed(it) } else { 0 }).collect()
}

/// Whether every slot has what it needs.
fn check_memory(plans: &[(Problem, Plan)]) -> Result<(), Error> {
    let Some((problem, _)) = plans.first() else { return Ok(()) };
    let needed = needed(plans.iter().map(|(problem, plan)| (problem, plan)));
    let mut slots = (0..).map(SlotId).zip(&problem.slots).zip(needed);
    match slots.find(|((_, slot), needed)| *needed > slot.memory) {
        Some(((slot, &cadre_planner::Slot { memory, .. }), needed)) => {
            Err(Error::SlotFull { slot, needed, memory })
        }
        None => Ok(()),
    }
}

/// Plans again, with ever smaller bundles, until the memory of each slot is at least what
/// [`needed`] says. `make` plans beside a bundle of so many bytes.
///
/// A plan that a limit is hopeless for is the first to be made under the next one, and what was made for a limit stays as long as it
/// fits smaller ones. So a limit under which not all plans can be made costs few plans, not all of them.
pub(super) fn fit_together(
    plans: &mut [(Problem, Plan)],
    mut make: impl FnMut(&Problem, u64) -> Result<Plan, Error>,
) -> Result<(), Error> {
    let Err(unfit) = check_memory(plans) else { return Ok(()) };
    let largest: Vec<u64> =
        plans.iter().map(|(problem, plan)| largest_bundle(problem, plan)).collect();
    let mut reserve = largest.iter().copied().max().unwrap_or(0);
    let mut order: Vec<usize> = (0..plans.len()).collect();
    order.sort_by_key(|at| Reverse(largest[*at]));
    let mut anew: Vec<Option<Plan>> = vec![None; plans.len()];
    let mut made = 0;
    for _ in 0..MAX_SMALLER_LIMITS {
        let fits = |problem: &Problem, plan: &Plan| {
            largest_bundle(problem, plan) <= reserve && check_beside(problem, plan, reserve).is_ok()
        };
        let hopeless = order.iter().position(|&at| {
            let (problem, plan) = &plans[at];
            if fits(problem, plan) {
                anew[at] = None;
                return false;
            }
            if anew[at].as_ref().is_some_and(|it| fits(problem, it)) {
                return false;
            }
            anew[at] = None;
            if made < MAX_PLANS_ANEW {
                made += 1;
                anew[at] = make(problem, reserve).ok();
            }
            anew[at].is_none()
        });
        let Some(hopeless) = hopeless else {
            for ((_, plan), anew) in plans.iter_mut().zip(anew) {
                if let Some(anew) = anew {
                    *plan = anew;
                }
            }
            return check_memory(plans);
        };
        if made == MAX_PLANS_ANEW {
            break;
        }
        order[..=hopeless].rotate_right(1);
        reserve -= reserve / 8;
    }
    // The error of the first plans, since those with smaller bundles only confuse.
    Err(unfit)
}

fn problem(
    header: &Header,
    nano: &Packing,
    (kind, costs): (Kind, Costs),
) -> Result<Problem, Error> {
    Ok(Problem {
        layout: nano.layout(kind)?,
        heads: kind.heads,
        element_bytes: wire_bytes(header.wire),
        // A trainer is one processor, so heads may part; in as many lanes as heads they move together.
        lanes: match header.kv_heads {
            KvHeads::Together => kind.heads.kv,
            KvHeads::Apart => 1,
        },
        slots: header.slots.clone(),
        costs,
        links: header.links.clone(),
        tolerance: header.tolerance,
    })
}
