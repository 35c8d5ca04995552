//! What a process tells Prometheus: of its certificates always, of the objects while it leads.

use std::time::Duration;

use cadre_control::DATA_VERSION;
use cadre_control::client::{Options, attach};
use cadre_control::proto::Role;
use cadre_desired::pool::Report;

use super::leading::leading;
use super::server::{Objects, Refused, Server};
use super::versions::{called, hello};
use super::{job, name, pool, reason, running, said};
use crate::http;
use crate::told::Servers;

const CERTIFICATES: [&str; 2] = [
    "cadre_operator_certificate_expiry_timestamp_seconds{file=\"tls.crt\"}",
    "cadre_operator_certificate_expiry_timestamp_seconds{file=\"ca.crt\"}",
];
const OBJECTS: [&str; 3] = [
    "cadre_operator_pool_servers{namespace=\"n\",pool=\"p\",state=\"desired\"} 1",
    "cadre_operator_job_checkpoint_steps{namespace=\"n\",job=\"j\"} 0",
    "cadre_operator_condition{kind=\"TrainingJob\",namespace=\"n\",name=\"j\",type=\"Reconciling\",reason=\"Starting\"} 1",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leader_alone_tells_of_objects_and_each_process_of_its_certificates() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = Server::new();
    let context = leading(&server, folder.path()).await.context;
    server.put("attentionpools", "p", &pool(1));
    server.put("trainingjobs", "j", &job());
    context.metrics.leader.set(1);
    let all = async {
        let lacks = |it: &&&str| !http::told(&context).contains(**it);
        while OBJECTS.iter().chain(&CERTIFICATES).any(|it| lacks(&it)) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let found = tokio::time::timeout(Duration::from_mins(1), all).await;
    assert!(found.is_ok(), "never all of them: {}", http::told(&context));
    // Of a pool that vanished while nobody looked nothing is told any more.
    let reports = [("vanished-0-0".to_owned(), Report::default())].into();
    let vanished = Servers { reports, ..Servers::default() };
    context.told.tell_pool(&("n".into(), "vanished".into()), vanished, true);
    assert!(context.told.live().iter().any(|it| it.1 == "vanished-0-0"));
    assert!(!http::told(&context).contains("vanished"));
    context.metrics.leader.set(0);
    let told = http::told(&context);
    assert!(OBJECTS.iter().all(|it| !told.contains(it)), "{told}");
    assert!(CERTIFICATES.iter().all(|it| told.contains(it)), "{told}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_that_the_api_server_does_not_check_are_told_by_the_pool_until_it_does() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = Server::new();
    let operator = leading(&server, folder.path()).await;
    server.put("attentionpools", "p", &pool(1));
    let pod = server.until("a server", |all| all.of("pods").into_iter().next().cloned()).await;
    server.put("pods", &name(&pod), &running());
    let told = async |expected: &str| {
        let is_told = |all: &Objects<'_>| {
            let pool = all.get("attentionpools", "p")?;
            (reason(pool, "Degraded") == expected).then(|| said(pool, "Degraded", "message"))
        };
        server.until(expected, is_told).await
    };
    told("AsItShould").await;
    let (verb, resource) = ("create", "tokenreviews");
    server.refuse(Refused { verb, resource, with: "", code: 403, words: "no".into() });
    let knock = async || {
        let (endpoint, hello) = called(&operator, &pod, hello(Role::Server, DATA_VERSION));
        let options = Options { welcome: Some(Duration::from_secs(1)), ..Options::default() };
        let came = tokio::task::spawn_blocking(|| attach(endpoint, hello, options)).await;
        assert!(came.expect("no panic").is_err(), "there is no job");
    };
    knock().await;
    assert_eq!(told("TokensNotChecked").await, "no worker is let in: review a token: no");
    server.refuse(Refused { verb, resource: "leases", with: "", code: 403, words: "no".into() });
    knock().await;
    told("AsItShould").await;
}
