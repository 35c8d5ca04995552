//! The whole operator against a small API server in memory: watches, looks, writes, status, events.
//!
//! What is decided is tested where it is decided; here is tested that it happens.

mod anew;
mod automatic;
mod classes;
mod encryption;
#[path = "../../desired/tests/world/fields.rs"]
mod fields;
mod hidden;
mod issuers;
mod leading;
mod leases;
mod marks;
mod pods;
mod refusals;
mod refused;
mod rollout;
mod server;
mod sharing;
mod standing;
mod telling;
mod versions;
mod wire;

use std::sync::Arc;

use cadre_crds::contract::FINALIZER;
use cadre_desired::Settings;
use serde_json::{Value, json};

use crate::caches::Scope;
use crate::context::Context;
use crate::issuer::Issuer;
use crate::leader::{self, Patience, Place};
use crate::metrics::Seen;
use crate::{controllers, release};
use server::{Refused, Server};

/// An operator that leads, until the test ends.
async fn operator(server: &Server) -> Arc<Context> {
    operator_with(server, Issuer::default()).await
}

async fn operator_with(server: &Server, issuer: Issuer) -> Arc<Context> {
    operator_of(server, &Scope::default(), issuer).await
}

/// An operator that looks after a class.
async fn operator_of(server: &Server, scope: &Scope, issuer: Issuer) -> Arc<Context> {
    let context = Arc::new(Context::new(server.client(), Settings::default(), scope, issuer));
    context.caches.ready().await.expect("the server answers");
    let own = context.clone();
    tokio::spawn(async move { controllers::run(&own, 4).await });
    context
}

fn pool(replicas: u32) -> Value {
    json!({
        "apiVersion": "cadre.dev/v1alpha1",
        "kind": "AttentionPool",
        "spec": {"replicas": replicas, "inPlace": false},
    })
}

fn job() -> Value {
    json!({
        "apiVersion": "cadre.dev/v1alpha1",
        "kind": "TrainingJob",
        "spec": {
            "nodes": 2,
            "attention": {"poolRef": {"name": "p"}},
            "template": {"spec": {"containers": [{"name": "trainer", "image": "i"}]}},
        },
    })
}

/// A job whose first failure is its last.
fn never_again() -> Value {
    let mut job = job();
    job["spec"]["failurePolicy"] = json!({"maxRestarts": 0});
    job
}

fn running() -> Value {
    json!({
        "spec": {"nodeName": "node-1"},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    })
}

fn name(object: &Value) -> String {
    object["metadata"]["name"].as_str().unwrap_or_default().to_owned()
}

fn reason(object: &Value, condition: &str) -> String {
    said(object, condition, "reason")
}

fn said(object: &Value, condition: &str, field: &str) -> String {
    let conditions = object["status"]["conditions"].as_array();
    let found = conditions.into_iter().flatten().find(|it| it["type"] == condition);
    found.and_then(|it| it[field].as_str()).unwrap_or_default().to_owned()
}

#[tokio::test]
async fn all_who_wait_for_the_caches_are_woken() {
    let server = Server::new();
    let context =
        Context::new(server.client(), Settings::default(), &Scope::default(), Issuer::default());
    let (health, leader) = tokio::join!(context.caches.ready(), context.caches.ready());
    health.expect("health hears of it");
    leader.expect("who wants to lead hears of it");
}

#[tokio::test]
async fn a_pool_gets_its_servers_tells_of_them_and_shrinks() {
    let server = Server::new();
    let context = operator(&server).await;
    server.put("attentionpools", "p", &pool(3));
    let pods = server
        .until("three servers", |all| {
            let pods: Vec<_> = all.of("pods").into_iter().map(name).collect();
            (pods.len() == 3).then_some(pods)
        })
        .await;
    assert!(pods[0].starts_with("p-0-") && pods[2].starts_with("p-2-"), "{pods:?}");
    server.until("a Service", |all| all.get("services", "p-servers").map(drop)).await;
    server.until("a budget", |all| all.get("poddisruptionbudgets", "p-servers").map(drop)).await;
    for pod in &pods {
        server.put("pods", pod, &running());
    }
    server
        .until("a status of three", |all| {
            let pool = all.get("attentionpools", "p")?;
            (pool["status"]["ready"] == 3 && reason(pool, "Progressing") == "Settled").then_some(())
        })
        .await;
    server.put("attentionpools", "p", &json!({"spec": {"replicas": 1}}));
    let left = server
        .until("a status of one", |all| {
            let pool = all.get("attentionpools", "p")?;
            let settled = pool["status"]["ready"] == 1 && reason(pool, "Progressing") == "Settled";
            settled.then(|| all.of("pods").into_iter().map(name).collect::<Vec<_>>())
        })
        .await;
    assert_eq!(left, pods[..1], "the highest slots leave");
    let text = context.metrics.text(&Seen::default());
    assert!(text.contains("cadre_operator_actions_total{action=\"drain\"} 2"), "{text}");
}

