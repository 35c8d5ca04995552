//! Jobs: from any state to rest, never two attempts at once, no restart too many.

mod causes;
mod clocks;
mod cluster;
mod encryption;
mod events;
mod kept;
mod kubernetes;
mod owned;
mod refusals;
mod restarts;
mod starting;
#[path = "../world/mod.rs"]
mod world;

use cadre_crds::contract::LABEL_QUEUE;
use cadre_crds::{FailureAction, FailureRule};
use cadre_desired::job::{decide, status};
use cadre_desired::{Applied, Failure};
use cluster::World;
use events::{Event, events};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use proptest::prelude::*;
use world::settings;

fn rest(world: &mut World) {
    world.refused.clear();
    for _ in 0..100 {
        world.calm();
        let before = (world.jobs.len(), world.job.status.clone());
        if world.awaits_a_pod() || world.awaits_an_end() {
            world.reconcile(usize::MAX);
            continue;
        }
        if reason(world, "Running") == "Restarting" {
            world.reconcile(usize::MAX);
            if reason(world, "Running") == "Restarting" {
                // It may pause.
                world.clock.second += world.again().unwrap_or(0);
            }
            continue;
        }
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
    #![proptest_config(ProptestConfig { cases: 2600, ..ProptestConfig::default() })]

    #[test]
    fn any_state_comes_to_rest(
        queued in any::<bool>(),
        deadline in prop::option::of(50_u32..500),
        events in events(),
    ) {
        comes_to_rest(queued, deadline, &events)?;
    }
}

/// Plays the events, lets the cluster calm down, and looks at what has become of the job.
fn comes_to_rest(
    queued: bool,
    deadline: Option<u32>,
    events: &[Event],
) -> Result<(), TestCaseError> {
    let mut world = World::new(queued);
    world.job.spec.active_deadline_seconds = deadline;
    for event in events {
        world.happen(event);
    }
    if !world.refused.is_empty() {
        refusals::are_told(&mut world);
    }
    rest(&mut world);
    let status = world.job.status.clone().expect("it was reported");
    prop_assert!(status.restarts <= world.may_count, "no disruption counts");
    let allowed =
        events.iter().filter_map(|it| if let Event::Allow(most) = it { Some(*most) } else { None });
    let most = allowed.max().unwrap_or_default().max(2);
    prop_assert!(status.in_a_row() <= status.restarts.min(most), "the budget holds");
    // An attempt that has failed may be counted after the checkpoint that it wrote at its end.
    prop_assert!(status.in_a_row() <= world.since_saved + 1, "progress sets the count back");
    let over = world.is_true("Complete") || world.is_true("Failed");
    if reason(&world, "Failed") == "RestartsUsedUp" {
        prop_assert!(status.in_a_row() >= world.job.spec.failure_policy.restarts());
    }
    let stalled = world.condition("Stalled").map(|it| it.reason);
    let expected = if world.is_true("Failed") {
        world.condition("Failed").map(|it| it.reason)
    } else {
        let waits = !over && !world.job.spec.suspend && !world.is_true("Running");
        waits.then(|| "PoolNotFound".to_owned())
    };
    prop_assert_eq!(stalled, expected);
    prop_assert!(!world.is_true("Reconciling"), "nothing is to come");
    let active = world
        .jobs
        .iter()
        .filter(|it| {
            it.status
                .as_ref()
                .is_none_or(|it| it.conditions.iter().flatten().all(|it| it.status != "True"))
        })
        .count();
    // The attempt that ended last may stay for its logs, beside the one that runs.
    let ended = world.jobs.len() - active;
    prop_assert!(ended <= 1 || active == 0 && !over && world.pool.is_none(), "{}", ended);
    if over {
        prop_assert_eq!(active, 0);
    } else if world.job.spec.suspend {
        prop_assert!(world.is_true("Suspended") && active == 0);
    } else if world.is_true("Running") {
        prop_assert_eq!(active, 1);
    } else {
        prop_assert!(world.pool.is_none(), "{:?}", world.condition("Running"));
    }
    for _ in 0..20 {
        world.calm();
        let late = deadline.is_some();
        prop_assert!(world.reconcile(usize::MAX) || late, "rest stays rest");
        prop_assert!(late || world.job.status.as_ref() == Some(&status), "and writes nothing");
    }
    Ok(())
}

#[test]
fn an_attempt_that_has_no_pods_yet_ends_before_the_next_one_starts() {
    let events = [
        Event::Reconcile(2),
        Event::GiveUp,
        Event::Wait(30),
        Event::Reconcile(1),
        Event::Reconcile(1),
        Event::Calm,
        Event::Spoil { pod: 0, code: None },
        Event::JobController,
    ];
    for queued in [false, true] {
        for count in 0..=events.len() {
            comes_to_rest(queued, None, &events[..count]).expect("it comes to rest");
        }
    }
}

#[test]
fn an_attempt_that_another_operator_has_left_running_goes_though_the_newest_has_failed() {
    let mut world = World::new(false);
    rest(&mut world);
    let mut second = world.jobs[0].clone();
    world.end_trainer(1, 1);
    rest(&mut world);
    // Attempt 1 is there again, and runs.
    second.status = None;
    world.decided.clear();
    world.done.clear();
    world.jobs[0] = second;
    world.job_controller();
    world.end_trainer(0, 1);
    world.calm();
    rest(&mut world);
    assert!(world.is_true("Running"), "{:?}", world.condition("Running"));
    assert_eq!(attempts(&world), ["2", "3"], "attempt 2 ended last");
}

/// Numbers of the attempts whose Jobs are there.
fn attempts(world: &World) -> Vec<String> {
    world.jobs.iter().filter_map(|it| cluster::attempt_of(&it.metadata)).collect()
}

fn reason(world: &World, condition: &str) -> String {
    world.condition(condition).map(|it| it.reason).unwrap_or_default()
}

#[test]
fn what_is_not_the_programs_fault_does_not_count() {
    let mut world = World::new(false);
    let rule = FailureRule { action: FailureAction::RestartUncounted, exit_codes: vec![9] };
    world.job.spec.failure_policy.rules = vec![rule];
    for _ in 0..10 {
        rest(&mut world);
        world.disrupt(0, "EvictionByEvictionAPI");
        rest(&mut world);
        world.end_trainer(0, 9);
    }
    rest(&mut world);
    let status = world.job.status.clone().expect("it was reported");
    assert_eq!((status.attempt, status.restarts), (21, 0));
    assert!(world.is_true("Running"));
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
    world.finish();
    rest(&mut world);
    assert!(world.is_true("Complete") && !world.gone);
    world.clock.second += 100;
    world.reconcile(usize::MAX);
    assert!(world.gone);
}

#[test]
fn an_end_that_is_refused_is_told_until_it_is_carried_out() {
    let mut world = World::new(false);
    rest(&mut world);
    world.finish();
    rest(&mut world);
    let mut told = |failure: Option<Failure>| {
        world.job.status = status(&Applied::new(world.observe(), failure), world.clock.now());
        reason(&world, "Degraded")
    };
    let refused = Failure { reason: "Forbidden", message: "delete Job j-1: no".into() };
    assert_eq!(told(Some(refused)), "Forbidden");
    assert_eq!(told(None), "AsItShould");
    assert!(world.is_true("Complete"));
}

#[test]
fn a_job_that_is_not_ours_is_neither_written_nor_given_a_certificate() {
    let mut world = World::new(false);
    rest(&mut world);
    let look = |world: &World| {
        let failure = Failure { reason: "Forbidden", message: "no".into() };
        let written = status(&Applied::new(world.observe(), Some(failure)), world.clock.now());
        let decision = decide(&world.observe(), &settings(), world.clock.now());
        (written.is_some(), decision.has_workers)
    };
    assert_eq!(look(&world), (true, true));
    let mut foreign = world.clone();
    foreign.job.spec.managed_by = Some("example.com/another".into());
    assert_eq!(look(&foreign), (false, false));
    let mut deleted = world.clone();
    deleted.job.metadata.deletion_timestamp = Some(Time(world.clock.now()));
    assert_eq!(look(&deleted), (false, false));
    // What runs of a job that has become invalid still talks to the control service.
    let mut invalid = world.clone();
    invalid.job.spec.failure_policy.max_restarts = Some(9999);
    assert_eq!(look(&invalid), (true, true));
    invalid.jobs.clear();
    invalid.pods.clear();
    assert_eq!(look(&invalid), (true, false));
    world.finish();
    rest(&mut world);
    assert_eq!(look(&world), (true, false));
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
    assert_eq!(reason(&world, "Reconciling"), "Queued");
    rest(&mut world);
    assert!(world.is_true("Running") && world.is_true("Admitted"));
    world.happen(&Event::Preempt);
    world.reconcile(usize::MAX);
    while reason(&world, "Running") != "QueuePlaceLost" {
        assert!(!world.is_true("Running"), "it waits in the queue, and says that it begins anew");
        // All but the queue.
        world.clock.second += 5;
        world.job_controller();
        world.kubelets();
        world.collect_garbage();
        world.reconcile(usize::MAX);
    }
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
    world.job.spec.attention.profile = Some("/calibration/h200.json".into());
    world.job.spec.attention.tolerance = Some("1.05".into());
    world.job.spec.checkpoint.claim_name = Some("shared".into());
    world.job.spec.checkpoint.resume_from = Some("i-0123abcd/step-40".into());
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
        ("CADRE_MEMORY_MIB", "4096"),
        ("CADRE_PROFILE", "/calibration/h200.json"),
        ("CADRE_TOLERANCE", "1.05"),
        ("CADRE_CHECKPOINTS", "/var/lib/cadre-checkpoints/j-uid-1"),
        ("CADRE_RESUME", "/var/lib/cadre-checkpoints/i-0123abcd/step-40"),
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
    // A trainer is told, too, that it begins at step 0.
    let mut world = World::new(false);
    world.reconcile(usize::MAX);
    let job = world.jobs.first().and_then(|it| it.spec.clone()).expect("it was made");
    let pod = job.template.spec.expect("it has a spec");
    let env = pod.containers[0].env.clone().unwrap_or_default();
    let resume = env.iter().find(|it| it.name == "CADRE_RESUME").and_then(|it| it.value.clone());
    assert_eq!(resume.as_deref(), Some("none"));
    let position = |name: &str| env.iter().position(|it| it.name == name);
    assert!(position("RANK") < position("A"), "a variable may refer to ours");
}
