//! A plan as a file, from which everything that is reported can be computed again.
//!
//! ```json
//! {"ranks": [[{"doc": 0, "rows": [0, 4096]}]],
//!  "tasks": [{"doc": 0, "q": [0, 128], "k": [0, 128], "kv_heads": [0, 8], "slot": 0}]}
//! ```
//!
//! Documents are numbered in file order, rows are counted from the document's start, and every range is
//! `[start, end)`.

use cadre_planner::{Plan, Problem};
use serde_json::json;

/// The file's text.
pub(super) fn text(problem: &Problem, plan: &Plan) -> String {
    let ranks: Vec<_> = problem
        .layout
        .ranks()
        .iter()
        .map(|stretches| {
            let stretch = |it: &cadre_planner::Stretch| json!({"doc": it.document.0, "rows": [it.start, it.end]});
            stretches.iter().map(stretch).collect::<Vec<_>>()
        })
        .collect();
    let tasks: Vec<_> = plan
        .tasks()
        .iter()
        .map(|it| {
            json!({
                "doc": it.document.0,
                "q": [it.rows.start, it.rows.end],
                "k": [it.keys.start, it.keys.end],
                "kv_heads": [it.kv_heads.start, it.kv_heads.end],
                "slot": plan.bundle(it.bundle).map(|it| it.slot.0),
            })
        })
        .collect();
    json!({"ranks": ranks, "tasks": tasks}).to_string() + "\n"
}
