//! Two jobs on one pool: what an edited share does, and who is told to have which servers.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;
use std::time::Duration;

use cadre_control::client::{Attachment, Options, attach};
use cadre_control::proto::controller_message::Message;
use cadre_control::proto::finished::Outcome;
use cadre_control::proto::{
    Drained, Finished, Hello, Listening, Probe, Probed, Progress, Role, View,
};
use cadre_control::{DATA_VERSION, Endpoint};
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::leading::leading;
use super::server::{Objects, Server};
use super::versions::{called, hello, trainer};
use super::{job, name, pool, reason, running};
use crate::http;

/// What a worker says when it comes, and where it listens then.
fn begin((endpoint, hello): &(Endpoint, Hello)) -> Option<Attachment> {
    let attachment = attach(endpoint.clone(), hello.clone(), Options::default()).ok()?;
    let place = || format!("127.0.0.1:{}", 1 + hello.index);
    let listening = Listening { exchange_address: place(), ring_address: place() };
    attachment.sender.send(listening).ok().map(|()| attachment)
}

/// A server: it goes from job to job, as it is told. For each it says what its ways are.
pub(super) fn serve(who: &(Endpoint, Hello), ways: &Probed) {
    while let Some(Attachment { sender, receiver, .. }) = begin(who) {
        if sender.send(ways.clone()).is_err() {
            return;
        }
        let told = receiver.iter().find(|it| matches!(it.message, Some(Message::Drain(_))));
        if told.is_none() || sender.send(Drained {}).is_err() {
            return;
        }
    }
}

