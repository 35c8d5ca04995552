//! Who a token belongs to: asks the API server, and takes only tokens that are bound to a pod.
//!
//! In: a bearer token. Out: the pod's namespace, name and uid, as the API server says them; where it does not answer, the status
//! of all objects with workers says so. The audience is
//! ours alone, so a token that a pod shows to somebody else is of no use here, and ours of none there.
//!
//! Nothing is cached: a token is good as long as its pod is there. At most [`AT_ONCE`] reviews run concurrently.

use std::fmt;
use std::sync::Arc;

use cadre_control::gate::Admission;
use cadre_control::{Caller, Gate};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use kube::Api;
use kube::api::PostParams;
use tokio::sync::Semaphore;
use tonic::Status;

use crate::context::Context;
use crate::error::words;
use crate::troubles::What;

/// Maximum reviews of tokens under way.
const AT_ONCE: usize = 32;
/// Where the API server says which pod a token is bound to.
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";
/// Start of a service account's user name; its namespace and name follow.
const SERVICE_ACCOUNT: &str = "system:serviceaccount:";

/// Asks the API server.
pub(crate) struct Reviewer {
    context: Arc<Context>,
    api: Api<TokenReview>,
    audience: String,
    room: Semaphore,
}

impl fmt::Debug for Reviewer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reviewer").field("audience", &self.audience).finish_non_exhaustive()
    }
}

impl Reviewer {
    pub(crate) fn new(context: Arc<Context>) -> Self {
        let (api, audience) = (Api::all(context.client.clone()), context.settings.audience.clone());
        Self { context, api, audience, room: Semaphore::new(AT_ONCE) }
    }

    async fn review(&self, token: String) -> Result<Caller, Status> {
        let _permit =
            self.room.acquire().await.map_err(|it| Status::unavailable(it.to_string()))?;
        let audiences = Some(vec![self.audience.clone()]);
        let review =
            TokenReview { spec: TokenReviewSpec { audiences, token }, ..TokenReview::default() };
        let answer = self.api.create(&PostParams::default(), &review).await;
        self.context.tried(What::Tokens, answer.as_ref().err().map(words));
        let answer = answer.map_err(|error| {
            tracing::warn!("tokens cannot be checked: {error}");
            Status::unavailable(format!("the API server does not check tokens: {error}"))
        })?;
        let status = answer.status.unwrap_or_default();
        let ours = status.audiences.iter().flatten().any(|it| *it == self.audience);
        if status.authenticated != Some(true) || !ours {
            let why = status.error.unwrap_or_else(|| "it is of another audience, or over".into());
            return Err(Status::unauthenticated(format!("the token is not good: {why}")));
        }
        caller(&status.user.unwrap_or_default()).ok_or_else(|| {
            Status::unauthenticated(
                "the token is bound to no pod; use a projected service-account token",
            )
        })
    }
}

impl Gate for Reviewer {
    fn admit(&self, token: String) -> Admission<'_> {
        Box::pin(self.review(token))
    }
}

/// The pod that a user's token is bound to.
fn caller(user: &UserInfo) -> Option<Caller> {
    let extra = |key: &str| user.extra.as_ref()?.get(key)?.first().cloned();
    let account = user.username.as_deref()?.strip_prefix(SERVICE_ACCOUNT)?;
    let (namespace, _) = account.split_once(':')?;
    Some(Caller { namespace: namespace.to_owned(), pod: extra(POD_NAME)?, uid: extra(POD_UID)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_service_account_whose_token_is_bound_to_a_pod_is_a_caller() {
        let user = |name: &str, extra: &[(&str, &str)]| UserInfo {
            username: Some(name.into()),
            extra: Some(
                extra.iter().map(|&(key, value)| (key.into(), vec![value.into()])).collect(),
            ),
            ..UserInfo::default()
        };
        let bound = [(POD_NAME, "x"), (POD_UID, "u")];
        let found = caller(&user("system:serviceaccount:n:default", &bound));
        let expected = Caller { namespace: "n".into(), pod: "x".into(), uid: "u".into() };
        assert_eq!(found, Some(expected));
        assert_eq!(caller(&user("system:serviceaccount:n:default", &bound[..1])), None);
        assert_eq!(caller(&user("admin", &bound)), None);
    }
}
