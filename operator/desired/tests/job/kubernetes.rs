//! What the Job controller, the kubelets and the garbage collector do to the pods of a job, one small step each.
//!
//! As the real ones do it:
//!
//! * A pod that is deleted computes on until its kubelet has ended it; a kubelet whose node is dead never does.
//! * A pod of a Job stays, by a finalizer, until the Job controller has counted it. If it was deleted it is gone then.
//! * A Job with a `podFailurePolicy` counts pods that have ended, any other also those that are on their way out.
//! * A Job that fails deletes the pods that still run, then says so (`FailureTarget`, with pod and rule), and has
//!   failed when all of them have ended. That holds for the pods that go because it was suspended, too.

use cadre_crds::contract::TRAINER_CONTAINER;
use k8s_openapi::api::batch::v1::{Job, JobCondition, PodFailurePolicy};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};

use super::cluster::{World, attempt_of};
use super::events::PUT_OUT;
use super::world::{Clock, end, name, on_node, set_condition, set_phase};

const COUNTED: &str = "batch.kubernetes.io/job-tracking";
/// Seconds that a pod has between SIGTERM and SIGKILL.
const GRACE_SECONDS: i64 = 30;
/// Trainers of a job here.
const TRAINERS: usize = 2;

impl World {
    /// Deletes a pod of the newest attempt that runs, as `kubectl delete` does. Out: whether there was one.
    pub(crate) fn delete_pod(&mut self, index: usize) -> bool {
        let now = self.theirs().second;
        self.running_pod(index).map(|it| going(it, now)).is_some()
    }

    /// Takes a pod of the newest attempt away, as the API for evictions and the controllers of nodes do, or as its kubelet does:
    /// that deletes none.
    pub(crate) fn disrupt(&mut self, index: usize, reason: &str) -> bool {
        let (now, clock) = (self.theirs().second, self.clock.clone());
        let Some(pod) = self.running_pod(index) else { return false };
        set_condition(pod, "DisruptionTarget", true);
        let conditions = pod.status.get_or_insert_default().conditions.iter_mut().flatten();
        for said in conditions.filter(|it| it.type_ == "DisruptionTarget") {
            said.reason = Some(reason.to_owned());
            said.message = Some(format!("words of {reason}"));
        }
        if reason == PUT_OUT {
            let conditions = pod.status.take().and_then(|it| it.conditions);
            end(pod, TRAINER_CONTAINER, 137, 5, &clock);
            let status = pod.status.get_or_insert_default();
            status.reason = Some("Evicted".into());
            status.conditions.get_or_insert_default().extend(conditions.into_iter().flatten());
        } else {
            going(pod, now);
        }
        true
    }

    /// A node dies, and the controller of nodes takes its pods away.
    pub(crate) fn lose_node_of(&mut self, index: usize) {
        self.disrupt(index, "DeletionByTaintManager");
        self.dead.insert(format!("node-{index}"));
    }

    /// A trainer of the newest attempt ends by itself. Out: whether there was one.
    pub(crate) fn end_trainer(&mut self, index: usize, code: i32) -> bool {
        let clock = self.clock.clone();
        let Some(pod) = self.running_pod(index) else { return false };
        end(pod, TRAINER_CONTAINER, code, 5, &clock);
        true
    }

    /// The scheduler says that it preempts a pod of the newest attempt, and does not go on with it; or takes that back.
    pub(crate) fn nominate(&mut self, index: usize, holds: bool) {
        if let Some(pod) = self.running_pod(index) {
            set_condition(pod, "DisruptionTarget", holds);
        }
    }

    /// A pod of the newest attempt fails before its trainer has begun: its kubelet does not admit it, or, with a `code`,
    /// an init container ends with it. Out: whether there was one.
    pub(crate) fn spoil(&mut self, index: usize, code: Option<i32>) -> bool {
        let clock = self.clock.clone();
        let Some(pod) = self.running_pod(index) else { return false };
        if let Some(code) = code {
            end(pod, "prepare", code, 5, &clock);
            let status = pod.status.get_or_insert_default();
            status.init_container_statuses = status.container_statuses.take();
        } else {
            set_phase(pod, "Failed", false);
            let status = pod.status.get_or_insert_default();
            status.reason = Some("UnexpectedAdmissionError".into());
            status.message = Some("no healthy device".into());
        }
        true
    }

