//! Events for programs: one JSON object a line.
//!
//! In: an event. Out: a line with `event` and the fields of the record, named as in the files of the
//! run. Headers are left out: they are long, and in `headers.jsonl`.

use std::path::Path;

use cadre_supervisor::{Level, RunEvent, WorkerName};
use serde::Serialize;

use crate::out::summary::Summary;

/// The line of an event, if it has one.
pub(super) fn event(event: &RunEvent) -> Option<String> {
    match event {
        RunEvent::Attempt(attempt) => Some(line(
            "attempt",
            AttemptLine {
                number: attempt.number,
                first_step: attempt.first_step,
                checkpoint: attempt.checkpoint.as_ref().map(|it| it.display().to_string()),
            },
        )),
        RunEvent::Process(process) => Some(line("process", process)),
        RunEvent::ProcessEnded { worker, how } => {
            Some(line("process_ended", EndLine { worker: *worker, how }))
        }
        RunEvent::Step(step) => Some(line("step", step)),
        RunEvent::Server(server) => Some(line("server", server)),
        RunEvent::Load(load) => Some(line(
            "load",
            LoadLine {
                worker: load.worker,
                step: load.step,
                queue: load.queue,
                busy: load.busy,
                tasks_per_second: load.tasks_per_second,
                observed_over_expected: load.observed_over_expected,
                memory_bytes: load.memory_bytes,
            },
        )),
        RunEvent::Notice { level, text } => Some(notice(*level, text)),
        RunEvent::Header { .. } | RunEvent::Finished(_) => None,
    }
}

/// The line of a notice.
pub(super) fn notice(level: Level, text: &str) -> String {
    line("notice", NoticeLine { level, text })
}

/// The last line.
pub(super) fn summary(summary: &Summary, out: &Path) -> String {
    line("summary", SummaryLine { out: out.display().to_string(), summary })
}

fn line(event: &str, record: impl Serialize) -> String {
    let line = Line { event, record };
    serde_json::to_string(&line).expect("records have text as keys")
}

#[derive(Serialize)]
struct Line<'a, T> {
    event: &'a str,
    #[serde(flatten)]
    record: T,
}

#[derive(Serialize)]
struct AttemptLine {
    number: u32,
    first_step: u64,
    checkpoint: Option<String>,
}

#[derive(Serialize)]
struct EndLine<'a> {
    #[serde(flatten)]
    worker: WorkerName,
    how: &'a str,
}

#[derive(Serialize)]
struct LoadLine {
    #[serde(flatten)]
    worker: WorkerName,
    step: u64,
    queue: u32,
    busy: f64,
    tasks_per_second: f64,
    observed_over_expected: f64,
    memory_bytes: u64,
}

#[derive(Serialize)]
struct NoticeLine<'a> {
    level: Level,
    text: &'a str,
}

#[derive(Serialize)]
struct SummaryLine<'a> {
    out: String,
    #[serde(flatten)]
    summary: &'a Summary,
}

#[cfg(test)]
mod tests {
    use cadre_supervisor::{LoadRecord, Role};
    use serde_json::{Value, json};

    use super::*;
    use crate::out::summary::tests::step;

    fn read(line: &str) -> Value {
        assert!(!line.contains('\n'));
        serde_json::from_str(line).unwrap()
    }

    #[test]
    fn events_are_flat_objects() {
        let worker = WorkerName { role: Role::Server, index: 1, incarnation: 2 };
        let load = LoadRecord {
            worker,
            step: 3,
            queue: 4,
            busy: 0.5,
            tasks_per_second: 6.0,
            observed_over_expected: 0.0,
            memory_bytes: 0,
        };
        let value = read(&event(&RunEvent::Load(load)).unwrap());
        assert_eq!((&value["event"], &value["role"]), (&json!("load"), &json!("server")));
        assert_eq!((&value["index"], &value["queue"]), (&json!(1), &json!(4)));
        let value = read(&event(&RunEvent::Step(step(0, 1.5))).unwrap());
        assert_eq!((&value["loss"], &value["loss_bits"]), (&json!(1.5), &json!("3fc00000")));
        let third = event(&RunEvent::Step(step(0, 1.0 / 3.0))).unwrap();
        assert!(
            third.starts_with("{\"event\":\"step\",") && third.contains(":0.33333334,"),
            "{third}"
        );
        let ended = RunEvent::ProcessEnded { worker, how: "killed by SIGKILL".into() };
        assert_eq!(read(&event(&ended).unwrap())["how"], "killed by SIGKILL");
        assert_eq!(read(&notice(Level::Warning, "x\ny"))["text"], "x\ny");
    }
}
