//! The stream over TLS with tokens: who is let in, who is not, and certificates that change.

use std::future::ready;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cadre_control::client::{self, Attachment, Options};
use cadre_control::gate::Admission;
use cadre_control::proto::{Conductor, Hello, Role, View, ViewNumber, Welcome};
use cadre_control::server::{self, Event, Link};
use cadre_control::tls::{self, Certificate, Files};
use cadre_control::{CONTROL_VERSION, Caller, Credentials, DATA_VERSION, Endpoint, Gate};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

const PATIENCE: Duration = Duration::from_secs(20);

/// Lets in who shows the token of pod `a`.
#[derive(Debug)]
struct Porter;

impl Gate for Porter {
    fn admit(&self, token: String) -> Admission<'_> {
        let caller = Caller { namespace: "n".into(), pod: "a".into(), uid: "u".into() };
        let answer = match token.as_str() {
            "token of a" => Ok(caller),
            _ => Err(Status::unauthenticated("the token is not good")),
        };
        Box::pin(ready(answer))
    }
}

fn issuer() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::new(Vec::new()).expect("no names");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().expect("entropy");
    CertifiedIssuer::self_signed(params, key).expect("a good request")
}

/// Writes a certificate for 127.0.0.1 and its issuer.
fn certify(folder: &Path, issuer: &CertifiedIssuer<'static, KeyPair>) {
    let key = KeyPair::generate().expect("entropy");
    let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("an address");
    let certificate = params.signed_by(&key, issuer).expect("a good request");
    let write = |name: &str, text: String| std::fs::write(folder.join(name), text).expect("room");
    write("ca.crt", issuer.pem());
    write("tls.key", key.serialize_pem());
    write("tls.crt", certificate.pem());
    write("token", "token of a\n".into());
}

/// A service, until it is dropped.
struct Service {
    endpoint: Endpoint,
    events: mpsc::Receiver<Event>,
    _stop: oneshot::Sender<()>,
}

fn serve(folder: &Path, listener: TcpListener) -> Service {
    let port = listener.local_addr().expect("bound").port();
    let files = Files { certificate: folder.join("tls.crt"), key: folder.join("tls.key") };
    let certificate = Certificate::read(files).expect("good files");
    let (sender, events) = mpsc::channel(64);
    let (stop, stopped) = oneshot::channel::<()>();
    tokio::spawn(async move {
        let incoming = tls::accept(listener, certificate);
        let gate: Arc<dyn Gate> = Arc::new(Porter);
        let stopped = async { drop(stopped.await) };
        server::serve(incoming, Some(DATA_VERSION), Some(gate), sender, stopped)
            .await
            .expect("serves");
    });
    let credentials = Credentials { issuers: folder.join("ca.crt"), token: folder.join("token") };
    let url = format!("https://127.0.0.1:{port}");
    let endpoint = Endpoint::parse(&url, Some(credentials)).expect("a good URL");
    Service { endpoint, events, _stop: stop }
}

async fn listen() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.expect("a free port")
}

fn attach(
    endpoint: &Endpoint,
    patience: Duration,
) -> std::thread::JoinHandle<Result<Attachment, client::Error>> {
    let hello = Hello {
        role: Role::Trainer.into(),
        control_version: CONTROL_VERSION,
        data_version: DATA_VERSION,
        ..Hello::default()
    };
    let endpoint = endpoint.clone();
    let options = Options { welcome: Some(patience), ..Options::default() };
    std::thread::spawn(move || client::attach(endpoint, hello, options))
}

async fn attached(events: &mut mpsc::Receiver<Event>) -> (Link, Hello, Option<Caller>) {
    loop {
        let next = tokio::time::timeout(2 * PATIENCE, events.recv()).await;
        match next.expect("somebody comes in time").expect("the service lives") {
            Event::Attached { link, hello, caller } => return (link, *hello, caller),
            Event::Message { .. } | Event::Detached { .. } => {}
        }
    }
}

async fn joined<T: Send + 'static>(thread: std::thread::JoinHandle<T>) -> T {
    tokio::task::spawn_blocking(|| thread.join().expect("no panic")).await.expect("no panic")
}