#[tokio::test]
async fn a_job_waits_for_its_pool_and_becomes_a_job_of_the_core_api() {
    let server = Server::new();
    server.put("trainingjobs", "j", &never_again());
    let _context = operator(&server).await;
    server
        .until("the reason", |all| {
            (reason(all.get("trainingjobs", "j")?, "Running") == "PoolNotFound").then_some(())
        })
        .await;
    server.put("attentionpools", "p", &pool(1));
    server
        .until("an attempt", |all| {
            let job = all.get("jobs", "j-1")?;
            assert_eq!(job["spec"]["completionMode"], "Indexed");
            assert_eq!(job["metadata"]["ownerReferences"][0]["name"], "j");
            Some(())
        })
        .await;
    server.until("a Service", |all| all.get("services", "j-trainers").map(drop)).await;
    server
        .until("a status", |all| {
            let job = all.get("trainingjobs", "j")?;
            (job["status"]["attempt"] == 1 && reason(job, "Running") == "Starting").then_some(())
        })
        .await;
    let failed = json!({"status": {"conditions": [{"type": "Failed", "status": "True"}]}});
    server.put("jobs", "j-1", &failed);
    server
        .until("the end", |all| {
            let job = all.get("trainingjobs", "j")?;
            (reason(job, "Failed") == "RestartsUsedUp").then_some(())
        })
        .await;
    server
        .until("an event", |all| {
            let events = all.of("events");
            events.into_iter().find(|it| it["reason"] == "RestartsUsedUp").map(|it| {
                assert_eq!(it["type"], "Warning");
                assert_eq!(it["regarding"]["name"], "j");
            })
        })
        .await;
}

#[tokio::test]
async fn a_pod_whose_trainer_never_began_says_what_failed_before() {
    let server = Server::new();
    let _context = operator(&server).await;
    server.put("attentionpools", "p", &pool(1));
    server.put("trainingjobs", "j", &never_again());
    let made = server.until("an attempt", |all| all.get("jobs", "j-1").cloned()).await;
    let ended = json!({"terminated": {"exitCode": 5, "message": "no room"}});
    let pod = json!({
        "metadata": made["spec"]["template"]["metadata"],
        "spec": {"nodeName": "node-1"},
        "status": {"phase": "Failed", "initContainerStatuses": [{"name": "prepare", "state": ended}]},
    });
    server.put("pods", "j-1-0", &pod);
    let failed = json!({"status": {"conditions": [{"type": "Failed", "status": "True"}]}});
    server.put("jobs", "j-1", &failed);
    server
        .until("what failed", |all| {
            let message = said(all.get("trainingjobs", "j")?, "Failed", "message");
            let why = "pod j-1-0: it failed before its trainer began: container prepare: exit code 5: no room";
            message.starts_with(why).then_some(())
        })
        .await;
}

#[tokio::test]
async fn what_belongs_to_somebody_else_is_left_alone_and_said() {
    let server = Server::new();
    let theirs = json!({"apiVersion": "v1", "kind": "Service", "spec": {"selector": {"a": "b"}}});
    server.put("services", "p-servers", &theirs);
    server.put("attentionpools", "p", &pool(1));
    let _context = operator(&server).await;
    server
        .until("an event", |all| {
            let events = all.of("events");
            let said = events.into_iter().find(|it| it["reason"] == "NameTaken")?;
            assert_eq!(
                said["note"],
                "Service p-servers is there and belongs to somebody else; rename one of the two"
            );
            let service = all.get("services", "p-servers")?;
            assert_eq!(service["spec"], json!({"selector": {"a": "b"}}));
            Some(())
        })
        .await;
}

