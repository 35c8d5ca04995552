//! Balance, bytes and planning time on the length sets of the published planner.
//!
//! The files lie beside a checkout, not in it; without them the test says so and passes.

#![allow(clippy::disallowed_methods, clippy::disallowed_types)] // a test may read files and clocks

use std::fs;
use std::path::Path;
use std::time::Instant;

use cadre_planner::{
    Costs, Document, Heads, Layout, Links, Mask, Plan, Problem, RankId, Slot, SlotId,
};
use serde::Deserialize;

use crate::problems::PLENTY;

#[derive(Deserialize)]
struct Workload {
    name: String,
    tokens_per_rank: u32,
    num_ranks: u16,
    ranks: Vec<Vec<u32>>,
}

#[test]
fn real_workloads_are_balanced_within_two_in_a_thousand() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/planner/workloads");
    let Ok(files) = fs::read_dir(&folder) else {
        println!("SKIPPED: no workloads at {}", folder.display());
        return;
    };
    let mut files: Vec<_> = files.map(|it| it.unwrap().path()).collect();
    files.sort();
    let mut worst = Vec::new();
    for file in files {
        let workload: Workload = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        for costs in [Costs::pairs_only(), Costs::default()] {
            for home in [true, false] {
                let ratio = plan_and_print(&workload, costs, home);
                if ratio > 1.002 {
                    worst.push((workload.name.clone(), costs.task > 0, home, ratio));
                }
            }
        }
    }
    assert!(worst.is_empty(), "max/mean above 1.002: {worst:?}");
}

/// Plans a workload and returns the most of the loads over their mean.
fn plan_and_print(workload: &Workload, costs: Costs, in_place: bool) -> f64 {
    let lengths = workload.ranks.iter().flatten();
    let documents = lengths.map(|&rows| Document { rows, mask: Mask::Causal }).collect();
    let slot = |rank| Slot {
        weight: 100,
        head_start: 0,
        home: Some(RankId(rank)).filter(|_| in_place),
        memory: PLENTY,
    };
    let problem = Problem {
        layout: Layout::end_to_end(documents, workload.tokens_per_rank).unwrap(),
        heads: Heads { query: 32, kv: 8, dim: 128 },
        element_bytes: 2,
        lanes: 8,
        slots: (0..workload.num_ranks).map(slot).collect(),
        costs,
        links: Links::equal(),
    };
    let start = Instant::now();
    let plan = cadre_planner::plan(&problem).unwrap();
    let took = start.elapsed();
    let loads: Vec<u64> =
        (0..workload.num_ranks).map(|slot| plan.load(&problem, SlotId(slot))).collect();
    let most = loads.iter().copied().max().unwrap();
    let mean = loads.iter().sum::<u64>() as f64 / loads.len() as f64;
    let ratio = most as f64 / mean;
    println!(
        "{:30} {:9} overheads {}: max/mean {ratio:.5}, gap {:5} ppm, {:6} bundles, {:6} tasks, \
         Q+KV {:8.2} GB, {took:.1?} with check",
        workload.name,
        if in_place { "in place" } else { "dedicated" },
        costs.task > 0,
        plan.bounds().gap_ppm,
        plan.bundles().len(),
        plan.tasks().len(),
        pulled(&problem, &plan) as f64 / 1e9,
    );
    ratio
}

/// Bytes of queries, keys and values that slots pull from ranks other than their own, forward.
fn pulled(problem: &Problem, plan: &Plan) -> u64 {
    let away = |slot: SlotId, document, rows| -> u64 {
        let home = problem.slots[usize::from(slot.0)].home;
        let pieces = problem.layout.locate(document, rows);
        pieces.filter(|it| Some(it.rank) != home).map(|it| it.rows.len() as u64).sum()
    };
    let slot_of = |task: &cadre_planner::Task| plan.bundle(task.bundle).unwrap().slot;
    let queries: u64 =
        plan.tasks().iter().map(|it| away(slot_of(it), it.document, it.rows.clone())).sum();
    let keys: u64 =
        plan.bundles().iter().map(|it| away(it.slot, it.document, it.keys.clone())).sum();
    queries * 32 * 128 * 2 + keys * 2 * 8 * 128 * 2
}
