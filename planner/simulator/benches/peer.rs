//! Plans beside those of the published planner (`DistCA`), each as uneven as the other, in one wire format.
//!
//! In: the recorded workloads and the published lengths, files beside a checkout (`../shared/data`, or the folder in
//! `CADRE_DATA`). Out: a line a case, means, and `target/bench/peer.json`. Without the files it says so and writes an empty list.
//!
//! The published planner is built again (`cadre_simulator::greedy`; `tests/distca.rs` compares it with its records) and runs at
//! its own tolerance, 0.05. Ours may be as uneven as that plan is, and no less than usual. Bytes of Q, K and V are those of a
//! forward phase. The busiest link is that of a place, the larger of what leaves and what arrives, forward and backward
//! together. Of the second column are its own bytes of the peer backward: rows of Q, O, dO and LSE, and bf16 dK and dV.
//!
//! Arguments: `recorded` or `fresh` for one part.

#![allow(clippy::disallowed_methods, clippy::disallowed_types)] // a bench reads files and clocks

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use cadre_planner::{Problem, Tolerance, plan};
use cadre_simulator::published::TOLERANCE;
use cadre_simulator::{Bytes, Cluster, Lay, LengthSet, Model, Phase, Sampler, greedy};
use serde::Deserialize;
use serde_json::{Value, json};

/// Seeds of fresh draws, a shape.
const SEEDS: std::ops::Range<u64> = 1_000..1_004;
/// Shapes of fresh draws: ranks, tokens of a rank, longest document, in 1,024 tokens.
const SHAPES: [(u32, u32, u32); 6] =
    [(8, 128, 128), (64, 128, 128), (8, 128, 512), (32, 128, 512), (64, 128, 512), (64, 512, 512)];

#[derive(Deserialize)]
struct Workload {
    name: String,
    num_ranks: u32,
    ranks: Vec<Vec<u32>>,
}

/// A plan beside the peer's.
struct Compared {
    name: String,
    uneven: f64,
    ours_uneven: f64,
    /// Ours over the peer's.
    bytes: f64,
    link: f64,
    own_link: f64,
    milliseconds: f64,
}

fn main() {
    let filter = std::env::args().skip(1).find(|it| !it.starts_with('-')).unwrap_or_default();
    let folder = std::env::var_os("CADRE_DATA").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data"),
        PathBuf::from,
    );
    let mut lines = Vec::new();
    for lanes in [8, 1] {
        for (part, cases) in [("recorded", recorded(&folder)), ("fresh", fresh(&folder))] {
            if part.contains(&filter) && !cases.is_empty() {
                compare(part, &cases, lanes, &mut lines);
            }
        }
    }
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target"), PathBuf::from);
    let file = target.join("bench/peer.json");
    let text = serde_json::to_string_pretty(&lines).expect("numbers and names are JSON");
    fs::create_dir_all(target.join("bench"))
        .and_then(|()| fs::write(&file, text + "\n"))
        .unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
}

/// Name, ranks and lengths of the recorded workloads.
fn recorded(folder: &Path) -> Vec<(String, u32, Vec<u32>)> {
    let folder = folder.join("planner/workloads");
    let Ok(files) = fs::read_dir(&folder) else {
        println!("SKIPPED: no workloads at {}", folder.display());
        return Vec::new();
    };
    let mut files: Vec<_> = files.map(|it| it.expect("a readable folder").path()).collect();
    files.sort();
    let read = |path: PathBuf| {
        let text = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let it: Workload = serde_json::from_slice(&text)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        (it.name, it.num_ranks, it.ranks.concat())
    };
    files.into_iter().map(read).collect()
}

/// Fresh draws of the published lengths.
fn fresh(folder: &Path) -> Vec<(String, u32, Vec<u32>)> {
    let mut cases = Vec::new();
    for (name, set) in [("pretrain", LengthSet::Pretrain), ("prolong", LengthSet::Prolong)] {
        let path = folder.join(format!("lengths-{name}.json"));
        let Ok(text) = fs::read(&path) else {
            println!("SKIPPED: no lengths at {}", path.display());
            continue;
        };
        let lengths: Vec<u64> = serde_json::from_slice(&text)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        for (ranks, tokens, longest) in SHAPES {
            for seed in SEEDS {
                let stretch = tokens.max(longest) * 1_024;
                let mut sampler = Sampler::new(set, &lengths, longest * 1_024, seed)
                    .expect("published lengths are drawn from");
                let count = ranks * tokens * 1_024 / stretch;
                let drawn = sampler.stretches(count as usize, stretch).expect("enough documents");
                let case = format!("{name}_{ranks}x{tokens}K_doc{longest}K seed {seed}");
                cases.push((case, ranks, drawn.concat()));
            }
        }
    }
    cases
}