    /// A container beside the trainer fails; the trainer of the newest attempt has ended well. Out: whether there was one.
    pub(crate) fn fail_beside(&mut self, index: usize, code: i32) -> bool {
        let clock = self.clock.clone();
        let Some(pod) = self.running_pod(index) else { return false };
        end(pod, "proxy", code, 5, &clock);
        let mut failed = pod.status.clone();
        end(pod, TRAINER_CONTAINER, 0, 5, &clock);
        let own = pod.status.get_or_insert_default().container_statuses.take();
        let beside = failed.as_mut().and_then(|it| it.container_statuses.as_mut());
        beside.expect("it has ended").extend(own.into_iter().flatten());
        pod.status = failed;
        true
    }

    /// A pod of another kind joins the pool under the job's name, as `docs/trainers.md` says; with a `number`, also under
    /// that of an attempt.
    pub(crate) fn join(&mut self, number: Option<&str>) {
        let mut pod = Pod::default();
        self.clock.born(&mut pod.metadata);
        pod.metadata.name = Some("theirs".into());
        pod.metadata.namespace = Some("n".into());
        let mut labels = vec![("cadre.dev/pool", "p"), ("cadre.dev/job", "j")];
        labels.extend(number.map(|it| ("cadre.dev/attempt", it)));
        let owned = labels.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned()));
        pod.metadata.labels = Some(owned.collect());
        pod.metadata.owner_references = number.map(|_| {
            vec![OwnerReference {
                kind: "Job".into(),
                name: "theirs".into(),
                uid: "uid-of-theirs".into(),
                controller: Some(true),
                ..OwnerReference::default()
            }]
        });
        on_node(&mut pod, "node-0");
        set_phase(&mut pod, "Running", true);
        self.pods.push(pod);
    }

    /// The clock of the API server and the Job controller.
    pub(crate) fn theirs(&self) -> Clock {
        Clock { second: self.clock.second + self.ahead, ..self.clock.clone() }
    }

    fn running_pod(&mut self, index: usize) -> Option<&mut Pod> {
        let newest = self.jobs.last().and_then(|it| attempt_of(&it.metadata))?;
        let dead = &self.dead;
        let runs = |it: &&mut Pod| {
            attempt_of(&it.metadata).as_ref() == Some(&newest)
                && !is_theirs(it)
                && !has_ended(it)
                && it.metadata.deletion_timestamp.is_none()
                && !is_lost(it, dead)
        };
        let suffix = format!("-{index}");
        self.pods.iter_mut().filter(runs).find(|it| name(&it.metadata).ends_with(&suffix))
    }

    /// Whether a pod that should end may still do so, for an operator that looks from now on.
    pub(crate) fn awaits_a_pod(&self) -> bool {
        let may_end = |it: &Pod| {
            let seen = it.metadata.uid.as_ref().and_then(|it| self.leaving.get(it));
            seen.is_none_or(|it| it + GRACE_SECONDS + 10 > self.clock.second)
        };
        self.pods.iter().any(|it| leaves(it) && !has_ended(it) && may_end(it))
    }

    /// Whether a conductor's words may still be followed by what it said.
    pub(crate) fn awaits_an_end(&self) -> bool {
        let patience = i64::from(self.job.spec.failure_policy.suspect_after_seconds);
        let until = self.last_words.as_ref().map(|it| it.since.as_second() + patience);
        until.is_some_and(|it| it >= self.clock.second)
    }

    /// Starts pods, and ends those that are to go.
    pub(crate) fn kubelets(&mut self) {
        for pod in &mut self.pods {
            if has_ended(pod) || is_lost(pod, &self.dead) {
                continue;
            }
            if pod.metadata.deletion_timestamp.is_some() {
                end(pod, TRAINER_CONTAINER, 143, 5, &self.clock);
            } else {
                set_phase(pod, "Running", true);
            }
        }
    }

    /// One look of the Job controller at every Job.
    pub(crate) fn job_controller(&mut self) {
        let clock = self.theirs();
        for at in 0..self.jobs.len() {
            let job = &self.jobs[at];
            if has(job, "Failed") || has(job, "Complete") {
                continue;
            }
            let (number, own) = (attempt_of(&job.metadata), name(&job.metadata).clone());
            let of_job = |it: &Pod| attempt_of(&it.metadata) == number && !is_theirs(it);
            let spec = job.spec.clone().expect("made with one");
            let policy = spec.pod_failure_policy.as_ref();
            let suspended = spec.suspend == Some(true);
            if !has(job, "FailureTarget") && !suspended {
                self.make_pods(at);
            }
            let failed = |it: &Pod| {
                phase(it) == "Failed" || policy.is_none() && leaves(it) && phase(it) != "Succeeded"
            };
            // What it decides when it first sees a failure it says once it has deleted the others.
            let first = self.pods.iter().find(|it| of_job(it) && failed(it));
            let now_decided = first.map(|it| verdict(policy, it));
            let decided = self.decided.get(&own).cloned().or(now_decided);
            if let Some((reason, message)) =
                decided.filter(|_| !has(&self.jobs[at], "FailureTarget"))
            {
                self.decided.insert(own, (reason.clone(), message.clone()));
                let now = self.theirs().second;
                let runs = |it: &&mut Pod| of_job(it) && !has_ended(it) && !leaves(it);
                let mut deleted = false;
                for pod in self.pods.iter_mut().filter(runs) {
                    going(pod, now);
                    deleted = true;
                }
                if deleted {
                    continue;
                }
                say(&mut self.jobs[at], &clock, "FailureTarget", (&reason, &message));
            }
            let failing = has(&self.jobs[at], "FailureTarget");
            for pod in self.pods.iter_mut().filter(|it| of_job(it)) {
                if has_ended(pod) || failed(pod) {
                    pod.metadata.finalizers = None;
                } else if failing || suspended {
                    going(pod, clock.second);
                }
            }
            let own: Vec<_> = self.pods.iter().filter(|it| of_job(it)).collect();
            let well = own.iter().filter(|it| phase(it) == "Succeeded").count();
            let ended = own.iter().all(|it| has_ended(it));
            let job = &mut self.jobs[at];
            if failing && ended {
                let said = condition(job, "FailureTarget").cloned().expect("it fails");
                let (reason, message) = (said.reason, said.message);
                let words = (reason.unwrap_or_default(), message.unwrap_or_default());
                say(job, &clock, "Failed", (&words.0, &words.1));
            } else if !failing && well == TRAINERS {
                say(job, &clock, "Complete", ("CompletionsReached", ""));
            }
        }
    }

    fn make_pods(&mut self, at: usize) {
        let clock = self.theirs();
        let job = &mut self.jobs[at];
        let number = attempt_of(&job.metadata);
        job.status.get_or_insert_default().start_time.get_or_insert(Time(clock.now()));
        for index in 0..TRAINERS {
            let own = format!("{}-{index}", name(&job.metadata));
            let is_there =
                |it: &Pod| attempt_of(&it.metadata) == number && name(&it.metadata) == own;
            if self.pods.iter().any(is_there) {
                continue;
            }
            let mut pod = Pod::default();
            self.clock.born(&mut pod.metadata);
            pod.metadata.name = Some(own);
            pod.metadata.namespace = Some("n".into());
            pod.metadata.finalizers = Some(vec![COUNTED.into()]);
            pod.metadata.owner_references = Some(vec![OwnerReference {
                kind: "Job".into(),
                name: name(&job.metadata),
                uid: job.metadata.uid.clone().unwrap_or_default(),
                controller: Some(true),
                ..OwnerReference::default()
            }]);
            let template = job.spec.as_ref().and_then(|it| it.template.metadata.as_ref());
            let mut labels = template.and_then(|it| it.labels.clone()).unwrap_or_default();
            labels.insert("batch.kubernetes.io/job-name".into(), name(&job.metadata));
            pod.metadata.labels = Some(labels);
            let node = format!("node-{index}");
            let node = if self.dead.contains(&node) { format!("spare-{index}") } else { node };
            on_node(&mut pod, &node);
            self.pods.push(pod);
        }
    }

    /// Pods of Jobs that are gone go; pods that have gone and that nobody counts any more are not there.
    pub(crate) fn collect_garbage(&mut self) {
        let now = self.theirs().second;
        for pod in &mut self.pods {
            let number = attempt_of(&pod.metadata);
            if !is_theirs(pod) && self.jobs.iter().all(|it| attempt_of(&it.metadata) != number) {
                pod.metadata.finalizers = None;
                going(pod, now);
            }
        }
        self.pods.retain(|it| {
            let goes = it.metadata.deletion_timestamp.is_some() && has_ended(it);
            !goes || it.metadata.finalizers.is_some()
        });
    }
}

