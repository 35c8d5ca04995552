//! A job in a small cluster: what Kubernetes and users do to it, one look of the operator after the other.

use cadre_crds::contract::{LABEL_ATTEMPT, LABEL_QUEUE, TRAINER_CONTAINER};
use cadre_crds::{AttentionPool, TrainingJob};
use cadre_desired::job::{Observed, decide, status};
use cadre_desired::{Action, Applied, Kind, Object};
use k8s_openapi::api::batch::v1::{Job, JobCondition};
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use proptest::prelude::*;
use serde_json::json;

use super::world::{Clock, end, name, on_node, set_condition, set_phase, settings};

#[derive(Clone, Debug)]
pub(crate) struct World {
    pub(crate) clock: Clock,
    pub(crate) job: TrainingJob,
    pub(crate) pool: Option<AttentionPool>,
    pub(crate) service: Option<Service>,
    pub(crate) jobs: Vec<Job>,
    pub(crate) pods: Vec<Pod>,
    pub(crate) gone: bool,
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
        let mut world =
            Self { clock, job, pool: None, service: None, jobs: vec![], pods: vec![], gone: false };
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
        Observed {
            job: self.job.clone(),
            pool: self.pool.clone(),
            service: self.service.clone(),
            jobs: self.jobs.clone(),
            pods: self.pods.clone(),
            progress: None,
            failovers: 0,
        }
    }

    /// One reconcile that dies after `most` actions. Out: whether it did nothing.
    pub(crate) fn reconcile(&mut self, most: usize) -> bool {
        if self.gone {
            return true;
        }
        let decision = decide(&self.observe(), &settings(), self.clock.now());
        let idle = decision.actions.is_empty();
        let whole = decision.actions.len() <= most;
        for action in decision.actions.into_iter().take(most) {
            self.carry_out(action);
        }
        if whole && !self.gone {
            let before = self.job.status.as_ref().map_or(0, |it| it.attempt);
            let after = status(&Applied::new(self.observe(), None), self.clock.now());
            assert!(after.attempt >= before, "attempts only rise");
            self.job.status = Some(after);
        }
        idle
    }

    pub(crate) fn carry_out(&mut self, action: Action) {
        match action {
            Action::Create(Object::Job(mut job)) => {
                let computes = |it: &&Pod| {
                    let phase = it.status.as_ref().and_then(|it| it.phase.as_deref());
                    let late = it.metadata.deletion_timestamp.as_ref();
                    let lost = late.is_some_and(|it| it.0.as_second() + 10 <= self.clock.second);
                    !lost && !matches!(phase, Some("Failed" | "Succeeded"))
                };
                let other = self.pods.iter().find(computes);
                assert!(other.is_none(), "an attempt starts beside another's pod");
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
                let Some(at) =
                    self.jobs.iter().position(|it| it.metadata.uid.as_ref() == Some(&which.uid))
                else {
                    return;
                };
                let job = self.jobs.remove(at);
                let number = attempt_of(&job.metadata);
                for pod in self.pods.iter_mut().filter(|it| attempt_of(&it.metadata) == number) {
                    pod.metadata.deletion_timestamp.get_or_insert(Time(self.clock.now()));
                }
            }
            Action::DeleteSelf => self.gone = true,
            Action::Create(Object::Pod(_) | Object::Budget(_))
            | Action::Apply(_)
            | Action::Drain { .. }
            | Action::Guard
            | Action::Release => panic!("not for a job: {action:?}"),
        }
    }

    /// What queue, Job controller, scheduler and kubelet do when nothing goes wrong.
    pub(crate) fn calm(&mut self) {
        self.clock.second += 3;
        self.pods.retain(|it| it.metadata.deletion_timestamp.is_none());
        let now = Time(self.clock.now());
        for job in &mut self.jobs {
            let spec = job.spec.as_mut().expect("made with one");
            spec.suspend = Some(false);
            let number = job.metadata.labels.as_ref().and_then(|it| it.get(LABEL_ATTEMPT)).cloned();
            let status = job.status.get_or_insert_default();
            if status.conditions.iter().flatten().any(|it| it.status == "True") {
                continue;
            }
            status.start_time.get_or_insert(now.clone());
            let there = self.pods.iter().filter(|it| attempt_of(&it.metadata) == number).count();
            for index in there..2 {
                let mut pod = Pod::default();
                self.clock.born(&mut pod.metadata);
                pod.metadata.name = Some(format!("{}-{index}", name(&job.metadata)));
                pod.metadata.labels =
                    spec.template.metadata.as_ref().and_then(|it| it.labels.clone());
                on_node(&mut pod, "node");
                self.pods.push(pod);
            }
        }
        for pod in &mut self.pods {
            let over = pod.status.as_ref().and_then(|it| it.phase.as_deref());
            if !matches!(over, Some("Failed" | "Succeeded")) {
                set_phase(pod, "Running", true);
            }
        }
    }

    /// A trainer of the newest attempt ends; the Job controller ends the others.
    pub(crate) fn fail(&mut self, code: i32, disrupted: bool) {
        let Some(job) = self.jobs.last_mut() else { return };
        let number = attempt_of(&job.metadata);
        let pods = || self.pods.iter().position(|it| attempt_of(&it.metadata) == number);
        let Some(first) = pods() else { return };
        set_job(job, if code == 0 { "Complete" } else { "Failed" });
        end(&mut self.pods[first], TRAINER_CONTAINER, code, 5, &self.clock);
        if disrupted {
            set_condition(&mut self.pods[first], "DisruptionTarget", true);
        }
        for pod in self.pods.iter_mut().filter(|it| attempt_of(&it.metadata) == number).skip(1) {
            pod.metadata.deletion_timestamp.get_or_insert(Time(self.clock.now()));
        }
    }

    pub(crate) fn happen(&mut self, event: &Event) {
        match *event {
            Event::Suspend(suspend) => self.job.spec.suspend = suspend,
            Event::Fail { code, disrupted } => self.fail(code, disrupted),
            Event::Preempt => {
                if let Some(job) = self.jobs.last_mut() {
                    job.spec.get_or_insert_default().suspend = Some(true);
                    for pod in &mut self.pods {
                        pod.metadata.deletion_timestamp.get_or_insert(Time(self.clock.now()));
                    }
                }
            }
            Event::DeleteJob => {
                self.jobs.pop();
                for pod in &mut self.pods {
                    pod.metadata.deletion_timestamp.get_or_insert(Time(self.clock.now()));
                }
            }
            Event::Pool(there) => {
                self.pool = None;
                if there {
                    self.make_pool();
                }
            }
            Event::Reconcile(most) => drop(self.reconcile(most)),
            Event::Calm => self.calm(),
            Event::Wait(seconds) => self.clock.second += seconds,
        }
    }

    pub(crate) fn condition(&self, wanted: &str) -> Option<Condition> {
        let status = self.job.status.as_ref()?;
        status.conditions.iter().find(|it| it.type_ == wanted).cloned()
    }

    pub(crate) fn is_true(&self, wanted: &str) -> bool {
        self.condition(wanted).is_some_and(|it| it.status == "True")
    }
}

