//! Plans of the published workloads, beside what the published planner (`DistCA`) does on them.
//!
//! Prints a line a workload and number of lanes and writes `target/bench/planner.json`: balance, Q+KV bytes, bytes of
//! the busiest sender, seconds of one core for plan, check and transfer lists. The peer's numbers were recorded with its
//! unmodified code (tolerance 0.05). Files come from `../shared/data/planner`, or the folder in
//! `CADRE_WORKLOADS`; without them the bench says so and writes an empty list. Any argument narrows the
//! workloads to those whose name contains it.
//!
//! Documents that span ranks are laid out head and tail, as the peer does. Bytes are bf16, one layer,
//! forward, between different ranks only, all lanes of a slot together. Then come large pools, dedicated beside in place, and
//! plans of a few tiles (`small`), which need no files.

#![allow(clippy::disallowed_methods, clippy::disallowed_types)] // a bench reads files and clocks

mod pools;
#[path = "../tests/planner/recorded.rs"]
mod recorded;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use cadre_planner::{
    Costs, Document, Layout, Links, Mask, Plan, Problem, Pulls, RankId, Slot, SlotId, Tolerance,
    Traffic, plan,
};
use serde_json::{Value, json};

use crate::pools::{HEADS, Place, pool};
use recorded::{Record, Workload, records, workloads};

/// Runs of a workload, of which the median counts, and of a plan of few tiles, of which the least does.
const TURNS: usize = 15;
/// Runs of a large pool; the least counts.
const POOL_TURNS: usize = 3;
/// Seconds that a plan of a few tiles may take.
const MOST_SMALL: f64 = 0.025;

fn main() {
    let filter = std::env::args().skip(1).find(|it| !it.starts_with('-')).unwrap_or_default();
    let mut lines = Vec::new();
    let workloads = workloads();
    if !workloads.is_empty() {
        let records = records();
        for lanes in [8, 1] {
            println!("{lanes} lanes: ours / ratio to DistCA at tolerance 0.05, above 1 is better");
            let mut logs = Vec::new();
            for workload in workloads.iter().filter(|it| it.name.contains(&filter)) {
                logs.push(compare(workload, &records, lanes, &mut lines));
            }
            let mean = |of: usize| {
                let sum: f64 = logs.iter().map(|it: &[f64; 2]| it[of].ln()).sum();
                (sum / logs.len().max(1) as f64).exp()
            };
            println!("geometric mean: bytes {:.3}, busiest sender {:.3}", mean(0), mean(1));
        }
    }
    if "pools".contains(&filter) {
        pools(&mut lines);
    }
    if "small".contains(&filter) {
        small(&mut lines);
    }
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"), PathBuf::from);
    let file = target.join("bench/planner.json");
    let text = serde_json::to_string_pretty(&lines).expect("numbers and names are JSON");
    fs::create_dir_all(target.join("bench"))
        .and_then(|()| fs::write(&file, text + "\n"))
        .unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
}

/// How long plans of large pools take, dedicated beside in place: lengths of a fixed heavy tail, no recorded files.
fn pools(lines: &mut Vec<Value>) {
    for (slots, documents) in [(512_u32, 65_536_usize), (2_048, 262_144), (8_192, 1_000_000)] {
        for lanes in [8, 1] {
            let seconds = [Place::Dedicated, Place::InPlace].map(|place| {
                let problem = pool(slots, documents, lanes, place, 12_345);
                let mut seconds: Vec<f64> = (0..POOL_TURNS)
                    .map(|_| {
                        let start = Instant::now();
                        std::hint::black_box(plan(&problem).expect("a pool can be planned"));
                        start.elapsed().as_secs_f64()
                    })
                    .collect();
                seconds.sort_by(f64::total_cmp);
                seconds[0]
            });
            let [dedicated, in_place] = seconds;
            println!(
                "{slots} slots, {documents} documents, {lanes} lanes: dedicated {dedicated:.3} s, in place {in_place:.3} s"
            );
            lines.push(json!({"case": format!("{slots} slots, {documents} documents, {lanes} lanes: planning"),
                "ours": dedicated, "peer": in_place, "peer_name": "the same slots in place", "unit": "s",
                "ratio": in_place / dedicated}));
        }
    }
}

/// How long plans of a few tiles take, which are searched and moved about tile by tile; no recorded files.
fn small(lines: &mut Vec<Value>) {
    for tiles in [12, 13, 16, 20, 24] {
        for slots in [2, 4, 8] {
            for lanes in [8, 1] {
                let seconds = [Place::Dedicated, Place::InPlace].map(|place| {
                    let problem = few_tiles(tiles, slots, lanes, place);
                    let run = |_| {
                        let start = Instant::now();
                        std::hint::black_box(plan(&problem).expect("tiles can be planned"));
                        start.elapsed().as_secs_f64()
                    };
                    (0..TURNS).map(run).fold(f64::INFINITY, f64::min)
                });
                let most = seconds[0].max(seconds[1]);
                let case = format!("{tiles} tiles, {slots} slots, {lanes} lanes: planning");
                println!(
                    "{case}: dedicated {:.2} ms, in place {:.2} ms",
                    1e3 * seconds[0],
                    1e3 * seconds[1]
                );
                lines.push(
                    json!({"case": case, "ours": most, "peer": MOST_SMALL, "peer_name": "the bar",
                    "unit": "s", "ratio": MOST_SMALL / most}),
                );
            }
        }
    }
}

