//! Every request of the operator that the API server may refuse, beyond the creation of objects: each is told by the look that
//! meets it, in a condition with the API server's words; where that cannot be written, in an event.

use std::fs;

use cadre_crds::contract::FINALIZER;
use serde_json::{Value, json};

use super::server::{Objects, Refused, Server};
use super::{job, name, operator, operator_with, pool, reason, running, said};
use crate::issuer::Issuer;

const WORDS: &str = "words of the API server";

fn refused(verb: &'static str, resource: &'static str) -> Refused {
    Refused { verb, resource, with: "", code: 403, words: WORDS.into() }
}

/// A pool of two servers that run, at rest; a job on it whose trainers run. Out: names of the servers.
async fn at_rest(server: &Server) -> Vec<String> {
    server.put("attentionpools", "p", &pool(2));
    let is_server = |it: &&Value| it["metadata"]["labels"]["cadre.dev/role"] == "server";
    let servers = server
        .until("two servers", |all| {
            let servers = all.of("pods").into_iter().filter(is_server).map(name);
            let servers: Vec<_> = servers.collect();
            (servers.len() == 2).then_some(servers)
        })
        .await;
    for pod in &servers {
        server.put("pods", pod, &running());
    }
    server.put("trainingjobs", "j", &job());
    let made = server.until("an attempt", |all| all.get("jobs", "j-1").cloned()).await;
    for own in ["j-1-0", "j-1-1"] {
        let trainer = json!({"metadata": made["spec"]["template"]["metadata"]});
        server.put("pods", own, &trainer);
        server.put("pods", own, &running());
    }
    server
        .until("rest", |all| {
            let settled = reason(all.get("attentionpools", "p")?, "Ready") == "Ready";
            let runs = reason(all.get("trainingjobs", "j")?, "Running") == "Running";
            (settled && runs && all.of("controllerrevisions").len() == 1).then_some(())
        })
        .await;
    servers
}

/// Waits until a condition says what was refused. It does so after the first time.
async fn told(server: &Server, kind: &str, own: &str, start: &str) {
    let words = |all: &Objects<'_>| {
        let message = said(all.get(kind, own)?, "Degraded", "message");
        let reason = reason(all.get(kind, own)?, "Degraded");
        (reason == "Forbidden").then(|| (message, all.refusals()))
    };
    let (message, refusals) = server.until(start, words).await;
    assert!(message.starts_with(start), "{message}");
    assert!(message.ends_with(WORDS), "{message}");
    assert_eq!(refusals, 1, "the look that meets it tells it: {message}");
}

/// What changes so that a request follows.
enum Cause {
    /// An object gets this.
    Put(&'static str, &'static str, Value),
    /// The first revision there is gets a twin that nobody needs.
    Revision,
    /// A trainer's pod ends with this code.
    Ends(i32),
}

