//! Jobs: from any state to rest, never two attempts at once, no restart too many.

mod world;

use cadre_crds::contract::{LABEL_ATTEMPT, LABEL_QUEUE, TRAINER_CONTAINER};
use cadre_crds::{AttentionPool, FailureAction, FailureRule, TrainingJob};
use cadre_desired::job::{Observed, decide, status};
use cadre_desired::{Action, Applied, Kind, Object};
use k8s_openapi::api::batch::v1::{Job, JobCondition};
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use proptest::prelude::*;
use serde_json::json;
use world::{Clock, end, name, on_node, set_condition, set_phase, settings};

#[derive(Clone, Debug)]
struct World {
    clock: Clock,
    job: TrainingJob,
    pool: Option<AttentionPool>,
    service: Option<Service>,
    jobs: Vec<Job>,
    pods: Vec<Pod>,
    gone: bool,
}

impl World {
    fn new(queued: bool) -> Self {
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

    fn make_pool(&mut self) {
        let mut pool = AttentionPool::default();
        pool.metadata.name = Some("p".into());
        pool.metadata.namespace = Some("n".into());
        self.pool = Some(pool);
    }

    fn observe(&self) -> Observed {
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
    fn reconcile(&mut self, most: usize) -> bool {
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
            let after = status(&Applied::new(self.observe()), self.clock.now());
            assert!(after.attempt >= before, "attempts only rise");
            self.job.status = Some(after);
        }
        idle
    }

    fn carry_out(&mut self, action: Action) {
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
    fn calm(&mut self) {
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
    fn fail(&mut self, code: i32, disrupted: bool) {
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

    fn happen(&mut self, event: &Event) {
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

    fn condition(&self, wanted: &str) -> Option<Condition> {
        let status = self.job.status.as_ref()?;
        status.conditions.iter().find(|it| it.type_ == wanted).cloned()
    }

    fn is_true(&self, wanted: &str) -> bool {
        self.condition(wanted).is_some_and(|it| it.status == "True")
    }
}

fn attempt_of(meta: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta) -> Option<String> {
    meta.labels.as_ref()?.get(LABEL_ATTEMPT).cloned()
}

fn set_job(job: &mut Job, condition: &str) {
    let condition = JobCondition {
        type_: condition.to_owned(),
        status: "True".to_owned(),
        ..JobCondition::default()
    };
    job.status.get_or_insert_default().conditions = Some(vec![condition]);
}

#[derive(Clone, Debug)]
enum Event {
    Suspend(bool),
    Fail { code: i32, disrupted: bool },
    Preempt,
    DeleteJob,
    Pool(bool),
    Reconcile(usize),
    Calm,
    Wait(i64),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
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

fn rest(world: &mut World) {
    for _ in 0..100 {
        world.calm();
        let before = (world.jobs.len(), world.job.status.clone());
        if world.reconcile(usize::MAX) && (world.jobs.len(), world.job.status.clone()) == before {
            world.calm();
            if world.reconcile(usize::MAX) && world.job.status == before.1 {
                return;
            }
        }
    }
    panic!("no rest: {:#?}", decide(&world.observe(), &settings(), world.clock.now()));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn any_state_comes_to_rest(
        queued in any::<bool>(),
        deadline in prop::option::of(50_u32..500),
        events in events(),
    ) {
        let mut world = World::new(queued);
        world.job.spec.active_deadline_seconds = deadline;
        for event in &events {
            world.happen(event);
        }
        rest(&mut world);
        let status = world.job.status.clone().expect("it was reported");
        prop_assert!(status.restarts <= 2, "the budget holds");
        let over = world.is_true("Complete") || world.is_true("Failed");
        let active = world.jobs.iter().filter(|it| it.status.as_ref()
            .is_none_or(|it| it.conditions.iter().flatten().all(|it| it.status != "True"))).count();
        if over {
            prop_assert_eq!(active, 0);
        } else if world.job.spec.suspend {
            prop_assert!(world.is_true("Suspended") && world.jobs.is_empty());
        } else if world.is_true("Running") {
            prop_assert_eq!((active, world.jobs.len()), (1, 1));
        } else {
            prop_assert!(world.pool.is_none(), "{:?}", world.condition("Running"));
        }
        for _ in 0..20 {
            world.calm();
            let late = deadline.is_some();
            prop_assert!(world.reconcile(usize::MAX) || late, "rest stays rest");
            prop_assert!(late || world.job.status.as_ref() == Some(&status), "and writes nothing");
        }
    }
}

fn reason(world: &World, condition: &str) -> String {
    world.condition(condition).map(|it| it.reason).unwrap_or_default()
}

#[test]
fn restarts_count_until_the_budget_is_used_up() {
    let mut world = World::new(false);
    for attempt in 1..=3 {
        rest(&mut world);
        let status = world.job.status.clone().expect("it was reported");
        assert_eq!((status.attempt, status.restarts), (attempt, attempt - 1));
        world.fail(1, false);
    }
    rest(&mut world);
    assert_eq!(reason(&world, "Failed"), "RestartsUsedUp");
    let message = world.condition("Failed").expect("it failed").message;
    assert_eq!(
        message,
        "pod j-3-0: exit code 1; 2 of 2 restarts used, raise spec.failurePolicy.maxRestarts to allow \
         more"
    );
    assert_eq!(world.jobs.len(), 1, "the last attempt stays for its logs");
}

#[test]
fn what_is_not_the_programs_fault_does_not_count() {
    let mut world = World::new(false);
    let rule = FailureRule { action: FailureAction::RestartUncounted, exit_codes: vec![9] };
    world.job.spec.failure_policy.rules = vec![rule];
    for _ in 0..10 {
        rest(&mut world);
        world.fail(137, true);
        rest(&mut world);
        world.fail(9, false);
    }
    rest(&mut world);
    let status = world.job.status.clone().expect("it was reported");
    assert_eq!((status.attempt, status.restarts), (21, 0));
    assert!(world.is_true("Running"));
}

#[test]
fn failures_end_the_job_with_their_reason() {
    let check = |code: i32, rule: Option<FailureRule>, expected: &str| {
        let mut world = World::new(false);
        world.job.spec.failure_policy.rules = rule.into_iter().collect();
        rest(&mut world);
        world.fail(code, false);
        rest(&mut world);
        assert_eq!(reason(&world, "Failed"), expected);
        assert_eq!(world.job.status.as_ref().map(|it| it.attempt), Some(1));
    };
    check(2, None, "BadInput");
    let rule = FailureRule { action: FailureAction::FailJob, exit_codes: vec![42] };
    check(42, Some(rule), "FailureRule");
}

#[test]
fn a_resumed_job_is_a_new_attempt_and_a_late_one_fails() {
    let mut world = World::new(false);
    world.job.spec.active_deadline_seconds = Some(500);
    rest(&mut world);
    world.job.spec.suspend = true;
    rest(&mut world);
    assert_eq!((world.jobs.len(), world.pods.len()), (0, 0));
    world.clock.second += 1_000;
    world.job.spec.suspend = false;
    rest(&mut world);
    assert_eq!(world.job.status.as_ref().map(|it| it.attempt), Some(2));
    world.clock.second += 600;
    rest(&mut world);
    assert_eq!(reason(&world, "Failed"), "DeadlineExceeded");
    assert!(world.jobs.is_empty(), "nothing runs on");
}

#[test]
fn a_finished_job_goes_after_its_time() {
    let mut world = World::new(false);
    world.job.spec.ttl_seconds_after_finished = Some(100);
    rest(&mut world);
    world.fail(0, false);
    rest(&mut world);
    assert!(world.is_true("Complete") && !world.gone);
    world.clock.second += 100;
    world.reconcile(usize::MAX);
    assert!(world.gone);
}

#[test]
fn a_job_in_a_queue_waits_for_it_with_the_queues_label() {
    let mut world = World::new(true);
    world.reconcile(usize::MAX);
    let job = world.jobs.first().expect("it was made").clone();
    assert_eq!(job.spec.as_ref().and_then(|it| it.suspend), Some(true));
    assert_eq!(
        job.metadata.labels.as_ref().and_then(|it| it.get(LABEL_QUEUE)).map(String::as_str),
        Some("team")
    );
    assert_eq!(reason(&world, "Running"), "Queued");
    rest(&mut world);
    assert!(world.is_true("Running") && world.is_true("Admitted"));
    world.happen(&Event::Preempt);
    world.reconcile(usize::MAX);
    rest(&mut world);
    let status = world.job.status.clone().expect("it was reported");
    assert_eq!((status.attempt, status.restarts), (2, 0), "a resume is a new attempt");
}

#[test]
fn obstacles_are_named() {
    let mut world = World::new(false);
    world.pool = None;
    rest(&mut world);
    assert_eq!(reason(&world, "Running"), "PoolNotFound");
    world.make_pool();
    if let Some(pool) = &mut world.pool {
        pool.metadata.namespace = Some("other".into());
    }
    rest(&mut world);
    assert_eq!(reason(&world, "Running"), "PoolRefuses");
    if let Some(pool) = &mut world.pool {
        pool.spec.access.namespaces = vec!["n".into()];
    }
    let mut service = Service::default();
    service.metadata.name = Some("j-trainers".into());
    world.service = Some(service);
    rest(&mut world);
    assert_eq!(reason(&world, "Running"), "NameTaken");
    world.service = None;
    world.job.spec.nodes = 0;
    rest(&mut world);
    assert_eq!(reason(&world, "Running"), "Invalid");
    world.job.spec.nodes = 2;
    rest(&mut world);
    assert!(world.is_true("Running"));
}

#[test]
fn trainers_get_the_variables_of_the_contract_and_keep_their_own() {
    let mut world = World::new(false);
    world.reconcile(usize::MAX);
    let job = world.jobs.first().and_then(|it| it.spec.clone()).expect("it was made");
    let pod = job.template.spec.expect("it has a spec");
    assert_eq!(pod.subdomain.as_deref(), Some("j-trainers"));
    assert_eq!(pod.automount_service_account_token, Some(false));
    let env = pod.containers[0].env.clone().unwrap_or_default();
    let value = |name: &str| {
        let variable = env.iter().find(|it| it.name == name).unwrap_or_else(|| panic!("{name}"));
        variable.value.clone().unwrap_or_else(|| "from the pod".into())
    };
    let expected = [
        ("CADRE_ROLE", "trainer"),
        ("CADRE_JOB", "j"),
        ("CADRE_POOL", "p"),
        ("CADRE_ATTEMPT", "1"),
        ("CADRE_INCARNATION", "0"),
        ("CADRE_INDEX", "from the pod"),
        ("RANK", "from the pod"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("PET_NNODES", "2"),
        ("MASTER_ADDR", "j-1-0.j-trainers"),
        ("A", "$(RANK)"),
    ];
    for (name, wanted) in expected {
        assert_eq!(value(name), wanted, "{name}");
    }
    let position = |name: &str| env.iter().position(|it| it.name == name);
    assert!(position("RANK") < position("A"), "a variable may refer to ours");
}