#[tokio::test]
async fn an_object_that_cannot_be_read_stops_no_other() {
    let server = Server::new();
    let mut broken = pool(1);
    broken["spec"]["template"] = json!({"spec": {"containers": "none"}});
    server.put("attentionpools", "broken", &broken);
    server.put("attentionpools", "p", &pool(1));
    let _context = operator(&server).await;
    server.until("a server", |all| (all.of("pods").len() == 1).then_some(())).await;
    server
        .until("why", |all| {
            let message = said(all.get("attentionpools", "broken")?, "Degraded", "message");
            message.starts_with("spec.template.spec.containers cannot be read: ").then_some(())
        })
        .await;

    // As if servers had served: its end waits for none of them.
    let ends = json!({"metadata": {
        "finalizers": [FINALIZER], "deletionTimestamp": "2026-01-01T00:00:00Z",
    }});
    server.put("attentionpools", "broken", &ends);
    server
        .until("its release", |all| {
            let left = &all.get("attentionpools", "broken")?["metadata"]["finalizers"];
            (*left == json!([])).then_some(())
        })
        .await;

    let mut broken = job();
    let variable = json!([{"name": "X", "value": 1}]);
    broken["spec"]["template"]["spec"]["containers"][0]["env"] = variable;
    server.put("trainingjobs", "j", &broken);
    server
        .until("what is wrong with the job", |all| {
            let message = said(all.get("trainingjobs", "j")?, "Running", "message");
            let named = "spec.template.spec.containers[0].env[0].value cannot be read: ";
            message.starts_with(named).then_some(())
        })
        .await;
}

#[tokio::test]
async fn pools_and_jobs_may_have_names_that_begin_with_a_digit() {
    let server = Server::new();
    let _context = operator(&server).await;
    server.put("attentionpools", "8b", &pool(1));
    let mut job = job();
    job["spec"]["attention"]["poolRef"]["name"] = "8b".into();
    server.put("trainingjobs", "70b-run", &job);
    server
        .until("all of it", |all| {
            let job = all.get("trainingjobs", "70b-run")?;
            let well = |it: &Value| reason(it, "Degraded") == "AsItShould";
            (well(job)
                && reason(job, "Running") == "Starting"
                && all.get("jobs", "70b-run-1").is_some())
            .then_some(())?;
            let pool = all.get("attentionpools", "8b")?;
            (well(pool) && all.of("pods").len() == 1).then_some(())
        })
        .await;
    // Budgets may be called so, and were before Services had another name.
    server.until("its budget", |all| all.get("poddisruptionbudgets", "8b-servers").map(drop)).await;
}

#[tokio::test]
async fn finalizers_are_released_while_no_operator_can_lead() {
    let server = Server::new();
    let guarded = json!({"metadata": {"finalizers": ["example.com/other", FINALIZER]}});
    server.put("attentionpools", "p", &pool(1));
    server.put("attentionpools", "p", &guarded);
    let place = |identity: &str| Place {
        namespace: "n".into(),
        name: "cadre-operator".into(),
        identity: identity.into(),
    };
    let operator = leader::acquire(server.client(), &place("operator"), Patience::default()).await;
    operator.give_back().await;
    let uninstall = place("uninstall");
    release::all(&server.client(), server.client(), &Scope::default(), &uninstall)
        .await
        .expect("the pool is released");

    let pools = server.history("attentionpools");
    let (freed, pool) = pools.last().expect("it was changed");
    assert_eq!(pool["metadata"]["finalizers"], json!(["example.com/other"]));
    let leases = server.history("leases");
    let holder = |it: &(u64, Value)| it.1["spec"]["holderIdentity"].as_str().map(str::to_owned);
    let before = leases.iter().rev().find(|it| it.0 < *freed).and_then(holder);
    assert_eq!(before.as_deref(), Some("uninstall"), "{leases:#?}");
    let after = leases.last().and_then(holder);
    assert_ne!(after.as_deref(), Some("uninstall"), "who installs anew need not wait");
}

#[tokio::test]
async fn an_uninstall_ends_though_the_definitions_went_before() {
    let server = Server::new();
    let words = "the server could not find the requested resource".into();
    let resource = "attentionpools";
    server.refuse(Refused { verb: "list", resource, with: "", code: 404, words });
    let place = Place { namespace: "n".into(), name: "l".into(), identity: "uninstall".into() };
    let (client, scope) = (server.client(), Scope::default());
    let released = release::all(&client, server.client(), &scope, &place).await;
    released.expect("nothing is left to release");
}

#[test]
fn the_charts_settings_are_known_and_are_the_defaults() {
    let values: Value = serde_saphyr::from_str(include_str!("../../../charts/cadre/values.yaml"))
        .expect("the chart's values are YAML");
    let settings: Settings =
        serde_json::from_value(values["settings"].clone()).expect("every setting is known");
    assert_eq!(format!("{settings:?}"), format!("{:?}", Settings::default()));
}