/// Four documents of so many tiles together, the last tile of each in part, over as many ranks as there are slots.
fn few_tiles(tiles: u32, slots: u32, lanes: u16, place: Place) -> Problem {
    let parts = [tiles / 2, tiles / 4, tiles / 8];
    let rest = tiles - parts.iter().sum::<u32>();
    let documents = parts.into_iter().chain([rest]).zip([31, 100, 64, 7]);
    let documents: Vec<Document> = documents
        .map(|(tiles, less)| Document { rows: 128 * tiles - less, mask: Mask::Causal })
        .collect();
    let rows: u32 = documents.iter().map(|it| it.rows).sum();
    let layout = Layout::end_to_end(documents, rows.div_ceil(slots)).expect("documents have rows");
    let ranks = layout.ranks().len() as u32;
    let home = |slot: u32| (place == Place::InPlace && slot < ranks).then_some(RankId(slot));
    let slot = |it| Slot { weight: 100, head_start: 0, home: home(it), memory: 1 << 50 };
    Problem {
        layout,
        slots: (0..slots).map(slot).collect(),
        ..pool(1, 1, lanes, Place::Dedicated, 1)
    }
}

/// Plans a workload; returns the ratios of bytes and of the busiest sender.
fn compare(
    workload: &Workload,
    records: &BTreeMap<String, Record>,
    lanes: u16,
    lines: &mut Vec<Value>,
) -> [f64; 2] {
    let problem = problem(workload, lanes);
    let mut seconds: Vec<f64> = Vec::new();
    let mut made = None;
    for _ in 0..TURNS {
        let start = Instant::now();
        let it = plan(&problem).expect("the workload can be planned");
        let pulls = Pulls::of(&problem, &it);
        seconds.push(start.elapsed().as_secs_f64());
        std::hint::black_box(pulls);
        made = Some(it);
    }
    let made = made.expect("turns were run");
    seconds.sort_by(f64::total_cmp);
    let seconds = seconds[TURNS / 2];
    let balance = balance(&problem, &made);
    let flow = Traffic::of(&problem, &made).forward;
    let total = flow.queries + flow.keys;
    let least = made.least(&problem).pulled;
    let Some(record) = records.get(&workload.name) else {
        println!("{:30} has no record of the peer", workload.name);
        return [1.0; 2];
    };
    let most = flow.places.iter().map(|it| it.inputs_sent).max().unwrap_or(0);
    let values = [
        ("max/mean", balance, record.max_over_mean, "ratio"),
        ("Q+KV", total as f64 / 1e9, (record.q_bytes + record.kv_bytes) as f64 / 1e9, "GB"),
        ("busiest sender", most as f64 / 1e9, record.max_send_bytes as f64 / 1e9, "GB"),
        ("planning", seconds, record.plan_cpu_s + record.metadata_cpu_s, "s"),
    ];
    for (what, ours, peer, unit) in values {
        lines.push(json!({"case": format!("{}, {lanes} lanes: {what}", workload.name), "ours": ours,
            "peer": peer, "peer_name": "DistCA at tolerance 0.05", "unit": unit, "ratio": peer / ours}));
    }
    let share = |index: usize| values[index].1 / values[index].2;
    println!(
        "{:30} max/mean {balance:.5} (peer {:.4})  Q+KV {:8.2} GB x {:.3}  send {:6.2} GB x {:.3}  {:8.2} ms / {:.0}  Q+KV/bound {:.2}",
        workload.name,
        record.max_over_mean,
        values[1].1,
        share(1),
        values[2].1,
        share(2),
        seconds * 1e3,
        1.0 / share(3),
        total as f64 / least.max(1) as f64,
    );
    [share(1), share(2)]
}

fn problem(workload: &Workload, lanes: u16) -> Problem {
    let lengths = workload.ranks.iter().flatten();
    let documents = lengths.map(|&rows| Document { rows, mask: Mask::Causal }).collect();
    let slot =
        |rank| Slot { weight: 100, head_start: 0, home: Some(RankId(rank)), memory: 1 << 50 };
    Problem {
        layout: Layout::head_tail(documents, workload.tokens_per_rank).expect("lengths fill ranks"),
        heads: HEADS,
        element_bytes: 2,
        lanes,
        slots: (0..workload.num_ranks).map(slot).collect(),
        costs: Costs::pairs_only(),
        links: Links::equal(),
        tolerance: Tolerance::USUAL,
    }
}

fn balance(problem: &Problem, plan: &Plan) -> f64 {
    let loads: Vec<u64> =
        (0..problem.slots.len() as u32).map(|slot| plan.load(problem, SlotId(slot))).collect();
    let mean = loads.iter().sum::<u64>() as f64 / loads.len() as f64;
    loads.iter().copied().max().unwrap_or(0) as f64 / mean
}
