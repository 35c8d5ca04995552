//! Scenes of a cluster, and what is said about them: each names the true cause and what to do.
//!
//! Objects are given as the API server writes them. A property says that no pod, however odd, leaves a finding without words.

#![allow(clippy::needless_pass_by_value)] // objects are literals

mod kept;

use cadre_cluster::explain::explain;
use cadre_cluster::{Seen, Target, Verdict, status};
use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;
use serde_json::{Value, json};

const NOW: &str = "2026-11-21T12:00:00Z";

fn parsed<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("an object of the API")
}

fn at(seconds: i64) -> String {
    let now: Timestamp = NOW.parse().expect("a time");
    Timestamp::from_second(now.as_second() + seconds).expect("a time").to_string()
}

fn condition(name: &str, truth: &str, reason: &str, message: &str) -> Value {
    json!({"type": name, "status": truth, "reason": reason, "message": message,
        "lastTransitionTime": at(-60), "observedGeneration": 1})
}

fn pool(status: Value) -> Value {
    json!({"apiVersion": "cadre.dev/v1alpha1", "kind": "AttentionPool",
        "metadata": {"name": "p", "namespace": "team", "generation": 1, "creationTimestamp": at(-600)},
        "spec": {"replicas": 2}, "status": status})
}

fn job(status: Value) -> Value {
    json!({"apiVersion": "cadre.dev/v1alpha1", "kind": "TrainingJob",
        "metadata": {"name": "j", "namespace": "team", "generation": 1, "creationTimestamp": at(-600)},
        "spec": {"nodes": 2, "attention": {"poolRef": {"name": "p"}},
            "template": {"spec": {"containers": [{"name": "trainer"}]}}},
        "status": status})
}

fn pod(name: &str, role: &str, spec: Value, status: Value) -> Value {
    let mut labels = json!({"cadre.dev/pool": "p", "cadre.dev/role": role});
    if role == "trainer" {
        labels["cadre.dev/job"] = json!("j");
        labels["cadre.dev/attempt"] = json!("1");
    }
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "team",
        "uid": name, "labels": labels}, "spec": spec, "status": status})
}

fn ready(name: &str, role: &str) -> Value {
    pod(
        name,
        role,
        json!({"nodeName": "n1", "containers": []}),
        json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}),
    )
}

fn attempt(status: Value, suspend: bool) -> Value {
    json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j-1", "namespace": "team",
        "uid": "j-1", "labels": {"cadre.dev/job": "j", "cadre.dev/attempt": "1"},
        "creationTimestamp": at(-300)}, "spec": {"suspend": suspend,
        "template": {"spec": {"containers": []}}}, "status": status})
}

fn warning(kind: &str, name: &str, reason: &str, message: &str) -> Value {
    json!({"metadata": {"name": "e", "namespace": "team"}, "type": "Warning", "reason": reason,
        "message": message, "lastTimestamp": at(-5),
        "involvedObject": {"kind": kind, "name": name, "namespace": "team"}})
}

/// A cluster with an operator that leads.
fn scene() -> Seen {
    let mut seen = Seen::nothing(NOW.parse().expect("a time"));
    let mut operator = ready("cadre-operator-1", "");
    operator["metadata"]["namespace"] = json!("cadre-system");
    seen.operators.push(parsed(operator));
    seen.leases.push(parsed(json!({"metadata": {"name": "cadre-operator"},
        "spec": {"renewTime": at(-2).replace('Z', ".000000Z")}})));
    seen
}

fn serving() -> Value {
    json!({"observedGeneration": 1, "desired": 2, "ready": 2, "registered": 2,
        "conditions": [condition("Available", "True", "Serving", "2 of 2")]})
}

fn text(seen: &Seen, target: &str) -> String {
    let target: Target = target.parse().expect("a target");
    explain(seen, "team", &target).expect("the object is there").text()
}

/// The text names the cause and the remedy.
fn says(seen: &Seen, target: &str, cause: &str, remedy: &str) {
    let text = text(seen, target);
    let line = |start: &str| {
        let found = text.lines().find(|it| it.starts_with(start)).unwrap_or_default();
        found.to_owned()
    };
    assert!(line("cause:").contains(cause), "cause {cause} of\n{text}");
    assert!(line("remedy:").contains(remedy), "remedy {remedy} of\n{text}");
}

