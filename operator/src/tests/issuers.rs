//! A new issuer of the control service reaches every namespace, and the one before it stays beside it.

use std::fs;
use std::time::Duration;

use rcgen::{CertificateParams, KeyPair};

use super::leading::leading;
use super::server::Server;
use super::{operator_with, pool};
use crate::issuer::Issuer;

const NAME: &str = "cadre-control-ca";

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
                let map = all.get("configmaps", NAME)?;
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

#[tokio::test]
async fn a_namespace_that_is_made_anew_has_the_issuer_and_one_that_has_lost_it_gets_it_back() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    fs::write(folder.path().join("ca.crt"), "an issuer").expect("room");
    let written = |server: &Server| {
        let server = server.clone();
        async move { server.until("the issuer", |all| all.get("configmaps", NAME).map(drop)).await }
    };
    let issuer = || Issuer::new(Some(folder.path().to_owned()));

    let server = Server::new();
    let _context = operator_with(&server, issuer()).await;
    server.put("attentionpools", "p", &pool(1));
    written(&server).await;
    // As with its namespace, and that comes back with the same objects.
    server.remove_object("attentionpools", "p");
    server.remove_object("configmaps", NAME);
    server.put("attentionpools", "p", &pool(1));
    written(&server).await;

    let server = Server::new();
    let mut soon = issuer();
    soon.again = Duration::from_millis(20);
    let _context = operator_with(&server, soon).await;
    server.put("attentionpools", "p", &pool(0));
    written(&server).await;
    server.remove_object("configmaps", NAME);
    written(&server).await;
}
