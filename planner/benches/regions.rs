//! Plans of very large pools, in regions, beside the plan without regions where that can be made.
//!
//! Prints a line a case and writes `target/bench/regions.json`. Lengths are of a fixed heavy tail; no files are read. First
//! plans of 2,048 and 8,192 slots in both ways: bytes of Q, K and V, finish. Then 100,000 slots with 3 and 10 million documents:
//! processor seconds of one process's decision (sums to regions, its own part), of the whole plan with its check, and of the transfer
//! lists; the bytes that a process has to know.

#![allow(clippy::disallowed_methods, clippy::disallowed_types)] // a bench writes a file and reads clocks

mod pools;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use cadre_planner::{
    Plan, Pulls, RankSum, Regions, SLOTS_OF_A_REGION, SlotId, plan, plan_in_regions,
};
use serde_json::{Value, json};

use crate::pools::{Place, pool};

/// Runs of what takes no more than a second; the least counts.
const TURNS: usize = 3;

fn main() {
    let filter = std::env::args().skip(1).find(|it| !it.starts_with('-')).unwrap_or_default();
    let mut lines = Vec::new();
    for (slots, documents) in [(2_048, 61_440), (4_096, 122_880), (8_192, 1_000_000)] {
        for place in [Place::InPlace, Place::Dedicated] {
            for lanes in [8, 1] {
                if "beside".contains(&filter) && !(place == Place::Dedicated && slots > 4_096) {
                    beside(slots, documents, lanes, place, &mut lines);
                }
            }
        }
    }
    for (slots, documents) in [(8_192, 1_000_000), (100_000, 3_000_000), (100_000, 10_000_000)] {
        for place in [Place::InPlace, Place::Dedicated] {
            for lanes in [8, 1] {
                let case = name(slots, documents, lanes, place);
                if "large".contains(&filter) || case.contains(&filter) {
                    large(slots, documents, lanes, place, &mut lines);
                }
            }
        }
    }
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"), PathBuf::from);
    let file = target.join("bench/regions.json");
    let text = serde_json::to_string_pretty(&lines).expect("numbers and names are JSON");
    fs::create_dir_all(target.join("bench"))
        .and_then(|()| fs::write(&file, text + "\n"))
        .unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
}

/// Seconds that this thread has had a processor, so that other work beside it does not count; where the system does not say,
/// seconds of the clock.
fn seconds(since: Instant) -> f64 {
    let told = fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = told.and_then(|it| it.split(' ').next()?.parse::<f64>().ok());
    nanoseconds.map_or_else(|| since.elapsed().as_secs_f64(), |it| it / 1e9)
}

/// Seconds of something, the least of some runs.
fn timed<T>(turns: usize, run: impl Fn() -> T) -> (T, f64) {
    let since = Instant::now();
    let once = || {
        let start = seconds(since);
        let made = run();
        (made, seconds(since) - start)
    };
    (1..turns).fold(once(), |best, _| {
        let next = once();
        if next.1 < best.1 { next } else { best }
    })
}

fn name(slots: u32, documents: usize, lanes: u16, place: Place) -> String {
    format!("{slots} slots, {documents} documents, {lanes} lanes, {place:?}")
}

/// Both ways to plan, of one problem.
fn beside(slots: u32, documents: usize, lanes: u16, place: Place, lines: &mut Vec<Value>) {
    let problem = pool(slots, documents, lanes, place, 12_345);
    let (ours, seconds) =
        timed(1, || plan_in_regions(&problem, SLOTS_OF_A_REGION).expect("it can be planned"));
    let (flat, longer) =
        timed(1, || plan_in_regions(&problem, u32::MAX).expect("it can be planned"));
    let late = |it: &Plan| it.bounds().finish as f64 / it.bounds().level as f64;
    let bytes = |it: &Plan| it.bounds().pulled as f64 / 1e9;
    let case = name(slots, documents, lanes, place);
    println!(
        "{case}: bytes {:.4} of those of one region, link {:.3}, finish {:.5} / {:.5}, {seconds:.3} s / {longer:.3} s",
        bytes(&ours) / bytes(&flat),
        ours.bounds().link as f64 / flat.bounds().link as f64,
        late(&ours),
        late(&flat)
    );
    let values = [
        ("Q+KV", bytes(&ours), bytes(&flat), "GB"),
        ("finish over level", late(&ours), late(&flat), "ratio"),
        ("planning", seconds, longer, "s"),
    ];
    for (what, ours, peer, unit) in values {
        lines.push(json!({"case": format!("{case}: {what}"), "ours": ours, "peer": peer,
            "peer_name": "one region", "unit": unit, "ratio": peer / ours}));
    }
}

/// A plan in regions alone, and one process's part of it.
fn large(slots: u32, documents: usize, lanes: u16, place: Place, lines: &mut Vec<Value>) {
    let problem = pool(slots, documents, lanes, place, 12_345);
    let case = name(slots, documents, lanes, place);
    let sums = RankSum::of(&problem);
    let (regions, dealt) = timed(TURNS, || Regions::of(&problem.slots, &sums, SLOTS_OF_A_REGION));
    // The slot that needs most documents of all that are asked.
    let (mut decided, mut known) = (0_f64, 0);
    for slot in (0..slots).step_by(slots as usize / 16) {
        let (part, seconds) =
            timed(TURNS, || regions.part(&problem, SlotId(slot)).expect("it can be planned"));
        decided = decided.max(seconds);
        known = known.max(part.documents);
    }
    let (made, seconds) = timed(1, || plan(&problem).expect("it can be planned"));
    let (lists, listing) = timed(1, || Pulls::of(&problem, &made));
    drop(lists);
    let late = made.bounds().finish as f64 / made.bounds().level as f64;
    let least = made.least(&problem).pulled.max(1) as f64;
    println!(
        "{case}: regions {} ({} shared slots), decision {:.3} + {decided:.3} s, plan and check {seconds:.3} s, lists {listing:.3} s, \
         finish {late:.5}, bytes {:.3} of their bound, knows sums of {} bytes and {known} documents",
        regions.count(),
        regions.shared(),
        dealt,
        made.bounds().pulled as f64 / least,
        sums.len() * RankSum::BYTES,
    );
    let bars = [
        ("a process's decision", dealt + decided, 1.0, "s"),
        (
            "plan, check and lists",
            seconds + listing,
            if documents > 3_000_000 { 15.0 } else { 5.0 },
            "s",
        ),
        ("finish over level", late, 1.005, "ratio"),
    ];
    for (what, ours, bar, unit) in bars {
        lines.push(json!({"case": format!("{case}: {what}"), "ours": ours, "peer": bar,
            "peer_name": "bar", "unit": unit, "ratio": bar / ours}));
    }
}