#[test]
fn an_autoscaler_of_a_pool_that_scales_itself_is_told_of() {
    let mut seen = scene();
    let scaler = |name: &str, kind: &str, target: &str| {
        json!({"metadata": {"name": name, "namespace": "team"}, "spec": {"maxReplicas": 4,
            "scaleTargetRef": {"kind": kind, "name": target}}})
    };
    let all = [("h", "AttentionPool", "p"), ("i", "AttentionPool", "q"), ("k", "Deployment", "p")];
    seen.autoscalers = all.map(|(name, kind, target)| parsed(scaler(name, kind, target))).to_vec();
    seen.pods = vec![parsed(ready("p-0-1", "server")), parsed(ready("p-1-1", "server"))];
    let pool = |mode: &str| {
        let mut pool = pool(serving());
        pool["spec"]["scaling"] = json!({"mode": mode, "min": 1, "max": 4});
        parsed(pool)
    };
    seen.pools = vec![pool("External")];
    assert!(!text(&seen, "attnpool/p").contains("autoscaler"));
    seen.pools = vec![pool("Auto")];
    says(&seen, "attnpool/p", "so does the operator", "mode to External");
    let text = text(&seen, "attnpool/p");
    assert!(
        text.contains("horizontalpodautoscaler h:") && !text.contains("autoscaler i"),
        "{text}"
    );
}

#[test]
fn jobs_that_have_servers_of_a_pool_are_named_with_the_time_since_when() {
    let mut seen = scene();
    let mut status = serving();
    status["holders"] = json!([{"namespace": "other", "name": "k", "since": at(-90),
        "servers": ["p-0-1", "p-1-1"]},
        {"namespace": "other", "name": "l", "since": at(-90), "servers": ["p-2-1"], "lent": 2}]);
    seen.pools.push(parsed(pool(status)));
    let text = text(&seen, "attnpool/p");
    for expected in [
        "cadjob other/k: has 2 of the servers since 2026-11-21T11:58:30Z",
        "cadjob other/l: has 1 of the servers since 2026-11-21T11:58:30Z; 2 of its share are lent while it uses none",
    ] {
        assert!(text.lines().any(|it| it.ends_with(expected)), "{text}");
    }
}

#[test]
fn what_is_well_is_counted() {
    let mut seen = scene();
    seen.pools.push(parsed(pool(serving())));
    seen.pods = vec![parsed(ready("p-0-1", "server")), parsed(ready("p-1-1", "server"))];
    assert_eq!(
        text(&seen, "attnpool/p"),
        "ok      attnpool team/p: 2 of 2 dedicated servers are ready, 2 registered, 0 serve in place\n\
         ok      └─ 2 servers: ready or done\n"
    );
    let table = status::text(&seen);
    assert!(table.contains("team/p") && table.contains("2/2") && table.contains("fine"), "{table}");
}

#[test]
fn a_server_without_a_node_says_what_the_scheduler_says() {
    let mut seen = scene();
    let why = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu.";
    seen.pools.push(parsed(pool(json!({"observedGeneration": 1, "desired": 2, "ready": 1,
        "conditions": [condition("Degraded", "True", "Unschedulable", why)]}))));
    let waiting = json!({"phase": "Pending", "conditions": [{"type": "PodScheduled",
        "status": "False", "reason": "Unschedulable", "message": why}]});
    seen.pods = vec![
        parsed(ready("p-0-1", "server")),
        parsed(pod("p-1-1", "server", json!({"containers": []}), waiting)),
    ];
    says(&seen, "attnpool/p", "pod team/p-1-1: no node: 0/4 nodes", "free GPUs");
    let table = status::text(&seen);
    assert!(table.contains("bad") && table.contains("Insufficient"), "{table}");
}

