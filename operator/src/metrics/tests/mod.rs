//! What the metrics tell, that the page and the chart know it, and that those who ask at once are told the same.

mod alerts;

use std::thread;

use serde_json::{Value, json};

use super::*;

const DASHBOARDS: [&str; 3] = [
    include_str!("../../../../charts/cadre/dashboards/operator.json"),
    include_str!("../../../../charts/cadre/dashboards/pool.json"),
    include_str!("../../../../charts/cadre/dashboards/job.json"),
];

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
    let paths = [("ucx".to_owned(), 3)].into();
    let report =
        Report { busy_ppm: Some(250_000), slow_factor_percent: 110, paths, ..Report::default() };
    let of_status = |status: Value, spec: Value| {
        let meta = json!({"namespace": "n", "name": "x"});
        json!({"metadata": meta, "spec": spec, "status": status})
    };
    let said = |type_: &str, status: &str, reason: &str| {
        json!({"type": type_, "status": status, "reason": reason, "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z"})
    };
    let holder = json!({"namespace": "m", "name": "j", "since": "2026-01-01T00:00:00Z",
        "servers": ["x-0-1"]});
    let status = json!({"desired": 4, "ready": 3, "holders": [holder], "conditions":
        [said("Degraded", "True", "Unschedulable"), said("Available", "False", "NoServer"),
        said("PlacementSatisfied", "False", "Far")]});
    let pool = serde_json::from_value(of_status(status, json!({})));
    let status = json!({"restarts": 2, "failovers": 5, "checkpointStep": 6, "progress":
        {"step": 7, "tokensPerSecond": 800, "exposedWaitPercent": 5, "imbalancePercent": 110}});
    let gaps = Gaps { compute: Some(0.5), link: None, bytes: Some(0.25) };
    let spec = json!({"template": {}, "attention": {"poolRef": {"name": "x"}}});
    let job = serde_json::from_value(of_status(status, spec));
    Seen {
        servers: vec![(("n".to_owned(), "p".to_owned()), "p-0-1".to_owned(), report)],
        pools: vec![Arc::new(pool.expect("a pool"))],
        jobs: vec![Arc::new(job.expect("a job"))],
        gaps: vec![(("n".to_owned(), "x".to_owned()), gaps)],
        certificates: vec![("tls.crt", 1_800_000_000)],
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
    for asked in DASHBOARDS {
        let words = asked.split(|it: char| it != '_' && !it.is_alphanumeric());
        for name in words.filter(|it| it.starts_with("cadre_operator_")) {
            assert!(text.contains(name), "{name}, which a dashboard asks for");
        }
    }
    for line in [
        "cadre_operator_leader 1",
        "cadre_operator_reconciles_total{kind=\"AttentionPool\",result=\"ok\"} 1",
        "cadre_operator_reconcile_seconds_count{kind=\"AttentionPool\"} 1",
        "cadre_operator_actions_total{action=\"guard\"} 1",
        "cadre_operator_status_writes_total{kind=\"TrainingJob\"} 1",
        "cadre_operator_server_busy_ratio{namespace=\"n\",pool=\"p\",server=\"p-0-1\"} 0.25",
        "cadre_operator_server_time_ratio{namespace=\"n\",pool=\"p\",server=\"p-0-1\"} 1.1",
        "cadre_operator_server_trainers{namespace=\"n\",pool=\"p\",server=\"p-0-1\",path=\"ucx\"} 3",
        "cadre_operator_server_held_since_timestamp_seconds{namespace=\"n\",pool=\"x\",server=\"x-0-1\",job_namespace=\"m\",job=\"j\"} 1767225600",
        "cadre_operator_pool_servers{namespace=\"n\",pool=\"x\",state=\"desired\"} 4",
        "cadre_operator_pool_servers{namespace=\"n\",pool=\"x\",state=\"ready\"} 3",
        "cadre_operator_job_steps{namespace=\"n\",job=\"x\"} 7",
        "cadre_operator_job_checkpoint_steps{namespace=\"n\",job=\"x\"} 6",
        "cadre_operator_job_restarts{namespace=\"n\",job=\"x\"} 2",
        "cadre_operator_job_failovers{namespace=\"n\",job=\"x\"} 5",
        "cadre_operator_job_tokens_per_second{namespace=\"n\",job=\"x\"} 800",
        "cadre_operator_job_exposed_wait_ratio{namespace=\"n\",job=\"x\"} 0.05",
        "cadre_operator_job_imbalance_ratio{namespace=\"n\",job=\"x\"} 1.1",
        "cadre_operator_job_plan_gap_ratio{namespace=\"n\",job=\"x\",of=\"compute\"} 0.5",
        "cadre_operator_job_plan_gap_ratio{namespace=\"n\",job=\"x\",of=\"bytes\"} 0.25",
        "cadre_operator_pool_misplaced{namespace=\"n\",pool=\"x\",reason=\"Far\"} 1",
        "cadre_operator_certificate_expiry_timestamp_seconds{file=\"tls.crt\"} 1800000000",
        "cadre_operator_condition{kind=\"AttentionPool\",namespace=\"n\",name=\"x\",type=\"Degraded\",reason=\"Unschedulable\"} 1",
    ] {
        assert!(text.lines().any(|it| it == line), "{line} in:\n{text}");
        let name = line.split(['{', ' ']).next().unwrap_or_default();
        let name = name.strip_suffix("_count").unwrap_or(name);
        assert!(page.contains(&format!("`{name}`")), "{name} in docs/operations.md");
    }
}

#[test]
fn dashboards_have_names_of_their_own_and_panels_that_do_not_overlap() {
    let mut names = std::collections::BTreeSet::new();
    for text in DASHBOARDS {
        let board: Value = serde_json::from_str(text).expect("JSON");
        for name in ["uid", "title"] {
            assert!(names.insert(board[name].as_str().expect(name).to_owned()), "{name} twice");
        }
        let variables = board["templating"]["list"].as_array().into_iter().flatten();
        let variables: Vec<_> = variables.filter_map(|it| it["name"].as_str()).collect();
        let mut taken = std::collections::BTreeSet::new();
        for panel in board["panels"].as_array().expect("panels") {
            assert!(names.insert(format!("{} {}", board["uid"], panel["id"])), "an id twice");
            let side = |name: &str| panel["gridPos"][name].as_u64().expect("a number");
            for x in side("x")..side("x") + side("w") {
                assert!(x < 24, "{panel}");
                for y in side("y")..side("y") + side("h") {
                    assert!(taken.insert((x, y)), "overlaps: {panel}");
                }
            }
            for target in panel["targets"].as_array().expect("targets") {
                let asked = target["expr"].as_str().expect("an expression");
                for variable in asked.split('$').skip(1) {
                    let end = variable.find(|it: char| !it.is_alphanumeric());
                    let variable = &variable[..end.unwrap_or(variable.len())];
                    assert!(variables.contains(&variable), "${variable} in {asked}");
                }
            }
        }
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
