//! What this project gains over the published planner, one cause after the other.
//!
//! In: a setting, a length set, a seed, a number of batches. Out: an [`OursRow`]. Each time changes one thing and keeps
//! what came before:
//!
//! 1. `greedy`: the published planner, ping-pong, `FlashAttention` 2;
//! 2. `kernel`: the same plans on a Hopper kernel;
//! 3. `balance`: our distribution of work, still with the greedy plan's transfers;
//! 4. `wire`: our transfers too, that is our plans;
//! 5. `overlap`: local work first inside every call, beside ping-pong.
//!
//! The packing baseline is given with both kernels. Nothing here is measured: it is the model of
//! the event engine with published speeds.

use serde::Serialize;

use crate::SimulationError;
use crate::machine::{Kernel, Machine, Model, Nanos};
use crate::phase::Phase;
use crate::published::{TOLERANCE, draw};
use crate::sampler::LengthSet;
use crate::step::Overlap;
use crate::trial::{Planner, Setting, best_packing};

/// Mean times of a step in one setting.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OursRow {
    /// Model, documents, machine.
    pub setting: Setting,
    /// Best packing on `FlashAttention` 2.
    pub packed_nanos: Nanos,
    /// Best packing on a Hopper kernel.
    pub packed_hopper_nanos: Nanos,
    /// See the module: `greedy`, `kernel`, `balance`, `wire`, `overlap`.
    pub stages: [Nanos; 5],
    /// Ours in one stream, in one call, and by ping-pong alone.
    pub ours_overlaps: [Nanos; 3],
    /// The published planner on the Hopper kernel in one stream, in one call, by ping-pong, and by both.
    pub greedy_overlaps: [Nanos; 4],
    /// The published planner on the Hopper kernel by ping-pong, with the bytes that its own system moves backward.
    pub greedy_own_nanos: Nanos,
    /// Best packing on a Hopper kernel with local work first in every call.
    pub packed_in_call_nanos: Nanos,
    /// Step without any transfer and with perfect balance: no plan is faster.
    pub ideal_nanos: Nanos,
    /// What the busiest link of the step needs at least, whatever plan is as even, where rows come from their ranks.
    pub link_bound_nanos: Nanos,
    /// Most over mean of attention, in millionths: greedy, ours.
    pub imbalance_ppm: [u64; 2],
    /// Bytes of Q, K and V of a layer and nano-batch: greedy, ours.
    pub input_bytes: [u64; 2],
    /// Bytes of the busiest sender: greedy, ours.
    pub sender_bytes: [u64; 2],
}

impl OursRow {
    /// The share of our step that no plan can do without: what work or the busiest link needs at least.
    pub fn reached(&self) -> f64 {
        self.ideal_nanos.max(self.link_bound_nanos) as f64 / self.stages[4].max(1) as f64
    }
}

/// Names of [`OursRow::stages`].
pub const STAGES: [&str; 5] = ["greedy", "kernel", "balance", "wire", "overlap"];

/// Settings of 8B without pipeline, 128K tokens a node, on `nodes` nodes each.
pub fn settings(nodes: &[u16]) -> Vec<Setting> {
    let lengths = [128, 256, 512].map(|it: u32| it * 1024);
    let setting = |(ranks, longest): (u16, u32)| Setting {
        model: Model::B8,
        longest,
        batch: (u64::from(ranks) * 131_072 / u64::from(longest)) as usize,
        ranks,
        stages: 1,
        micro: 1,
    };
    nodes.iter().flat_map(|ranks| lengths.map(|it| (*ranks, it))).map(setting).collect()
}

