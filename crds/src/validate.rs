//! What makes a pool or a job wrong, beyond the types of its fields.
//!
//! In: typed objects. Out: the first [`Refusal`], naming the field and the remedy.
//!
//! Nothing is changed or defaulted here. [`pool`], [`job`] and [`together`] hold everywhere and are
//! what the API server checks as well; [`pool_on_one_machine`] and
//! [`job_on_one_machine`] are for runs without a cluster.

use k8s_openapi::api::core::v1::{Container, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::contract::{SERVER_CONTAINER, TRAINER_CONTAINER, is_reserved};
pub use crate::name::NAME_LENGTH;
use crate::{
    AttentionPool, Checkpoint, FailurePolicy, ScalingMode, TrainingJob, UpdateStrategy, UpdateType,
};

/// Most servers of a pool and trainers of a job.
pub const MAX_WORKERS: u32 = 4096;

/// A wrong field.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{field} {problem}; {remedy}")]
pub struct Refusal {
    /// Path of the field, from the object's root.
    pub field: String,
    /// What is wrong with it.
    pub problem: String,
    /// What to write instead.
    pub remedy: String,
}

fn refuse(
    field: impl Into<String>,
    problem: impl Into<String>,
    remedy: impl Into<String>,
) -> Result<(), Refusal> {
    Err(Refusal { field: field.into(), problem: problem.into(), remedy: remedy.into() })
}

/// Checks a pool by itself.
///
/// # Errors
///
/// The first wrong field.
pub fn pool(pool: &AttentionPool) -> Result<(), Refusal> {
    name(&pool.metadata)?;
    let spec = &pool.spec;
    within("spec.replicas", spec.replicas, 0, MAX_WORKERS)?;
    let scaling = &spec.scaling;
    if spec.replicas == 0 && !spec.in_place && scaling.mode == ScalingMode::Fixed {
        return refuse(
            "spec.replicas",
            "is 0 while spec.inPlace is false, so the pool has no server",
            "set spec.replicas to 1 or more, or spec.inPlace to true",
        );
    }
    update(&spec.update_strategy)?;
    within("spec.scaling.min", scaling.min, 0, MAX_WORKERS)?;
    match scaling.max {
        Some(max) => within("spec.scaling.max", max, scaling.min.max(1), MAX_WORKERS)?,
        None if scaling.mode == ScalingMode::Auto => {
            return refuse(
                "spec.scaling.max",
                "is missing while spec.scaling.mode is Auto",
                "say how many servers there may be at most",
            );
        }
        None => {}
    }
    within("spec.scaling.targetUtilizationPercent", scaling.target_utilization_percent, 1, 100)?;
    strings("spec.placement.levels", &spec.placement.levels, 16)?;
    strings("spec.placement.colocateWith", &spec.placement.colocate_with, 64)?;
    within("spec.fabric.gpusPerServer", spec.fabric.gpus_per_server, 0, 64)?;
    strings("spec.fabric.rdmaResources", &spec.fabric.rdma_resources, 8)?;
    positive_if_set("spec.fabric.minBandwidthMbps", spec.fabric.min_bandwidth_mbps)?;
    positive("spec.drain.timeoutSeconds", spec.drain.timeout_seconds)?;
    let health = &spec.health;
    let suspect = health.suspect_after_milliseconds;
    within("spec.health.suspectAfterMilliseconds", suspect, 400, 600_000)?;
    positive("spec.health.reportTimeoutSeconds", health.report_timeout_seconds)?;
    positive("spec.health.reshapeAfterSeconds", health.reshape_after_seconds)?;
    within("spec.health.slowFactorPercent", health.slow_factor_percent, 101, 10_000)?;
    positive("spec.health.quarantineAfter", health.quarantine_after)?;
    strings("spec.access.namespaces", &spec.access.namespaces, 64)?;
    positive_if_set("spec.access.maxServersPerJob", spec.access.max_servers_per_job)?;
    match &spec.template {
        Some(template) => container(template, SERVER_CONTAINER).map(|_| ()),
        None => Ok(()),
    }
}

fn update(strategy: &UpdateStrategy) -> Result<(), Refusal> {
    match (&strategy.rolling_update, strategy.r#type) {
        (None, _) => Ok(()),
        (Some(_), UpdateType::OnDelete) => refuse(
            "spec.updateStrategy.rollingUpdate",
            "is of no use to spec.updateStrategy.type OnDelete",
            "remove it, or write RollingUpdate",
        ),
        (Some(rolling), UpdateType::RollingUpdate) => {
            let field = "spec.updateStrategy.rollingUpdate.maxUnavailable";
            within(field, rolling.max_unavailable, 1, MAX_WORKERS)
        }
    }
}

/// Checks a job by itself.
///
/// # Errors
///
/// The first wrong field.
pub fn job(job: &TrainingJob) -> Result<(), Refusal> {
    name(&job.metadata)?;
    let spec = &job.spec;
    within("spec.nodes", spec.nodes, 1, MAX_WORKERS)?;
    within("spec.procsPerNode", spec.procs_per_node, 1, MAX_WORKERS)?;
    if spec.trainers() > MAX_WORKERS {
        return refuse(
            "spec.nodes",
            format!("× spec.procsPerNode makes {} trainers", spec.trainers()),
            format!("{MAX_WORKERS} is the most"),
        );
    }
    if spec.attention.pool_ref.name.is_empty() {
        return refuse("spec.attention.poolRef.name", "is empty", "name an AttentionPool");
    }
    within("spec.attention.share", spec.attention.share, 1, 1000)?;
    if let Some(servers) = spec.attention.servers {
        within("spec.attention.servers", servers, 1, MAX_WORKERS)?;
    }
    positive("spec.attention.poolWaitSeconds", spec.attention.pool_wait_seconds)?;
    let memory = spec.attention.in_place_memory_mebibytes;
    within("spec.attention.inPlaceMemoryMebibytes", memory, 1, 16_777_216)?;
    if spec.attention.profile.as_deref() == Some("") {
        let remedy = "name a file of cadre calibrate, or leave the field out";
        return refuse("spec.attention.profile", "is empty", remedy);
    }
    if let Some(tolerance) = &spec.attention.tolerance
        && !tolerance.parse::<f64>().is_ok_and(|it| (1.0..=2.0).contains(&it))
    {
        let remedy = "write a ratio from 1 to 2, such as \"1.002\", or leave the field out";
        return refuse("spec.attention.tolerance", format!("is `{tolerance}`"), remedy);
    }
    positive_if_set("spec.activeDeadlineSeconds", spec.active_deadline_seconds)?;
    within("spec.failurePolicy.maxRestarts", spec.failure_policy.restarts(), 0, 1000)?;
    let silence = spec.failure_policy.suspect_after_seconds;
    within("spec.failurePolicy.suspectAfterSeconds", silence, 1, 3600)?;
    let stalled = spec.failure_policy.stalled_after_seconds;
    within("spec.failurePolicy.stalledAfterSeconds", stalled, 1, 86400)?;
    patience("spec.failurePolicy.stalledAfterSeconds", &spec.failure_policy)?;
    at_most("spec.failurePolicy.rules", spec.failure_policy.rules.len(), 16)?;
    for (at, rule) in spec.failure_policy.rules.iter().enumerate() {
        let field = format!("spec.failurePolicy.rules[{at}].exitCodes");
        if rule.exit_codes.is_empty() {
            return refuse(field, "is empty", "list the exit codes that the rule is about");
        }
        at_most(&field, rule.exit_codes.len(), 255)?;
        for &code in &rule.exit_codes {
            within(&field, code, 1, 255)?;
        }
    }
    positive("spec.checkpoint.keep", spec.checkpoint.keep)?;
    if spec.checkpoint.claim_name.is_some() && spec.checkpoint.host_path.is_some() {
        return refuse(
            "spec.checkpoint.hostPath",
            "is set beside spec.checkpoint.claimName",
            "keep one of them",
        );
    }
    resumes(&spec.checkpoint)?;
    container(&spec.template, TRAINER_CONTAINER).map(|_| ())
}

/// Checks the checkpoint of another job that a job begins with: it needs storage that both jobs
/// share.
fn resumes(place: &Checkpoint) -> Result<(), Refusal> {
    let field = "spec.checkpoint.resumeFrom";
    let Some(from) = &place.resume_from else { return Ok(()) };
    let (job, step) = from.split_once('/').map_or((from.as_str(), None), |it| (it.0, Some(it.1)));
    let inner = |it: char| it.is_ascii_lowercase() || it.is_ascii_digit() || it == '-';
    let is_job = !job.is_empty() && !job.starts_with('-') && job.chars().all(inner);
    let digits = |it: &str| !it.is_empty() && it.chars().all(|it| it.is_ascii_digit());
    let is_step = step.is_none_or(|it| it.strip_prefix("step-").is_some_and(digits));
    if !is_job || !is_step || from.len() > 128 {
        let problem = format!("is `{}`, no folder of a job's checkpoints", from.escape_debug());
        return refuse(field, problem, "write NAME-UID, or NAME-UID/step-N for one of them");
    }
    if !place.is_shared() {
        let remedy = "name that job's, spec.checkpoint.claimName or hostPath";
        return refuse(field, "is set without storage", remedy);
    }
    Ok(())
}

/// Checks that `stalledAfterSeconds` is above `suspectAfterSeconds`: a process that is paused for
/// the shorter time has to count as silent, not as one that stands still. `field` is where the
/// longer time was given.
///
/// # Errors
///
/// That field.
pub fn patience(field: &str, policy: &FailurePolicy) -> Result<(), Refusal> {
    let FailurePolicy { suspect_after_seconds: silence, stalled_after_seconds: stalled, .. } =
        *policy;
    if stalled > silence {
        return Ok(());
    }
    refuse(
        field,
        format!(
            "is {stalled}, not above spec.failurePolicy.suspectAfterSeconds, which is {silence}"
        ),
        format!("write more than {silence}, or lower spec.failurePolicy.suspectAfterSeconds"),
    )
}

/// Checks that a job refers to this pool.
///
/// # Errors
///
/// The job's reference, when it names another pool.
pub fn together(pool: &AttentionPool, job: &TrainingJob) -> Result<(), Refusal> {
    let wanted = &job.spec.attention.pool_ref;
    let found = pool.metadata.name.as_deref().unwrap_or_default();
    if wanted.name != found {
        return refuse(
            "spec.attention.poolRef.name",
            format!("is `{}`, but the pool is called `{found}`", wanted.name),
            format!("write `{found}`, or give the manifest of `{}`", wanted.name),
        );
    }
    let of = |meta: &ObjectMeta| meta.namespace.clone().unwrap_or_else(|| "default".into());
    let home = of(&pool.metadata);
    let wanted = wanted.namespace.clone().unwrap_or_else(|| of(&job.metadata));
    if wanted != home {
        return refuse(
            "spec.attention.poolRef.namespace",
            format!("is `{wanted}`, but the pool is in `{home}`"),
            format!("write `{home}`"),
        );
    }
    Ok(())
}

/// Checks what one machine without a cluster cannot do for a pool.
///
/// # Errors
///
/// The first field that one machine cannot do.
pub fn pool_on_one_machine(pool: &AttentionPool) -> Result<(), Refusal> {
    if pool.spec.replicas == 0 && !pool.spec.in_place {
        return refuse(
            "spec.replicas",
            "is 0 while spec.inPlace is false, and nothing scales a pool on one machine",
            "set spec.replicas to 1 or more, or spec.inPlace to true",
        );
    }
    match &pool.spec.template {
        Some(template) => plain_env(container(template, SERVER_CONTAINER)?),
        None => Ok(()),
    }
}

/// Checks what one machine without a cluster cannot do for a job.
///
/// # Errors
///
/// The first field that one machine cannot do.
pub fn job_on_one_machine(job: &TrainingJob) -> Result<(), Refusal> {
    if job.spec.suspend {
        return refuse("spec.suspend", "is true, so nothing would run", "remove it");
    }
    let trainer = container(&job.spec.template, TRAINER_CONTAINER)?;
    if trainer.command.as_ref().is_none_or(Vec::is_empty) {
        return refuse(
            "spec.template.spec.containers[0].command",
            "is missing, and the image's own is not known on one machine",
            "write the program to run, such as [cadre, train]",
        );
    }
    plain_env(trainer)
}

/// The one container of a template, which has to carry this name.
///
/// # Errors
///
/// None, several, another name, or a variable that is the controller's.
pub fn container<'a>(template: &'a PodTemplateSpec, name: &str) -> Result<&'a Container, Refusal> {
    let containers =
        template.spec.as_ref().map(|spec| spec.containers.as_slice()).unwrap_or_default();
    let [container] = containers else {
        refuse(
            "spec.template.spec.containers",
            format!("has {} containers", containers.len()),
            format!("write exactly one, named `{name}`"),
        )?;
        unreachable!("a refusal is an error");
    };
    if container.name != name {
        refuse(
            "spec.template.spec.containers[0].name",
            format!("is `{}`", container.name),
            format!("name it `{name}`"),
        )?;
    }
    for (at, variable) in container.env.iter().flatten().enumerate() {
        if is_reserved(&variable.name) {
            refuse(
                format!("spec.template.spec.containers[0].env[{at}].name"),
                format!("is `{}`, which Cadre sets itself", variable.name),
                "remove the variable",
            )?;
        }
    }
    Ok(container)
}

