//! The published workloads, and what the published planner (`DistCA`) did on them: files beside a checkout, not in it.
//!
//! In: the folder in `CADRE_WORKLOADS`, or `../shared/data/planner`. Out: workloads by name, and records of tolerance 0.05.

#![allow(clippy::disallowed_methods, clippy::disallowed_types)] // tests and benches may read files
// Tests and the bench use a part each.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Documents of each rank, in rows.
#[derive(Deserialize)]
pub(crate) struct Workload {
    pub(crate) name: String,
    pub(crate) tokens_per_rank: u32,
    pub(crate) num_ranks: u32,
    pub(crate) ranks: Vec<Vec<u32>>,
}

/// The peer's record of a workload.
#[derive(Deserialize)]
pub(crate) struct Record {
    workload: String,
    tolerance: f64,
    hidden_q: u32,
    pub(crate) max_over_mean: f64,
    pub(crate) q_bytes: u64,
    pub(crate) kv_bytes: u64,
    pub(crate) max_send_bytes: u64,
    pub(crate) plan_cpu_s: f64,
    pub(crate) metadata_cpu_s: f64,
}

fn folder() -> PathBuf {
    std::env::var_os("CADRE_WORKLOADS").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/planner"),
        PathBuf::from,
    )
}

fn read<T: DeserializeOwned>(path: &Path) -> T {
    let text = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All workloads, by name; none, said aloud, where there are no files.
pub(crate) fn workloads() -> Vec<Workload> {
    let folder = folder().join("workloads");
    let Ok(files) = fs::read_dir(&folder) else {
        println!("SKIPPED: no workloads at {}", folder.display());
        return Vec::new();
    };
    let mut files: Vec<_> = files.map(|it| it.expect("a readable folder").path()).collect();
    files.sort();
    files.iter().map(|it| read(it)).collect()
}

/// The peer's records at heads of 4096 numbers and tolerance 0.05, by workload.
pub(crate) fn records() -> BTreeMap<String, Record> {
    let all: Vec<Record> = read(&folder().join("distca.json"));
    let kept =
        all.into_iter().filter(|it| it.hidden_q == 4096 && (it.tolerance - 0.05).abs() < 1e-9);
    kept.map(|it| (it.workload.clone(), it)).collect()
}
