//! The live display on a terminal: progress, one row per server, notices above.
//!
//! In: events. Out: lines on stderr that are drawn over. A row shows a server's last load report while
//! it lives, and its last step where there are no reports, as in place.

use std::collections::BTreeMap;
use std::time::Duration;

use cadre_supervisor::{
    Level, LoadRecord, Role, RunEvent, ServerKind, ServerRecord, StepRecord, WorkerName,
};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::{losses, restart, word};

/// The display.
#[derive(Debug)]
pub(crate) struct Live {
    screen: MultiProgress,
    steps: ProgressBar,
    servers: BTreeMap<String, ProgressBar>,
}

impl Live {
    /// An empty display of a job of `steps` steps, if their number is known.
    pub(super) fn new(steps: Option<u64>) -> Self {
        let screen = MultiProgress::new();
        let bar = screen.add(steps.map_or_else(ProgressBar::no_length, ProgressBar::new));
        bar.set_style(style(match steps {
            Some(_) => "{bar:32.cyan/blue} {pos}/{len}  {elapsed} (left {eta})\n  {msg}",
            None => "step {pos}  {elapsed}\n  {msg}",
        }));
        bar.set_message("starting");
        bar.enable_steady_tick(Duration::from_millis(500));
        Self { screen, steps: bar, servers: BTreeMap::new() }
    }

    /// Draws what happened.
    pub(super) fn event(&mut self, event: &RunEvent) {
        match event {
            RunEvent::Step(step) => {
                self.steps.set_position(step.step + 1);
                self.steps.set_message(message(step));
            }
            RunEvent::Attempt(attempt) => {
                self.steps.set_position(attempt.first_step);
                self.steps.reset_eta();
                if attempt.number > 1 || attempt.first_step > 0 {
                    let text = restart(attempt.number, attempt.first_step);
                    self.notice(Level::Information, &text);
                }
            }
            RunEvent::Process(process) if process.worker.role == Role::Server => {
                self.row(&server(process.worker)).set_message(format!("process {}", process.pid));
            }
            RunEvent::ProcessEnded { worker, how } if worker.role == Role::Server => {
                self.row(&server(*worker)).set_message(format!("gone: {how}"));
            }
            RunEvent::Load(load) => self.row(&server(load.worker)).set_message(loaded(load)),
            RunEvent::Server(record) if record.kind == ServerKind::InPlace => {
                self.row(&record.server).set_message(worked(record));
            }
            RunEvent::Notice { level, text } => self.notice(*level, text),
            RunEvent::Process(_)
            | RunEvent::ProcessEnded { .. }
            | RunEvent::Server(_)
            | RunEvent::Header { .. }
            | RunEvent::Finished(_) => {}
        }
    }

    /// Writes a line above the display.
    pub(super) fn notice(&self, level: Level, text: &str) {
        // A terminal that has gone away must not end the training.
        let _ = self.screen.println(format!("{}: {text}", word(level)));
    }

    /// Takes the display away.
    pub(super) fn clear(&self) {
        self.steps.disable_steady_tick();
        let _ = self.screen.clear();
    }

    fn row(&mut self, name: &str) -> &ProgressBar {
        self.servers.entry(name.to_owned()).or_insert_with(|| {
            let row = self.screen.add(ProgressBar::no_length());
            row.set_style(style("  {prefix:12} {msg}"));
            row.set_prefix(name.to_owned());
            row
        })
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("a test draws every template")
}

/// The row of a server; its replacement takes it over.
fn server(worker: WorkerName) -> String {
    format!("{}-{}", worker.role, worker.index)
}

fn message(step: &StepRecord) -> String {
    let seconds = step.seconds.max(1e-9);
    format!(
        "{}  {:.0} tokens/s  exposed wait {:.1} %  imbalance {:.2} (unplanned {:.2})",
        losses(step),
        step.tokens as f64 / seconds,
        100.0 * step.exposed_wait_seconds / seconds,
        step.imbalance,
        step.imbalance_unplanned,
    )
}

fn loaded(load: &LoadRecord) -> String {
    format!(
        "busy {:3.0} %  queue {:3}  {:.0} tasks/s",
        100.0 * load.busy,
        load.queue,
        load.tasks_per_second
    )
}

fn worked(record: &ServerRecord) -> String {
    format!("busy {:.2} s  {} tasks in step {}", record.busy_seconds, record.tasks, record.step + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::out::summary::tests::{server as record, step};

    #[test]
    fn every_event_can_be_drawn() {
        let mut live = Live::new(Some(3));
        live.screen.set_draw_target(indicatif::ProgressDrawTarget::hidden());
        let worker = WorkerName { role: Role::Server, index: 0, incarnation: 0 };
        let load = LoadRecord {
            worker,
            step: 0,
            queue: 2,
            busy: 0.5,
            tasks_per_second: 9.0,
            observed_over_expected: 1.0,
            memory_bytes: 1 << 20,
        };
        let in_place = ServerRecord { kind: ServerKind::InPlace, ..record(0, "trainer-0", 0) };
        live.event(&RunEvent::Step(step(0, 1.0)));
        live.event(&RunEvent::Load(load));
        live.event(&RunEvent::Server(in_place));
        assert_eq!(live.servers["server-0"].message(), "busy  50 %  queue   2  9 tasks/s");
        live.event(&RunEvent::ProcessEnded { worker, how: "killed by SIGKILL".into() });
        assert_eq!(live.servers["server-0"].message(), "gone: killed by SIGKILL");
        assert_eq!(live.servers["trainer-0"].message(), "busy 0.50 s  3 tasks in step 1");
        live.clear();
    }
}
