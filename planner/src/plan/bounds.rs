//! The certificate of a plan: what it reaches, and what no plan could beat.
//!
//! In: a problem and a plan. Out: [`Bounds`]. The lower bound of the finish is the larger of two: all work poured
//! over the slots like water, and the dearest tile row of one KV head on
//! the slot that would finish it first. Those of links and bytes are [`least`]'s, at the finish that the plan reaches. They
//! take half as long as the plan, so they are found for those who ask ([`Plan::least`], [`Plan::least_memory`]).

use serde::{Deserialize, Serialize};

use super::{BundleId, Plan, Runs};
use crate::memory::Memory;
use crate::{Cuts, DocumentId, Least, Problem, Slot, TILE_ROWS, Traffic, least, least_memory};

/// How good a plan is. Finishing times are forward cost at weight 100.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Bounds {
    /// When all slots would finish if work could be poured: each starts after its head start,
    /// none waits. Rounded up, where `finish` is rounded down.
    pub level: u64,
    /// When the dearest tile row of one KV head would finish at the slot best for it; the dearest row, where cuts lie at the
    /// edges of ranks.
    pub indivisible: u64,
    /// When the last slot with work finishes under the plan.
    pub finish: u64,
    /// How much later `finish` is than the larger bound, in parts per million of that bound.
    pub gap_ppm: u64,
    /// Nanoseconds of the busiest link, the busiest of a forward and of a backward phase together.
    pub link: u64,
    /// Bytes of Q, K and V that slots pull forward.
    pub pulled: u64,
    /// Bytes that the slot needs that needs most: two phases and the reserve.
    pub memory: u64,
}

impl Bounds {
    pub(super) fn of(problem: &Problem, plan: &Plan, runs: &Runs, memory: &Memory) -> Self {
        let slots = &problem.slots;
        let loads = loads(problem, plan, runs).into_iter().zip(slots).filter(|it| it.0 > 0);
        let finish = loads.map(|(load, slot)| slot.finish(load)).max().unwrap_or(0);
        let level = level(slots, least_work(problem));
        let indivisible = indivisible(problem, plan.cuts());
        let bound = level.max(indivisible).max(1);
        let over = u128::from(finish.saturating_sub(bound)) * 1_000_000;
        let gap_ppm = u64::try_from(over.div_ceil(u128::from(bound))).unwrap_or(u64::MAX);
        let traffic = Traffic::of_runs(problem, plan, runs);
        Self {
            level,
            indivisible,
            finish,
            gap_ppm,
            link: traffic.busiest(),
            pulled: traffic.forward.queries + traffic.forward.keys,
            memory: memory.most_needed(),
        }
    }
}

impl Plan {
    /// Less than that no plan that finishes by then pulls or sends; zeros where no bound is known. `problem` is that of the plan.
    pub fn least(&self, problem: &Problem) -> Least {
        let bound = || least(problem, self.bounds.finish);
        if self.uses_standby(problem) { Least::default() } else { bound().unwrap_or_default() }
    }

    /// With fewer bytes in every slot there is no plan that finishes by then; zero where no bound is known. `problem` is that of
    /// the plan.
    pub fn least_memory(&self, problem: &Problem) -> u64 {
        let bound = || least_memory(problem, self.cuts, self.bounds.finish);
        if self.uses_standby(problem) { 0 } else { bound() }
    }

    /// Whether standby slots have work, as in plans at home: the bounds count them as idle.
    fn uses_standby(&self, problem: &Problem) -> bool {
        let slot = |it: &super::Bundle| problem.slots.get(it.slot.0 as usize);
        self.bundles.iter().filter_map(slot).any(Slot::is_standby)
    }
}

/// Forward cost of all that is planned for each slot.
fn loads(problem: &Problem, plan: &Plan, runs: &Runs) -> Vec<u64> {
    let mut loads = vec![0; problem.slots.len()];
    for (id, it) in (0..).map(BundleId).zip(plan.bundles()) {
        let (document, heads) =
            (problem.document(it.document), problem.heads.query_count(&it.kv_heads));
        for run in runs.of_bundle(id) {
            loads[it.slot.0 as usize] +=
                problem.costs.run(document, heads, &run.rows, run.tasks.into());
        }
    }
    loads
}

/// Cost of all documents if none were cut.
pub(crate) fn least_work(problem: &Problem) -> u64 {
    let heads = problem.all_heads();
    let documents = (0..).map(DocumentId).zip(problem.layout.documents());
    documents.map(|(id, it)| problem.cost(id, &heads, &(0..it.rows))).sum()
}

/// Least time by which the slots that are not standby can have done `work`, poured like water
/// over their head starts.
pub(crate) fn level(slots: &[Slot], work: u64) -> u64 {
    let mut active: Vec<&Slot> = slots.iter().filter(|it| !it.is_standby()).collect();
    active.sort_by_key(|it| it.head_start);
    if active.is_empty() {
        return 0;
    }
    // With the first n slots at work, `level · Σ weight − Σ head_start · weight = 100 · work`.
    let (mut weight, mut started) = (0_u128, 0_u128);
    let mut least = u128::MAX;
    for slot in active {
        weight += u128::from(slot.weight);
        started += u128::from(slot.head_start) * u128::from(slot.weight);
        least = least.min((u128::from(work) * 100 + started).div_ceil(weight));
    }
    u64::try_from(least).unwrap_or(u64::MAX)
}

fn indivisible(problem: &Problem, cuts: Cuts) -> u64 {
    let heads = if problem.heads_may_part() { 0..1 } else { problem.all_heads() };
    let dearest = |id: DocumentId| {
        let rows = problem.document(id).rows;
        let last = (rows - 1) / TILE_ROWS * TILE_ROWS;
        let tiles = match cuts {
            Cuts::Tiles => {
                [0..rows.min(TILE_ROWS), last.saturating_sub(TILE_ROWS)..last, last..rows]
            }
            Cuts::RankEdges => [0..1, rows / 2..rows / 2 + 1, rows - 1..rows],
        };
        tiles.iter().map(|tile| problem.cost(id, &heads, tile)).max().unwrap_or(0)
    };
    let dearest = problem.layout.longest().iter().map(|id| dearest(*id)).max().unwrap_or(0);
    let active = problem.slots.iter().filter(|it| !it.is_standby());
    active.map(|it| it.finish(dearest)).min().unwrap_or(0)
}
