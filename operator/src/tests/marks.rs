//! The pod that leads is the one that the Service of the control service leads to.

use serde_json::{Value, json};

use super::server::{Objects, Refused, Server};
use super::{name, running};
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
    let (client, own) = (server.client(), place("b"));
    // Pod a led, and died without a word.
    tokio::select! {
        () = keep_on(&client, &own) => {}
        () = until_marked(&server, &["b", "x"]) => {}
    }
    // Its process begins anew in the same pod, as that of pod b does after it has lost the lease.
    take_off(&client, &own).await;
    until_marked(&server, &["x"]).await;
    take_off(&client, &place("no-pod")).await;
}

#[tokio::test]
async fn a_mark_that_is_refused_is_tried_again() {
    let server = Server::new();
    release(&server);
    let refused =
        Refused { verb: "patch", resource: "pods", with: "", code: 403, words: "no".into() };
    server.refuse(refused);
    let later = async {
        while server.until("an answer", |all| Some(all.refusals())).await == 0 {
            tokio::task::yield_now().await;
        }
        let nothing =
            Refused { verb: "patch", resource: "leases", with: "", code: 403, words: "no".into() };
        server.refuse(nothing);
        until_marked(&server, &["b", "x"]).await;
    };
    let (client, own) = (server.client(), place("b"));
    tokio::select! {
        () = keep_on(&client, &own) => {}
        () = later => {}
    }
}

#[test]
fn the_charts_service_leads_to_the_pod_with_the_mark() {
    let chart = include_str!("../../../charts/cadre/templates/operator.yaml");
    assert!(chart.contains(&format!("{LABEL_LEADS}: \"true\"")));
}
