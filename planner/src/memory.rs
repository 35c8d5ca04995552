//! How many bytes a bundle and a slot need.
//!
//! In: a plan. Out: bytes of inputs and results, what a server keeps in its arena. Scratch of the
//! kernels (accumulators of a tile) and the program itself are not in it.
//!
//! With `e` bytes an element, `d` the head dim, `h` KV heads and `H` query heads of the bundle, `r`
//! query rows and `k` key rows:
//!
//! * forward: K, V `2·e·h·d·k`, Q and O `2·e·H·d·r`, LSE `4·H·r`;
//! * backward: K, V `2·e·h·d·k`, dK, dV `8·h·d·k` (f32), Q, dO and dQ `3·e·H·d·r`, LSE and Δ `8·H·r`.
//!
//! A slot holds two phases of all its bundles, and a **reserve** for the largest bundle of the
//! plan, since every bundle may move to it.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::plan::Bundle;
use crate::{BundleId, Error, Plan, Problem, SlotId};

/// Bytes of one bundle's inputs and results.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct BundleMemory {
    /// In a forward phase.
    pub forward: u64,
    /// In a backward phase.
    pub backward: u64,
}

impl BundleMemory {
    /// The larger of both.
    pub fn most(self) -> u64 {
        self.forward.max(self.backward)
    }
}

/// Bytes that a plan asks of a slot.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct SlotMemory {
    /// All bundles of the slot in the larger of a forward and a backward phase.
    pub phase: u64,
    /// The largest bundle of the plan, whichever slot has it.
    pub reserve: u64,
}

impl SlotMemory {
    /// Two phases and the reserve.
    pub fn needed(self) -> u64 {
        self.phase.saturating_mul(2).saturating_add(self.reserve)
    }
}

/// Bytes of a bundle; zero for one that does not exist.
pub fn memory_of(problem: &Problem, plan: &Plan, bundle: BundleId) -> BundleMemory {
    let rows = plan.tasks_of(bundle).iter().map(|it| u64::from(it.rows.end - it.rows.start)).sum();
    plan.bundle(bundle).map_or(BundleMemory::default(), |it| of_bundle(problem, it, rows))
}

fn of_bundle(problem: &Problem, Bundle { kv_heads, keys, .. }: &Bundle, rows: u64) -> BundleMemory {
    bytes(problem, kv_heads, rows, keys.len() as u64)
}

/// Bytes that the plan asks of a slot. Standby slots have no phase, but a reserve.
pub fn memory_of_slot(problem: &Problem, plan: &Plan, slot: SlotId) -> SlotMemory {
    let all = (0..plan.bundles().len() as u32).map(BundleId);
    let reserve = all.map(|it| memory_of(problem, plan, it).most()).max().unwrap_or(0);
    SlotMemory { phase: phase(problem, plan, slot), reserve }
}

/// As [`memory_of_slot`], for all slots.
pub fn memory_of_slots(problem: &Problem, plan: &Plan) -> Vec<SlotMemory> {
    let Memory { phases, reserve } = Memory::of(problem, plan);
    phases.into_iter().map(|phase| SlotMemory { phase, reserve }).collect()
}

/// What a plan asks of all slots.
pub(crate) struct Memory {
    /// The larger of a forward and a backward phase of each slot.
    phases: Vec<u64>,
    /// The largest bundle.
    reserve: u64,
}

impl Memory {
    /// Of a plan whose bundles name slots and tasks that exist.
    pub(crate) fn of(problem: &Problem, plan: &Plan) -> Self {
        let mut phases = vec![BundleMemory::default(); problem.slots.len()];
        // What a row and a key need under each number of KV heads.
        let each = |rows, keys| {
            (0..=problem.heads.kv).map(move |heads| bytes(problem, &(0..heads), rows, keys))
        };
        let (row, key): (Vec<_>, Vec<_>) = (each(1, 0).collect(), each(0, 1).collect());
        let mut reserve = 0;
        for it in plan.bundles() {
            let tasks = &plan.tasks()[it.tasks.start as usize..it.tasks.end as usize];
            let rows: u64 = tasks.iter().map(|it| u64::from(it.rows.end - it.rows.start)).sum();
            let (heads, keys) = (it.kv_heads.len(), it.keys.len() as u64);
            let of =
                |one: fn(&BundleMemory) -> u64| rows * one(&row[heads]) + keys * one(&key[heads]);
            let (forward, backward) = (of(|it| it.forward), of(|it| it.backward));
            reserve = reserve.max(forward.max(backward));
            let phase = &mut phases[it.slot.0 as usize];
            phase.forward += forward;
            phase.backward += backward;
        }
        Self { phases: phases.into_iter().map(BundleMemory::most).collect(), reserve }
    }

    /// Bytes of the slot that needs most. Slots without work do not count.
    pub(crate) fn most_needed(&self) -> u64 {
        let phase = self.phases.iter().copied().max().unwrap_or(0);
        SlotMemory { phase, reserve: self.reserve }.needed()
    }

    /// See [`check_beside`].
    pub(crate) fn check(&self, problem: &Problem, beside: u64) -> Result<(), Error> {
        let reserve = self.reserve.max(beside);
        for ((slot, it), &phase) in (0..).map(SlotId).zip(&problem.slots).zip(&self.phases) {
            let needed = 2 * u128::from(phase) + u128::from(reserve);
            if phase > 0 && needed > u128::from(it.memory) {
                let needed = u64::try_from(needed).unwrap_or(u64::MAX);
                return Err(Error::SlotFull { slot, needed, memory: it.memory });
            }
        }
        Ok(())
    }
}

/// Bytes of the largest bundle of a plan.
pub fn largest_bundle(problem: &Problem, plan: &Plan) -> u64 {
    Memory::of(problem, plan).reserve
}

/// Refuses a plan that a slot cannot hold beside a bundle of `reserve` bytes of another plan; a slot without work is not asked.
///
/// # Errors
///
/// [`Error::SlotFull`], of the first such slot.
pub fn check_beside(problem: &Problem, plan: &Plan, reserve: u64) -> Result<(), Error> {
    Memory::of(problem, plan).check(problem, reserve)
}

pub(crate) fn phase(problem: &Problem, plan: &Plan, slot: SlotId) -> u64 {
    let bundles = plan.bundles_of(slot).map(|(bundle, _)| memory_of(problem, plan, bundle));
    let (forward, backward) = bundles
        .fold((0, 0), |(forward, backward), it| (forward + it.forward, backward + it.backward));
    forward.max(backward)
}

/// Bytes of `rows` query rows and `keys` key rows.
pub(crate) fn bytes(
    problem: &Problem,
    kv_heads: &Range<u16>,
    rows: u64,
    keys: u64,
) -> BundleMemory {
    let element = u64::from(problem.element_bytes);
    let dim = u64::from(problem.heads.dim);
    let kv_heads_count = kv_heads.len() as u64;
    let query_heads = problem.heads.query_count(kv_heads);
    let key = 2 * element * kv_heads_count * dim;
    let key_part = 8 * kv_heads_count * dim;
    let query = element * query_heads * dim;
    let statistic = 4 * query_heads;
    BundleMemory {
        forward: keys * key + rows * (2 * query + statistic),
        backward: keys * (key + key_part) + rows * (3 * query + 2 * statistic),
    }
}
