//! A job in a small cluster: what Kubernetes and users do to it, one look of the operator after the other.

use std::collections::{BTreeMap, BTreeSet};

use cadre_crds::contract::{LABEL_ATTEMPT, LABEL_QUEUE};
use cadre_crds::{AttentionPool, TrainingJob};
use cadre_desired::job::{Arrived, LastWords, Observed, Watched, decide, status, watch};
use cadre_desired::{Action, Applied, Failure, Kind, Object};
use cadre_views::Unserved;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use serde_json::json;

use super::events::{Event, PUT_OUT, REASONS};
use super::kubernetes::{has, is_theirs};
use super::refusals::{REFUSALS, words};
use super::world::{Clock, settings};

#[derive(Clone, Debug)]
pub(crate) struct World {
    pub(crate) clock: Clock,
    pub(crate) job: TrainingJob,
    pub(crate) pool: Option<AttentionPool>,
    pub(crate) service: Option<Service>,
    pub(crate) jobs: Vec<Job>,
    pub(crate) pods: Vec<Pod>,
    /// Nodes whose kubelet is no more.
    pub(crate) dead: BTreeSet<String>,
    /// Steps in the newest checkpoint that trainers told of.
    pub(crate) checkpoint: u64,
    /// What a conductor said last.
    pub(crate) last_words: Option<LastWords>,
    /// Who has joined, where that is known.
    pub(crate) joined: Option<Arrived>,
    /// Trainers that are connected, by attempt and rank.
    pub(crate) attached: Option<BTreeSet<(u32, u32)>>,
    /// Why a pod that was tried was refused.
    pub(crate) refused_pod: Option<Failure>,
    pub(crate) unserved: Option<(u32, Unserved)>,
    /// What the operator has seen by its own clock, as of its last look.
    pub(crate) watched: Option<Watched>,
    /// When a look first found a pod on its way out, by uid.
    pub(crate) leaving: BTreeMap<String, i64>,
    /// Seconds by which the clocks of the API server and the Job controller are ahead of the operator's.
    pub(crate) ahead: i64,
    /// Failures that may have counted: of disruptions only those for lack of memory or disk do.
    pub(crate) may_count: u32,
    /// Failures of these since a newer checkpoint was told of while the job was not over.
    pub(crate) since_saved: u32,
    pub(crate) gone: bool,
    /// What the API server refuses, of [`REFUSALS`].
    pub(crate) refused: BTreeSet<&'static str>,
    /// What it has refused in the last look.
    pub(crate) failure: Option<Failure>,
    /// Why Jobs fail, by name, as their controller has decided.
    pub(crate) decided: BTreeMap<String, (String, String)>,
    /// What was done since something else happened: none of it is done again.
    pub(crate) done: Vec<Action>,
}

impl World {
    pub(crate) fn new(queued: bool) -> Self {
        let mut clock = Clock::new();
        let mut job: TrainingJob = serde_json::from_value(json!({
            "metadata": {"name": "j", "namespace": "n"},
            "spec": {
                "nodes": 2,
                "attention": {"poolRef": {"name": "p"}},
                "template": {"spec": {"containers": [
                    {"name": "trainer", "image": "i", "env": [{"name": "A", "value": "$(RANK)"}]},
                ]}},
                "failurePolicy": {"maxRestarts": 2},
            },
        }))
        .expect("a good job");
        if queued {
            job.metadata.labels = Some([(LABEL_QUEUE.to_owned(), "team".to_owned())].into());
        }
        clock.born(&mut job.metadata);
        let mut world = Self {
            clock,
            job,
            pool: None,
            service: None,
            jobs: vec![],
            pods: vec![],
            dead: BTreeSet::new(),
            checkpoint: 0,
            last_words: None,
            joined: None,
            attached: Some(BTreeSet::new()),
            refused_pod: None,
            unserved: None,
            watched: None,
            leaving: BTreeMap::new(),
            ahead: 0,
            may_count: 0,
            since_saved: 0,
            gone: false,
            refused: BTreeSet::new(),
            failure: None,
            decided: BTreeMap::new(),
            done: Vec::new(),
        };
        world.make_pool();
        world
    }

    pub(crate) fn make_pool(&mut self) {
        let mut pool = AttentionPool::default();
        pool.metadata.name = Some("p".into());
        pool.metadata.namespace = Some("n".into());
        self.pool = Some(pool);
    }