#[test]
fn a_pod_on_a_broken_node_points_at_the_node() {
    let mut seen = scene();
    seen.pools.push(parsed(pool(serving())));
    let lost = json!({"phase": "Running", "startTime": at(-900),
        "conditions": [{"type": "Ready", "status": "False"}]});
    seen.pods.push(parsed(pod(
        "p-0-1",
        "server",
        json!({"nodeName": "n7", "containers": []}),
        lost,
    )));
    seen.nodes.push(parsed(json!({"metadata": {"name": "n7"}, "status": {"conditions": [
        {"type": "Ready", "status": "Unknown", "message": "Kubelet stopped posting node status."}]}})));
    says(&seen, "attnpool/p", "node n7: is not ready: Kubelet stopped", "repair the node");
    seen.nodes.clear();
    says(&seen, "attnpool/p", "node n7: is not in the cluster any more", "--force");
    seen.unread.push("nodes: forbidden".into());
    says(
        &seen,
        "attnpool/p",
        "pod team/p-0-1: its containers are being made for 15 min",
        "kubelet",
    );
}

#[test]
fn a_server_that_falls_over_says_how_it_ended() {
    let mut seen = scene();
    seen.pools.push(parsed(pool(serving())));
    let crash = json!({"phase": "Running", "containerStatuses": [{"name": "server", "ready": false,
        "restartCount": 4, "image": "i", "imageID": "",
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
        "lastState": {"terminated": {"exitCode": 2, "reason": "Error",
            "message": "starting\nerror: CADRE_CA: no such file\n"}}}]});
    seen.pods.push(parsed(pod(
        "p-0-1",
        "server",
        json!({"nodeName": "n1", "containers": []}),
        crash,
    )));
    seen.nodes.push(parsed(json!({"metadata": {"name": "n1"}})));
    let cause = "container server: ended with exit code 2 Error: error: CADRE_CA: no such file";
    says(&seen, "attnpool/p", cause, "the input is wrong");
}

#[test]
fn devices_that_do_not_work_are_told_of_the_node() {
    let mut seen = scene();
    seen.pools.push(parsed(pool(serving())));
    let refused = json!({"phase": "Failed", "reason": "UnexpectedAdmissionError",
        "message": "Allocate failed due to no healthy devices"});
    seen.pods.push(parsed(pod(
        "p-0-1",
        "server",
        json!({"nodeName": "n1", "containers": []}),
        refused,
    )));
    seen.nodes.push(parsed(json!({"metadata": {"name": "n1"}, "status": {
        "capacity": {"nvidia.com/gpu": "8", "cpu": "64"},
        "allocatable": {"nvidia.com/gpu": "7", "cpu": "63"}}})));
    says(&seen, "attnpool/p", "node n1: has 7 of 8 nvidia.com/gpu that work", "device plugin");
}

#[test]
fn a_job_says_what_its_attempt_waits_for() {
    let mut seen = scene();
    seen.pools.push(parsed(pool(serving())));
    seen.jobs.push(parsed(job(json!({"observedGeneration": 1, "attempt": 1,
        "conditions": [condition("Running", "False", "Starting", "0 of 2 pods are ready")]}))));
    seen.attempts.push(parsed(attempt(json!({}), true)));
    says(&seen, "cadjob/j", "attempt j-1: the queue has not admitted it", "wait for the queue");
    seen.attempts = vec![parsed(attempt(json!({"active": 0}), false))];
    seen.events.push(parsed(warning(
        "Job",
        "j-1",
        "FailedCreate",
        "pods \"j-1-0\" is forbidden: violates PodSecurity \"restricted:latest\"",
    )));
    says(&seen, "cadjob/j", "event FailedCreate: pods", "Pod Security level");
}

#[test]
fn a_job_without_its_pool_says_so() {
    let mut seen = scene();
    seen.jobs.push(parsed(job(json!({"observedGeneration": 1, "conditions": [
        condition("Running", "False", "PoolNotFound", "spec.attention.poolRef names no AttentionPool")]}))));
    says(&seen, "cadjob/j", "Running False (PoolNotFound)", "create the pool");
}

