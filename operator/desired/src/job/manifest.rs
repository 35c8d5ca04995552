//! The objects that a job is made of.
//!
//! In: a job that passed validation, an attempt's number. Out: the Service that names the pods, and the
//! Indexed Job whose pods are the trainers. Nothing is decided here; equal inputs, equal objects.
//!
//! With one trainer a pod `RANK` and `CADRE_INDEX` are the pod's index. With several, the container's command
//! starts them and sets `RANK` and `LOCAL_RANK`: torchrun from the `PET_` variables, `cadre train` by itself.

use std::collections::BTreeMap;

use cadre_crds::TrainingJob;
use cadre_crds::contract::{
    ANNOTATION_CHECKPOINT, ANNOTATION_ENCRYPTION, ANNOTATION_GENERATION, ANNOTATION_IN_A_ROW,
    ANNOTATION_RESTARTS, ANNOTATION_VAIN, CADRE_ATTEMPT, CADRE_CHECKPOINTS, CADRE_INCARNATION,
    CADRE_INDEX, CADRE_JOB, CADRE_MEMORY_MIB, CADRE_POOL, CADRE_PROFILE, CADRE_RESUME, CADRE_ROLE,
    CADRE_TOLERANCE, GROUP_RANK, LABEL_ATTEMPT, LABEL_QUEUE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT, PET_MASTER_ADDR, PET_MASTER_PORT, PET_NNODES, PET_NODE_RANK,
    PET_NPROC_PER_NODE, RANK, RESUME_NONE, ROLE_TRAINER, TRAINER_CONTAINER, WORLD_SIZE,
};
use k8s_openapi::api::batch::v1::{Job, JobSpec};
use k8s_openapi::api::core::v1::{
    EmptyDirVolumeSource, EnvVar, HostPathVolumeSource, PersistentVolumeClaimVolumeSource,
    PodTemplateSpec, Service, ServiceSpec, Volume,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::attempt::{Restarts, checkpoint};
use super::{Observed, encryption, failure};
use crate::names::{attempt, job_labels, name, owned_by, queue_labels, trainers_service};
use crate::podspec::{complete, empty, from_field, mount, variable, volume};
use crate::settings::Settings;

/// Where checkpoints are in a trainer's container.
const CHECKPOINTS: &str = "/var/lib/cadre-checkpoints";
/// Port of trainer 0 that is the trainer's own to use.
const PORT: &str = "29500";
/// Where the core controller writes a pod's index.
const INDEX: &str = "metadata.annotations['batch.kubernetes.io/job-completion-index']";

/// Gives each pod of each attempt a name that others resolve, before it is ready.
pub(crate) fn service(job: &TrainingJob) -> Service {
    let labels = job_labels(&job.metadata, &job.spec.attention.pool_ref.name);
    let selector = labels.iter().filter(|(key, _)| key.starts_with("cadre.dev/"));
    let selector = selector.map(|(key, value)| (key.clone(), value.clone())).collect();
    Service {
        metadata: ObjectMeta {
            name: Some(trainers_service(name(&job.metadata))),
            namespace: job.metadata.namespace.clone(),
            labels: Some(labels),
            owner_references: Some(vec![owned_by::<TrainingJob>(&job.metadata)]),
            ..ObjectMeta::default()
        },
        spec: Some(ServiceSpec {
            cluster_ip: Some("None".into()),
            publish_not_ready_addresses: Some(true),
            selector: Some(selector),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

/// An attempt. In a queue it waits, suspended, until the queue admits it.
pub(crate) fn job(
    observed: &Observed,
    settings: &Settings,
    number: u32,
    restarts: Restarts,
) -> Job {
    let object = &observed.job;
    let spec = &object.spec;
    let mut labels = job_labels(&object.metadata, &spec.attention.pool_ref.name);
    labels.insert(LABEL_ATTEMPT.into(), number.to_string());
    let queue = queue_labels(&object.metadata);
    let queued = queue.contains_key(LABEL_QUEUE);
    let own = attempt(name(&object.metadata), number);
    let nodes = i32::try_from(spec.nodes).unwrap_or(i32::MAX);
    let template = template(object, settings, number, &own, &labels);
    labels.extend(queue);
    Job {
        metadata: ObjectMeta {
            name: Some(own),
            namespace: object.metadata.namespace.clone(),
            labels: Some(labels),
            annotations: Some(BTreeMap::from([
                (ANNOTATION_RESTARTS.to_owned(), restarts.all.to_string()),
                (ANNOTATION_IN_A_ROW.to_owned(), restarts.in_a_row.to_string()),
                (ANNOTATION_VAIN.to_owned(), restarts.vain.to_string()),
                (ANNOTATION_CHECKPOINT.to_owned(), checkpoint(observed).to_string()),
                (
                    ANNOTATION_GENERATION.to_owned(),
                    object.metadata.generation.unwrap_or_default().to_string(),
                ),
                (ANNOTATION_ENCRYPTION.to_owned(), encryption::next(object).word().to_owned()),
            ])),
            owner_references: Some(vec![owned_by::<TrainingJob>(&object.metadata)]),
            ..ObjectMeta::default()
        },
        spec: Some(JobSpec {
            completion_mode: Some("Indexed".into()),
            completions: Some(nodes),
            parallelism: Some(nodes),
            // One pod's end is the attempt's end; the next attempt is a Job of its own.
            backoff_limit: Some(0),
            pod_failure_policy: Some(failure::rules()),
            suspend: Some(queued),
            template,
            ..JobSpec::default()
        }),
        status: None,
    }
}

fn template(
    object: &TrainingJob,
    settings: &Settings,
    number: u32,
    own: &str,
    labels: &BTreeMap<String, String>,
) -> PodTemplateSpec {
    let mut template = object.spec.template.clone();
    let meta = template.metadata.get_or_insert_with(ObjectMeta::default);
    meta.labels.get_or_insert_with(BTreeMap::new).extend(labels.clone());
    let links = encryption::next(object).word().to_owned();
    meta.annotations.get_or_insert_default().insert(ANNOTATION_ENCRYPTION.to_owned(), links);
    let spec = template.spec.get_or_insert_default();
    let subdomain = trainers_service(name(&object.metadata));
    let master = format!("{own}-0.{subdomain}");
    spec.subdomain = Some(subdomain);
    volume(spec, checkpoints(object));
    if let Some(trainer) = spec.containers.iter_mut().find(|it| it.name == TRAINER_CONTAINER) {
        mount(trainer, "cadre-checkpoints", CHECKPOINTS, false);
    }
    let variables = variables(object, number, &master);
    complete(spec, TRAINER_CONTAINER, variables, settings);
    template
}

fn variables(object: &TrainingJob, number: u32, master: &str) -> Vec<EnvVar> {
    let spec = &object.spec;
    let mut variables = vec![
        variable(CADRE_ROLE, ROLE_TRAINER),
        variable(CADRE_JOB, name(&object.metadata)),
        variable(CADRE_POOL, spec.attention.pool_ref.name.as_str()),
        variable(CADRE_ATTEMPT, number.to_string()),
        // Each attempt starts each trainer once.
        variable(CADRE_INCARNATION, number.saturating_sub(1).to_string()),
        variable(CADRE_CHECKPOINTS, format!("{CHECKPOINTS}/{}", checkpoint_folder(object))),
        variable(CADRE_MEMORY_MIB, spec.attention.in_place_memory_mebibytes.to_string()),
        variable(MASTER_ADDR, master),
        variable(MASTER_PORT, PORT),
        variable(PET_MASTER_ADDR, master),
        variable(PET_MASTER_PORT, PORT),
        variable(PET_NNODES, spec.nodes.to_string()),
        variable(PET_NPROC_PER_NODE, spec.procs_per_node.to_string()),
        variable(WORLD_SIZE, spec.trainers().to_string()),
        variable(LOCAL_WORLD_SIZE, spec.procs_per_node.to_string()),
        from_field(GROUP_RANK, INDEX),
        from_field(PET_NODE_RANK, INDEX),
    ];
    // For workers of control version 2; later ones have both from their settings.
    if let Some(profile) = &spec.attention.profile {
        variables.push(variable(CADRE_PROFILE, profile.as_str()));
    }
    if let Some(tolerance) = &spec.attention.tolerance {
        variables.push(variable(CADRE_TOLERANCE, tolerance.as_str()));
    }
    let resume = spec.checkpoint.resume_from.as_ref().map(|from| format!("{CHECKPOINTS}/{from}"));
    variables.push(variable(CADRE_RESUME, resume.unwrap_or_else(|| RESUME_NONE.into())));
    if spec.procs_per_node == 1 {
        variables.push(from_field(RANK, INDEX));
        variables.push(from_field(CADRE_INDEX, INDEX));
        variables.push(variable(LOCAL_RANK, "0"));
    }
    variables
}

/// The job's own folder in its storage: jobs may share a claim, and one of the same name that was deleted is another.
pub(crate) fn checkpoint_folder(object: &TrainingJob) -> String {
    let uid = object.metadata.uid.as_deref().unwrap_or_default();
    let start = uid.get(..8).unwrap_or(uid);
    format!("{}-{start}", name(&object.metadata))
}

/// The claim, the node's directory, or nothing that outlives the pod.
fn checkpoints(object: &TrainingJob) -> Volume {
    let place = &object.spec.checkpoint;
    let mut volume = empty("cadre-checkpoints", EmptyDirVolumeSource::default());
    if let Some(claim) = &place.claim_name {
        volume.empty_dir = None;
        volume.persistent_volume_claim =
            Some(PersistentVolumeClaimVolumeSource { claim_name: claim.clone(), read_only: None });
    } else if let Some(path) = &place.host_path {
        volume.empty_dir = None;
        volume.host_path = Some(HostPathVolumeSource {
            path: path.clone(),
            type_: Some("DirectoryOrCreate".into()),
        });
    }
    volume
}