    pub(crate) fn observe(&self) -> Observed {
        let mut observed = Observed {
            job: self.job.clone(),
            unreadable: None,
            pool: self.pool.clone(),
            service: self.service.clone(),
            jobs: self.jobs.clone(),
            pods: self.pods.clone(),
            progress: None,
            checkpoint: self.checkpoint,
            failovers: 0,
            last_words: self.last_words.clone(),
            joined: self.joined.clone(),
            attached: self.attached.clone(),
            refused_pod: self.refused_pod.clone(),
            unserved: self.unserved,
            watched: self.watched.clone(),
        };
        observed.watched = Some(watch(&observed, self.clock.now()));
        observed
    }

    /// One reconcile that dies after `most` actions. Out: whether it did nothing.
    pub(crate) fn reconcile(&mut self, most: usize) -> bool {
        if self.gone {
            return true;
        }
        let observed = self.observe();
        let decision = decide(&observed, &settings(), self.clock.now());
        self.watched = observed.watched;
        for pod in self.pods.iter().filter(|it| it.metadata.deletion_timestamp.is_some()) {
            let uid = pod.metadata.uid.clone().unwrap_or_default();
            self.leaving.entry(uid).or_insert(self.clock.second);
        }
        let idle = decision.actions.is_empty();
        let whole = decision.actions.len() <= most;
        let mut failure = None;
        for action in decision.actions.into_iter().take(most) {
            let makes = matches!(action, Action::Create(Object::Job(_)));
            let name = words(&action);
            if self.refused.contains(name) {
                let refused = Failure { reason: "Forbidden", message: name.to_owned() };
                failure.get_or_insert(refused);
            } else if !(makes && failure.is_some()) {
                assert!(!self.done.contains(&action), "nothing has changed since: {action:?}");
                self.done.push(action.clone());
                self.carry_out(action);
            }
        }
        if whole && !self.gone {
            self.failure.clone_from(&failure);
            let before = self.job.status.as_ref().map_or(0, |it| it.attempt);
            let after = status(&Applied::new(self.observe(), failure), self.clock.now());
            let after = after.expect("the job is ours");
            assert!(after.attempt >= before, "attempts only rise");
            self.job.status = Some(after);
        }
        idle
    }

    /// Seconds until the next look, if it asks for one.
    pub(crate) fn again(&self) -> Option<i64> {
        decide(&self.observe(), &settings(), self.clock.now()).again
    }

    pub(crate) fn carry_out(&mut self, action: Action) {
        match action {
            Action::Create(Object::Job(mut job)) => {
                let computes = |it: &&Pod| {
                    let phase = it.status.as_ref().and_then(|it| it.phase.as_deref());
                    let late = it.metadata.deletion_timestamp.as_ref();
                    let lost = late.is_some_and(|it| it.0.as_second() + 10 <= self.theirs().second);
                    !lost && !matches!(phase, Some("Failed" | "Succeeded"))
                };
                let other = self.pods.iter().filter(|it| !is_theirs(it)).find(computes);
                assert!(other.is_none(), "an attempt starts beside another's pod");
                let is_over = |it: &&Job| has(it, "FailureTarget") || has(it, "Complete");
                let other = self.jobs.iter().find(|it| !is_over(it));
                assert!(other.is_none(), "an attempt starts beside another that makes pods");
                if self.jobs.iter().any(|it| it.metadata.name == job.metadata.name) {
                    return;
                }
                self.clock.born(&mut job.metadata);
                self.jobs.push(*job);
            }
            Action::Create(Object::Service(mut it)) | Action::Apply(Object::Service(mut it)) => {
                self.clock.born(&mut it.metadata);
                self.service = Some(*it);
            }
            Action::Delete(which) => {
                assert_eq!(which.kind, Kind::Job);
                let named = |it: &Job| it.metadata.uid.as_ref() == Some(&which.uid);
                let Some(at) = self.jobs.iter().position(named) else { return };
                let job = self.jobs.remove(at);
                let is_newest = self.jobs.iter().all(|it| number_of(it) < number_of(&job));
                let spec = &self.job.spec.failure_policy;
                let used =
                    self.job.status.as_ref().is_some_and(|it| it.in_a_row() >= spec.restarts());
                let over = self.is_true("Failed") && used && has(&job, "FailureTarget");
                assert!(!over || !is_newest, "the last attempt of a failed job stays for its logs");
                self.collect_garbage();
            }
            Action::Note { object, annotation, text } => {
                let mut jobs = self.jobs.iter_mut();
                let job = jobs.find(|it| it.metadata.uid.as_ref() == Some(&object.uid));
                let notes = &mut job.expect("only Jobs that are there").metadata.annotations;
                let before = notes.get_or_insert_default().insert(annotation.to_owned(), text);
                assert_eq!(before, None, "what is noted is noted once");
            }
            Action::DeleteSelf => self.gone = true,
            Action::Create(Object::Pod(_) | Object::Budget(_) | Object::Revision(_))
            | Action::Apply(_)
            | Action::Drain { .. }
            | Action::Scale { .. }
            | Action::Guard
            | Action::Release => panic!("not for a job: {action:?}"),
        }
    }

