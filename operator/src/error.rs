//! Why something could not be done for an object.
//!
//! Each variant has a reason, as conditions and events write it; nothing else is decided here.

use cadre_desired::Failure;
use kube::core::Status;

/// What failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The API server refuses, or is not there.
    #[error("{what}: {}", words(source))]
    Api {
        /// The request.
        what: String,
        /// The error of the client.
        source: Box<kube::Error>,
    },
    /// An object of somebody else has the name that ours needs.
    #[error("{kind} {name} is there and belongs to somebody else; rename one of the two")]
    NameTaken {
        /// Kind of the object.
        kind: &'static str,
        /// Name of the object.
        name: String,
    },
    /// The certificate of the control service's issuer is missing.
    #[error("certificate file {}: {source}; mount the control service's certificates there", path.display())]
    Issuer {
        /// Path of the file.
        path: std::path::PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// The status has changed since it was read; looked at again at once.
    #[error("the object has changed meanwhile")]
    Stale,
}

impl Error {
    pub(crate) fn api(what: impl Into<String>, source: kube::Error) -> Self {
        Self::Api { what: what.into(), source: Box::new(source) }
    }

    /// The failure for the status; none if the next reconcile, at once, is expected not to meet it
    /// again.
    pub(crate) fn failure(&self) -> Option<Failure> {
        let failure = || Failure { reason: self.reason(), message: self.to_string() };
        (!matches!(self, Self::Stale)).then(failure)
    }

    /// The first of two that is more than [`Self::Stale`], which goes away by itself and would hide the other.
    pub(crate) fn first(one: Result<(), Self>, other: Result<(), Self>) -> Result<(), Self> {
        match (one, other) {
            (Err(Self::Stale), Err(other)) => Err(other),
            (one, other) => one.and(other),
        }
    }

    /// Reason, as a condition writes it.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Api { source, .. } => match status(source).map(|it| it.code) {
                Some(403) => "Forbidden",
                Some(422 | 400) => "Refused",
                Some(_) | None => "ApiServerFailed",
            },
            Self::NameTaken { .. } => "NameTaken",
            Self::Issuer { .. } => "NoCertificate",
            Self::Stale => "Stale",
        }
    }
}

/// Message of the API server, or why it could not be reached.
pub(crate) fn words(error: &kube::Error) -> String {
    status(error).map_or_else(|| error.to_string(), |it| it.message.clone())
}

/// Status of the API server, if it was the one that refused.
pub(crate) fn status(error: &kube::Error) -> Option<&Status> {
    if let kube::Error::Api(status) = error { Some(status) } else { None }
}

/// Whether the API server answers with this code.
pub(crate) fn is_code(error: &kube::Error, code: u16) -> bool {
    status(error).is_some_and(|it| it.code == code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_have_reasons() {
        let refused = |code: u16| {
            let status = Status { code, ..Status::default() };
            Error::api("create pod p-0-1", kube::Error::Api(Box::new(status)))
        };
        assert_eq!(refused(403).reason(), "Forbidden");
        assert_eq!(refused(422).reason(), "Refused");
        assert_eq!(refused(500).reason(), "ApiServerFailed");
        let taken = Error::NameTaken { kind: "Service", name: "p-servers".into() };
        assert_eq!(taken.reason(), "NameTaken");
        assert_eq!(
            taken.to_string(),
            "Service p-servers is there and belongs to somebody else; rename one of the two"
        );
        let source = std::io::Error::from(std::io::ErrorKind::NotFound);
        let missing = Error::Issuer { path: "/tls/ca.crt".into(), source };
        assert_eq!(missing.reason(), "NoCertificate");
        assert!(missing.to_string().contains("/tls/ca.crt"));
        assert_eq!(Error::Stale.reason(), "Stale");
    }
}