fn compare(part: &str, cases: &[(String, u32, Vec<u32>)], lanes: u16, lines: &mut Vec<Value>) {
    println!("{part}, {lanes} lanes: ours over the peer's, both as uneven as the peer");
    let compared: Vec<Compared> = cases.iter().map(|it| beside(it, lanes)).collect();
    for it in &compared {
        let Compared { name, uneven, ours_uneven, bytes, link, own_link, milliseconds } = it;
        println!(
            "{name:40} peer {uneven:.4} ours {ours_uneven:.4}  Q+KV x {bytes:.3}  busiest link x {link:.3} (own format {own_link:.3})  {milliseconds:.1} ms"
        );
        for (what, ratio) in [("Q+KV", bytes), ("busiest link", link)] {
            lines.push(json!({"case": format!("{name}, {lanes} lanes: {what}"), "ours": ratio, "peer": 1.0,
                "peer_name": "DistCA at tolerance 0.05, ours as uneven", "unit": "ratio", "ratio": 1.0 / ratio}));
        }
    }
    let of = |what: &str, few: &[&Compared]| {
        if few.is_empty() {
            return;
        }
        let mean = |of: fn(&Compared) -> f64| {
            (few.iter().map(|it| of(it).ln()).sum::<f64>() / few.len() as f64).exp()
        };
        let most = |of: fn(&Compared) -> f64| few.iter().map(|it| of(it)).fold(0.0, f64::max);
        println!(
            "{what}, geometric mean (most): Q+KV {:.3} ({:.3}), busiest link {:.3} ({:.3}), own format {:.3} ({:.3})",
            mean(|it| it.bytes),
            most(|it| it.bytes),
            mean(|it| it.link),
            most(|it| it.link),
            mean(|it| it.own_link),
            most(|it| it.own_link),
        );
    };
    of("all", &compared.iter().collect::<Vec<_>>());
    let is_large = |it: &&Compared| {
        it.name.starts_with("prolong")
            && ["_64x", "_512x"].iter().any(|size| it.name.contains(size))
    };
    of("ProLong from 64 slots on", &compared.iter().filter(is_large).collect::<Vec<_>>());
}

fn beside((name, ranks, lengths): &(String, u32, Vec<u32>), lanes: u16) -> Compared {
    let model = Model::B8;
    let cluster = Cluster { lanes, ..Cluster::in_place(model, *ranks) };
    let problem = cluster.problem(lengths, Lay::HeadTail).expect("lengths fill ranks");
    let places = problem.layout.ranks().len();
    let shares = greedy(&model, &problem.layout, places, TOLERANCE);
    let peer = Phase::new(&model, &problem.layout, places, &shares);
    let uneven = peer.imbalance_ppm() as f64 / 1e6;
    let tolerance = Tolerance::new(uneven.clamp(1.002, 2.0)).expect("it is in range");
    let problem = Problem { tolerance, ..problem };
    let start = Instant::now();
    let plan = plan(&problem).expect("the workload can be planned");
    let milliseconds = start.elapsed().as_secs_f64() * 1e3;
    let ours = Phase::of_plan(&model, &problem, &plan);
    let over = |ours: u64, peer: u64| ours as f64 / peer.max(1) as f64;
    Compared {
        name: name.clone(),
        uneven,
        ours_uneven: plan.bounds().finish as f64 / plan.bounds().level as f64,
        bytes: over(ours.total().inputs, peer.total().inputs),
        link: over(busiest(&ours, both), busiest(&peer, both)),
        own_link: over(busiest(&ours, both), busiest(&peer, as_published)),
        milliseconds,
    }
}

/// Bytes from the rank to the place and back, forward and backward together.
fn both(it: &Bytes) -> [u64; 2] {
    [it.inputs + it.backward_inputs, it.results + it.backward_results]
}

/// The same in the peer's own format.
fn as_published(it: &Bytes) -> [u64; 2] {
    let statistics = it.results - it.queries;
    let back = 3 * it.queries + statistics + it.keys;
    [it.inputs + back, it.results + it.queries + it.keys]
}

/// Bytes of the place that sends or receives most.
fn busiest(phase: &Phase, of: fn(&Bytes) -> [u64; 2]) -> u64 {
    let places = phase.tokens.len();
    let (mut out, mut into) = (vec![0; places], vec![0; places]);
    for (&(rank, place), bytes) in &phase.wires {
        let [there, back] = of(bytes);
        out[rank] += there;
        into[place] += there;
        out[place] += back;
        into[rank] += back;
    }
    out.into_iter().chain(into).max().unwrap_or(0)
}
