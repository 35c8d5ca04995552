//! What a plan costs, as one line of JSON or as a table.
//!
//! In: a workload, its problem and plan. Out: text.

use cadre_planner::{Plan, Problem, SlotId, Traffic};
use serde::Serialize;

use super::moved;
use super::workload::Workload;
use crate::printed;

/// What is reported, under the names of the JSON.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    workload: String,
    slots: usize,
    documents: usize,
    max_over_mean_before: f64,
    max_over_mean: f64,
    q_bytes: u64,
    kv_bytes: u64,
    /// With LSE.
    o_bytes: u64,
    /// Q, K and V.
    max_send_bytes: u64,
    max_recv_bytes: u64,
    max_link_seconds_forward: f64,
    max_link_seconds_backward: f64,
    tasks: usize,
    tasks_moved: usize,
    plan_seconds: f64,
    lists_seconds: f64,
    /// How much later the last slot finishes than in the best possible plan, at most.
    gap_compute: f64,
    /// How much longer the busiest link needs, forward and backward, than in the best possible plan with this finish, at most.
    gap_link: Option<f64>,
    /// How many more bytes of Q, K and V move than in the best possible plan with this finish, at most.
    gap_bytes: Option<f64>,
    /// Most that a slot needs for rows and results.
    memory_bytes: u64,
    /// What a slot of any plan with this finish needs, at least.
    least_memory_bytes: u64,
}

impl Report {
    pub(super) fn new(
        workload: &Workload,
        problem: &Problem,
        plan: &Plan,
        before: (u64, u64),
        (plan_seconds, lists_seconds): (f64, f64),
    ) -> Self {
        let (bounds, least) = (plan.bounds(), plan.least(problem));
        let Traffic { forward, backward } = Traffic::of(problem, plan);
        let finishes: Vec<f64> = (0..problem.slots.len() as u32)
            .map(|slot| plan.finish(problem, SlotId(slot)) as f64)
            .collect();
        let mean = finishes.iter().sum::<f64>() / finishes.len() as f64;
        let seconds = |nanoseconds: u64| nanoseconds as f64 / 1e9;
        let gap =
            |reached: u64, least: u64| (least > 0).then(|| reached as f64 / least as f64 - 1.0);
        let most =
            |of: fn(&cadre_planner::Place) -> u64| forward.places.iter().map(of).max().unwrap_or(0);
        Self {
            workload: workload.name.clone(),
            slots: problem.slots.len(),
            documents: problem.layout.documents().len(),
            max_over_mean_before: before.0 as f64 / (before.1 as f64).max(1.0),
            max_over_mean: finishes.iter().copied().fold(0.0, f64::max) / mean.max(1.0),
            q_bytes: forward.queries,
            kv_bytes: forward.keys,
            o_bytes: forward.results,
            max_send_bytes: most(|it| it.inputs_sent),
            max_recv_bytes: most(|it| it.inputs_received),
            max_link_seconds_forward: seconds(forward.busiest()),
            max_link_seconds_backward: seconds(backward.busiest()),
            tasks: plan.tasks().len(),
            tasks_moved: moved(problem, plan),
            plan_seconds,
            lists_seconds,
            gap_compute: bounds.gap_ppm as f64 / 1e6,
            gap_link: gap(bounds.link, least.link),
            gap_bytes: gap(bounds.pulled, least.pulled),
            memory_bytes: bounds.memory,
            least_memory_bytes: plan.least_memory(problem),
        }
    }

    /// One line.
    pub(super) fn json(&self) -> String {
        let line = serde_json::to_string(self).expect("numbers and a name are JSON");
        line + "\n"
    }

    /// A table for people.
    pub(super) fn table(&self) -> String {
        let mut table = printed::table();
        let mut row = |name: &str, value: String| {
            table.add_row([name.to_owned(), value]);
        };
        let gigabytes = |bytes: u64| format!("{:.2} GB", bytes as f64 / 1e9);
        row("workload", format!("{}, {} documents", self.workload, self.documents));
        row("slots", self.slots.to_string());
        let (after, before) = (self.max_over_mean, self.max_over_mean_before);
        row("max/mean", format!("{after:.4}, unplanned {before:.4}"));
        row("above the bound", format!("{:.3} %", 100.0 * self.gap_compute));
        row("Q and KV pulled", gigabytes(self.q_bytes + self.kv_bytes));
        if let Some(gap) = self.gap_bytes {
            row("above their bound", format!("{:.0} %", 100.0 * gap));
        }
        row("O and LSE returned", gigabytes(self.o_bytes));
        row("busiest sender", gigabytes(self.max_send_bytes));
        row("busiest receiver", gigabytes(self.max_recv_bytes));
        let (forward, backward) = (self.max_link_seconds_forward, self.max_link_seconds_backward);
        row(
            "busiest link at 50 GB/s",
            format!("{:.1} ms forward, {:.1} ms backward", 1e3 * forward, 1e3 * backward),
        );
        if let Some(gap) = self.gap_link {
            row("above its bound", format!("{:.0} %", 100.0 * gap));
        }
        row("memory of a slot", printed::at_least(self.memory_bytes, self.least_memory_bytes));
        row("tasks", format!("{}, of which {} move", self.tasks, self.tasks_moved));
        let (plan, lists) = (self.plan_seconds, self.lists_seconds);
        row("planning", format!("{:.2} ms, transfer lists {:.2} ms", 1e3 * plan, 1e3 * lists));
        format!("{table}\n")
    }
}
