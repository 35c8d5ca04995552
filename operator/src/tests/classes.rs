//! Two operators of two classes beside each other: each looks after its own objects, and touches nothing of the other's.

use cadre_crds::contract::{FINALIZER, LABEL_CLASS};
use serde_json::{Value, json};

use super::server::Server;
use super::{job, name, operator_of, pool, reason};
use crate::caches::Scope;
use crate::issuer::Issuer;
use crate::leader::Place;
use crate::release;

fn scope(class: Option<&str>) -> Scope {
    Scope { namespace: None, class: class.map(str::to_owned) }
}

/// A pool, or a job, of a class.
fn of(class: Option<&str>, mut object: Value) -> Value {
    if let Some(class) = class {
        object["spec"]["class"] = class.into();
    }
    object
}

/// Names and classes of the servers that are there.
fn servers(all: &super::server::Objects<'_>) -> Vec<(String, Option<String>)> {
    let pods = all.of("pods").into_iter();
    let servers = pods.filter(|it| it["metadata"]["labels"]["cadre.dev/role"] == "server");
    let class = |it: &Value| it["metadata"]["labels"][LABEL_CLASS].as_str().map(str::to_owned);
    servers.map(|it| (name(it)[..1].to_owned(), class(it))).collect()
}

#[tokio::test]
async fn an_operator_looks_after_its_class_alone() {
    let server = Server::new();
    for (class, own) in [(None, "a"), (Some("trial"), "b")] {
        server.put("attentionpools", own, &of(class, pool(1)));
        let mut job = of(class, job());
        job["spec"]["attention"]["poolRef"]["name"] = own.into();
        server.put("trainingjobs", own, &job);
        // Of another class than its pool.
        job["spec"]["attention"]["poolRef"]["name"] = if own == "a" { "b" } else { "a" }.into();
        server.put("trainingjobs", &format!("{own}-astray"), &job);
    }
    let _first = operator_of(&server, &scope(None), Issuer::default()).await;
    server
        .until("all of the first", |all| {
            (all.get("jobs", "a-1").is_some() && !servers(all).is_empty()).then_some(())
        })
        .await;
    server
        .until("what is astray", |all| {
            (reason(all.get("trainingjobs", "a-astray")?, "Running") == "PoolNotFound")
                .then_some(())
        })
        .await;
    server
        .until("nothing of the other class", |all| {
            assert_eq!(servers(all), [("a".to_owned(), None)]);
            assert!(all.get("jobs", "b-1").is_none());
            for (kind, name) in
                [("attentionpools", "b"), ("trainingjobs", "b"), ("trainingjobs", "b-astray")]
            {
                assert!(all.get(kind, name)?["status"].is_null(), "{kind} {name}");
            }
            Some(())
        })
        .await;
    let _second = operator_of(&server, &scope(Some("trial")), Issuer::default()).await;
    server
        .until("all of the second", |all| {
            let both = [("a".to_owned(), None), ("b".to_owned(), Some("trial".to_owned()))];
            (all.get("jobs", "b-1").is_some() && servers(all) == both).then_some(())
        })
        .await;
}

#[tokio::test]
async fn a_pod_of_another_class_is_no_server_of_a_pool() {
    let server = Server::new();
    server.put("attentionpools", "a", &pool(1));
    // As somebody makes it whom the policy of the pool's own class lets pass.
    let labels = json!({"cadre.dev/pool": "a", "cadre.dev/role": "server", "cadre.dev/slot": "0",
        LABEL_CLASS: "trial"});
    server.put("pods", "theirs", &json!({"metadata": {"labels": labels}}));
    let context = operator_of(&server, &scope(None), Issuer::default()).await;
    assert!(context.caches.pods.state().is_empty());
    server.until("a server", |all| (all.of("pods").len() == 2).then_some(())).await;
}

#[tokio::test]
async fn an_uninstall_releases_its_class_alone() {
    let server = Server::new();
    for (class, own) in [(None, "a"), (Some("trial"), "b"), (Some("other"), "c")] {
        server.put("attentionpools", own, &of(class, pool(1)));
        let guarded = json!({"metadata": {"finalizers": [FINALIZER]}});
        server.put("attentionpools", own, &guarded);
    }
    let place = Place { namespace: "n".into(), name: "trial".into(), identity: "u".into() };
    let client = server.client();
    release::all(&client, server.client(), &scope(Some("trial")), &place).await.expect("released");
    let left = server
        .until("the pools", |all| {
            let pools = all.of("attentionpools").into_iter();
            Some(pools.map(|it| it["metadata"]["finalizers"].clone()).collect::<Vec<_>>())
        })
        .await;
    assert_eq!(left, [json!([FINALIZER]), json!([]), json!([FINALIZER])]);
}
