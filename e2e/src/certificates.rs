//! Certificates and keys of a throw-away cluster.
//!
//! In: a folder. Out: in it the cluster's authority, a certificate for each part that speaks to the API
//! server, and the key that signs tokens of service accounts. They are good for a test and nowhere
//! trusted.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};

/// Names and addresses of the API server.
const SERVER: [&str; 8] = [
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
    "localhost",
    "127.0.0.1",
    "10.96.0.1",
    crate::network::HOST,
];
/// File, user and group of each client.
const CLIENTS: [(&str, &str, &str); 8] = [
    ("admin", "admin", "system:masters"),
    ("controller-manager", "system:kube-controller-manager", ""),
    ("scheduler", "system:kube-scheduler", ""),
    ("kube-proxy", "system:kube-proxy", ""),
    // The API server to those that serve a part of the API behind it.
    ("front-proxy", "front-proxy-client", ""),
    ("to-kubelet", "kube-apiserver-kubelet-client", "system:masters"),
    ("node-a", "system:node:node-a", "system:nodes"),
    ("node-b", "system:node:node-b", "system:nodes"),
];

/// Makes all of them in `folder`, which is there.
pub fn make(folder: &Path) -> Result<()> {
    let authority = authority()?;
    write(folder, "ca.crt", &authority.pem())?;
    write(folder, "ca.key", &authority.key().serialize_pem())?;
    let mut server = CertificateParams::new(SERVER.map(str::to_owned)).context("names")?;
    server.distinguished_name.push(DnType::CommonName, "kube-apiserver");
    server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    sign(folder, "apiserver", &server, &authority)?;
    for (file, user, group) in CLIENTS {
        let mut client = CertificateParams::default();
        client.distinguished_name.push(DnType::CommonName, user);
        if !group.is_empty() {
            client.distinguished_name.push(DnType::OrganizationName, group);
        }
        client.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        sign(folder, file, &client, &authority)?;
    }
    let tokens = KeyPair::generate().context("a key")?;
    write(folder, "tokens.key", &tokens.serialize_pem())?;
    write(folder, "tokens.pub", &tokens.public_key_pem())
}

fn authority() -> Result<CertifiedIssuer<'static, KeyPair>> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "test cluster");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    CertifiedIssuer::self_signed(params, KeyPair::generate().context("a key")?).context("authority")
}

fn sign(
    folder: &Path,
    name: &str,
    params: &CertificateParams,
    authority: &CertifiedIssuer<'_, KeyPair>,
) -> Result<()> {
    let key = KeyPair::generate().context("a key")?;
    let certificate = params.signed_by(&key, authority).with_context(|| name.to_owned())?;
    write(folder, &format!("{name}.crt"), &certificate.pem())?;
    write(folder, &format!("{name}.key"), &key.serialize_pem())
}

fn write(folder: &Path, name: &str, text: &str) -> Result<()> {
    let path = folder.join(name);
    fs::write(&path, text).with_context(|| format!("{}: cannot be written", path.display()))
}
