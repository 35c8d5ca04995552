//! Links of an attempt are what they were when it began, for all who come, whatever the job says by then.

use cadre_control::DATA_VERSION;
use cadre_control::client::Attachment;
use cadre_control::proto::{Hello, Role};
use serde_json::{Value, json};

use super::leading::leading;
use super::server::Server;
use super::versions::{come, hello, trainer, trainer_of};
use super::{job, name, pool, running, said};

fn links(worker: &Attachment) -> String {
    let settings: Value = serde_json::from_str(&worker.welcome.settings).expect("JSON");
    settings["encryption"].as_str().expect("it is told").to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_comes_after_an_edit_has_the_links_of_those_who_are_there() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = Server::new();
    let operator = leading(&server, folder.path()).await;
    server.put("attentionpools", "p", &pool(1));
    let mut one = job();
    one["spec"]["nodes"] = 1.into();
    server.put("trainingjobs", "j", &one);
    let pod = trainer(&server, "j").await;
    let conductor = come(&operator, &pod, hello(Role::Trainer, DATA_VERSION)).await;
    let conductor = conductor.expect("it trains");
    assert_eq!(links(&conductor), "Tcp", "of a job that says nothing");

    server.put("trainingjobs", "j", &json!({"spec": {"attention": {"encryption": "Off"}}}));
    server
        .until("the status to say so", |all| {
            let job = all.get("trainingjobs", "j")?;
            let waits = said(job, "Running", "message").contains("counts from the next attempt on");
            (waits && job["status"]["encryption"] == "Tcp").then_some(())
        })
        .await;
    let role = |it: &&Value| it["metadata"]["labels"]["cadre.dev/role"] == "server";
    let found = server.until("a server", |all| all.of("pods").into_iter().find(role).cloned());
    let pod = found.await;
    server.put("pods", &name(&pod), &running());
    let served = come(&operator, &pod, hello(Role::Server, DATA_VERSION)).await;
    assert_eq!(links(&served.expect("it serves")), "Tcp", "as the trainers have it");

    drop(conductor);
    server.put("pods", "j-1-0", &evicted());
    server.put("jobs", "j-1", &failed());
    let pod = trainer_of(&server, "j", 2).await;
    let conductor = come(&operator, &pod, hello(Role::Trainer, DATA_VERSION)).await;
    assert_eq!(links(&conductor.expect("it trains")), "Off", "from the next attempt on");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_of_other_kinds_say_it_and_one_that_parts_from_the_others_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = Server::new();
    let operator = leading(&server, folder.path()).await;
    server.put("attentionpools", "p", &pool(1));
    let labels = json!({"cadre.dev/pool": "p", "cadre.dev/job": "plain"});
    let pods = [("a", "Tls"), ("b", "Off"), ("c", "tls")].map(|(name, word)| {
        let notes = json!({"cadre.dev/encryption": word});
        let meta = json!({"name": name, "labels": labels, "annotations": notes});
        server.put("pods", name, &json!({"metadata": meta}));
        server.put("pods", name, &running());
        json!({"metadata": meta})
    });
    let own = || Hello { trainers: 2, ..hello(Role::Trainer, DATA_VERSION) };
    let first = come(&operator, &pods[0], own()).await.expect("it trains");
    assert_eq!(links(&first), "Tls");
    for (pod, why) in [
        (&pods[1], "give all pods of the job the same"),
        (&pods[2], "set it to Tcp, Required or Off"),
    ] {
        let refused = come(&operator, pod, own()).await.expect_err("it is parted").to_string();
        assert!(refused.contains(why), "{refused}");
    }
}

fn evicted() -> Value {
    let condition = json!({"type": "DisruptionTarget", "status": "True",
        "reason": "EvictionByEvictionAPI", "message": "drained"});
    json!({"status": {"phase": "Failed", "conditions": [condition]}})
}

fn failed() -> Value {
    let condition = json!({"type": "FailureTarget", "status": "True", "reason": "PodFailurePolicy",
        "message": "Pod n/j-1-0 has condition DisruptionTarget matching FailJob rule at index 0"});
    json!({"status": {"conditions": [condition]}})
}