/// Verb and resource of the request, its cause, the kind that tells it, and how the words begin.
fn table() -> Vec<(&'static str, &'static str, Cause, &'static str, &'static str)> {
    let [pools, jobs] = ["attentionpools", "trainingjobs"];
    let other = || json!({"spec": {"selector": {"a": "b"}}});
    let budget = |spec: Value| json!({"spec": spec});
    let more = json!({"spec": {"scaling": {"mode": "Auto", "min": 3, "max": 5}}});
    let fewer = || json!({"spec": {"replicas": 1}});
    let guarded = json!({"metadata": {"finalizers": [FINALIZER]}});
    let suspended = json!({"spec": {"suspend": true}});
    let over = json!({"spec": {"ttlSecondsAfterFinished": 0}, "status": {"conditions": [{
        "type": "Complete", "status": "True", "reason": "Completed", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
    let put = Cause::Put;
    vec![
        (
            "apply",
            "services",
            put("services", "p-servers", other()),
            pools,
            "apply Service p-servers",
        ),
        (
            "apply",
            "poddisruptionbudgets",
            put("poddisruptionbudgets", "p-servers", budget(json!({"maxUnavailable": 7}))),
            pools,
            "apply PodDisruptionBudget p-servers",
        ),
        (
            "delete",
            "poddisruptionbudgets",
            put("poddisruptionbudgets", "p-servers", budget(json!({"minAvailable": 1}))),
            pools,
            "delete PodDisruptionBudget p-servers",
        ),
        (
            "delete",
            "controllerrevisions",
            Cause::Revision,
            pools,
            "delete ControllerRevision p-twin",
        ),
        ("patch", "pods", put(pools, "p", fewer()), pools, "drain pod p-1-"),
        ("apply", "attentionpools", put(pools, "p", more), pools, "write spec.replicas 3"),
        ("delete", "pods", put(pools, "p", fewer()), pools, "delete Pod p-1-"),
        ("patch", "attentionpools", put(pools, "p", guarded), pools, "change the finalizers"),
        (
            "apply",
            "services",
            put("services", "j-trainers", other()),
            jobs,
            "apply Service j-trainers",
        ),
        ("patch", "jobs", Cause::Ends(1), jobs, "note on Job j-1"),
        ("delete", "jobs", put(jobs, "j", suspended), jobs, "delete Job j-1"),
        ("delete", "trainingjobs", put(jobs, "j", over), jobs, "delete TrainingJob j"),
    ]
}

#[tokio::test]
async fn each_request_that_is_refused_is_told_by_the_look_that_meets_it() {
    for (verb, resource, cause, kind, start) in table() {
        let server = Server::new();
        let _context = operator(&server).await;
        at_rest(&server).await;
        server.refuse(refused(verb, resource));
        match cause {
            Cause::Put(resource, own, change) => server.put(resource, own, &change),
            Cause::Revision => {
                let twin = server
                    .until("a revision", |all| {
                        all.of("controllerrevisions").first().copied().cloned()
                    })
                    .await;
                let mut labels = twin["metadata"]["labels"].clone();
                labels["cadre.dev/revision"] = "twin".into();
                let owners = &twin["metadata"]["ownerReferences"];
                let meta = json!({"labels": labels, "ownerReferences": owners});
                server.put("controllerrevisions", "p-twin", &json!({"metadata": meta}));
            }
            Cause::Ends(code) => {
                let ended = json!({"terminated": {"exitCode": code}});
                let statuses = json!([{"name": "trainer", "state": ended}]);
                let status = json!({"phase": "Failed", "containerStatuses": statuses});
                server.put("pods", "j-1-0", &json!({"status": status}));
            }
        }
        let own = if kind == "attentionpools" { "p" } else { "j" };
        told(&server, kind, own, start).await;
    }
}

#[tokio::test]
async fn an_issuer_that_cannot_be_brought_is_told() {
    for (verb, start) in [("get", "look at ConfigMap n/"), ("apply", "write ConfigMap n/")] {
        for kind in ["attentionpools", "trainingjobs"] {
            let folder = tempfile::tempdir().expect("a temporary folder");
            fs::write(folder.path().join("ca.crt"), "an issuer").expect("room");
            let server = Server::new();
            server.refuse(refused(verb, "configmaps"));
            let issuer = Issuer::new(Some(folder.path().to_owned()));
            let _context = operator_with(&server, issuer).await;
            server.put(kind, "p", &if kind == "attentionpools" { pool(1) } else { job() });
            if kind == "trainingjobs" {
                // A job without its pool needs no workers.
                server.put("attentionpools", "p", &pool(1));
            }
            let words = |all: &Objects<'_>| {
                let message = said(all.get(kind, "p")?, "Degraded", "message");
                message.starts_with(start).then_some(message)
            };
            let message = server.until(start, words).await;
            assert!(message.ends_with(WORDS), "{message}");
        }
    }
}

#[tokio::test]
async fn objects_of_others_with_the_names_of_ours_are_told() {
    let theirs = |resource: &str, own: &str, kind: &str, of: &str| {
        let (resource, own, kind) = (resource.to_owned(), own.to_owned(), kind.to_owned());
        let of = of.to_owned();
        async move {
            let server = Server::new();
            server.put(&resource, &own, &json!({"kind": kind, "spec": {}}));
            let _context = operator(&server).await;
            server.put("attentionpools", "p", &pool(1));
            server.put("trainingjobs", "p", &job());
            let told = |all: &Objects<'_>| {
                let object = all.get(&of, "p")?;
                (reason(object, "Degraded") == "NameTaken")
                    .then(|| said(object, "Degraded", "message"))
            };
            let message = server.until("a name that is taken", told).await;
            assert!(message.contains(&kind), "{kind} {own}: {message}");
        }
    };
    theirs("poddisruptionbudgets", "p-servers", "PodDisruptionBudget", "attentionpools").await;
    theirs("jobs", "p-1", "Job", "trainingjobs").await;
}

#[tokio::test]
async fn a_status_that_cannot_be_written_is_told_in_an_event() {
    for (kind, own) in [("attentionpools", "p"), ("trainingjobs", "j")] {
        let server = Server::new();
        server.refuse(refused("status", kind));
        let _context = operator(&server).await;
        server.put(kind, own, &if kind == "attentionpools" { pool(1) } else { job() });
        server
            .until("an event", |all| {
                let events = all.of("events").into_iter();
                let mut told = events.filter(|it| it["regarding"]["name"] == own);
                let words = format!("write the status: {WORDS}");
                told.any(|it| it["reason"] == "Forbidden" && it["note"] == words).then_some(())
            })
            .await;
    }
}
