//! Bugs that people write where launches are put behind copies and their results wait for a word, each as a replacement in one file.
//!
//! In: nothing. Out: the list. Every text stands exactly once in its file, so a change that removes it makes the test say so.

use crate::common::{Planted, planted};

const LAUNCHES: &str = "launches::launches";
const ANSWERS: &str = "answers::answers";

const COMPUTE: &str = "src/compute.rs";
const FLIGHT: &str = "src/launch/flight.rs";
const PLANS: &str = "src/launch/plans.rs";
const PROMISE: &str = "src/launch/promise.rs";
const RESIDENT: &str = "src/launch/resident.rs";

/// All of them; the tests are those of `tests/gpu_exchange`.
pub(crate) const PLANTED: &[Planted] = &[
    planted(
        LAUNCHES,
        RESIDENT,
        "every tensor of a landing begins where the landing does",
        "rows.part(area.start as u64, area.len() as u64)",
        "rows.part(0, area.len() as u64)",
    ),
    planted(
        LAUNCHES,
        RESIDENT,
        "a launch does not wait for the copies to its rows",
        "            it.ready_on(stream)?;\n",
        "",
    ),
    planted(
        LAUNCHES,
        RESIDENT,
        "rows of a launch are counted from the trainer's first",
        "let rows = TaskRows { rows: task.rows.clone(), q_row: rows.start - span.start };",
        "let rows = TaskRows { rows: task.rows.clone(), q_row: rows.start };",
    ),
    planted(
        LAUNCHES,
        RESIDENT,
        "rows between two tasks of a bundle go out with its dQ",
        "it[0].end == it[1].start",
        "it[0].end <= it[1].start",
    ),
    planted(
        LAUNCHES,
        RESIDENT,
        "results are published when another stream is over",
        "Flight::new(stream, start, works",
        "Flight::new(&self.streams[0].0, start, works",
    ),
    planted(
        LAUNCHES,
        FLIGHT,
        "the room of a launch that is given up is free while it is written",
        "            let _ = self.over.wait();\n",
        "",
    ),
    planted(
        LAUNCHES,
        PLANS,
        "rows at home are looked for where they were in a landing",
        "home: matches!(first.rows, BundleRows::Home(_)),",
        "home: true,",
    ),
    planted(
        LAUNCHES,
        PLANS,
        "no plan is kept for the next layer",
        "self.weight + made.weight <= self.most",
        "self.weight + made.weight > self.most",
    ),
    planted(
        ANSWERS,
        PROMISE,
        "a work that was refused is promised all the same",
        "Err(before) => WORDS[usize::from(before)],",
        "Err(_) => word,",
    ),
    planted(
        ANSWERS,
        COMPUTE,
        "results are told before their rows are known to count",
        "Word::Open => self.promised.push(done),",
        "Word::Open => self.answer(done),",
    ),
    planted(
        ANSWERS,
        COMPUTE,
        "results of rows that do not count are told",
        "Word::Broken | Word::Refused => {}",
        "Word::Broken | Word::Refused => self.answer(done),",
    ),
];
