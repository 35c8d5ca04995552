//! Processes of a run, by what the supervisor and the kernel say.
//!
//! In: the folder of a run; process ids. Out: which are there. Nothing is signalled.

use std::fs;
use std::path::Path;

use serde_json::Value;

/// Processes that a run has started and not ended.
pub(super) fn processes(out: &Path) -> Vec<u64> {
    let text = fs::read_to_string(out.join("processes.json")).unwrap_or_default();
    let list: Vec<Value> = serde_json::from_str(&text).unwrap_or_default();
    list.iter().filter_map(|it| it["pid"].as_u64()).collect()
}

/// Of those, the ones that run.
pub(super) fn alive(out: &Path) -> Vec<u64> {
    processes(out).into_iter().filter(|&it| runs(it)).collect()
}

/// Whether a process is there and no zombie.
pub(super) fn runs(pid: u64) -> bool {
    state(pid).is_some_and(|it| !matches!(it, 'Z' | 'X'))
}

/// What the kernel says of a process.
pub(super) fn state(pid: u64) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}
