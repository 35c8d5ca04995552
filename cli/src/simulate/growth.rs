//! Planning time as slots and documents grow: measured, not simulated.
//!
//! In: a length set, the most slots. Out: a row for each power of two from 64 slots on: one slot in place at each
//! rank, 512K tokens a rank, eight lanes; the plan is checked as part of its making.

use std::time::Instant;

use cadre_planner::{Problem, Pulls, RankSum, Regions, SLOTS_OF_A_REGION, SlotId, plan};
use cadre_simulator::{Cluster, Lay, LengthSet, Model, Sampler, SimulationError};
use cadre_step::packing::Packing;
use serde::Serialize;

use super::tables::text;
use crate::plan::size::fillers;

/// Tokens of a rank, and the longest document.
const TOKENS_OF_A_RANK: u32 = 524_288;
/// Ranks whose documents one draw fills.
const RANKS_OF_A_DRAW: u32 = 64;

/// One size.
#[derive(Clone, Debug, Serialize)]
pub(super) struct GrowthRow {
    pub(super) slots: u32,
    pub(super) documents: usize,
    pub(super) tasks: usize,
    /// The plan and its check.
    pub(super) plan_seconds: f64,
    /// Transfer lists of all slots.
    pub(super) lists_seconds: f64,
    /// What one rank needs to find its own part: sums of all ranks to regions, and the plans of its own.
    pub(super) own_seconds: f64,
    /// Documents that it has to know for that, beside the sums.
    pub(super) own_documents: usize,
    /// Bytes of the sums of all ranks.
    pub(super) sums_bytes: usize,
    /// Bytes of a header: its documents, where their rows are, its slots and who fills them; all else is below a kilobyte.
    pub(super) header_bytes: usize,
    /// Finish above the bound, in millionths.
    pub(super) gap_ppm: u64,
}

pub(super) fn rows(
    set: LengthSet,
    lengths: &[u64],
    seed: u64,
    most: u32,
) -> Result<Vec<GrowthRow>, SimulationError> {
    let sizes = std::iter::successors(Some(64_u32), |it| it.checked_mul(2));
    let sizes = sizes.take_while(|it| *it <= most);
    sizes.map(|slots| row(set, lengths, seed, slots)).collect()
}

fn row(
    set: LengthSet,
    lengths: &[u64],
    seed: u64,
    slots: u32,
) -> Result<GrowthRow, SimulationError> {
    let mut documents = Vec::new();
    for draw in 0..u64::from(slots / RANKS_OF_A_DRAW) {
        let mut sampler = Sampler::new(set, lengths, TOKENS_OF_A_RANK, seed + draw)?;
        documents.extend(sampler.stretches(RANKS_OF_A_DRAW as usize, TOKENS_OF_A_RANK)?.concat());
    }
    let problem = Cluster::in_place(Model::B8, slots).problem(&documents, Lay::EndToEnd)?;
    let start = Instant::now();
    let plan = plan(&problem)?;
    let plan_seconds = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let lists = Pulls::of(&problem, &plan);
    let lists_seconds = start.elapsed().as_secs_f64();
    drop(lists);
    let sums = RankSum::of(&problem);
    let start = Instant::now();
    let regions = Regions::of(&problem.slots, &sums, SLOTS_OF_A_REGION);
    let part = regions.part(&problem, SlotId(slots / 2))?;
    let own_seconds = start.elapsed().as_secs_f64();
    Ok(GrowthRow {
        slots,
        documents: documents.len(),
        tasks: plan.tasks().len(),
        plan_seconds,
        lists_seconds,
        own_seconds,
        own_documents: part.documents,
        sums_bytes: sums.len() * RankSum::BYTES,
        header_bytes: header_bytes(&problem)?,
        gap_ppm: plan.bounds().gap_ppm,
    })
}

/// Size of what grows with a job in the header of a step with this nano-batch.
fn header_bytes(problem: &Problem) -> Result<usize, SimulationError> {
    let lengths: Vec<u32> = problem.layout.documents().iter().map(|it| it.rows).collect();
    let packing = Packing::new(&lengths, problem.layout.ranks().to_vec())?;
    let fillers = fillers(&problem.slots);
    Ok(postcard::to_stdvec(&(packing, &problem.slots, fillers)).map_or(0, |it| it.len()))
}

pub(super) fn table(rows: &[GrowthRow]) -> String {
    let head = [
        "slots",
        "documents",
        "tasks",
        "plan and check (ms)",
        "lists (ms)",
        "one rank's part (ms)",
        "its documents",
        "sums (KB)",
        "header (KB)",
        "above bound",
    ];
    let rows = rows.iter().map(|it| {
        vec![
            it.slots.to_string(),
            it.documents.to_string(),
            it.tasks.to_string(),
            format!("{:.1}", 1e3 * it.plan_seconds),
            format!("{:.1}", 1e3 * it.lists_seconds),
            format!("{:.1}", 1e3 * it.own_seconds),
            it.own_documents.to_string(),
            format!("{:.1}", it.sums_bytes as f64 / 1e3),
            format!("{:.1}", it.header_bytes as f64 / 1e3),
            format!("{:.3} %", it.gap_ppm as f64 / 1e4),
        ]
    });
    text(&head, rows)
}
