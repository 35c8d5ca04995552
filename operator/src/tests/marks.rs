//! The pod that leads is the one that the Service of the control service leads to.

use serde_json::{Value, json};

use super::server::{Objects, Refused, Server};
use super::{job, name, operator, pool, reason, running, said};
use crate::leader::Place;
use crate::mark::{LABEL_LEADS, keep_on, take_off};

fn place(identity: &str) -> Place {
    Place { namespace: "n".into(), name: "cadre-operator".into(), identity: identity.into() }
}

/// Pods of this release, and one of another in the same namespace.
fn release(server: &Server) {
    for (own, release, leads) in [("a", "cadre", true), ("b", "cadre", false), ("x", "trial", true)]
    {
        let labels = json!({"app.kubernetes.io/name": "cadre-operator", "app.kubernetes.io/instance": release});
        server.put("pods", own, &running());
        server.put("pods", own, &json!({"metadata": {"labels": labels}}));
        if leads {
            server.put("pods", own, &json!({"metadata": {"labels": {LABEL_LEADS: "true"}}}));
        }
    }
}

fn marked(all: &Objects<'_>) -> Vec<String> {
    let is_marked = |it: &&Value| it["metadata"]["labels"][LABEL_LEADS] == "true";
    all.of("pods").into_iter().filter(is_marked).map(name).collect()
}

async fn until_marked(server: &Server, expected: &[&str]) {
    server.until("the mark", |all| (marked(all) == expected).then_some(())).await;
}

#[tokio::test]
async fn the_pod_that_leads_has_the_mark_and_no_other_of_its_release() {
    let server = Server::new();
    release(&server);
    let (context, own) = (operator(&server).await, place("b"));
    // Pod a led, and died without a word.
    tokio::select! {
        () = keep_on(&context, &own) => {}
        () = until_marked(&server, &["b", "x"]) => {}
    }
    // Its process begins anew in the same pod, as that of pod b does after it has lost the lease.
    take_off(&context.client, &own).await;
    until_marked(&server, &["x"]).await;
    take_off(&context.client, &place("no-pod")).await;
}

#[tokio::test]
async fn a_mark_that_is_refused_is_tried_again_and_told_by_all_who_have_workers() {
    let server = Server::new();
    release(&server);
    let context = operator(&server).await;
    server.put("attentionpools", "p", &pool(1));
    server.put("trainingjobs", "j", &job());
    let objects = [("attentionpools", "p"), ("trainingjobs", "j")];
    let told = async |expected: &str| {
        for (kind, own) in objects {
            let is_told = |all: &Objects<'_>| {
                let object = all.get(kind, own)?;
                (reason(object, "Degraded") == expected)
                    .then(|| said(object, "Degraded", "message"))
            };
            let message = server.until(expected, is_told).await;
            if expected == "NotMarked" {
                let words =
                    "workers do not find the operator: label pod b with cadre.dev/leads: no";
                assert_eq!(message, words, "{kind}");
            }
        }
    };
    told("AsItShould").await;
    let refused =
        |resource| Refused { verb: "patch", resource, with: "", code: 403, words: "no".into() };
    server.refuse(refused("pods"));
    let later = async {
        told("NotMarked").await;
        server.refuse(refused("leases"));
        until_marked(&server, &["b", "x"]).await;
        told("AsItShould").await;
    };
    let own = place("b");
    tokio::select! {
        () = keep_on(&context, &own) => {}
        () = later => {}
    }
}

#[test]
fn the_charts_service_leads_to_the_pod_with_the_mark() {
    let chart = include_str!("../../../charts/cadre/templates/operator.yaml");
    assert!(chart.contains(&format!("{LABEL_LEADS}: \"true\"")));
    let unless = "{{- if not .Values.control.leaderAlone }}\n            - --unmarked\n";
    assert!(chart.contains(unless), "where the Service does not need it nobody is told of it");
}