    /// What queue, Job controller, scheduler and kubelets do when nothing goes wrong.
    pub(crate) fn calm(&mut self) {
        self.done.clear();
        self.clock.second += 3;
        for job in self.jobs.iter_mut().filter(|it| !has(it, "FailureTarget")) {
            job.spec.get_or_insert_default().suspend = Some(false);
        }
        self.job_controller();
        self.kubelets();
        self.job_controller();
        self.collect_garbage();
    }

    /// The conductor of the newest attempt says that it has failed; nobody ends.
    pub(crate) fn give_up(&mut self, exit_code: i32, text: &str) -> bool {
        let Some(job) = self.jobs.last() else { return false };
        let attempt = attempt_of(&job.metadata).and_then(|it| it.parse().ok()).expect("a number");
        let (since, text) = (self.clock.now(), text.to_owned());
        self.last_words = Some(LastWords { attempt, since, exit_code, text });
        true
    }

    /// All trainers of the newest attempt end well.
    pub(crate) fn finish(&mut self) {
        self.end_trainer(0, 0);
        self.end_trainer(1, 0);
    }

    pub(crate) fn happen(&mut self, event: &Event) {
        if !matches!(event, Event::Reconcile(_) | Event::Wait(_)) {
            self.done.clear();
        }
        match *event {
            Event::Suspend(suspend) => self.job.spec.suspend = suspend,
            Event::End { pod, code } => {
                let ended = self.end_trainer(pod, code);
                self.may_count(ended && code != 0);
            }
            Event::Finish => self.finish(),
            Event::Disrupt { pod, reason } => {
                let disrupted = self.disrupt(pod, REASONS[reason]);
                self.may_count(disrupted && REASONS[reason] == PUT_OUT);
            }
            Event::Save(steps) => {
                // What is over goes on only where somebody allows it.
                let over = self.is_true("Failed") || self.is_true("Complete");
                self.since_saved *= u32::from(over || steps <= self.checkpoint);
                self.checkpoint = self.checkpoint.max(steps);
            }
            Event::Allow(restarts) => self.job.spec.failure_policy.max_restarts = Some(restarts),
            Event::GiveUp => {
                let gives_up = self.give_up(3, "it stands still");
                self.may_count(gives_up);
            }
            Event::Beside { pod, code } => {
                let failed = self.fail_beside(pod, code);
                self.may_count(failed);
            }
            Event::Spoil { pod, code } => {
                let spoiled = self.spoil(pod, code);
                self.may_count(spoiled);
            }
            Event::Nominate { pod, holds } => self.nominate(pod, holds),
            // Nobody may have seen who deleted it.
            Event::DeletePod(pod) => {
                let deleted = self.delete_pod(pod);
                self.may_count(deleted);
            }
            Event::LoseNode(pod) => self.lose_node_of(pod),
            Event::Preempt => {
                if let Some(job) = self.jobs.last_mut() {
                    job.spec.get_or_insert_default().suspend = Some(true);
                    // A queue that changes its mind unseen.
                    self.may_count(true);
                }
            }
            Event::DeleteJob => drop(self.jobs.pop()),
            Event::JobController => self.job_controller(),
            Event::Kubelets => self.kubelets(),
            Event::CollectGarbage => self.collect_garbage(),
            Event::Pool(there) => {
                self.pool = None;
                if there {
                    self.make_pool();
                }
            }
            Event::Refuse(which) => drop(self.refused.insert(REFUSALS[which])),
            Event::Agree => self.refused.clear(),
            Event::Reconcile(most) => drop(self.reconcile(most)),
            Event::Calm => self.calm(),
            Event::Wait(seconds) => self.clock.second += seconds,
        }
    }

    fn may_count(&mut self, has_failed: bool) {
        self.may_count += u32::from(has_failed);
        self.since_saved += u32::from(has_failed);
    }

    pub(crate) fn condition(&self, wanted: &str) -> Option<Condition> {
        let status = self.job.status.as_ref()?;
        status.conditions.iter().find(|it| it.type_ == wanted).cloned()
    }

    pub(crate) fn is_true(&self, wanted: &str) -> bool {
        self.condition(wanted).is_some_and(|it| it.status == "True")
    }
}

pub(crate) fn attempt_of(meta: &ObjectMeta) -> Option<String> {
    meta.labels.as_ref()?.get(LABEL_ATTEMPT).cloned()
}

fn number_of(job: &Job) -> Option<u32> {
    attempt_of(&job.metadata)?.parse().ok()
}
