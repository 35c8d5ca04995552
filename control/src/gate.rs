//! Who may speak: the token of a worker is checked before its first message is read.
//!
//! In: the bearer token of a call. Out: a [`Caller`], the pod that the token is bound to, or a
//! refusal. What a pod may say is the business of who reads the events. A Unix socket has no gate: who
//! can open it is who started the workers.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use tonic::Status;
use tonic::metadata::MetadataMap;

/// The pod that a worker is.
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
    /// `Unauthenticated` for a token that is not good, `Unavailable` when nobody can say now.
    fn admit(&self, token: String) -> Admission<'_>;
}

/// What [`Gate::admit`] comes to.
pub type Admission<'a> = Pin<Box<dyn Future<Output = Result<Caller, Status>> + Send + 'a>>;

/// The token of a call.
pub(crate) fn bearer(metadata: &MetadataMap) -> Result<String, Status> {
    let text = metadata.get("authorization").and_then(|it| it.to_str().ok());
    let token = text.and_then(|it| it.strip_prefix("Bearer ")).map(str::trim);
    token.filter(|it| !it.is_empty()).map(str::to_owned).ok_or_else(|| {
        Status::unauthenticated("the call has no bearer token; set CADRE_CONTROL_TOKEN")
    })
}
