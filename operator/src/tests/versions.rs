//! Jobs of other builds than the operator's, and jobs that it has not read yet.

use std::time::Duration;
use std::{fs, thread};

use cadre_control::client::{self, Attachment, Options, attach};
use cadre_control::proto::{Hello, Role};
use cadre_control::{CONTROL_VERSION, Credentials, DATA_VERSION, Endpoint};
use serde_json::{Value, json};

use super::leading::{Leading, leading};
use super::server::{Objects, Server};
use super::{job, name, pool, reason, running, said};

/// A worker of a build, as it comes first.
pub(super) fn hello(role: Role, data_version: u32) -> Hello {
    let secret = if role == Role::Trainer { vec![7; 32] } else { Vec::new() };
    Hello {
        role: role.into(),
        control_version: CONTROL_VERSION,
        data_version,
        job_secret: secret,
        ..Hello::default()
    }
}

/// Attaches with the token of a pod, and waits until it is welcome.
pub(super) async fn come(
    operator: &Leading,
    pod: &Value,
    hello: Hello,
) -> Result<Attachment, client::Error> {
    let (endpoint, hello) = called(operator, pod, hello);
    let attached = tokio::task::spawn_blocking(|| attach(endpoint, hello, Options::default()));
    attached.await.expect("no panic")
}

/// Where the worker of a pod attaches, and with what words.
pub(super) fn called(operator: &Leading, pod: &Value, mut hello: Hello) -> (Endpoint, Hello) {
    let start = pod["metadata"]["annotations"]["cadre.dev/incarnation"].as_str();
    hello.incarnation = start.and_then(|it| it.parse().ok()).unwrap_or_default();
    let slot = pod["metadata"]["labels"]["cadre.dev/slot"].as_str();
    hello.index = slot.and_then(|it| it.parse().ok()).unwrap_or_default();
    let issuers = operator.certificates.join("ca.crt");
    let token = operator.certificates.join(name(pod));
    fs::write(&token, format!("token of {}", name(pod))).expect("room");
    let endpoint = Endpoint::parse(&operator.url, Some(Credentials { issuers, token }));
    (endpoint.expect("a good URL"), hello)
}

/// Makes the first trainer's pod of a job's first attempt. Out: it, running.
pub(super) async fn trainer(server: &Server, job: &str) -> Value {
    trainer_of(server, job, 1).await
}