/// Whether a pod is of another kind.
pub(crate) fn is_theirs(pod: &Pod) -> bool {
    name(&pod.metadata) == "theirs"
}

fn going(pod: &mut Pod, now: i64) {
    let at = k8s_openapi::jiff::Timestamp::from_second(now + GRACE_SECONDS).expect("a good second");
    if pod.metadata.deletion_timestamp.is_none() {
        pod.metadata.deletion_timestamp = Some(Time(at));
        pod.metadata.deletion_grace_period_seconds = Some(GRACE_SECONDS);
    }
}

fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|it| it.phase.as_deref()).unwrap_or_default()
}

fn has_ended(pod: &Pod) -> bool {
    matches!(phase(pod), "Failed" | "Succeeded")
}

fn leaves(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

fn is_lost(pod: &Pod, dead: &std::collections::BTreeSet<String>) -> bool {
    pod.spec.as_ref().and_then(|it| it.node_name.as_ref()).is_some_and(|it| dead.contains(it))
}

fn condition<'a>(job: &'a Job, wanted: &str) -> Option<&'a JobCondition> {
    job.status.as_ref()?.conditions.as_ref()?.iter().find(|it| it.type_ == wanted)
}

pub(crate) fn has(job: &Job, wanted: &str) -> bool {
    condition(job, wanted).is_some()
}

