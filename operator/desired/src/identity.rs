//! Which worker a pod is, by its labels: a pod may speak only for itself.
//!
//! In: a pod as the API server has it, and what a worker says in its hello. Out: the pool and the worker,
//! or a [`Refusal`] that names both. What a pod's labels say is what the operator wrote there, or for pods of
//! other kinds what their own controller did; nothing is believed of the hello that a label contradicts.

use std::ops::Range;

use cadre_crds::TrainingJob;
use cadre_crds::contract::{
    ANNOTATION_INCARNATION, LABEL_ATTEMPT, LABEL_JOB, LABEL_POOL, LABEL_ROLE, LABEL_SLOT,
    ROLE_SERVER,
};
use cadre_views::{JobKey, ServerId, Who};
use k8s_openapi::api::core::v1::Pod;

use crate::names::{self, annotation, label, name};

/// Labels in which the controllers of other kinds write which job a pod belongs to.
const JOB_LABELS: [&str; 5] = [
    LABEL_JOB,
    "jobset.sigs.k8s.io/jobset-name",
    "training.kubeflow.org/job-name",
    "ray.io/cluster",
    JOB_NAME,
];
/// Where the core controller writes which Job a pod is of. It stays where the Job goes without its pods.
const JOB_NAME: &str = "batch.kubernetes.io/job-name";
/// Where the core controller writes a pod's index.
const INDEX: &str = "batch.kubernetes.io/job-completion-index";

/// The role that a worker claims.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Claim {
    /// A server, else a trainer.
    pub is_server: bool,
    /// Index of a server, rank of a trainer.
    pub index: u32,
    /// Which start of it.
    pub incarnation: u32,
}

/// Identity of a pod.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Identity {
    /// Name of its pool.
    pub pool: String,
    /// The worker.
    pub who: Who,
}

/// Why a pod does not speak for the worker that it claims to be.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// The pod has no label of a pool.
    #[error("pod {pod} has no label cadre.dev/pool; set it to the pool's name")]
    NoPool {
        /// The pod.
        pod: String,
    },
    /// No label says which job the pod trains.
    #[error("pod {pod} has no label that names its job; set cadre.dev/job")]
    NoJob {
        /// The pod.
        pod: String,
    },
    /// A `TrainingJob` has the name of the pod's job, and has not made the pod.
    #[error(
        "pod {pod} names TrainingJob {job} in a label and is none of its pods; give its own job another name (cadre.dev/job)"
    )]
    Stranger {
        /// The pod.
        pod: String,
        /// The job, with its namespace.
        job: String,
    },
    /// The worker claims to be another pod.
    #[error("pod {pod} is {is} and may not speak for {claimed}; each pod speaks for itself alone")]
    Another {
        /// The pod.
        pod: String,
        /// The identity by the pod's labels.
        is: String,
        /// The identity that the worker claims.
        claimed: String,
    },
}

/// Identity of a pod that makes this claim. `job` is the `TrainingJob` of its label, if there is
/// one.
///
/// # Errors
///
/// [`Refusal`].
pub fn of(pod: &Pod, claim: Claim, job: Option<&TrainingJob>) -> Result<Identity, Refusal> {
    let own = || name(&pod.metadata).to_owned();
    let number = |text: Option<&str>| text.and_then(|it| it.parse::<u32>().ok());
    let pool = label(&pod.metadata, LABEL_POOL).ok_or_else(|| Refusal::NoPool { pod: own() })?;
    let Claim { is_server, index, incarnation } = claim;
    let claimed = |who: &str| format!("{who} {index} (incarnation {incarnation})");
    let claimed = || claimed(if is_server { "server" } else { "trainer" });
    let another = |is: String| Refusal::Another { pod: own(), is, claimed: claimed() };
    let who = if label(&pod.metadata, LABEL_ROLE) == Some(ROLE_SERVER) {
        let slot = number(label(&pod.metadata, LABEL_SLOT)).unwrap_or_default();
        let start = number(annotation(&pod.metadata, ANNOTATION_INCARNATION)).unwrap_or_default();
        if !is_server || (index, incarnation) != (slot, start) {
            return Err(another(format!("server {slot} (incarnation {start})")));
        }
        Who::Server(ServerId { index, incarnation })
    } else {
        let key = job_of(pod).ok_or_else(|| Refusal::NoJob { pod: own() })?;
        if job.is_some() && !is_trainer_of(pod, &key.name) {
            let job = format!("{}/{}", key.namespace, key.name);
            return Err(Refusal::Stranger { pod: own(), job });
        }
        let ranks = job.and_then(|job| ranks(pod, job));
        let started = job.is_some().then(|| key.attempt.saturating_sub(1));
        let fits = ranks.as_ref().is_none_or(|it| it.contains(&index))
            && started.is_none_or(|it| it == incarnation);
        if is_server || !fits {
            let (from, to) = ranks.map_or((0, 0), |it| (it.start, it.end.saturating_sub(1)));
            let which = if from == to { from.to_string() } else { format!("{from} to {to}") };
            let start = started.unwrap_or_default();
            return Err(another(format!("trainer {which} (incarnation {start}) of job {key}")));
        }
        Who::Trainer(key, index)
    };
    Ok(Identity { pool: pool.to_owned(), who })
}

