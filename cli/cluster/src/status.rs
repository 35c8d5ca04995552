//! All pools and jobs at a glance.
//!
//! In: what was [`Seen`]. Out: a table each, with one word and the cause for what is not fine.

use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;

use crate::explain::{Finding, Verdict, explain};
use crate::seen::{Kind, Seen, Target, name, namespace};

/// Tables of pools and jobs, by namespace and name.
pub fn text(seen: &Seen) -> String {
    let mut parts = Vec::new();
    if seen.pools.is_empty() && seen.jobs.is_empty() {
        parts.push("no pools and no jobs; -n chooses another namespace, -A all".to_owned());
    }
    if !seen.pools.is_empty() {
        parts.push(pools(seen).to_string());
    }
    if !seen.jobs.is_empty() {
        parts.push(jobs(seen).to_string());
    }
    parts.extend(seen.unread.iter().map(|it| format!("not read: {it}")));
    parts.join("\n") + "\n"
}

fn pools(seen: &Seen) -> Table {
    let mut table = table(&["pool", "ready", "registered", "in place", "busy", "is", "because"]);
    let mut all: Vec<_> = seen.pools.iter().collect();
    all.sort_by_key(|it| (it.metadata.namespace.clone(), it.metadata.name.clone()));
    for pool in all {
        let status = pool.status.clone().unwrap_or_default();
        let meta = &pool.metadata;
        let (is, because) = verdict(seen, Kind::Pool, namespace(meta), name(meta));
        table.add_row([
            format!("{}/{}", namespace(meta), name(meta)),
            format!("{}/{}", status.ready, status.desired),
            status.registered.to_string(),
            status.in_place_servers.to_string(),
            status.utilization_percent.map_or_else(|| "–".to_owned(), |it| format!("{it} %")),
            is,
            because,
        ]);
    }
    table
}

fn jobs(seen: &Seen) -> Table {
    let columns = ["job", "attempt", "step", "tokens/s", "waits", "time left", "is", "because"];
    let mut table = table(&columns);
    let mut all: Vec<_> = seen.jobs.iter().collect();
    all.sort_by_key(|it| (it.metadata.namespace.clone(), it.metadata.name.clone()));
    for job in all {
        let status = job.status.clone().unwrap_or_default();
        let meta = &job.metadata;
        let (is, because) = verdict(seen, Kind::Job, namespace(meta), name(meta));
        let progress = status.progress.as_ref();
        let told = |text: Option<String>| text.unwrap_or_else(|| "–".to_owned());
        table.add_row([
            format!("{}/{}", namespace(meta), name(meta)),
            status.attempt.to_string(),
            told(progress.map(|it| format!("{}/{}", it.step, it.total))),
            told(progress.map(|it| it.tokens_per_second.to_string())),
            told(progress.map(|it| format!("{} %", it.exposed_wait_percent))),
            told(progress.map(|it| duration(it.eta_seconds))),
            is,
            because,
        ]);
    }
    table
}

fn verdict(seen: &Seen, kind: Kind, home: &str, named: &str) -> (String, String) {
    let target = Target { kind, name: named.to_owned() };
    let Ok(found) = explain(seen, home, &target) else { return Default::default() };
    let word = match found.verdict {
        Verdict::Fine => "fine",
        Verdict::Waiting => "waiting",
        Verdict::Bad => "bad",
    };
    let because = if found.verdict == Verdict::Fine { String::new() } else { cause(&found) };
    (word.to_owned(), because)
}

fn cause(found: &Finding) -> String {
    let it = found.cause();
    if std::ptr::eq(it, found) { it.says.clone() } else { format!("{}: {}", it.what, it.says) }
}

fn duration(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        _ => format!("{} h {} min", seconds / 3_600, seconds / 60 % 60),
    }
}

fn table(columns: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(columns.to_vec());
    table
}
