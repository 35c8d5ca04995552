//! Names at the boundary of a pod: labels, containers and environment variables.
//!
//! The local supervisor and the operator set them, workers read them. Nothing else is agreed on
//! between a controller and the process that it starts; the rest goes through the control service.

/// Group and version of the objects.
pub const API_VERSION: &str = "cadre.dev/v1alpha1";
/// Container of a trainer's pod that trains.
pub const TRAINER_CONTAINER: &str = "trainer";
/// Container of a server's pod that serves.
pub const SERVER_CONTAINER: &str = "server";

/// Label: name of the pool. On any pod it makes the pod join the pool.
pub const LABEL_POOL: &str = "cadre.dev/pool";
/// Label: name of the job.
pub const LABEL_JOB: &str = "cadre.dev/job";
/// Label: [`ROLE_TRAINER`] or [`ROLE_SERVER`].
pub const LABEL_ROLE: &str = "cadre.dev/role";
/// Label: slot that a server fills.
pub const LABEL_SLOT: &str = "cadre.dev/slot";
/// Label: digest of the template that a pod was made from.
pub const LABEL_REVISION: &str = "cadre.dev/revision";
/// Label of a server's pod: class of its pool, if that has one.
pub const LABEL_CLASS: &str = "cadre.dev/class";
/// Label: number of the job's attempt.
pub const LABEL_ATTEMPT: &str = "cadre.dev/attempt";

/// Annotation of an attempt's Job: restarts that counted before it.
pub const ANNOTATION_RESTARTS: &str = "cadre.dev/restarts";
/// Annotation of an attempt's Job: those of them since a newer checkpoint was heard of.
pub const ANNOTATION_IN_A_ROW: &str = "cadre.dev/restarts-without-progress";
/// Annotation of an attempt's Job: attempts since a newer checkpoint was heard of that ended before it, also those whose restart
/// does not count.
pub const ANNOTATION_VAIN: &str = "cadre.dev/attempts-without-progress";
/// Annotation of an attempt's Job: steps in the newest checkpoint that was heard of before it.
pub const ANNOTATION_CHECKPOINT: &str = "cadre.dev/checkpoint-step";
/// Annotation of an attempt's Job: generation of the spec that it was made from.
pub const ANNOTATION_GENERATION: &str = "cadre.dev/generation";
/// Annotation of an attempt's Job: which trainer ended it and how, as the operator saw it, JSON.
pub const ANNOTATION_ENDED: &str = "cadre.dev/ended";
/// Annotation of an attempt's Job and of trainers' pods: what its attempt encrypts, a value of `spec.attention.encryption`.
pub const ANNOTATION_ENCRYPTION: &str = "cadre.dev/encryption";
/// Annotation of the disruption budget of a pool of mode `Auto`: when the operator took over numbers that others had written,
/// RFC 3339, parted by commas, the newest last. Whoever replaces the pool's object leaves it as it is.
pub const ANNOTATION_TAKEN_OVER: &str = "cadre.dev/replicas-taken-over";
/// Annotation of a server's pod: why it drains.
pub const ANNOTATION_DRAIN: &str = "cadre.dev/drain";
/// Annotation of a server's pod: since when it drains, RFC 3339.
pub const ANNOTATION_DRAIN_SINCE: &str = "cadre.dev/drain-since";
/// Annotation of a server's pod: how often in a row its slot's servers failed before it.
pub const ANNOTATION_FAILURES: &str = "cadre.dev/failures";
/// Annotation of a server's pod: nodes that it avoids, parted by commas.
pub const ANNOTATION_AVOID: &str = "cadre.dev/avoid-nodes";
/// Annotation of a server's pod: its start of the slot, also in [`CADRE_INCARNATION`].
pub const ANNOTATION_INCARNATION: &str = "cadre.dev/incarnation";
/// Finalizer of a pool whose servers serve: they drain before the pool is gone.
pub const FINALIZER: &str = "cadre.dev/drain";
/// Value of `spec.managedBy` that means Cadre's own operator, as leaving it out does.
pub const MANAGED_BY: &str = "cadre.dev/operator";
/// Prefix of the labels of a queue; objects that are made for an object get them too.
pub const QUEUE_PREFIX: &str = "kueue.x-k8s.io/";
/// Label that puts an object into a queue: the Job of an attempt starts when the queue admits it.
pub const LABEL_QUEUE: &str = "kueue.x-k8s.io/queue-name";

/// Role of a trainer.
pub const ROLE_TRAINER: &str = "trainer";
/// Role of a dedicated attention server.
pub const ROLE_SERVER: &str = "server";

/// Host of trainer 0.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// Port of trainer 0, free for the trainer's own use.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// Number of the trainer, from 0.
pub const RANK: &str = "RANK";
/// Trainers of the job. A trainer with [`CADRE_ATTEMPT`] has to have it, and [`LOCAL_RANK`].
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// Number of the trainer in its pod, from 0.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// Trainers in the pod.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
/// Number of the pod in the job, from 0.
pub const GROUP_RANK: &str = "GROUP_RANK";
/// torchrun's `--nnodes`.
pub const PET_NNODES: &str = "PET_NNODES";
/// torchrun's `--nproc-per-node`.
pub const PET_NPROC_PER_NODE: &str = "PET_NPROC_PER_NODE";
/// torchrun's `--node-rank`.
pub const PET_NODE_RANK: &str = "PET_NODE_RANK";
/// torchrun's `--master-addr`.
pub const PET_MASTER_ADDR: &str = "PET_MASTER_ADDR";
/// torchrun's `--master-port`.
pub const PET_MASTER_PORT: &str = "PET_MASTER_PORT";

