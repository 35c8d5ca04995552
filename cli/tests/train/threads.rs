//! Threads of the processes of a run, beside the table of docs/architecture.md.
//!
//! The kernel names them; a process's first thread is *main*. `scripts/tables` compares the same table with the sources.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;

/// Threads that are there whenever a process of this kind is in its job, by the row of the page.
const ALWAYS: [(&str, &[&str]); 3] = [
    ("trainer", &["io", "plan", "rescue", "control"]),
    ("server", &["io", "plan", "control", "signals"]),
    ("`cadre run`", &["supervisor", "control-server", "control-events", "signals", "wait-"]),
];

/// Asserts that the processes of a run that goes on have the threads of their rows, and no others.
pub(super) fn are_those_of_the_page(out: &Path, controller: u32) {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/architecture.md");
    let page = fs::read_to_string(page).expect("the page is there");
    let section = page.split("\n## Threads\n").nth(1).expect("it has the section");
    let table = section.split("\n## ").next().expect("it ends");
    let text = fs::read_to_string(out.join("processes.json")).expect("a run writes it");
    let list: Vec<Value> = serde_json::from_str(&text).expect("a list");
    let workers = list.iter().map(|it| (it["role"].as_str().unwrap_or_default(), &it["pid"]));
    let mut processes: Vec<_> =
        workers.filter_map(|(role, pid)| Some((role, pid.as_u64()?))).collect();
    processes.push(("`cadre run`", controller.into()));
    for (process, pid) in processes {
        let named = named(table, process);
        let threads = threads(pid);
        let strange: Vec<_> =
            threads.iter().filter(|it| !named.iter().any(|name| is(it, name))).collect();
        assert!(strange.is_empty(), "{process} has {strange:?}; its rows of the page: {named:?}");
        let (_, always) = ALWAYS.iter().find(|it| it.0 == process).expect("a kind of process");
        for name in *always {
            assert!(named.contains(*name), "the page has no {name} in the rows of {process}");
            assert!(threads.iter().any(|it| is(it, name)), "{process} has no {name}: {threads:?}");
        }
    }
}

/// Whether a thread has this name, or one that begins so where a number follows.
fn is(thread: &str, name: &str) -> bool {
    thread == name || (name.ends_with('-') && thread.starts_with(name))
}

/// Names in the rows of a process: what stands in asterisks, up to its number.
fn named(table: &str, process: &str) -> BTreeSet<String> {
    let rows = table.lines().filter_map(|it| it.strip_prefix("| ")?.split_once(" | "));
    let own = rows.filter(|(of, _)| of.split(", ").any(|it| it == process));
    let names = own.flat_map(|(_, its)| its.split('*').skip(1).step_by(2));
    let bare =
        |it: &str| it.trim_end_matches(|c: char| c.is_ascii_digit()).replace("ROLE-INDEX", "");
    names.map(bare).collect()
}

/// Names of a process's threads but its first.
fn threads(pid: u64) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs").flatten();
    let others = tasks.filter(|it| it.file_name().to_str() != Some(&pid.to_string()));
    let names = others.filter_map(|it| fs::read_to_string(it.path().join("comm")).ok());
    names.map(|it| it.trim().to_owned()).collect()
}
