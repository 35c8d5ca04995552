//! Conductors that say that their attempt has failed: those that go, and those that do not.

use std::time::Duration;

use cadre_control::DATA_VERSION;
use cadre_control::client::Attachment;
use cadre_control::proto::{Finished, Hello, Role, Saved, finished::Outcome};
use serde_json::json;

use super::leading::{Leading, leading};
use super::server::Server;
use super::versions::{come, hello, trainer, trainer_of};
use super::{job, pool, said};

const WORDS: &str = "trainer 0 stands still in step 7";

/// The only trainer of a new job, which has said that the attempt has failed.
async fn failed(server: &Server, operator: &Leading, name: &str) -> Attachment {
    let mut one = job();
    one["spec"]["nodes"] = 1.into();
    one["spec"]["failurePolicy"] = json!({"maxRestarts": 1, "suspectAfterSeconds": 1});
    server.put("trainingjobs", name, &one);
    let pod = trainer(server, name).await;
    let conductor = come(operator, &pod, hello(Role::Trainer, DATA_VERSION)).await;
    let conductor = conductor.expect("it trains");
    conductor.sender.send(Saved { steps: 20 }).expect("there is room");
    let (outcome, message) = (Outcome::Failed.into(), WORDS.to_owned());
    let finished = Finished { outcome, message, exit_code: 3, ..Finished::default() };
    conductor.sender.send(finished).expect("there is room");
    conductor
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attempt_whose_only_trainer_stands_still_is_ended_and_counts() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = Server::new();
    let operator = leading(&server, folder.path()).await;
    server.put("attentionpools", "p", &pool(1));
    let conductor = failed(&server, &operator, "j").await;
    server
        .until("the end of the attempt", |all| {
            let ended = all.get("jobs", "j-1").is_none();
            ended.then(|| {
                let job = all.get("trainingjobs", "j").expect("it is there");
                assert_eq!(job["status"]["restarts"], 1, "it counts before it goes");
            })
        })
        .await;
    let all = server.history("trainingjobs");
    let told = all.iter().any(|(_, it)| said(it, "Running", "message").contains(WORDS));
    assert!(told, "the cause is told before the attempt goes: {all:#?}");
    // What the garbage collector does.
    server.remove_object("pods", "j-1-0");
    // As where the kubelet is dead: the pod is gone, and its process works on.
    server
        .until("who works on", |all| {
            let message = said(all.get("trainingjobs", "j")?, "Running", "message");
            let who =
                "trainer 0 of attempt 1 (its pod is gone) should be gone and is still connected";
            message.contains(who).then(|| assert!(all.get("jobs", "j-2").is_none()))
        })
        .await;
    let leave = move || conductor.sender.leave(Duration::from_mins(1));
    tokio::task::spawn_blocking(leave).await.expect("no panic").expect("it was heard out");
    let second = server
        .until("another attempt", |all| {
            let status = &all.get("trainingjobs", "j")?["status"];
            all.get("jobs", "j-2").filter(|_| status["restarts"] == 1).cloned()
        })
        .await;
    let notes = &second["metadata"]["annotations"];
    assert_eq!(notes["cadre.dev/checkpoint-step"], "20");
    assert_eq!(notes["cadre.dev/restarts-without-progress"], "1");
    // The conductor goes on from a checkpoint that nobody told of.
    let pod = trainer_of(&server, "j", 2).await;
    let resume = "/c/j-u/step-40".to_owned();
    let conductor = hello(Role::Trainer, DATA_VERSION);
    let conductor = come(&operator, &pod, Hello { resume, ..conductor }).await;
    let _conductor = conductor.expect("it trains");
    server
        .until("progress", |all| {
            let status = &all.get("trainingjobs", "j")?["status"];
            let row = status["restartsWithoutProgress"].as_u64();
            (status["checkpointStep"] == 40 && row == Some(0)).then_some(())
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conductor_that_takes_its_leave_may_close_for_as_long_as_it_likes() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = Server::new();
    let operator = leading(&server, folder.path()).await;
    server.put("attentionpools", "p", &pool(1));
    let conductor = failed(&server, &operator, "j").await;
    let leave = move || conductor.sender.leave(Duration::from_mins(1));
    let left = tokio::task::spawn_blocking(leave).await.expect("no panic");
    left.expect("it was heard out");
    let uid = server.until("the job", |all| all.get("trainingjobs", "j").cloned()).await;
    let uid = uid["metadata"]["uid"].as_str().expect("it has one").to_owned();
    let told = operator.context.told.job(&("n".to_owned(), "j".to_owned()), &uid);
    assert_eq!((told.uid, told.last_words), (uid, None));
}