pub(crate) fn attempt_of(
    meta: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
) -> Option<String> {
    meta.labels.as_ref()?.get(LABEL_ATTEMPT).cloned()
}

pub(crate) fn set_job(job: &mut Job, condition: &str) {
    let condition = JobCondition {
        type_: condition.to_owned(),
        status: "True".to_owned(),
        ..JobCondition::default()
    };
    job.status.get_or_insert_default().conditions = Some(vec![condition]);
}

#[derive(Clone, Debug)]
pub(crate) enum Event {
    Suspend(bool),
    Fail { code: i32, disrupted: bool },
    Preempt,
    DeleteJob,
    Pool(bool),
    Reconcile(usize),
    Calm,
    Wait(i64),
}

pub(crate) fn events() -> impl Strategy<Value = Vec<Event>> {
    let code = prop_oneof![Just(0), Just(1), Just(2), Just(137)];
    let event = prop_oneof![
        2 => any::<bool>().prop_map(Event::Suspend),
        2 => (code, any::<bool>()).prop_map(|(code, disrupted)| Event::Fail { code, disrupted }),
        1 => Just(Event::Preempt),
        1 => Just(Event::DeleteJob),
        1 => any::<bool>().prop_map(Event::Pool),
        5 => (0_usize..4).prop_map(Event::Reconcile),
        4 => Just(Event::Reconcile(usize::MAX)),
        5 => Just(Event::Calm),
        1 => (0_i64..200).prop_map(Event::Wait),
    ];
    prop::collection::vec(event, 0..60)
}