/// Simulates one row over `batches` batches.
///
/// # Errors
///
/// The sampler's or the planner's, and no packing that holds all documents.
pub fn row(
    setting: Setting,
    set: LengthSet,
    lengths: &[u64],
    seed: u64,
    batches: usize,
) -> Result<OursRow, SimulationError> {
    let (flash, hopper) = (Machine::h200(Kernel::FLASH_2), Machine::h200(Kernel::HOPPER));
    let mut row = OursRow {
        setting,
        packed_nanos: 0,
        packed_hopper_nanos: 0,
        stages: [0; 5],
        ours_overlaps: [0; 3],
        greedy_overlaps: [0; 4],
        greedy_own_nanos: 0,
        packed_in_call_nanos: 0,
        ideal_nanos: 0,
        link_bound_nanos: 0,
        imbalance_ppm: [0; 2],
        input_bytes: [0; 2],
        sender_bytes: [0; 2],
    };
    let (mut packed, mut packed_hopper, mut in_call) = (Vec::new(), Vec::new(), Vec::new());
    let count = batches.max(1) as u64;
    for batch in 0..batches as u64 {
        let sequences = draw(&setting, set, lengths, seed + batch)?;
        packed.push(setting.packings(&flash, &sequences));
        packed_hopper.push(setting.packings(&hopper, &sequences));
        in_call.push(setting.packings_with(&hopper, Overlap::InCall, &sequences));
        let greedy = setting.phases(Planner::Greedy(TOLERANCE), &sequences)?;
        let ours = setting.phases(Planner::Ours, &sequences)?;
        let balanced = mixed(&greedy, &ours);
        let times = [
            (flash, Overlap::PingPong, &greedy),
            (hopper, Overlap::PingPong, &greedy),
            (hopper, Overlap::PingPong, &balanced),
            (hopper, Overlap::PingPong, &ours),
            (hopper, Overlap::Both, &ours),
        ];
        for (sum, (machine, overlap, phases)) in row.stages.iter_mut().zip(times) {
            *sum += setting.pool(machine, overlap, phases) / count;
        }
        let overlaps = [Overlap::OneStream, Overlap::InCall, Overlap::PingPong];
        for (sum, overlap) in row.ours_overlaps.iter_mut().zip(overlaps) {
            *sum += setting.pool(hopper, overlap, &ours) / count;
        }
        let overlaps = [Overlap::OneStream, Overlap::InCall, Overlap::PingPong, Overlap::Both];
        for (sum, overlap) in row.greedy_overlaps.iter_mut().zip(overlaps) {
            *sum += setting.pool(hopper, overlap, &greedy) / count;
        }
        let own: Vec<Vec<Phase>> = greedy
            .iter()
            .map(|nanos| nanos.iter().cloned().map(Phase::as_published).collect())
            .collect();
        row.greedy_own_nanos += setting.pool(hopper, Overlap::PingPong, &own) / count;
        let layers = u64::from(setting.model.layers / u32::from(setting.stages));
        let links: Nanos = ours.iter().flatten().map(|it| it.least_link).sum();
        row.link_bound_nanos += layers * links / count;
        row.ideal_nanos += setting.pool(hopper, Overlap::Both, &ideal(&ours)) / count;
        for (at, phases) in [&greedy, &ours].into_iter().enumerate() {
            let all = || phases.iter().flatten();
            let each = count * all().count().max(1) as u64;
            row.imbalance_ppm[at] += all().map(Phase::imbalance_ppm).sum::<u64>() / each;
            row.input_bytes[at] += all().map(|it| it.total().inputs).sum::<u64>() / each;
            row.sender_bytes[at] += all().map(Phase::busiest_sender).sum::<u64>() / each;
        }
    }
    let best = |batches| best_packing(batches).ok_or(SimulationError::NoPacking);
    row.packed_nanos = best(&packed)?.1 / count;
    row.packed_hopper_nanos = best(&packed_hopper)?.1 / count;
    row.packed_in_call_nanos = best(&in_call)?.1 / count;
    Ok(row)
}

/// Work of the second, transfers of the first.
fn mixed(wires: &[Vec<Phase>], work: &[Vec<Phase>]) -> Vec<Vec<Phase>> {
    let both = wires.iter().zip(work);
    both.map(|(wires, work)| {
        let nanos = wires.iter().zip(work);
        nanos.map(|(wires, work)| Phase { wires: wires.wires.clone(), ..work.clone() }).collect()
    })
    .collect()
}

/// A phase with the same work, spread evenly, and no transfer.
fn ideal(phases: &[Vec<Phase>]) -> Vec<Vec<Phase>> {
    let even = |phase: &Phase| {
        let places = phase.cost.len().max(1) as u64;
        let cost = vec![phase.cost.iter().sum::<u64>() / places; phase.cost.len()];
        Phase { tokens: phase.tokens.clone(), local: cost.clone(), cost, ..Phase::default() }
    };
    phases.iter().map(|nanos| nanos.iter().map(even).collect()).collect()
}
