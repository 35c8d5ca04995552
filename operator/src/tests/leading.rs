//! An operator that leads, with its control service over TLS.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cadre_desired::Settings;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use super::server::Server;
use crate::caches::Scope;
use crate::context::Context;
use crate::control::{self, Place};
use crate::controllers;
use crate::issuer::Issuer;

/// The operator, until the test ends.
pub(super) struct Leading {
    pub(super) context: Arc<Context>,
    /// Of its control service.
    pub(super) url: String,
    /// Folder with `ca.crt`.
    pub(super) certificates: PathBuf,
}

/// Starts one with its certificates below `folder`.
pub(super) async fn leading(server: &Server, folder: &Path) -> Leading {
    let certificates = certify(folder);
    let place = Place { address: ([127, 0, 0, 1], 0).into(), certificates: certificates.clone() };
    let listener = control::listen(&place).await.expect("a free port");
    let port = listener.0.local_addr().expect("bound").port();
    let url = format!("https://127.0.0.1:{port}");
    let settings = Settings { control: url.clone(), ..Settings::default() };
    let issuer = Issuer::new(Some(certificates.clone()));
    let context = Arc::new(Context::new(server.client(), settings, &Scope::default(), issuer));
    context.caches.ready().await.expect("the server answers");
    let own = context.clone();
    tokio::spawn(async move { controllers::run(&own, 4).await });
    let own = context.clone();
    tokio::spawn(async move { control::run(own, listener, 1).await });
    Leading { context, url, certificates }
}

/// Writes a certificate for 127.0.0.1 and its issuer. Out: the folder.
fn certify(folder: &Path) -> PathBuf {
    let folder = folder.join("certificates");
    fs::create_dir(&folder).expect("a new folder");
    let mut params = CertificateParams::new(Vec::new()).expect("no names");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().expect("entropy");
    let issuer = CertifiedIssuer::self_signed(params, key).expect("a good request");
    let key = KeyPair::generate().expect("entropy");
    let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("an address");
    let certificate = params.signed_by(&key, &issuer).expect("a good request");
    for (file, text) in
        [("ca.crt", issuer.pem()), ("tls.crt", certificate.pem()), ("tls.key", key.serialize_pem())]
    {
        fs::write(folder.join(file), text).expect("room");
    }
    folder
}
