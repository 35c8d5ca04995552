//! The greedy baseline against what the published planner was recorded to do.
//!
//! Records lie beside the checkout (`../shared/data/planner`, or the folder in `CADRE_WORKLOADS`); without them the test
//! says so and passes. Its difference to every record is printed.

#![allow(clippy::disallowed_methods, clippy::disallowed_types)] // a test reads files

use std::path::{Path, PathBuf};

use cadre_simulator::{Cluster, Lay, Model, Phase, greedy};
use serde::Deserialize;

#[derive(Deserialize)]
struct Record {
    workload: String,
    tolerance: f64,
    hidden_q: u64,
    max_over_mean: f64,
    q_bytes: u64,
    kv_bytes: u64,
    max_send_bytes: u64,
}

#[derive(Deserialize)]
struct Workload {
    num_ranks: u32,
    ranks: Vec<Vec<u32>>,
}

#[test]
fn the_greedy_baseline_does_what_the_published_planner_did() {
    let folder = std::env::var_os("CADRE_WORKLOADS").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/planner"),
        PathBuf::from,
    );
    let Ok(text) = std::fs::read(folder.join("distca.json")) else {
        println!("SKIPPED: no records at {}", folder.display());
        return;
    };
    let records: Vec<Record> = serde_json::from_slice(&text).unwrap();
    let (mut bytes, mut sender, mut count) = (0.0, 0.0, 0.0);
    for record in records.iter().filter(|it| it.tolerance < 0.11) {
        let path = folder.join("workloads").join(format!("{}.json", record.workload));
        let workload: Workload = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let lengths: Vec<u32> = workload.ranks.concat();
        let model = if record.hidden_q == 8192 { Model::B34 } else { Model::B8 };
        let problem =
            Cluster::in_place(model, workload.num_ranks).problem(&lengths, Lay::HeadTail).unwrap();
        let tolerance = (record.tolerance * 1000.0).round() as u64;
        let places = problem.layout.ranks().len();
        let shares = greedy(&model, &problem.layout, places, tolerance);
        let phase = Phase::new(&model, &problem.layout, places, &shares);
        let total = phase.total();
        let ratio = total.inputs as f64 / (record.q_bytes + record.kv_bytes) as f64;
        let sent = phase.busiest_sender() as f64 / record.max_send_bytes as f64;
        let balance = phase.imbalance_ppm() as f64 / 1e6;
        println!(
            "{:28} ε {:.2} {:3}: max/mean {balance:.4} (recorded {:.4}), Q {:.3}, KV {:.3}, Q+KV {ratio:.3}, sender {sent:.3} of the record",
            record.workload,
            record.tolerance,
            model.name,
            record.max_over_mean,
            total.queries as f64 / record.q_bytes as f64,
            total.keys as f64 / record.kv_bytes as f64,
        );
        assert!((ratio - 1.0).abs() < 0.01, "bytes");
        assert!((sent - 1.0).abs() < 0.01, "busiest sender");
        // At no tolerance it leaves pieces below a tile, which are charged as a tile here and as pairs there.
        assert!((balance - record.max_over_mean).abs() < 0.006, "balance");
        bytes += ratio.ln();
        sender += sent.ln();
        count += 1.0;
    }
    println!(
        "geometric mean: Q+KV {:.3}, sender {:.3}",
        f64::exp(bytes / count),
        f64::exp(sender / count)
    );
}