/// The same of any attempt.
pub(super) async fn trainer_of(server: &Server, job: &str, attempt: u32) -> Value {
    let own = format!("{job}-{attempt}");
    let made = server.until("an attempt", |all| all.get("jobs", &own).cloned()).await;
    let mut trainer = json!({"metadata": made["spec"]["template"]["metadata"]});
    trainer["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] = "0".into();
    // Where servers have it; `come` reads it.
    let start = (attempt - 1).to_string();
    trainer["metadata"]["annotations"]["cadre.dev/incarnation"] = start.into();
    let own = format!("{own}-0");
    server.put("pods", &own, &trainer);
    server.put("pods", &own, &running());
    server.until("the pod", |all| all.get("pods", &own).cloned()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_is_served_by_servers_of_its_build_and_others_wait_for_one_of_theirs() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = Server::new();
    let operator = leading(&server, folder.path()).await;
    server.put("attentionpools", "p", &pool(2));
    let mut one = job();
    one["spec"]["nodes"] = 1.into();
    server.put("trainingjobs", "older", &one);
    let first = trainer(&server, "older").await;
    let role = |it: &Value| it["metadata"]["labels"]["cadre.dev/role"] == "server";
    let servers = server
        .until("two servers", |all| {
            let found: Vec<_> = all.of("pods").into_iter().filter(|it| role(it)).cloned().collect();
            (found.len() == 2).then_some(found)
        })
        .await;
    for pod in &servers {
        server.put("pods", &name(pod), &running());
    }

    let older = DATA_VERSION - 1;
    let trained = come(&operator, &first, hello(Role::Trainer, older)).await;
    let _trainer = trained.expect("it goes on");
    let served = come(&operator, &servers[0], hello(Role::Server, older)).await;
    let served = served.expect("it serves");
    assert_eq!(served.welcome.session, "n/older/1");
    let another = come(&operator, &servers[1], hello(Role::Server, DATA_VERSION));
    let newer = async {
        server
            .until("both are there", |all| {
                let pool = all.get("attentionpools", "p")?;
                (pool["status"]["registered"] == 2).then_some(())
            })
            .await;
        server.put("trainingjobs", "newer", &one);
        let second = trainer(&server, "newer").await;
        come(&operator, &second, hello(Role::Trainer, DATA_VERSION)).await
    };
    let (another, newer) = tokio::join!(another, newer);
    let (another, _newer) = (another.expect("it serves"), newer.expect("it trains"));
    assert_eq!(another.welcome.session, "n/newer/1");

    // As if another operator had made the one that works on: a lost server has a successor of that one's image.
    let image = json!({"spec": {"containers": [{"name": "server", "image": "cadre:before"}]}});
    server.put("pods", &name(&servers[0]), &image);
    server.remove_object("pods", &name(&servers[1]));
    let successor = server
        .until("a successor", |all| {
            let slot = |it: &Value| it["metadata"]["labels"]["cadre.dev/slot"] == "1";
            all.of("pods").into_iter().find(|it| role(it) && slot(it)).cloned()
        })
        .await;
    assert_eq!(successor["spec"]["containers"][0]["image"], "cadre:before");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trainer_whose_job_is_not_read_yet_waits_for_the_settings_that_others_have() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = Server::new();
    let operator = leading(&server, folder.path()).await;
    server.put("attentionpools", "p", &pool(1));
    let labels = json!({"cadre.dev/pool": "p", "cadre.dev/job": "j", "cadre.dev/attempt": "1",
        "batch.kubernetes.io/job-name": "j-1", "batch.kubernetes.io/job-completion-index": "0"});
    let meta = json!({"name": "a", "labels": labels});
    server.put("pods", "a", &json!({"metadata": meta}));
    server.put("pods", "a", &running());
    let pod = json!({"metadata": meta});
    let own = || Hello { trainers: 1, ..hello(Role::Trainer, DATA_VERSION) };
    // Until it is heard what it waits for, however slow this machine is.
    loop {
        let (endpoint, hello) = called(&operator, &pod, own());
        let options = Options { welcome: Some(Duration::from_secs(1)), ..Options::default() };
        let came = tokio::task::spawn_blocking(|| attach(endpoint, hello, options)).await;
        let refused = came.expect("no panic").expect_err("nobody knows its job").to_string();
        if refused.contains("TrainingJob n/j is not known here yet") {
            break;
        }
    }
    // Who waits for long is told on its pod.
    let knocks = async {
        loop {
            let (endpoint, hello) = called(&operator, &pod, own());
            let options = Options { welcome: Some(Duration::from_secs(1)), ..Options::default() };
            let came = tokio::task::spawn_blocking(|| attach(endpoint, hello, options)).await;
            assert!(came.expect("no panic").is_err(), "nobody knows its job");
        }
    };
    let told = server.until("an event of the pod", |all| {
        let events = all.of("events");
        let told = events.into_iter().find(|it| it["reason"] == "NotAdmitted")?;
        assert_eq!(
            (&told["regarding"]["kind"], &told["regarding"]["name"]),
            (&"Pod".into(), &"a".into())
        );
        assert_eq!(told["note"], "TrainingJob n/j is not known here yet");
        Some(())
    });
    tokio::select! {
        () = knocks => {}
        () = told => {}
    }
    let mut one = job();
    one["spec"]["nodes"] = 1.into();
    one["spec"]["failurePolicy"] = json!({"suspectAfterSeconds": 21, "stalledAfterSeconds": 61});
    server.put("trainingjobs", "j", &one);
    let welcome = come(&operator, &pod, own()).await.expect("it trains").welcome;
    let settings: Value = serde_json::from_str(&welcome.settings).expect("JSON");
    assert_eq!(settings["trainer_suspect_after_seconds"], 21);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_without_a_server_of_its_build_says_so_and_its_automatic_pool_keeps_none_for_it() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = Server::new();
    let operator = leading(&server, folder.path()).await;
    let mut automatic = pool(0);
    automatic["spec"]["scaling"] =
        json!({"mode": "Auto", "min": 0, "max": 4, "scaleDownStabilizationSeconds": 1});
    server.put("attentionpools", "p", &automatic);
    let mut one = job();
    one["spec"]["nodes"] = 1.into();
    server.put("trainingjobs", "j", &one);
    let first = trainer(&server, "j").await;
    let role = |it: &Value| it["metadata"]["labels"]["cadre.dev/role"] == "server";
    let made = server
        .until("a server", |all| all.of("pods").into_iter().find(|it| role(it)).cloned())
        .await;
    server.put("pods", &name(&made), &running());
    let (endpoint, own) = called(&operator, &made, hello(Role::Server, DATA_VERSION));
    thread::spawn(move || drop(attach(endpoint, own, Options::default())));
    let trained = come(&operator, &first, hello(Role::Trainer, DATA_VERSION - 1)).await;
    let _trainer = trained.expect("it waits for servers");
    let message = server
        .until("what it lacks", |all| {
            let job = all.get("trainingjobs", "j")?;
            (reason(job, "Degraded") == "OtherBuild").then(|| said(job, "Degraded", "message"))
        })
        .await;
    assert!(message.starts_with("no server of the pool has data version"), "{message}");
    let gone = |all: &Objects<'_>| all.of("pods").into_iter().all(|it| !role(it)).then_some(());
    let looks = async {
        // As time does it every 15 s.
        let mut ticks = tokio::time::interval(Duration::from_millis(200));
        loop {
            ticks.tick().await;
            operator.context.caches.pool_triggers.put(("n".to_owned(), "p".to_owned()));
        }
    };
    tokio::select! {
        () = looks => {}
        () = server.until("no server", gone) => {}
    }
}
