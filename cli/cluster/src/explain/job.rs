//! Why a job is as it is.
//!
//! In: a job. Out: its conditions that are bad news, its pool, the newest attempt and its pods.

use cadre_crds::TrainingJob;
use cadre_crds::contract::LABEL_ATTEMPT;
use k8s_openapi::api::batch::v1::Job;

use super::{Finding, Verdict, of_condition, operator, pod, pool, remedy, worst};
use crate::facts::condition;
use crate::seen::{Seen, label, name, namespace};

pub(super) fn explain(seen: &Seen, job: &TrainingJob) -> Finding {
    let meta = &job.metadata;
    let what = format!("cadjob {}/{}", namespace(meta), name(meta));
    let status = job.status.clone().unwrap_or_default();
    let said = |name: &str, truth: &str| {
        condition(&status.conditions, name).filter(|it| it.status == truth)
    };
    if let Some(it) = said("Complete", "True") {
        return Finding::new(what, Verdict::Fine, format!("complete: {}", it.message));
    }
    if let Some(it) = said("Failed", "True") {
        let says = format!("has failed in attempt {}", status.attempt);
        let pods = seen.attempt(job).map(|it| pods(seen, job, it)).unwrap_or_default();
        return Finding::new(what, Verdict::Bad, says)
            .over([of_condition(it, Verdict::Bad)])
            .over(pods.into_iter().filter(|it| it.verdict == Verdict::Bad));
    }
    let mut below: Vec<Finding> =
        operator::behind(seen, meta, status.observed_generation).into_iter().collect();
    let progress = status
        .progress
        .as_ref()
        .map(|it| format!("step {} of {}, {} tokens/s", it.step, it.total, it.tokens_per_second));
    let running = said("Running", "True").is_some();
    if let Some(it) = said("Running", "False").or_else(|| said("Degraded", "True")) {
        let verdict = match it.reason.as_str() {
            "Invalid" | "PoolNotFound" | "PoolRefuses" | "NameTaken" => Verdict::Bad,
            _ => Verdict::Waiting,
        };
        below.push(of_condition(it, verdict));
    }
    below.extend(of_pool(seen, job));
    below.extend(seen.attempt(job).map(|it| of_attempt(seen, job, it)));
    let says = match (running, progress) {
        (true, Some(progress)) => format!("attempt {} runs: {progress}", status.attempt),
        (true, None) => format!("attempt {} runs, no step is reported yet", status.attempt),
        (false, _) if meta.deletion_timestamp.is_some() => "is being deleted".to_owned(),
        (false, _) => format!("does not run; attempt {}", status.attempt),
    };
    let verdict = worst(&below).max(if running { Verdict::Fine } else { Verdict::Waiting });
    Finding::new(what, verdict, says).over(below)
}

/// The finding about the job's pool. Its causes are left out while the pool is fine.
fn of_pool(seen: &Seen, job: &TrainingJob) -> Option<Finding> {
    let wanted = &job.spec.attention.pool_ref;
    let home = namespace(&job.metadata);
    let pool = seen.pool(wanted.namespace.as_deref().unwrap_or(home), &wanted.name)?;
    // Trainers of this job are explained below; those of other jobs do not matter here.
    let mut found = pool::alone(seen, pool, Vec::new());
    if found.verdict == Verdict::Fine {
        found.below.clear();
    }
    Some(found)
}

fn of_attempt(seen: &Seen, job: &TrainingJob, attempt: &Job) -> Finding {
    let what = format!("attempt {}", name(&attempt.metadata));
    if attempt.spec.as_ref().and_then(|it| it.suspend) == Some(true) {
        return Finding::new(what, Verdict::Waiting, "the queue has not admitted it yet")
            .with(remedy::of_reason("Queued"));
    }
    let status = attempt.status.as_ref();
    let number = |it: Option<i32>| it.unwrap_or_default();
    let active = number(status.and_then(|it| it.active));
    let ready = number(status.and_then(|it| it.ready));
    let failed = number(status.and_then(|it| it.failed));
    let wanted = job.spec.nodes;
    let says = format!("{active} of {wanted} pods are there, {ready} ready, {failed} failed");
    let mut below = pods(seen, job, attempt);
    // A pod that was never made tells nothing; the Job's events do.
    if u32::try_from(active).unwrap_or(0) < wanted
        && let Some(it) = seen.warnings("Job", &attempt.metadata).first()
    {
        let message = it.message.clone().unwrap_or_default();
        let reason = it.reason.clone().unwrap_or_default();
        let finding = Finding::new(format!("event {reason}"), Verdict::Bad, message.clone());
        below.insert(0, finding.with(remedy::of_warning(&message)));
    }
    Finding::new(what, worst(&below), says).over(below)
}

fn pods(seen: &Seen, job: &TrainingJob, attempt: &Job) -> Vec<Finding> {
    let number = label(&attempt.metadata, LABEL_ATTEMPT);
    let mut trainers = seen.trainers(job);
    trainers.retain(|it| label(&it.metadata, LABEL_ATTEMPT) == number);
    pod::all(seen, "trainers", &trainers)
}
