//! What the metrics tell, that the page and the chart know it, and that those who ask at once are told the same.

mod alerts;

use std::thread;

use serde_json::{Value, json};

use super::*;

/// Metrics of a process that leads and has done something of each kind.
fn metrics() -> Metrics {
    let metrics = Metrics::default();
    metrics.leader.set(1);
    metrics.reconciled("AttentionPool", true, Duration::from_millis(3));
    metrics.action(&Action::Guard);
    metrics.wrote_status("TrainingJob");
    metrics
}

/// A pool, a job, both called `x`, and a server.
fn seen() -> Seen {
    let report = Report { busy_ppm: Some(250_000), slow_factor_percent: 110, ..Report::default() };
    let of_status = |status: Value, spec: Value| {
        let meta = json!({"namespace": "n", "name": "x"});
        json!({"metadata": meta, "spec": spec, "status": status})
    };
    let said = |type_: &str, status: &str, reason: &str| {
        json!({"type": type_, "status": status, "reason": reason, "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z"})
    };
    let status = json!({"desired": 4, "ready": 3, "conditions":
        [said("Degraded", "True", "Unschedulable"), said("Available", "False", "NoServer")]});
    let pool = serde_json::from_value(of_status(status, json!({})));
    let status =
        json!({"restarts": 2, "failovers": 5, "checkpointStep": 6, "progress": {"step": 7}});
    let spec = json!({"template": {}, "attention": {"poolRef": {"name": "x"}}});
    let job = serde_json::from_value(of_status(status, spec));
    Seen {
        servers: vec![(("n".to_owned(), "p".to_owned()), "p-0-1".to_owned(), report)],
        pools: vec![Arc::new(pool.expect("a pool"))],
        jobs: vec![Arc::new(job.expect("a job"))],
    }
}

#[test]
fn documented_names_are_told() {
    let page = include_str!("../../../../docs/operations.md");
    let metrics = metrics();
    let text = metrics.text(&seen());
    let none = metrics.text(&Seen::default());
    assert!(!none.contains("p-0-1") && !none.contains("\"x\""), "who has gone is told no more");
    assert!(!text.contains("NoServer"), "what is not true is not told");
    let asked = include_str!("../../../../charts/cadre/dashboards/operator.json");
    let words = asked.split(|it: char| it != '_' && !it.is_alphanumeric());
    for name in words.filter(|it| it.starts_with("cadre_operator_")) {
        assert!(text.contains(name), "{name}, which the dashboard asks for");
    }
    for line in [
        "cadre_operator_leader 1",
        "cadre_operator_reconciles_total{kind=\"AttentionPool\",result=\"ok\"} 1",
        "cadre_operator_reconcile_seconds_count{kind=\"AttentionPool\"} 1",
        "cadre_operator_actions_total{action=\"guard\"} 1",
        "cadre_operator_status_writes_total{kind=\"TrainingJob\"} 1",
        "cadre_operator_server_busy_ratio{namespace=\"n\",pool=\"p\",server=\"p-0-1\"} 0.25",
        "cadre_operator_server_time_ratio{namespace=\"n\",pool=\"p\",server=\"p-0-1\"} 1.1",
        "cadre_operator_pool_servers{namespace=\"n\",pool=\"x\",state=\"desired\"} 4",
        "cadre_operator_pool_servers{namespace=\"n\",pool=\"x\",state=\"ready\"} 3",
        "cadre_operator_job_steps{namespace=\"n\",job=\"x\"} 7",
        "cadre_operator_job_checkpoint_steps{namespace=\"n\",job=\"x\"} 6",
        "cadre_operator_job_restarts{namespace=\"n\",job=\"x\"} 2",
        "cadre_operator_job_failovers{namespace=\"n\",job=\"x\"} 5",
        "cadre_operator_condition{kind=\"AttentionPool\",namespace=\"n\",name=\"x\",type=\"Degraded\",reason=\"Unschedulable\"} 1",
    ] {
        assert!(text.lines().any(|it| it == line), "{line} in:\n{text}");
        let name = line.split(['{', ' ']).next().unwrap_or_default();
        let name = name.strip_suffix("_count").unwrap_or(name);
        assert!(page.contains(&format!("`{name}`")), "{name} in docs/operations.md");
    }
}

#[test]
fn all_who_ask_at_once_are_told_everything() {
    let metrics = metrics();
    let seen = seen();
    let lines = |text: &str| {
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let alone = lines(&metrics.text(&seen));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    assert_eq!(lines(&metrics.text(&seen)), alone);
                }
            });
        }
    });
}
