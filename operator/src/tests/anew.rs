//! Pools and jobs that go, and are made anew under their names.

use std::thread;
use std::time::Duration;

use cadre_control::DATA_VERSION;
use cadre_control::proto::{Hello, Probed, Role, View};
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::leading::{Leading, leading};
use super::server::Server;
use super::sharing::{conduct, filled, serve};
use super::versions::{called, come, hello, trainer};
use super::{job, name, pool, running};

/// A pool of one server, which serves until the test ends or its pod does.
async fn one_that_serves(server: &Server, operator: &Leading) -> String {
    server.put("attentionpools", "p", &pool(1));
    let is_server = |it: &Value| it["metadata"]["labels"]["cadre.dev/role"] == "server";
    let pod = server
        .until("a server", |all| all.of("pods").into_iter().find(|it| is_server(it)).cloned())
        .await;
    server.put("pods", &name(&pod), &running());
    let who = called(operator, &pod, hello(Role::Server, DATA_VERSION));
    thread::spawn(move || serve(&who, &Probed::default()));
    name(&pod)
}

/// Waits for a view with so many servers.
async fn until_filled(views: &mut UnboundedReceiver<(String, View)>, expected: usize) {
    let next = async { while views.recv().await.map(|it| filled(&it.1)) != Some(expected) {} };
    let found = tokio::time::timeout(Duration::from_mins(1), next).await;
    found.unwrap_or_else(|_| panic!("never a view with {expected} servers"));
}

fn one_trainer() -> Value {
    let mut one = job();
    one["spec"]["nodes"] = 1.into();
    one
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_that_is_made_anew_serves_the_trainers_that_have_outlived_the_one_before() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = Server::new();
    let operator = leading(&server, folder.path()).await;
    let first = one_that_serves(&server, &operator).await;
    server.put("trainingjobs", "j", &one_trainer());
    let pod = trainer(&server, "j").await;
    let who = called(&operator, &pod, hello(Role::Trainer, DATA_VERSION));
    let (sender, mut views) = unbounded_channel();
    thread::spawn(move || conduct(&who, "j", &sender));
    until_filled(&mut views, 1).await;

    let ends = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}});
    server.put("attentionpools", "p", &ends);
    server.until("its end", |all| all.get("pods", &first).is_none().then_some(())).await;
    server
        .until("its release", |all| {
            let left = &all.get("attentionpools", "p")?["metadata"]["finalizers"];
            left.as_array().is_none_or(Vec::is_empty).then_some(())
        })
        .await;
    server.remove_object("attentionpools", "p");
    one_that_serves(&server, &operator).await;
    until_filled(&mut views, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_is_made_anew_is_told_what_it_says_and_not_what_the_one_before_said() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = Server::new();
    let operator = leading(&server, folder.path()).await;
    server.put("attentionpools", "p", &pool(1));
    for (secret, encryption) in [(7, "Tcp"), (8, "Off")] {
        let mut one = one_trainer();
        one["spec"]["attention"]["encryption"] = encryption.into();
        server.put("trainingjobs", "j", &one);
        let pod = trainer(&server, "j").await;
        let own = Hello { job_secret: vec![secret; 32], ..hello(Role::Trainer, DATA_VERSION) };
        let came = come(&operator, &pod, own).await.expect("it trains");
        let settings: Value = serde_json::from_str(&came.welcome.settings).expect("JSON");
        assert_eq!(settings["encryption"], encryption, "{settings:#}");
        // Its conductor is killed, and says nothing.
        drop(came);
        let own =
            [("trainingjobs", "j"), ("jobs", "j-1"), ("pods", "j-1-0"), ("services", "j-trainers")];
        for (resource, own) in own {
            server.remove_object(resource, own);
        }
    }
}