#[test]
fn a_job_that_failed_points_at_its_trainer() {
    let mut seen = scene();
    seen.jobs.push(parsed(job(json!({"observedGeneration": 1, "attempt": 1, "conditions": [
        condition("Failed", "True", "BadInput", "pod j-1-0 ended with exit code 2")]}))));
    seen.attempts.push(parsed(attempt(json!({"failed": 1}), false)));
    says(&seen, "cadjob/j", "Failed True (BadInput)", "correct what the message names");
    let done = json!({"observedGeneration": 1, "conditions": [
        condition("Complete", "True", "Completed", "every trainer has ended well")]});
    seen.jobs = vec![parsed(job(done))];
    assert!(text(&seen, "cadjob/j").starts_with("ok "), "complete is fine");
}

#[test]
fn an_object_that_nobody_looks_at_points_at_the_operator() {
    let mut seen = scene();
    let mut changed = pool(serving());
    changed["metadata"]["generation"] = json!(3);
    seen.pools.push(parsed(changed));
    let operators = std::mem::take(&mut seen.operators);
    says(&seen, "attnpool/p", "operator: there is none", "install the chart");
    seen.operators = operators;
    seen.leases = vec![parsed(json!({"spec": {"renewTime": at(-200).replace('Z', ".000000Z")}}))];
    says(&seen, "attnpool/p", "operator: no operator leads since 3 min", "log of its pods");
}

#[test]
fn a_name_that_is_not_there_gets_those_that_are() {
    let mut seen = scene();
    seen.pools.push(parsed(pool(json!({}))));
    let target: Target = "attnpool/q".parse().expect("a target");
    let refusal = explain(&seen, "team", &target).expect_err("there is no q");
    assert_eq!(refusal, "attnpool/q is not in namespace team: there are p");
    let refusal = explain(&seen, "other", &target).expect_err("nothing there");
    assert!(refusal.contains("choose another namespace with -n"), "{refusal}");
}

fn words() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        prop::sample::select(vec![
            "",
            "False",
            "True",
            "Unknown",
            "Ready",
            "PodScheduled",
            "Running",
            "Pending",
            "Failed",
            "SchedulingGated",
            "CrashLoopBackOff",
            "ErrImagePull",
            "OOMKilled",
            "n1",
        ])
        .prop_map(Value::from),
    ]
}

prop_compose! {
    /// A status with any of the words in any of its places.
    fn statuses()(
        phase in words(), condition in words(), truth in words(), reason in words(),
        waiting in words(), ended in words(), code in any::<i32>(), node in words(),
        deleted in any::<bool>(), parts in 0..8_u8,
    ) -> Value {
        let mut state = json!({});
        if parts & 1 != 0 {
            state["waiting"] = json!({"reason": waiting});
        }
        if parts & 2 != 0 {
            state["terminated"] = json!({"exitCode": code, "reason": ended});
        }
        let text = |it: &Value| it.as_str().unwrap_or_default().to_owned();
        let mut status = json!({"phase": phase, "conditions": [
            {"type": text(&condition), "status": text(&truth), "reason": reason}]});
        if parts & 4 != 0 {
            status["containerStatuses"] = json!([{"name": "server", "ready": false, "image": "",
                "imageID": "", "restartCount": 0, "state": state}]);
        }
        let mut it = pod("p-0-1", "server", json!({"nodeName": node, "containers": []}), status);
        if deleted {
            it["metadata"]["deletionTimestamp"] = json!(at(-30));
        }
        it
    }
}

proptest! {
    #[test]
    fn whatever_is_not_fine_says_why(pods in prop::collection::vec(statuses(), 0..12)) {
        let mut seen = scene();
        seen.pools.push(parsed(pool(serving())));
        seen.pods = pods.into_iter().map(parsed).collect();
        let target: Target = "attnpool/p".parse().expect("a target");
        let found = explain(&seen, "team", &target).expect("the pool is there");
        let cause = found.cause();
        prop_assert!(found.verdict == Verdict::Fine || cause.verdict != Verdict::Fine);
        prop_assert!(!cause.says.trim().is_empty() && !cause.what.trim().is_empty());
        prop_assert!(status::text(&seen).contains("team/p"));
    }
}
