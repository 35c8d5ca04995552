//! Where a controller listens.
//!
//! In: the text of `CADRE_CONTROL`. Out: a connected gRPC channel. Unix sockets now; a TLS endpoint
//! is another variant here and nothing else changes, since [`crate::client`] only sees the channel.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::Channel;

/// Address of a control service.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Endpoint {
    /// A socket of this machine.
    Unix(PathBuf),
}

impl Endpoint {
    /// Reads an address as it stands in `CADRE_CONTROL`: an absolute path.
    pub fn parse(text: &str) -> Result<Self, Error> {
        if text.starts_with('/') {
            return Ok(Self::Unix(PathBuf::from(text)));
        }
        Err(Error::Address { text: text.to_owned() })
    }

    /// Opens a connection, within `deadline`.
    pub(crate) async fn connect(
        &self,
        deadline: Duration,
    ) -> Result<Channel, tonic::transport::Error> {
        match self {
            Self::Unix(path) => {
                let path = path.clone();
                // The authority is of no use on a socket, but HTTP/2 wants one.
                tonic::transport::Endpoint::from_static("http://control.cadre.local")
                    .connect_timeout(deadline)
                    .connect_with_connector(tower::service_fn(move |_| {
                        let path = path.clone();
                        async move { UnixStream::connect(path).await.map(TokioIo::new) }
                    }))
                    .await
            }
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Why an address is refused.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Error {
    /// Not an address.
    #[error(
        "control address {text:?} is not an absolute path; workers are started by `cadre run` or \
         the operator, which set CADRE_CONTROL"
    )]
    Address {
        /// What was given.
        text: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_a_unix_socket() {
        let parsed = Endpoint::parse("/run/cadre/control");
        assert_eq!(parsed, Ok(Endpoint::Unix(PathBuf::from("/run/cadre/control"))));
    }

    #[test]
    fn anything_else_is_refused_with_the_remedy() {
        let refusal = Endpoint::parse("control:50051").expect_err("not a path");
        assert!(refusal.to_string().contains("set CADRE_CONTROL"), "{refusal}");
    }
}
