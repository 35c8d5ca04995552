//! One look at a pool: observe, decide, apply, report.

use std::sync::Arc;
use std::time::Duration;

use cadre_crds::{AttentionPool, AttentionPoolStatus};
use cadre_desired::{Applied, pool};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt as _;
use kube::runtime::controller::Action;

use crate::caches::Guarded;
use crate::context::Context;
use crate::control::issuer;
use crate::error::Error;
use crate::recent::LOOK_AGAIN;
use crate::{apply, observe, report};

pub(crate) async fn reconcile(
    object: Arc<Guarded<AttentionPool>>,
    context: Arc<Context>,
) -> Result<Action, Error> {
    let object = match &object.0 {
        Ok(object) => object,
        Err(invalid) => {
            tracing::warn!("pool {}: cannot be read: {}", object.name_any(), invalid.error);
            return Ok(Action::await_change());
        }
    };
    let uid = object.uid().unwrap_or_default();
    let now = Timestamp::now();
    let observed = observe::pool(&context, object);
    let (decision, memory) = pool::decide(&observed, &context.settings, now);
    issuer::bring(&context, &object.namespace().unwrap_or_default()).await?;
    apply::all(&context, object, decision.actions).await?;
    context.remember(&uid, Some(memory));

    let applied = Applied::new(observe::pool(&context, object));
    let key = (object.namespace().unwrap_or_default(), object.name_any());
    let gone = object.metadata.deletion_timestamp.is_some() && applied.pods.is_empty();
    context.known.put(key, (!gone).then(|| pool::facts(&applied)));
    let status = pool::status(&applied, &context.settings, now);
    let old = object.status.as_ref();
    let before = old.map(|it| it.conditions.as_slice()).unwrap_or_default();
    let conditions = (before, status.conditions.as_slice());
    // What was asked for and who scales are not to see an old answer.
    let asked = |it: &AttentionPoolStatus| (it.observed_generation, it.desired);
    let at_once = old.is_none_or(|it| asked(it) != asked(&status));
    let turn = report::status(&context, object, old, &status, conditions, at_once).await?;
    if object.metadata.deletion_timestamp.is_some() {
        context.remember(&uid, None);
    }
    Ok(again(decision.again, context.recent_pods.waits(), turn))
}

/// Looks again after so many seconds, or at the next change. A write that the cache never sees is no change,
/// so while one `waits` the next look comes by itself; and so it does when it is the status's `turn`.
pub(crate) fn again(seconds: Option<i64>, waits: bool, turn: Option<Duration>) -> Action {
    let wanted = seconds.and_then(|it| u64::try_from(it).ok()).map(Duration::from_secs);
    let missing = waits.then_some(LOOK_AGAIN);
    match wanted.into_iter().chain(missing).chain(turn).min() {
        Some(pause) => Action::requeue(pause),
        None => Action::await_change(),
    }
}