fn plain_env(container: &Container) -> Result<(), Refusal> {
    for (at, variable) in container.env.iter().flatten().enumerate() {
        if variable.value_from.is_some() {
            return refuse(
                format!("spec.template.spec.containers[0].env[{at}].valueFrom"),
                "needs a cluster",
                "write a value",
            );
        }
    }
    if container.env_from.iter().flatten().next().is_some() {
        return refuse(
            "spec.template.spec.containers[0].envFrom",
            "needs a cluster",
            "write the variables under env",
        );
    }
    Ok(())
}

fn name(meta: &ObjectMeta) -> Result<(), Refusal> {
    let name = meta.name.as_deref().unwrap_or_default();
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if name.is_empty() {
        return refuse("metadata.name", "is missing", "give the object a name");
    }
    if !name.chars().all(inner) || name.starts_with('-') || name.ends_with('-') {
        return refuse(
            "metadata.name",
            format!("`{}` is not a name", name.escape_debug()),
            "use a–z, 0–9 and -, with a letter or digit at both ends",
        );
    }
    if name.len() > NAME_LENGTH {
        return refuse(
            "metadata.name",
            format!("has {} characters", name.len()),
            format!("{NAME_LENGTH} is the most"),
        );
    }
    Ok(())
}

fn positive(field: &str, value: u32) -> Result<(), Refusal> {
    within(field, value, 1, u32::MAX)
}

fn positive_if_set(field: &str, value: Option<u32>) -> Result<(), Refusal> {
    value.map_or(Ok(()), |value| positive(field, value))
}

fn within(field: &str, value: u32, least: u32, most: u32) -> Result<(), Refusal> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    let remedy = match most {
        u32::MAX => format!("write {least} or more"),
        _ => format!("write a number from {least} to {most}"),
    };
    refuse(field, format!("is {value}"), remedy)
}

fn at_most(field: &str, count: usize, most: usize) -> Result<(), Refusal> {
    if count <= most {
        return Ok(());
    }
    refuse(field, format!("has {count} entries"), format!("{most} is the most"))
}

fn strings(field: &str, values: &[String], most: usize) -> Result<(), Refusal> {
    at_most(field, values.len(), most)?;
    match values.iter().position(String::is_empty) {
        Some(at) => refuse(format!("{field}[{at}]"), "is empty", "write a name or remove it"),
        None => Ok(()),
    }
}
