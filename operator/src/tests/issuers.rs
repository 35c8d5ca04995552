//! A new issuer of the control service reaches every namespace, and the one before it stays beside it.

use std::fs;

use rcgen::{CertificateParams, KeyPair};

use super::leading::leading;
use super::pool;
use super::server::Server;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_issuer_is_brought_where_nothing_else_happens_and_overlaps_the_last_one() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = Server::new();
    let operator = leading(&server, folder.path()).await;
    let file = operator.certificates.join("ca.crt");
    let first = fs::read_to_string(&file).expect("it is written");
    server.put("attentionpools", "p", &pool(1));
    let told = async |expected: String| {
        server
            .until("the issuers", |all| {
                let map = all.get("configmaps", "cadre-control-ca")?;
                (map["data"]["ca.crt"] == expected.as_str()).then_some(())
            })
            .await;
    };
    told(first.clone()).await;
    let params = CertificateParams::new(Vec::new()).expect("no names");
    let second = params.self_signed(&KeyPair::generate().expect("entropy")).expect("a request");
    fs::write(&file, second.pem()).expect("room");
    told(second.pem() + &first).await;
}
