//! Balance, bytes and planning time on the length sets of the published planner.
//!
//! The files lie beside a checkout, not in it, or in the folder in `CADRE_WORKLOADS`; without them the tests say so and pass.

#![allow(clippy::disallowed_methods, clippy::disallowed_types)] // a test may read files and clocks

use std::time::Instant;

use cadre_planner::{
    Costs, Document, Heads, Layout, Links, Mask, Plan, Problem, RankId, Slot, SlotId, Tolerance,
    Traffic,
};

use crate::problems::PLENTY;
use crate::recorded::{Workload, records, workloads};

#[test]
fn real_workloads_are_balanced_within_two_in_a_thousand() {
    let mut worst = Vec::new();
    for workload in workloads() {
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

/// Shares of what `DistCA` moves at its tolerance of 0.05: bytes of Q, K and V, and of the busiest sender, with 8 lanes and with
/// one.
const REACHED: [(&str, [[f64; 2]; 2]); 16] = [
    ("pretrain_16x128K_doc512K_s42", [[0.820, 0.749], [0.411, 0.347]]),
    ("pretrain_32x128K_doc512K_s42", [[0.760, 0.703], [0.501, 0.408]]),
    ("pretrain_512x512K_s42", [[0.905, 0.987], [0.571, 0.589]]),
    ("pretrain_64x128K_doc512K_s42", [[0.740, 0.588], [0.373, 0.283]]),
    ("pretrain_64x128K_s42", [[0.864, 0.902], [0.550, 0.491]]),
    ("pretrain_64x512K_s42", [[0.926, 0.977], [0.590, 0.621]]),
    ("pretrain_8x128K_doc512K_s42", [[0.945, 0.948], [0.439, 0.383]]),
    ("pretrain_8x128K_s42", [[1.024, 0.945], [0.624, 0.703]]),
    ("prolong_16x128K_doc512K_s42", [[0.830, 0.628], [0.418, 0.295]]),
    ("prolong_32x128K_doc512K_s42", [[0.849, 0.830], [0.283, 0.208]]),
    ("prolong_512x512K_s42", [[0.869, 0.581], [0.479, 0.293]]),
    ("prolong_64x128K_doc512K_s42", [[0.814, 0.698], [0.292, 0.185]]),
    ("prolong_64x128K_s42", [[0.869, 0.726], [0.460, 0.361]]),
    ("prolong_64x512K_s42", [[0.833, 0.693], [0.471, 0.347]]),
    ("prolong_8x128K_doc512K_s42", [[0.823, 0.679], [0.475, 0.340]]),
    ("prolong_8x128K_s42", [[0.776, 0.656], [0.413, 0.356]]),
];
/// What a share may be more, to allow for its rounding.
const ROUNDING: f64 = 0.001;

#[test]
fn real_workloads_move_no_more_than_was_reached() {
    let workloads = workloads();
    if workloads.is_empty() {
        return;
    }
    let records = records();
    let mut worse = Vec::new();
    for (name, reached) in REACHED {
        let workload = workloads.iter().find(|it| it.name == name).unwrap();
        let record = &records[name];
        for (lanes, most) in [8, 1].into_iter().zip(reached) {
            let layout = Layout::head_tail(documents(workload), workload.tokens_per_rank).unwrap();
            let problem = problem(workload, layout, lanes, Costs::pairs_only(), true);
            let flow = Traffic::of(&problem, &cadre_planner::plan(&problem).unwrap()).forward;
            let sender = flow.places.iter().map(|it| it.inputs_sent).max().unwrap();
            let shares = [
                (flow.queries + flow.keys) as f64 / (record.q_bytes + record.kv_bytes) as f64,
                sender as f64 / record.max_send_bytes as f64,
            ];
            println!("{name:30} {lanes} lanes: bytes {:.4}, sender {:.4}", shares[0], shares[1]);
            if shares.iter().zip(most).any(|(share, most)| *share > most + ROUNDING) {
                worse.push((name, lanes, shares, most));
            }
        }
    }
    assert!(worse.is_empty(), "{worse:#?}");
}

fn documents(workload: &Workload) -> Vec<Document> {
    let lengths = workload.ranks.iter().flatten();
    lengths.map(|&rows| Document { rows, mask: Mask::Causal }).collect()
}

/// A workload with a slot for each rank.
fn problem(
    workload: &Workload,
    layout: Layout,
    lanes: u16,
    costs: Costs,
    in_place: bool,
) -> Problem {
    let slot = |rank| Slot {
        weight: 100,
        head_start: 0,
        home: Some(RankId(rank)).filter(|_| in_place),
        memory: PLENTY,
    };
    Problem {
        layout,
        heads: Heads { query: 32, kv: 8, dim: 128 },
        element_bytes: 2,
        lanes,
        slots: (0..workload.num_ranks).map(slot).collect(),
        costs,
        links: Links::equal(),
        tolerance: Tolerance::USUAL,
    }
}

/// Plans a workload and returns the most of the loads over their mean.
fn plan_and_print(workload: &Workload, costs: Costs, in_place: bool) -> f64 {
    let layout = Layout::end_to_end(documents(workload), workload.tokens_per_rank).unwrap();
    let problem = problem(workload, layout, 8, costs, in_place);
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
        let home = problem.slots[slot.0 as usize].home;
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
