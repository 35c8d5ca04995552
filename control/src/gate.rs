//! Authentication of workers: a worker's token is checked before its first message is read.
//!
//! In: the bearer token of a call. Out: a [`Caller`], the pod that the token is bound to, or a refusal. The reader of the events
//! decides what a pod may say. A Unix socket has no gate: only the user who started the workers can open it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use tonic::Status;
use tonic::metadata::MetadataMap;

/// The pod that a worker runs in.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Caller {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Uid of the pod: another pod of the same name is another caller.
    pub uid: String,
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pod {}/{}", self.namespace, self.pod)
    }
}

/// Checks tokens.
pub trait Gate: fmt::Debug + Send + Sync {
    /// Identifies the pod to which a token belongs.
    ///
    /// # Errors
    ///
    /// `Unauthenticated` for an invalid token, `Unavailable` when it cannot be checked now.
    fn admit(&self, token: String) -> Admission<'_>;
}

/// The result of [`Gate::admit`].
pub type Admission<'a> = Pin<Box<dyn Future<Output = Result<Caller, Status>> + Send + 'a>>;

/// The token of a call.
pub(crate) fn bearer(metadata: &MetadataMap) -> Result<String, Status> {
    let text = metadata.get("authorization").and_then(|it| it.to_str().ok());
    let token = text.and_then(|it| it.strip_prefix("Bearer ")).map(str::trim);
    token.filter(|it| !it.is_empty()).map(str::to_owned).ok_or_else(|| {
        Status::unauthenticated("the call has no bearer token; set CADRE_CONTROL_TOKEN")
    })
}
