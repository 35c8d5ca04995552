//! TLS of the control service's listener.
//!
//! In: a TCP listener and the files of a certificate and its key. Out: a stream of connections after their handshake. Changed
//! files are read again, so that a renewed certificate needs no restart. The old certificate stays in use while the files cannot
//! be read, and until clients have the new issuer.
//!
//! Each handshake has a deadline, and at most `MAX_HANDSHAKES` run at a time. A client's failure never ends the stream.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;

/// Deadline of a client's handshake.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);
/// Maximum handshakes in progress; further clients wait in the listener's queue.
const MAX_HANDSHAKES: usize = 128;
/// Pause after a failed accept, which usually means that the process is out of descriptors.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// Files of a certificate.
#[derive(Clone, Debug)]
pub struct Files {
    /// The certificate and those between it and its issuer, PEM.
    pub certificate: PathBuf,
    /// Its private key, PEM.
    pub key: PathBuf,
}

/// The certificate that was read last.
#[derive(Clone)]
pub struct Certificate {
    files: Files,
    written: [Option<SystemTime>; 2],
    config: Arc<ServerConfig>,
    settles: Duration,
}

impl Certificate {
    /// Reads the files.
    ///
    /// # Errors
    ///
    /// A file is missing, or holds no certificate or key that belong together.
    pub fn read(files: Files) -> Result<Self, Error> {
        let written = files.written();
        let config = Arc::new(files.config()?);
        Ok(Self { files, written, config, settles: Duration::ZERO })
    }

    /// As [`Self::read`], but a file that changes is used only after it has been there for
    /// `settles`, so that clients get the new issuer first. Files that are there at the start are
    /// used at once.
    #[must_use]
    pub fn settling(self, settles: Duration) -> Self {
        Self { settles, ..self }
    }

    /// The configuration with the newest certificate that could be read.
    fn newest(&mut self) -> Arc<ServerConfig> {
        let written = self.files.written();
        // A time in the future says nothing about the age, since a clock may have been set back:
        // use the file.
        let age = |it: &SystemTime| it.elapsed().unwrap_or(Duration::MAX);
        let is_young = written.iter().flatten().any(|it| age(it) < self.settles);
        if written != self.written && !is_young {
            match self.files.config() {
                Ok(config) => {
                    tracing::info!(
                        "the certificate in {} is new",
                        self.files.certificate.display()
                    );
                    self.config = Arc::new(config);
                    self.written = written;
                }
                Err(error) => tracing::warn!("{error}; the former certificate stays in use"),
            }
        }
        Arc::clone(&self.config)
    }
}

impl Files {
    fn written(&self) -> [Option<SystemTime>; 2] {
        let time = |path| std::fs::metadata(path).and_then(|it| it.modified()).ok();
        [time(&self.certificate), time(&self.key)]
    }

    fn config(&self) -> Result<ServerConfig, Error> {
        let failed = |path: &PathBuf| {
            let path = path.clone();
            move |reason: String| Error::File { path, reason }
        };
        let chain = CertificateDer::pem_file_iter(&self.certificate)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(|it| failed(&self.certificate)(it.to_string()))?;
        if chain.is_empty() {
            return Err(failed(&self.certificate)("no certificate in it".into()));
        }
        let key = PrivateKeyDer::from_pem_file(&self.key)
            .map_err(|it| failed(&self.key)(it.to_string()))?;
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&tokio_rustls::rustls::version::TLS13])
            .and_then(|it| it.with_no_client_auth().with_single_cert(chain, key))
            .map_err(|it| failed(&self.key)(it.to_string()))?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(config)
    }
}

/// Connections of a listener, after their handshake.
///
/// Ends when the stream is dropped. To be called within a runtime.
pub fn accept(
    listener: TcpListener,
    mut certificate: Certificate,
) -> ReceiverStream<std::io::Result<TlsStream<TcpStream>>> {
    let (done, stream) = mpsc::channel(MAX_HANDSHAKES);
    let room = Arc::new(Semaphore::new(MAX_HANDSHAKES));
    tokio::spawn(async move {
        loop {
            let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = done.closed() => return,
            };
            let (socket, from) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!("no connection can be accepted: {error}");
                    tokio::time::sleep(ACCEPT_AGAIN_AFTER).await;
                    continue;
                }
            };
            // Without this, small messages of one stream would wait for each other.
            let _ = socket.set_nodelay(true);
            let acceptor = TlsAcceptor::from(certificate.newest());
            let done = done.clone();
            tokio::spawn(async move {
                match tokio::time::timeout(HANDSHAKE_WITHIN, acceptor.accept(socket)).await {
                    // Dropped if the service has ended.
                    Ok(Ok(stream)) => drop(done.send(Ok(stream)).await),
                    Ok(Err(error)) => tracing::debug!("handshake with {from}: {error}"),
                    Err(_late) => tracing::debug!("handshake with {from}: too slow"),
                }
                drop(permit);
            });
        }
    });
    ReceiverStream::new(stream)
}

/// Why a listener has no certificate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be used.
    #[error(
        "certificate file {}: {reason}; mount the control service's certificate and its key there",
        path.display()
    )]
    File {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    #[test]
    fn a_new_certificate_is_used_when_its_issuer_has_had_time_to_become_known() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let renew = |age: Duration| {
            let key = KeyPair::generate().unwrap();
            let params = CertificateParams::new(vec!["a".to_owned()]).unwrap();
            let certificate = params.self_signed(&key).unwrap();
            for (name, text) in [("crt", certificate.pem()), ("key", key.serialize_pem())] {
                std::fs::write(path(name), text).unwrap();
                let file = File::options().write(true).open(path(name)).unwrap();
                file.set_modified(SystemTime::now() - age).unwrap();
            }
        };
        let hour = Duration::from_hours(1);
        let files = || Files { certificate: path("crt"), key: path("key") };
        renew(Duration::ZERO);
        let mut first = Certificate::read(files()).unwrap().settling(hour);
        let begun = first.newest();
        renew(hour / 2);
        assert!(Arc::ptr_eq(&first.newest(), &begun), "the last one goes on");
        let started = Certificate::read(files()).unwrap().settling(hour);
        assert!(!Arc::ptr_eq(&started.config, &begun), "who starts has no last one");
        renew(hour * 2);
        let second = first.newest();
        assert!(!Arc::ptr_eq(&second, &begun));
        // Said without a time to settle, it is used at once.
        let mut first = Certificate { settles: Duration::ZERO, ..first };
        renew(Duration::ZERO);
        assert!(!Arc::ptr_eq(&first.newest(), &second));
    }
}
