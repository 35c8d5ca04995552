//! What a process tells Prometheus: of its certificates always, of the objects while it leads.

use std::time::Duration;

use cadre_desired::pool::Report;

use super::leading::leading;
use super::server::Server;
use super::{job, pool};
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