/// Start of every variable that Cadre alone may set, but for [`CADRE_EXCHANGE`].
pub const CADRE_PREFIX: &str = "CADRE_";
/// Address of the control service: path of a Unix socket, or an `https` URL.
pub const CADRE_CONTROL: &str = "CADRE_CONTROL";
/// File with the certificates that the control service's own is checked by.
pub const CADRE_CONTROL_CA: &str = "CADRE_CONTROL_CA";
/// File with the token that a pod shows to the control service.
pub const CADRE_CONTROL_TOKEN: &str = "CADRE_CONTROL_TOKEN";
/// IP address of this machine, or of the pod, that peers reach it by. A pod has to have it; elsewhere, not set: the loopback's.
pub const CADRE_HOST: &str = "CADRE_HOST";
/// [`ROLE_TRAINER`] or [`ROLE_SERVER`].
pub const CADRE_ROLE: &str = "CADRE_ROLE";
/// Number of the worker among those of its role, from 0.
pub const CADRE_INDEX: &str = "CADRE_INDEX";
/// How often the worker with this role and index has been started, from 0.
pub const CADRE_INCARNATION: &str = "CADRE_INCARNATION";
/// Memory of a trainer for rows of others, in MiB. Needed before the settings come: where [`CADRE_ATTEMPT`] is set, it has to be
/// set, too; in a pod that no job describes [`TRAINER_MEMORY_MIB`] if it is not set.
pub const CADRE_MEMORY_MIB: &str = "CADRE_MEMORY_MIB";
/// See [`CADRE_MEMORY_MIB`].
pub const TRAINER_MEMORY_MIB: u32 = 4096;
/// Calibration that plans are made with: a file, or a name that ships with Cadre; not set: nominal costs. Read by workers of control
/// version 2, and in pods that no job describes, which log what they take; else the settings say it.
pub const CADRE_PROFILE: &str = "CADRE_PROFILE";
/// How uneven plans may be, the last finish over the mean, 1 to 2; not set: 1.002. Read as [`CADRE_PROFILE`].
pub const CADRE_TOLERANCE: &str = "CADRE_TOLERANCE";
/// How rows of a rank move whose program has no option for it, such as a script of Python: `auto`, `tcp`, `shm` or `ucx`; not set:
/// `auto`. `cadre run --exchange` sets it; a pod template may, too.
pub const CADRE_EXCHANGE: &str = "CADRE_EXCHANGE";
/// Number of the job's attempt, from 1.
pub const CADRE_ATTEMPT: &str = "CADRE_ATTEMPT";
/// Name of the job.
pub const CADRE_JOB: &str = "CADRE_JOB";
/// Name of the pool.
pub const CADRE_POOL: &str = "CADRE_POOL";
/// Directory for what the run leaves behind.
pub const CADRE_OUT: &str = "CADRE_OUT";
/// Directory in which each rank that a launcher starts leaves the code that it exits with, in a file named by its [`RANK`]; not set:
/// nobody reads it.
pub const CADRE_CODES: &str = "CADRE_CODES";
/// Directory for checkpoints.
pub const CADRE_CHECKPOINTS: &str = "CADRE_CHECKPOINTS";
/// Checkpoint of another job that this one begins with, or a directory of them; [`RESUME_NONE`]: it begins at step 0. Needed before
/// the settings come: where [`CADRE_ATTEMPT`] is set, it has to be set, too.
pub const CADRE_RESUME: &str = "CADRE_RESUME";
/// See [`CADRE_RESUME`].
pub const RESUME_NONE: &str = "none";
/// Directory that trace events go to; not set: no trace.
pub const CADRE_TRACE: &str = "CADRE_TRACE";
/// Process id of the supervisor; a worker whose parent is another has lost it.
pub const CADRE_PARENT_PID: &str = "CADRE_PARENT_PID";

/// Exit code of a worker that was asked to end by SIGTERM and had nothing to hand over.
pub const ASKED_TO_END: u8 = 143;

/// Variables of workers that only a controller sets, and nobody inherits.
pub const OF_WORKERS: &[&str] = &[
    CADRE_ATTEMPT,
    CADRE_CHECKPOINTS,
    CADRE_CODES,
    CADRE_CONTROL,
    CADRE_CONTROL_CA,
    CADRE_CONTROL_TOKEN,
    CADRE_EXCHANGE,
    CADRE_HOST,
    CADRE_INCARNATION,
    CADRE_INDEX,
    CADRE_JOB,
    CADRE_MEMORY_MIB,
    CADRE_OUT,
    CADRE_PARENT_PID,
    CADRE_POOL,
    CADRE_PROFILE,
    CADRE_RESUME,
    CADRE_ROLE,
    CADRE_TOLERANCE,
    CADRE_TRACE,
];

/// Variables that the controller sets and a pod template therefore must not.
pub const RESERVED: &[&str] = &[
    GROUP_RANK,
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
    PET_MASTER_ADDR,
    PET_MASTER_PORT,
    PET_NNODES,
    PET_NODE_RANK,
    PET_NPROC_PER_NODE,
    RANK,
    WORLD_SIZE,
];

/// Whether a pod template is refused when it sets this variable.
pub fn is_reserved(variable: &str) -> bool {
    variable != CADRE_EXCHANGE
        && (variable.starts_with(CADRE_PREFIX) || RESERVED.contains(&variable))
}