/// A conductor: each view is used in a step, and told with the job's name.
pub(super) fn conduct(who: &(Endpoint, Hello), job: &str, told: &UnboundedSender<(String, View)>) {
    let Some(Attachment { sender, receiver, .. }) = begin(who) else { return };
    for message in receiver {
        if let Some(Message::View(view)) = message.message {
            let step = Progress { view: view.number, seconds: 1.0, ..Progress::default() };
            if sender.send(step).is_err() || told.send((job.to_owned(), view)).is_err() {
                return;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trainer_serves_in_place_once_it_has_come_and_listens() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = Server::new();
    // Two trainers of a kind that is not ours; both pods are ready before there is a pool.
    let labels = json!({"cadre.dev/pool": "p", "cadre.dev/job": "theirs"});
    for own in ["first", "second"] {
        server.put("pods", own, &json!({"metadata": {"labels": labels}}));
        server.put("pods", own, &running());
    }
    let operator = leading(&server, folder.path()).await;
    let spec = json!({"replicas": 1, "inPlace": true});
    let in_place =
        json!({"apiVersion": "cadre.dev/v1alpha1", "kind": "AttentionPool", "spec": spec});
    server.put("attentionpools", "p", &in_place);
    server
        .until("a look", |all| {
            let pool = all.get("attentionpools", "p")?;
            (!pool["status"].is_null()).then(|| assert_eq!(pool["status"]["inPlaceServers"], 0))
        })
        .await;
    let pod = server.until("the pod", |all| all.get("pods", "first").cloned()).await;
    let mut hello = hello(Role::Trainer, DATA_VERSION);
    hello.trainers = 1;
    let who = called(&operator, &pod, hello);
    let (sender, _views) = unbounded_channel();
    thread::spawn(move || conduct(&who, "theirs", &sender));
    server
        .until("one of two", |all| {
            let pool = all.get("attentionpools", "p")?;
            let available = pool["status"]["conditions"].as_array()?.iter();
            let serves = available.clone().any(|it| it["reason"] == "Serving");
            (pool["status"]["inPlaceServers"] == 1 && serves).then_some(())
        })
        .await;
}

/// Servers that a view names.
pub(super) fn filled(view: &View) -> usize {
    view.slots.iter().filter(|it| it.server.is_some()).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_edited_share_moves_servers_at_once_and_the_status_names_who_has_them() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = Server::new();
    let operator = leading(&server, folder.path()).await;
    operator.context.metrics.leader.set(1);
    server.put("attentionpools", "p", &pool(4));
    let pods = server
        .until("four servers", |all| {
            let pods: Vec<Value> = all.of("pods").into_iter().cloned().collect();
            (pods.len() == 4).then_some(pods)
        })
        .await;
    for pod in &pods {
        server.put("pods", &name(pod), &running());
        let who = called(&operator, pod, hello(Role::Server, DATA_VERSION));
        thread::spawn(move || serve(&who, &Probed::default()));
    }
    let (sender, mut views) = unbounded_channel();
    for own in ["a", "b"] {
        let mut one = job();
        one["spec"]["nodes"] = 1.into();
        server.put("trainingjobs", own, &one);
        let pod = trainer(&server, own).await;
        let who = called(&operator, &pod, hello(Role::Trainer, DATA_VERSION));
        let told = sender.clone();
        thread::spawn(move || conduct(&who, own, &told));
    }

    let mut now = BTreeMap::new();
    for (share, expected) in [(100, [2, 2]), (300, [3, 1]), (100, [2, 2])] {
        server.put("trainingjobs", "a", &json!({"spec": {"attention": {"share": share}}}));
        while ["a", "b"].map(|it| now.get(it).map_or(0, filled)) != expected {
            let next = tokio::time::timeout(Duration::from_mins(1), views.recv()).await;
            let (job, view) = next.unwrap_or_else(|_| panic!("{share}: {now:#?}")).expect("views");
            now.insert(job, view);
        }
    }

    server
        .until("both in the status", |all| {
            let holders = all.get("attentionpools", "p")?["status"]["holders"].as_array()?;
            let names: BTreeSet<_> = holders.iter().filter_map(|it| it["name"].as_str()).collect();
            (names == BTreeSet::from(["a", "b"])).then_some(())
        })
        .await;
    let text = http::told(&operator.context);
    for own in ["a", "b"] {
        let held = |it: &str| {
            it.starts_with("cadre_operator_server_held_since_timestamp_seconds{")
                && it.contains(&format!("job_namespace=\"n\",job=\"{own}\""))
        };
        assert!(text.lines().any(held), "{own} in {text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_ways_from_a_server_to_a_jobs_trainers_are_told_until_the_job_is_over() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = Server::new();
    let operator = leading(&server, folder.path()).await;
    operator.context.metrics.leader.set(1);
    let mut demanding = pool(1);
    demanding["spec"]["fabric"] = json!({"minBandwidthMbps": 100});
    server.put("attentionpools", "p", &demanding);
    let pod = server.until("a server", |all| all.of("pods").into_iter().next().cloned()).await;
    server.put("pods", &name(&pod), &running());
    let who = called(&operator, &pod, hello(Role::Server, DATA_VERSION));
    let slow = Probe { mbps: 5, path: "tcp".into(), ..Probe::default() };
    thread::spawn(move || serve(&who, &Probed { probes: vec![slow] }));

    let mut one = job();
    one["spec"]["nodes"] = 1.into();
    server.put("trainingjobs", "j", &one);
    let pod = trainer(&server, "j").await;
    let conductor = called(&operator, &pod, hello(Role::Trainer, DATA_VERSION));
    let conductor = tokio::task::spawn_blocking(move || begin(&conductor)).await;
    let conductor = conductor.expect("no panic").expect("it trains");
    let placement = |all: &Objects<'_>, holders: usize| {
        let pool = all.get("attentionpools", "p")?;
        let held = pool["status"]["holders"].as_array().map_or(0, Vec::len);
        (held == holders).then(|| reason(pool, "PlacementSatisfied"))
    };
    let is_slow = |all: &Objects<'_>| placement(all, 1).filter(|it| it == "SlowLink").map(drop);
    server.until("a slow way", is_slow).await;
    let of_ways = || http::told(&operator.context).contains("cadre_operator_server_trainers{");
    assert!(of_ways());

    let finished = Finished { outcome: Outcome::Completed.into(), ..Finished::default() };
    conductor.sender.send(finished).expect("there is room");
    server.until("a free server", |all| placement(all, 0).filter(|it| it == "Near")).await;
    assert!(!of_ways());
}