/// The ranks of a trainer's pod, where the core controller has numbered it.
pub(crate) fn ranks(pod: &Pod, job: &TrainingJob) -> Option<Range<u32>> {
    let place: u32 = label(&pod.metadata, INDEX)?.parse().ok()?;
    let each = job.spec.procs_per_node;
    Some(place.saturating_mul(each)..place.saturating_add(1).saturating_mul(each))
}

/// Namespace of the pool that a pod joins by its label: its own, unless its `TrainingJob` names another. Pools of one name in
/// two namespaces are told apart by this.
pub fn home(pod: &Pod, job: Option<&TrainingJob>) -> String {
    let named = job.and_then(|it| it.spec.attention.pool_ref.namespace.clone());
    named.or_else(|| pod.metadata.namespace.clone()).unwrap_or_default()
}

/// The attempt that a trainer's pod belongs to, of any kind.
pub fn job_of(pod: &Pod) -> Option<JobKey> {
    let name = JOB_LABELS.iter().find_map(|it| label(&pod.metadata, it))?.to_owned();
    let attempt = label(&pod.metadata, LABEL_ATTEMPT).and_then(|it| it.parse().ok()).unwrap_or(1);
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    Some(JobKey { namespace, name, attempt })
}

/// Whether an attempt of the `TrainingJob` of this name has made a pod, also one whose Job was deleted without it. Anybody may
/// give a pod the labels of one.
pub(crate) fn is_trainer_of(pod: &Pod, job: &str) -> bool {
    let number = label(&pod.metadata, LABEL_ATTEMPT).and_then(|it| it.parse().ok());
    let Some(number) = number else { return false };
    let own = names::attempt(job, number);
    let mut owners = pod.metadata.owner_references.iter().flatten();
    match owners.find(|it| it.controller == Some(true)) {
        Some(owner) => owner.kind == "Job" && owner.name == own,
        None => label(&pod.metadata, JOB_NAME) == Some(&own),
    }
}