#[tokio::test]
async fn a_pod_is_let_in_by_its_token_and_tells_a_new_controller_what_it_got() {
    let folder = tempfile::tempdir().expect("a folder");
    certify(folder.path(), &issuer());
    let mut service = serve(folder.path(), listen().await);
    let client = attach(&service.endpoint, PATIENCE);
    let (link, hello, caller) = attached(&mut service.events).await;
    assert_eq!(caller.expect("there is a gate").to_string(), "pod n/a");
    assert_eq!((hello.session.as_str(), hello.view), ("", None));
    link.send(Welcome { session: "n/j/1".into(), ..Welcome::default() }).expect("room");
    let attachment = joined(client).await.expect("welcome");
    let view = View { number: Some(ViewNumber { term: 3, counter: 9 }), slots: Vec::new() };
    link.send(view.clone()).expect("room");
    link.send(Conductor::default()).expect("room");
    let receiver = tokio::task::spawn_blocking(move || {
        for _ in 0..2 {
            attachment.receiver.recv_timeout(PATIENCE).expect("view and conductor");
        }
        attachment
    });
    let _attachment = receiver.await.expect("no panic");

    // Another controller at the same address, with another certificate of another issuer.
    let port = match &service.endpoint {
        Endpoint::Tls { url, .. } => url.rsplit(':').next().expect("a port").to_owned(),
        Endpoint::Unix(_) => unreachable!("it is a URL"),
    };
    drop((link, service));
    certify(folder.path(), &issuer());
    let bound = async {
        loop {
            // The first service ends at its own pace.
            match TcpListener::bind(format!("127.0.0.1:{port}")).await {
                Ok(listener) => break listener,
                Err(_) => tokio::task::yield_now().await,
            }
        }
    };
    let listener = tokio::time::timeout(2 * PATIENCE, bound).await.expect("it ends in time");
    let mut service = serve(folder.path(), listener);
    let (_link, hello, _) = attached(&mut service.events).await;
    assert_eq!((hello.session.as_str(), hello.view), ("n/j/1", Some(view)));
}

#[tokio::test]
async fn a_wrong_token_is_refused_at_once_with_the_words_of_the_gate() {
    let folder = tempfile::tempdir().expect("a folder");
    certify(folder.path(), &issuer());
    let service = serve(folder.path(), listen().await);
    std::fs::write(folder.path().join("token"), "token of b").expect("room");
    let refusal = joined(attach(&service.endpoint, PATIENCE)).await.expect_err("not a's token");
    assert_eq!(refusal.to_string(), "refused by the controller: the token is not good");
    std::fs::write(folder.path().join("token"), "").expect("room");
    let refusal = joined(attach(&service.endpoint, PATIENCE)).await.expect_err("no token");
    assert!(refusal.to_string().ends_with("set CADRE_CONTROL_TOKEN"), "{refusal}");
}

#[tokio::test]
async fn a_service_of_another_issuer_gets_no_token() {
    let folder = tempfile::tempdir().expect("a folder");
    certify(folder.path(), &issuer());
    let mut service = serve(folder.path(), listen().await);
    std::fs::write(folder.path().join("ca.crt"), issuer().pem()).expect("room");
    let patience = Duration::from_secs(3);
    let refusal = joined(attach(&service.endpoint, patience)).await.expect_err("a stranger");
    let text = refusal.to_string();
    assert!(text.contains("invalid peer certificate"), "{text}");
    assert!(service.events.try_recv().is_err(), "nobody was let in");
    std::fs::remove_file(folder.path().join("ca.crt")).expect("it was there");
    let text = joined(attach(&service.endpoint, patience)).await.expect_err("blind").to_string();
    assert!(text.contains("ca.crt") && text.ends_with("mount it into the pod"), "{text}");
}

#[tokio::test]
async fn a_renewed_certificate_needs_no_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    certify(folder.path(), &issuer());
    let mut service = serve(folder.path(), listen().await);
    let _first = attach(&service.endpoint, PATIENCE);
    let (_link, ..) = attached(&mut service.events).await;
    // Another issuer too: a client that reads the new one meets the new certificate, or nobody.
    certify(folder.path(), &issuer());
    let _second = attach(&service.endpoint, PATIENCE);
    let (_link, ..) = attached(&mut service.events).await;
}

#[test]
fn files_that_hold_no_certificate_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let files =
        Files { certificate: folder.path().join("tls.crt"), key: folder.path().join("tls.key") };
    let refusal = Certificate::read(files.clone()).err().expect("no file").to_string();
    assert!(refusal.contains("tls.crt"), "{refusal}");
    certify(folder.path(), &issuer());
    std::fs::write(&files.key, "nothing").expect("room");
    let refusal = Certificate::read(files).err().expect("no key").to_string();
    assert!(refusal.contains("tls.key"), "{refusal}");
}