fn say(job: &mut Job, clock: &Clock, condition: &str, (reason, message): (&str, &str)) {
    let condition = JobCondition {
        last_transition_time: Some(Time(clock.now())),
        type_: condition.to_owned(),
        status: "True".to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        ..JobCondition::default()
    };
    job.status.get_or_insert_default().conditions.get_or_insert_with(Vec::new).push(condition);
}

/// Reason and message, in the words of Kubernetes, of a Job whose pod has failed.
fn verdict(policy: Option<&PodFailurePolicy>, pod: &Pod) -> (String, String) {
    let status = pod.status.clone().unwrap_or_default();
    let own = format!("n/{}", name(&pod.metadata));
    let containers = status.container_statuses.iter().chain(&status.init_container_statuses);
    let ends = containers.flatten().filter_map(|it| {
        Some((it.name.clone(), it.state.as_ref()?.terminated.as_ref()?.exit_code))
    });
    let ends: Vec<_> = ends.filter(|it| it.1 != 0).collect();
    for (index, rule) in policy.iter().flat_map(|it| it.rules.iter().enumerate()) {
        assert_eq!(rule.action, "FailJob", "the others would start pods anew");
        let matching = format!("matching {} rule at index {index}", rule.action);
        for pattern in rule.on_pod_conditions.iter().flatten() {
            let fits = |it: &k8s_openapi::api::core::v1::PodCondition| {
                it.type_ == pattern.type_ && Some(&it.status) == pattern.status.as_ref()
            };
            if status.conditions.iter().flatten().any(fits) {
                let said = format!("Pod {own} has condition {} {matching}", pattern.type_);
                return ("PodFailurePolicy".into(), said);
            }
        }
        let Some(codes) = &rule.on_exit_codes else { continue };
        for (container, code) in &ends {
            let named = codes.container_name.as_ref().is_none_or(|it| it == container);
            if named && (codes.operator == "In") == codes.values.contains(code) {
                let said = format!(
                    "Container {container} for pod {own} failed with exit code {code} {matching}"
                );
                return ("PodFailurePolicy".into(), said);
            }
        }
    }
    let said = "Job has reached the specified backoff limit";
    ("BackoffLimitExceeded".into(), said.into())
}
