//! One look at a pool: observe, decide, apply, report.

use std::collections::BTreeSet;
use std::sync::Arc;

use cadre_crds::{AttentionPool, AttentionPoolStatus, Readable};
use cadre_desired::{Applied, pool};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt as _;

use crate::context::Context;
use crate::control::issuer;
use crate::error::Error;
use crate::looked::Looked;
use crate::{apply, observe, report};

pub(crate) async fn reconcile(
    object: Arc<Readable<AttentionPool>>,
    context: Arc<Context>,
) -> Result<Looked, Error> {
    let object = object.as_ref();
    let uid = object.uid().unwrap_or_default();
    let now = Timestamp::now();
    let observed = observe::pool(&context, object);
    let (decision, memory) = pool::decide(&observed, &context.settings, now);
    context.remember(&uid, Some(memory));
    let has_workers = decision.has_workers;
    let prepared = issuer::bring(&context, object, &decision).await;
    let renewal = prepared.as_ref().ok().copied().flatten();
    let prepared = prepared.map(drop);
    let done = apply::all(&context, object, decision.actions, prepared).await;
    let apply::Done { version, failed, lacks_pods } = done;
    context.unmade.tell(&uid, lacks_pods, now);
    let (trouble, lasts) = context.trouble(has_workers).unzip();
    let next = [renewal, context.told.completes_in(), lasts].into_iter().flatten().min();

    // After an error, servers that are there keep being served, and the status names what is
    // missing.
    let failure = failed.as_ref().and_then(Error::failure).or(trouble);
    let applied = Applied::new(observe::pool(&context, object), failure);
    let key = (object.namespace().unwrap_or_default(), object.name_any());
    context.known.put(key, pool::facts(&applied));
    let status = pool::status(&applied, &context.settings, now);
    let old = object.object.status.as_ref();
    let before = old.map(|it| it.conditions.as_slice()).unwrap_or_default();
    let conditions = (before, status.conditions.as_slice());
    // Changes of these are written at once, since users and tools wait for them.
    let asked = |it: &AttentionPoolStatus| {
        let revisions = [&it.current_revision, &it.update_revision].map(String::clone);
        let jobs = it.holders.iter().map(|it| (it.namespace.clone(), it.name.clone()));
        (it.observed_generation, it.desired, revisions, jobs.collect::<BTreeSet<_>>())
    };
    let at_once = old.is_none_or(|it| asked(it) != asked(&status));
    let turn =
        report::status(&context, (object, version), old, &status, conditions, at_once).await?;
    if object.object.metadata.deletion_timestamp.is_some() {
        context.remember(&uid, None);
    }
    Ok(Looked::new(decision.again, context.recent_pods.waits(), [turn, next], failed))
}
