//! Objects of ours that somebody has taken a label off: the watches do not show them any more.

use serde_json::{Value, json};

use super::server::{Objects, Refused, Server};
use super::{never_again, operator, pool, reason, said};

const LABEL: &str = "app.kubernetes.io/managed-by";

fn without_label() -> Value {
    json!({"metadata": {"labels": {LABEL: null}}})
}

/// Waits until all that a pool of two servers is made of is there, and the pool has looked at it.
async fn made(server: &Server) {
    server.put("attentionpools", "p", &pool(2));
    let made = |all: &Objects<'_>| {
        all.get("services", "p-servers")?;
        all.get("poddisruptionbudgets", "p-servers")?;
        let count = (all.of("pods").len(), all.of("controllerrevisions").len());
        let fine = reason(all.get("attentionpools", "p")?, "Degraded") == "AsItShould";
        (count == (2, 1) && fine).then_some(())
    };
    server.until("all of it", made).await;
}

#[tokio::test]
async fn objects_of_ours_that_have_lost_their_label_get_it_back() {
    let server = Server::new();
    let _context = operator(&server).await;
    made(&server).await;
    for kind in ["services", "poddisruptionbudgets"] {
        let uid = |all: &Objects<'_>| Some(all.get(kind, "p-servers")?["metadata"]["uid"].clone());
        let before = server.until("it", uid).await;
        server.put(kind, "p-servers", &without_label());
        let back = |all: &Objects<'_>| {
            let meta = &all.get(kind, "p-servers")?["metadata"];
            (meta["labels"][LABEL] == "cadre-operator").then(|| meta["uid"].clone())
        };
        assert_eq!(server.until("its label", back).await, before, "{kind}");
    }
}

#[tokio::test]
async fn a_label_that_may_not_be_given_back_is_told_by_the_objects_name() {
    let server = Server::new();
    let _context = operator(&server).await;
    made(&server).await;
    let (verb, resource) = ("patch", "services");
    server.refuse(Refused { verb, resource, with: "", code: 403, words: "no".into() });
    server.put("services", "p-servers", &without_label());
    let told = |all: &Objects<'_>| {
        let pool = all.get("attentionpools", "p")?;
        (reason(pool, "Degraded") == "Forbidden").then(|| said(pool, "Degraded", "message"))
    };
    let expected = "give Service p-servers its labels back: no";
    assert_eq!(server.until("the refusal", told).await, expected);
}

#[tokio::test]
async fn an_attempt_whose_job_has_lost_the_label_is_still_seen() {
    let server = Server::new();
    let _context = operator(&server).await;
    server.put("attentionpools", "p", &pool(1));
    server.put("trainingjobs", "j", &never_again());
    let told = |all: &Objects<'_>| {
        let is_told = all.get("trainingjobs", "j")?["status"]["attempt"] == 1;
        all.get("jobs", "j-1").filter(|_| is_told).map(drop)
    };
    server.until("an attempt", told).await;
    server.put("jobs", "j-1", &without_label());
    let failed = json!({"status": {"conditions": [{"type": "Failed", "status": "True"}]}});
    server.put("jobs", "j-1", &failed);
    let ended = |all: &Objects<'_>| {
        (reason(all.get("trainingjobs", "j")?, "Failed") == "RestartsUsedUp").then_some(())
    };
    server.until("its end", ended).await;
}
