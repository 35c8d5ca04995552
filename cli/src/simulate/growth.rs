//! Planning time as slots and documents grow: measured, not simulated.
//!
//! In: a length set, the most slots. Out: a row for each power of two from 64 slots on: one slot in place at each
//! rank, 512K tokens a rank, eight lanes; the plan is checked as part of its making.

use std::time::Instant;

use cadre_planner::{Pulls, plan};
use cadre_simulator::{Cluster, Lay, LengthSet, Model, Sampler, SimulationError};
use serde::Serialize;

use super::tables::text;

/// Tokens of a rank, and the longest document.
const TOKENS: u32 = 524_288;
/// Ranks that one draw fills.
const RANKS_OF_A_DRAW: u16 = 64;

/// One size.
#[derive(Clone, Debug, Serialize)]
pub(super) struct GrowthRow {
    pub(super) slots: u16,
    pub(super) documents: usize,
    pub(super) tasks: usize,
    /// The plan and its check.
    pub(super) plan_seconds: f64,
    /// Transfer lists of all slots.
    pub(super) lists_seconds: f64,
    /// Finish above the bound, in millionths.
    pub(super) gap_ppm: u64,
}

pub(super) fn rows(
    set: LengthSet,
    lengths: &[u64],
    seed: u64,
    most: u16,
) -> Result<Vec<GrowthRow>, SimulationError> {
    let sizes = std::iter::successors(Some(64_u16), |it| it.checked_mul(2));
    let sizes = sizes.take_while(|it| *it <= most);
    sizes.map(|slots| row(set, lengths, seed, slots)).collect()
}

fn row(
    set: LengthSet,
    lengths: &[u64],
    seed: u64,
    slots: u16,
) -> Result<GrowthRow, SimulationError> {
    let mut documents = Vec::new();
    for draw in 0..u64::from(slots / RANKS_OF_A_DRAW) {
        let mut sampler = Sampler::new(set, lengths, TOKENS, seed + draw)?;
        documents.extend(sampler.stretches(RANKS_OF_A_DRAW.into(), TOKENS)?.concat());
    }
    let problem = Cluster::in_place(Model::B8, slots.into()).problem(&documents, Lay::EndToEnd)?;
    let start = Instant::now();
    let plan = plan(&problem)?;
    let plan_seconds = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let lists = Pulls::of(&problem, &plan);
    let lists_seconds = start.elapsed().as_secs_f64();
    drop(lists);
    Ok(GrowthRow {
        slots,
        documents: documents.len(),
        tasks: plan.tasks().len(),
        plan_seconds,
        lists_seconds,
        gap_ppm: plan.bounds().gap_ppm,
    })
}

pub(super) fn table(rows: &[GrowthRow]) -> String {
    let head = ["slots", "documents", "tasks", "plan and check (ms)", "lists (ms)", "above bound"];
    let rows = rows.iter().map(|it| {
        vec![
            it.slots.to_string(),
            it.documents.to_string(),
            it.tasks.to_string(),
            format!("{:.1}", 1e3 * it.plan_seconds),
            format!("{:.1}", 1e3 * it.lists_seconds),
            format!("{:.3} %", it.gap_ppm as f64 / 1e4),
        ]
    });
    text(&head, rows)
}
