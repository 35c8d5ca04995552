//! Addresses of a control service, and the credentials of the connection.
//!
//! In: the text of `CADRE_CONTROL` and, for `https`, files with a token and certificates. Out: a connected gRPC channel, and the
//! token for its calls. A Unix socket needs neither file.
//!
//! The files are read for each connection, since the kubelet renews tokens and issuers.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig};

/// Interval of pings on a silent connection, and time for the answer. A controller whose node has
/// died is noticed after both.
pub(crate) const KEEP_ALIVE: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(5)];

/// Address of a control service.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Endpoint {
    /// A socket of this machine.
    Unix(PathBuf),
    /// A host of the network, over TLS.
    Tls {
        /// `https://HOST:PORT`.
        url: String,
        /// Files by which service and worker prove their identity.
        credentials: Credentials,
    },
}

/// Files by which service and worker prove their identity.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Credentials {
    /// Certificates of the issuers, PEM, against which the service's certificate is checked.
    pub issuers: PathBuf,
    /// The token that identifies the worker.
    pub token: PathBuf,
}

impl Endpoint {
    /// Reads an address as it stands in `CADRE_CONTROL`: an absolute path, or an `https` URL, which
    /// needs credentials.
    ///
    /// # Errors
    ///
    /// Another text, or a URL without credentials.
    pub fn parse(text: &str, credentials: Option<Credentials>) -> Result<Self, Error> {
        if text.starts_with('/') {
            return Ok(Self::Unix(PathBuf::from(text)));
        }
        let host = text.strip_prefix("https://").is_some_and(|it| !it.is_empty());
        if !host || text.parse::<tonic::transport::Uri>().is_err() {
            return Err(Error::Address { text: text.to_owned() });
        }
        let credentials = credentials.ok_or(Error::Credentials)?;
        Ok(Self::Tls { url: text.to_owned(), credentials })
    }

    /// Opens a connection, within `deadline`.
    pub(crate) async fn connect(&self, deadline: Duration) -> Result<Channel, Error> {
        let failed = |source: tonic::transport::Error| Error::Connect {
            endpoint: self.to_string(),
            reason: chain(&source),
        };
        match self {
            Self::Unix(path) => {
                let path = path.clone();
                // The authority has no meaning on a socket, but HTTP/2 demands one.
                tonic::transport::Endpoint::from_static("http://control.cadre.local")
                    .connect_timeout(deadline)
                    .connect_with_connector(tower::service_fn(move |_| {
                        let path = path.clone();
                        async move { UnixStream::connect(path).await.map(TokioIo::new) }
                    }))
                    .await
                    .map_err(failed)
            }
            Self::Tls { url, credentials } => {
                let issuers = read(&credentials.issuers)?;
                let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(issuers));
                let [interval, timeout] = KEEP_ALIVE;
                tonic::transport::Endpoint::from_shared(url.clone())
                    .and_then(|it| it.tls_config(tls))
                    .map_err(failed)?
                    .connect_timeout(deadline)
                    .tcp_nodelay(true)
                    .http2_keep_alive_interval(interval)
                    .keep_alive_timeout(timeout)
                    .connect()
                    .await
                    .map_err(failed)
            }
        }
    }

    /// The `authorization` header of a call, `Bearer` and the token; none on a Unix socket.
    pub(crate) fn authorization(&self) -> Result<Option<MetadataValue<Ascii>>, Error> {
        let Self::Tls { credentials, .. } = self else { return Ok(None) };
        let token = read(&credentials.token)?;
        let value = MetadataValue::try_from(format!("Bearer {}", token.trim())).map_err(|_| {
            let (path, reason) = (credentials.token.clone(), "it holds no token".to_owned());
            Error::File { path, reason }
        })?;
        Ok(Some(value))
    }
}

fn read(path: &PathBuf) -> Result<String, Error> {
    let failed =
        |source: std::io::Error| Error::File { path: path.clone(), reason: source.to_string() };
    std::fs::read_to_string(path).map_err(failed)
}

/// The text of an error with its causes, which the transport's own text leaves out.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |it| it.source());
    let mut texts: Vec<String> = causes.map(ToString::to_string).collect();
    texts.dedup();
    texts.join(": ")
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tls { url, .. } => f.write_str(url),
        }
    }
}

/// Why there is no connection.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Error {
    /// Neither a path nor an `https` URL.
    #[error(
        "{text:?} is no address of a control service; set CADRE_CONTROL to the path of a Unix socket \
         or to https://HOST:PORT"
    )]
    Address {
        /// The text.
        text: String,
    },
    /// An `https` URL lacks its credentials.
    #[error(
        "CADRE_CONTROL is an https address; set CADRE_CONTROL_CA and CADRE_CONTROL_TOKEN to the files \
         of its issuers and of a token"
    )]
    Credentials,
    /// A file cannot be read.
    #[error("file {}: {reason}; mount it into the pod", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What the system says.
        reason: String,
    },
    /// Nobody answers at the address, or another service does.
    #[error("{endpoint}: {reason}")]
    Connect {
        /// Where.
        endpoint: String,
        /// What the transport says.
        reason: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absolute_paths_are_unix_sockets() {
        let endpoint = Endpoint::parse("/run/cadre/control", None).expect("a path");
        assert_eq!(endpoint, Endpoint::Unix("/run/cadre/control".into()));
        assert_eq!(endpoint.to_string(), "/run/cadre/control");
    }

    #[test]
    fn https_addresses_need_credentials() {
        let credentials = Credentials { issuers: "/ca".into(), token: "/token".into() };
        let url = "https://cadre-operator.cadre-system.svc:9443";
        let endpoint = Endpoint::parse(url, Some(credentials)).expect("a good URL");
        assert_eq!(endpoint.to_string(), url);
        assert_eq!(Endpoint::parse(url, None), Err(Error::Credentials));
    }

    #[test]
    fn anything_else_is_refused_with_the_remedy() {
        for text in ["control:50051", "http://control:50051", "https://", "https://a b"] {
            let refusal = Endpoint::parse(text, None).expect_err("no address");
            assert!(refusal.to_string().contains("set CADRE_CONTROL to"), "{refusal}");
        }
    }
}