/// Whether a `TrainingJob` describes the job of a trainer's pod: the operator alone numbers attempts.
pub fn is_described(pod: &Pod) -> bool {
    label(&pod.metadata, LABEL_ATTEMPT).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(labels: &[(&str, &str)]) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.name = Some("x".into());
        pod.metadata.namespace = Some("n".into());
        let owned = labels.iter().map(|&(key, value)| (key.to_owned(), value.to_owned()));
        pod.metadata.labels = Some(owned.collect());
        pod.metadata.annotations =
            Some([(ANNOTATION_INCARNATION.to_owned(), "3".to_owned())].into());
        pod
    }

    fn claim(is_server: bool, index: u32, incarnation: u32) -> Claim {
        Claim { is_server, index, incarnation }
    }

    fn training(procs_per_node: u32) -> TrainingJob {
        let mut job: TrainingJob = serde_json::from_value(serde_json::json!({
            "metadata": {"name": "j"},
            "spec": {"template": {}, "attention": {"poolRef": {"name": "p"}}},
        }))
        .expect("a job");
        job.spec.procs_per_node = procs_per_node;
        job
    }

    #[test]
    fn a_server_is_its_slot_and_nothing_else() {
        let server = pod(&[(LABEL_POOL, "p"), (LABEL_ROLE, ROLE_SERVER), (LABEL_SLOT, "7")]);
        let who = of(&server, claim(true, 7, 3), None).map(|it| it.who);
        assert_eq!(who, Ok(Who::Server(ServerId { index: 7, incarnation: 3 })));
        for wrong in [claim(true, 6, 3), claim(true, 7, 2), claim(false, 7, 3)] {
            let refusal = of(&server, wrong, None).expect_err("another").to_string();
            assert!(refusal.starts_with("pod x is server 7 (incarnation 3) and may not speak for"));
        }
    }

    #[test]
    fn a_trainer_is_one_of_its_pods_ranks_in_its_attempt() {
        let labels = [
            (LABEL_POOL, "p"),
            (LABEL_JOB, "j"),
            (LABEL_ATTEMPT, "2"),
            (INDEX, "1"),
            ("batch.kubernetes.io/job-name", "j-2"),
        ];
        let (trainer, job) = (pod(&labels), training(2));
        let key = JobKey { namespace: "n".into(), name: "j".into(), attempt: 2 };
        for rank in [2, 3] {
            let who = of(&trainer, claim(false, rank, 1), Some(&job)).map(|it| it.who);
            assert_eq!(who, Ok(Who::Trainer(key.clone(), rank)));
        }
        let refusal = of(&trainer, claim(false, 0, 1), Some(&job)).expect_err("of another pod");
        assert_eq!(
            refusal.to_string(),
            "pod x is trainer 2 to 3 (incarnation 1) of job n/j/2 and may not speak for trainer 0 \
             (incarnation 1); each pod speaks for itself alone"
        );
        assert!(of(&trainer, claim(false, 2, 0), Some(&job)).is_err(), "an earlier attempt");
        assert!(of(&trainer, claim(true, 2, 1), Some(&job)).is_err(), "no server");
    }

    #[test]
    fn a_pod_joins_the_pool_of_the_namespace_that_its_job_names_and_no_other_of_that_name() {
        let (trainer, mut job) = (pod(&[(LABEL_POOL, "p"), (LABEL_JOB, "j")]), training(1));
        assert_eq!([home(&trainer, None), home(&trainer, Some(&job))], ["n", "n"]);
        job.spec.attention.pool_ref.namespace = Some("shared".into());
        assert_eq!(home(&trainer, Some(&job)), "shared");
    }

    #[test]
    fn a_pod_with_the_name_of_a_training_job_that_is_none_of_its_pods_does_not_speak_for_it() {
        let labels = [(LABEL_POOL, "p"), (LABEL_JOB, "j")];
        let stray = |more: &[(&str, &str)]| pod(&[&labels, more].concat());
        let job = training(1);
        let others = [
            stray(&[]),
            stray(&[(LABEL_ATTEMPT, "1")]),
            stray(&[(LABEL_ATTEMPT, "1"), (INDEX, "0")]),
            stray(&[(LABEL_ATTEMPT, "1"), (INDEX, "0"), ("batch.kubernetes.io/job-name", "mine")]),
        ];
        for pod in others {
            let refusal = of(&pod, claim(false, 0, 0), Some(&job)).expect_err("it is a stranger");
            let said = refusal.to_string();
            assert!(
                said.starts_with("pod x names TrainingJob n/j in a label and is none"),
                "{said}"
            );
        }
        let theirs = of(&stray(&[]), claim(false, 0, 0), None).expect("no job has this name");
        assert_eq!(theirs.who.to_string(), "trainer 0 of n/j/1");
    }

    #[test]
    fn pods_of_other_kinds_join_by_the_label_of_the_pool() {
        let theirs = pod(&[(LABEL_POOL, "p"), ("jobset.sigs.k8s.io/jobset-name", "theirs")]);
        let identity = of(&theirs, claim(false, 5, 0), None).expect("joined");
        assert_eq!(identity.pool, "p");
        assert_eq!(identity.who.to_string(), "trainer 5 of n/theirs/1");
        let nobody = of(&pod(&[(LABEL_POOL, "p")]), claim(false, 0, 0), None);
        assert!(matches!(nobody, Err(Refusal::NoJob { .. })));
        let stranger = of(&pod(&[]), claim(false, 0, 0), None).expect_err("no pool").to_string();
        assert_eq!(stranger, "pod x has no label cadre.dev/pool; set it to the pool's name");
    }
}
