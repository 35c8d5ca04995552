//! Events for programs: one JSON object a line.
//!
//! In: an event. Out: a line with `event` and the fields of the record, named as in the files of the
//! run. Headers are left out: they are long, and in `headers.jsonl`.

use std::path::Path;

use cadre_worker::supervisor::{Level, RunEvent};
use serde::Serialize;
use serde_json::{Value, json};

use crate::out::summary::Summary;

/// The line of an event, if it has one.
pub(super) fn event(event: &RunEvent) -> Option<String> {
    match event {
        RunEvent::Attempt(attempt) => Some(line(
            "attempt",
            json!({
                "number": attempt.number,
                "first_step": attempt.first_step,
                "checkpoint": attempt.checkpoint,
            }),
        )),
        RunEvent::Process(process) => Some(record("process", process)),
        RunEvent::ProcessEnded { worker, how } => {
            let mut fields = serde_json::to_value(worker).expect("a name has text as keys");
            fields["how"] = how.as_str().into();
            Some(line("process_ended", fields))
        }
        RunEvent::Step(step) => Some(record("step", step)),
        RunEvent::Server(server) => Some(record("server", server)),
        RunEvent::Load(load) => {
            let mut fields = serde_json::to_value(load).expect("a load has text as keys");
            if let Some(fields) = fields.as_object_mut()
                && let Some(Value::Object(worker)) = fields.remove("worker")
            {
                fields.extend(worker);
            }
            Some(line("load", fields))
        }
        RunEvent::Notice { level, text } => Some(notice(*level, text)),
        RunEvent::Header { .. } | RunEvent::Finished(_) => None,
    }
}

/// The line of a notice.
pub(super) fn notice(level: Level, text: &str) -> String {
    line("notice", json!({"level": level, "text": text}))
}

/// The last line.
pub(super) fn summary(summary: &Summary, out: &Path) -> String {
    let mut fields = serde_json::to_value(summary).expect("a summary has text as keys");
    fields["out"] = out.display().to_string().into();
    line("summary", fields)
}

fn record(event: &str, record: &impl Serialize) -> String {
    line(event, serde_json::to_value(record).expect("records have text as keys"))
}

fn line(event: &str, mut fields: Value) -> String {
    fields["event"] = event.into();
    fields.to_string()
}

#[cfg(test)]
mod tests {
    use cadre_worker::supervisor::{LoadRecord, Role, WorkerName};

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
        };
        let value = read(&event(&RunEvent::Load(load)).unwrap());
        assert_eq!((&value["event"], &value["role"]), (&json!("load"), &json!("server")));
        assert_eq!((&value["index"], &value["queue"]), (&json!(1), &json!(4)));
        let value = read(&event(&RunEvent::Step(step(0, 1.5))).unwrap());
        assert_eq!(value["loss_bits"], "3fc00000");
        let ended = RunEvent::ProcessEnded { worker, how: "killed by SIGKILL".into() };
        assert_eq!(read(&event(&ended).unwrap())["how"], "killed by SIGKILL");
        assert_eq!(read(&notice(Level::Warning, "x\ny"))["text"], "x\ny");
    }
}
