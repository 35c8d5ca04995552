//! One look at a job: observe, decide, apply, report.

use std::sync::Arc;

use cadre_crds::{Readable, TrainingJob, TrainingJobStatus};
use cadre_desired::{Applied, job};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt as _;

use crate::context::Context;
use crate::control::issuer;
use crate::error::Error;
use crate::looked::Looked;
use crate::{apply, lacks, observe, report};

pub(crate) async fn reconcile(
    object: Arc<Readable<TrainingJob>>,
    context: Arc<Context>,
) -> Result<Looked, Error> {
    let object = object.as_ref();
    let now = Timestamp::now();
    let observed = observe::job(&context, object);
    let decision = job::decide(&observed, &context.settings, now);
    let has_workers = decision.has_workers;
    let prepared = issuer::bring(&context, object, &decision).await;
    let renewal = prepared.as_ref().ok().copied().flatten();
    let prepared = prepared.map(drop);
    let done = apply::all(&context, object, decision.actions, prepared).await;
    let apply::Done { version, failed, lacks_pods: _ } = done;
    let lacks = decision.lacks_pods.as_deref();
    let tries = lacks::try_pod(&context, object, lacks).await;
    let (trouble, lasts) = context.trouble(has_workers).unzip();
    let turns = [renewal, context.told.completes_in(), tries, lasts];
    let next = turns.into_iter().flatten().min();

    let failure = failed.as_ref().and_then(Error::failure).or(trouble);
    let applied = Applied::new(observe::job(&context, object), failure);
    let uid = object.object.uid().unwrap_or_default();
    let key = (object.object.namespace().unwrap_or_default(), object.object.name_any());
    let is_owed = context.told.owes(&key);
    let Some(status) = job::status(&applied, now) else {
        context.told.wrote(&key, &uid, None);
        return Ok(Looked::new(decision.again, context.recent_jobs.waits(), [None, next], failed));
    };
    let old = object.object.status.as_ref();
    let before = old.map(|it| it.conditions.as_slice()).unwrap_or_default();
    let conditions = (before, status.conditions.as_slice());
    // Attempts, restarts and checkpoints are what the next look goes on from.
    let counted = |it: &TrainingJobStatus| {
        let restarts = (it.restarts, it.restarts_without_progress);
        (it.observed_generation, it.attempt, restarts, it.checkpoint_step)
    };
    let at_once = is_owed || old.is_none_or(|it| counted(it) != counted(&status));
    let turn =
        report::status(&context, (object, version), old, &status, conditions, at_once).await?;
    if turn.is_none() {
        context.told.wrote(&key, &uid, Some(&status));
    }
    Ok(Looked::new(decision.again, context.recent_jobs.waits(), [turn, next], failed))
}
