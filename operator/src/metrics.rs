//! What the operator tells Prometheus.
//!
//! | name | labels | what |
//! |---|---|---|
//! | `cadre_operator_reconciles_total` | `kind`, `result` | looks at objects; result `ok` or `error` |
//! | `cadre_operator_reconcile_seconds` | `kind` | time of a look |
//! | `cadre_operator_actions_total` | `action` | what was done to the cluster |
//! | `cadre_operator_status_writes_total` | `kind` | statuses written |
//! | `cadre_operator_leader` | | 1 while this process leads |
//! | `cadre_operator_server_busy_ratio` | `namespace`, `pool`, `server` | share of the time in which a server computes |
//! | `cadre_operator_server_time_ratio` | the same | its observed over its expected time |

use std::sync::atomic::{AtomicI64, AtomicU64};
use std::time::Duration;

use cadre_desired::Action;
use cadre_desired::pool::Report;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// All metrics.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    pub(crate) leader: Gauge<i64, AtomicI64>,
    reconciles: Family<Look, Counter>,
    seconds: Family<OfKind, Histogram>,
    actions: Family<Done, Counter>,
    status_writes: Family<OfKind, Counter>,
    busy: Family<OfServer, Gauge<f64, AtomicU64>>,
    time: Family<OfServer, Gauge<f64, AtomicU64>>,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct OfServer {
    namespace: String,
    pool: String,
    server: String,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct Look {
    kind: String,
    result: &'static str,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct OfKind {
    kind: String,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct Done {
    action: &'static str,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("cadre_operator");
        let leader = Gauge::default();
        let reconciles = Family::default();
        let seconds = Family::new_with_constructor(histogram as fn() -> Histogram);
        let actions = Family::default();
        let status_writes = Family::default();
        registry.register("leader", "1 while this process leads", leader.clone());
        registry.register("reconciles", "Looks at objects", reconciles.clone());
        registry.register("reconcile_seconds", "Time of a look", seconds.clone());
        registry.register("actions", "What was done to the cluster", actions.clone());
        registry.register("status_writes", "Statuses written", status_writes.clone());
        let (busy, time) = (Family::default(), Family::default());
        registry.register(
            "server_busy_ratio",
            "Share of the time in which it computes",
            busy.clone(),
        );
        registry.register("server_time_ratio", "Observed over expected time", time.clone());
        Self { registry, leader, reconciles, seconds, actions, status_writes, busy, time }
    }
}

/// From 1 ms to 16 s.
fn histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 15))
}

impl Metrics {
    pub(crate) fn reconciled(&self, kind: &str, ok: bool, took: Duration) {
        let result = if ok { "ok" } else { "error" };
        self.reconciles.get_or_create(&Look { kind: kind.into(), result }).inc();
        self.seconds.get_or_create(&OfKind { kind: kind.into() }).observe(took.as_secs_f64());
    }

    pub(crate) fn action(&self, action: &Action) {
        let action = match action {
            Action::Create(_) => "create",
            Action::Apply(_) => "apply",
            Action::Drain { .. } => "drain",
            Action::Note { .. } => "note",
            Action::Delete(_) | Action::DeleteSelf => "delete",
            Action::Guard => "guard",
            Action::Release => "release",
        };
        self.actions.get_or_create(&Done { action }).inc();
    }

    pub(crate) fn wrote_status(&self, kind: &str) {
        self.status_writes.get_or_create(&OfKind { kind: kind.into() }).inc();
    }

    /// All of them in the text that Prometheus reads, with what servers report now.
    pub(crate) fn text(&self, servers: &[((String, String), String, Report)]) -> String {
        self.busy.clear();
        self.time.clear();
        for ((namespace, pool), server, report) in servers {
            let of = OfServer {
                namespace: namespace.clone(),
                pool: pool.clone(),
                server: server.clone(),
            };
            if let Some(busy) = report.busy_ppm {
                self.busy.get_or_create(&of).set(f64::from(busy) / 1e6);
            }
            if report.slow_factor_percent > 0 {
                self.time.get_or_create(&of).set(f64::from(report.slow_factor_percent) / 100.0);
            }
        }
        let mut text = String::new();
        // Writing into memory does not fail; an empty page would say it.
        if encode(&mut text, &self.registry).is_err() {
            text.clear();
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documented_names_are_told() {
        let page = include_str!("../../docs/operations.md");
        let metrics = Metrics::default();
        metrics.leader.set(1);
        metrics.reconciled("AttentionPool", true, Duration::from_millis(3));
        metrics.action(&Action::Guard);
        metrics.wrote_status("TrainingJob");
        let report =
            Report { busy_ppm: Some(250_000), slow_factor_percent: 110, ..Report::default() };
        let servers = [(("n".to_owned(), "p".to_owned()), "p-0-1".to_owned(), report)];
        let text = metrics.text(&servers);
        assert!(!metrics.text(&[]).contains("p-0-1"), "a server that has gone is told no more");
        for line in [
            "cadre_operator_leader 1",
            "cadre_operator_reconciles_total{kind=\"AttentionPool\",result=\"ok\"} 1",
            "cadre_operator_reconcile_seconds_count{kind=\"AttentionPool\"} 1",
            "cadre_operator_actions_total{action=\"guard\"} 1",
            "cadre_operator_status_writes_total{kind=\"TrainingJob\"} 1",
            "cadre_operator_server_busy_ratio{namespace=\"n\",pool=\"p\",server=\"p-0-1\"} 0.25",
            "cadre_operator_server_time_ratio{namespace=\"n\",pool=\"p\",server=\"p-0-1\"} 1.1",
        ] {
            assert!(text.lines().any(|it| it == line), "{line} in:\n{text}");
            let name = line.split(['{', ' ']).next().unwrap_or_default();
            let name = name.strip_suffix("_count").unwrap_or(name);
            assert!(page.contains(&format!("`{name}`")), "{name} in docs/operations.md");
        }
    }
}
