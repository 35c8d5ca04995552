//! Tables of `cadre simulate` for people.
//!
//! In: rows of the simulator. Out: text.

use cadre_simulator::churn::{ChurnRow, SpreadRow};
use cadre_simulator::ours::OursRow;
use cadre_simulator::published::{self, PublishedRow, outside};
use cadre_simulator::trial::Setting;
use cadre_simulator::{LengthSet, SimulationError};
use serde::Serialize;

use crate::printed;

/// A table with a head.
pub(super) fn text(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut table = printed::table();
    table.set_header(head.iter().copied());
    for row in rows {
        table.add_row(row);
    }
    format!("{table}\n")
}

fn seconds(nanos: u64) -> String {
    format!("{:.3}", nanos as f64 / 1e9)
}

fn percent(millionths: u64) -> String {
    format!("{:.2} %", millionths as f64 / 1e4)
}

fn size(setting: &Setting) -> [String; 2] {
    [setting.processors().to_string(), format!("{}K x {}", setting.longest / 1024, setting.batch)]
}

pub(super) fn published(set: LengthSet, rows: &[PublishedRow]) -> String {
    let head = [
        "group",
        "GPUs",
        "batch",
        "best group",
        "packed (s)",
        "published planner (s)",
        "speedup",
        "published",
        "error",
        "one stream",
    ];
    let line = |it: &PublishedRow| {
        let [processors, batch] = size(&it.setting);
        let (least, most) = it.range.published;
        let fitted = if it.range.fitted { " (fitted)" } else { "" };
        vec![
            format!("{}{fitted}", it.range.name),
            processors,
            batch,
            format!("CP {}", it.group_ranks),
            seconds(it.packed_nanos),
            seconds(it.greedy_nanos),
            format!("{:.3}", it.speedup()),
            format!("{:.2}-{:.2}", least as f64 / 1e3, most as f64 / 1e3),
            format!("{:+.1} %", 100.0 * it.error()),
            format!("{:+.1} %", 100.0 * it.one_stream()),
        ]
    };
    format!("{}\n{}", set.name(), text(&head, rows.iter().map(line)))
}

/// A published share beside the model's.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ShareRow {
    name: String,
    share: f64,
    published: f64,
    error: f64,
}

pub(super) fn shares(
    set: LengthSet,
    lengths: &[u64],
    seed: u64,
    batches: usize,
) -> Result<Vec<ShareRow>, SimulationError> {
    let row = |name: String, share: f64, published: f64| ShareRow {
        name,
        share,
        published,
        error: outside(share, published, published),
    };
    let mut rows = Vec::new();
    for (nodes, published) in [(2, 0.03), (32, 0.40)] {
        let name = format!("gathering keys, {nodes} nodes, share of the step");
        rows.push(row(name, published::gather_share(nodes), published));
    }
    for (groups, published) in [(4, 0.19), (8, 0.55)] {
        let name = format!("idle under variable packing, DP {groups}, 512K");
        let idle = published::idle_share(groups, set, lengths, seed, batches)?;
        rows.push(row(name, idle, published));
    }
    Ok(rows)
}

pub(super) fn share_table(rows: &[ShareRow]) -> String {
    let line = |it: &ShareRow| {
        vec![
            it.name.clone(),
            format!("{:.1} %", 100.0 * it.share),
            format!("{:.0} %", 100.0 * it.published),
            format!("{:+.0} %", 100.0 * it.error),
        ]
    };
    text(&["share", "model", "published", "error"], rows.iter().map(line))
}

pub(super) fn ours(rows: &[OursRow]) -> String {
    let head = [
        "GPUs",
        "batch",
        "packed FA2 (s)",
        "packed Hopper (s)",
        "greedy FA2 (s)",
        "kernel",
        "balance",
        "wire",
        "overlap",
        "ours (s)",
        "ideal (s)",
        "max/mean",
        "bytes",
        "sender",
    ];
    let line = |it: &OursRow| {
        let [processors, batch] = size(&it.setting);
        let gain = |at: usize| format!("{:.3}x", it.stages[at - 1] as f64 / it.stages[at] as f64);
        let ratio = |of: [u64; 2]| format!("{:.2}", of[1] as f64 / (of[0] as f64).max(1.0));
        vec![
            processors,
            batch,
            seconds(it.packed_nanos),
            seconds(it.packed_hopper_nanos),
            seconds(it.stages[0]),
            gain(1),
            gain(2),
            gain(3),
            gain(4),
            seconds(it.stages[4]),
            seconds(it.ideal_nanos),
            format!("{:.3}", it.imbalance_ppm[1] as f64 / 1e6),
            ratio(it.input_bytes),
            ratio(it.sender_bytes),
        ]
    };
    text(&head, rows.iter().map(line))
}

/// Our step against what no plan can do without, and each system with each overlap on the same kernel.
pub(super) fn overlaps(rows: &[OursRow]) -> String {
    let head = [
        "GPUs",
        "batch",
        "ideal (s)",
        "links at least (s)",
        "reached",
        "packed: one stream",
        "in call",
        "greedy: one stream",
        "in call",
        "ping-pong",
        "both",
        "own bytes",
        "ours: one stream",
        "in call",
        "ping-pong",
        "both",
    ];
    let line = |it: &OursRow| {
        let [processors, batch] = size(&it.setting);
        let bounds = [seconds(it.ideal_nanos), seconds(it.link_bound_nanos)];
        let packed = [it.packed_hopper_nanos, it.packed_in_call_nanos].map(seconds);
        let greedy = it.greedy_overlaps.into_iter().chain([it.greedy_own_nanos]).map(seconds);
        let ours = it.ours_overlaps.into_iter().chain([it.stages[4]]).map(seconds);
        let mut line = vec![processors, batch];
        line.extend(bounds);
        line.push(format!("{:.3}", it.reached()));
        line.extend(packed.into_iter().chain(greedy).chain(ours));
        line
    };
    text(&head, rows.iter().map(line))
}

pub(super) fn spreads(rows: &[SpreadRow]) -> String {
    let line = |it: &SpreadRow| {
        vec![
            it.name.clone(),
            it.slots.to_string(),
            percent(it.last_over_mean_ppm),
            percent(it.spread_ppm),
        ]
    };
    text(&["speeds", "slots", "last over mean", "last over first"], rows.iter().map(line))
}

pub(super) fn churn(rows: &[ChurnRow]) -> String {
    let head = [
        "step",
        "event",
        "alive",
        "last over mean",
        "bundles moved",
        "moved (MB a layer)",
        "step (s)",
        "lost (s)",
        "planned anew (s)",
    ];
    let line = |it: &ChurnRow| {
        vec![
            it.step.to_string(),
            it.event.clone(),
            it.alive.to_string(),
            percent(it.imbalance_ppm),
            it.bundles_moved.to_string(),
            format!("{:.0}", it.bytes_moved as f64 / 1e6),
            seconds(it.nanos),
            seconds(it.lost_nanos),
            seconds(it.anew_nanos),
        ]
    };
    text(&head, rows.iter().map(line))
}
