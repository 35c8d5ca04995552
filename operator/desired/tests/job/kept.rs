//! Which attempts stay for their logs, and whose pods an attempt waits for.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::cluster::World;
use super::events::Event;
use super::world::name;
use super::{attempts, reason, rest};

/// Names of the pods that are there.
fn pods(world: &World) -> Vec<String> {
    let mut names: Vec<_> = world.pods.iter().map(|it| name(&it.metadata)).collect();
    names.sort();
    names
}

#[test]
fn the_attempt_that_ended_last_stays_for_its_logs_until_another_one_ends() {
    let mut world = World::new(false);
    world.job.spec.failure_policy.max_restarts = Some(9);
    rest(&mut world);
    world.end_trainer(1, 1);
    rest(&mut world);
    assert_eq!(attempts(&world), ["1", "2"]);
    assert!(pods(&world).contains(&"j-1-1".to_owned()), "the one that failed: {:?}", pods(&world));
    world.end_trainer(0, 1);
    rest(&mut world);
    assert_eq!(attempts(&world), ["2", "3"]);
    let there = pods(&world);
    assert!(
        there.contains(&"j-2-0".to_owned()) && !there.contains(&"j-1-1".to_owned()),
        "{there:?}"
    );
    // It also stays while the job is suspended, and while the next attempt is lost and made anew.
    world.job.spec.suspend = true;
    rest(&mut world);
    assert_eq!(attempts(&world), ["2"]);
    world.job.spec.suspend = false;
    rest(&mut world);
    assert_eq!(attempts(&world), ["2", "4"]);
    let before = world.job.status.clone().expect("it was reported");
    world.happen(&Event::DeleteJob);
    rest(&mut world);
    assert_eq!(attempts(&world), ["2", "5"]);
    let status = world.job.status.clone().expect("it was reported");
    assert_eq!(
        (status.restarts, status.in_a_row()),
        (before.restarts, before.in_a_row()),
        "its failure has counted"
    );
    world.finish();
    rest(&mut world);
    assert_eq!(attempts(&world), ["5"]);
}

#[test]
fn a_pod_of_another_kind_under_the_jobs_name_holds_no_attempt_up() {
    for (number, is_owned) in [(None, false), (Some("1"), true), (Some("1"), false)] {
        let mut world = World::new(false);
        world.join(number);
        if !is_owned {
            world.pods.last_mut().expect("it has joined").metadata.owner_references = None;
        }
        rest(&mut world);
        assert!(world.is_true("Running"), "{number:?}: {:?}", world.condition("Running"));
        world.end_trainer(0, 1);
        rest(&mut world);
        assert!(world.is_true("Running"), "{number:?}: {:?}", world.condition("Running"));
        assert_eq!(attempts(&world), ["1", "2"], "{number:?}");
    }
}

#[test]
fn an_attempt_waits_for_trainers_whose_job_was_deleted_without_them() {
    let mut world = World::new(false);
    rest(&mut world);
    for pod in &mut world.pods {
        pod.metadata.owner_references = None;
        // Nobody takes them away.
        pod.metadata.finalizers = None;
    }
    world.jobs.clear();
    for _ in 0..20 {
        world.clock.second += 30;
        world.done.clear();
        world.reconcile(usize::MAX);
    }
    assert!(world.jobs.is_empty(), "they still train");
    let said = world.condition("Running").map(|it| it.message).unwrap_or_default();
    assert!(said.ends_with("; it waits for pod j-1-0"), "{said}");
}

#[test]
fn a_pod_that_the_next_attempt_waits_for_is_named() {
    let mut world = World::new(false);
    rest(&mut world);
    world.delete_pod(1);
    world.job.spec.suspend = true;
    world.reconcile(usize::MAX);
    world.collect_garbage();
    world.job.spec.suspend = false;
    world.reconcile(usize::MAX);
    assert_eq!(reason(&world, "Running"), "Starting");
    let said = world.condition("Running").map(|it| it.message).unwrap_or_default();
    assert!(said.ends_with("; it waits for pod j-1-0"), "{said}");
}

#[test]
fn an_attempt_says_of_which_generation_it_is() {
    let mut world = World::new(false);
    let told = |world: &World| {
        let status = world.job.status.clone().expect("it was reported");
        (status.attempt, status.attempt_generation, status.observed_generation)
    };
    rest(&mut world);
    assert_eq!(told(&world), (1, 1, 1));
    world.job.metadata.generation = Some(5);
    rest(&mut world);
    assert_eq!(told(&world), (1, 1, 5), "what was changed counts from the next attempt on");
    world.end_trainer(0, 1);
    rest(&mut world);
    assert_eq!(told(&world), (2, 5, 5));
}

#[test]
fn an_attempt_waits_for_a_trainer_that_a_dead_kubelet_has_not_ended() {
    for is_pod_there in [true, false] {
        let mut world = World::new(false);
        rest(&mut world);
        for (index, pod) in world.pods.iter_mut().enumerate() {
            let labels = pod.metadata.labels.get_or_insert_default();
            labels.insert("batch.kubernetes.io/job-completion-index".into(), index.to_string());
        }
        world.lose_node_of(0);
        // A new leader does not know them yet.
        world.attached = None;
        for _ in 0..50 {
            world.calm();
            world.reconcile(usize::MAX);
        }
        assert!(!world.is_true("Running"), "they may still train");
        let said = world.condition("Running").map(|it| it.message).unwrap_or_default();
        assert!(
            said.ends_with("the operator is new, and trainers that work on may come back to it"),
            "{said}"
        );
        world.attached = Some([(1, 0)].into());
        // Much longer than a pod is waited for.
        for _ in 0..200 {
            world.calm();
            world.reconcile(usize::MAX);
            if !is_pod_there && world.jobs.is_empty() {
                world.pods.retain(|it| name(&it.metadata) != "j-1-0");
            }
        }
        assert!(!world.is_true("Running"), "two would write the same checkpoints");
        let said = world.condition("Running").map(|it| it.message).unwrap_or_default();
        let who = if is_pod_there { "pod j-1-0 on node node-0" } else { "its pod is gone" };
        let expected = format!("; trainer 0 of attempt 1 ({who}) should be gone and is still");
        assert!(said.contains(&expected), "{said}");
        world.attached = Some(BTreeSet::new());
        rest(&mut world);
        assert!(world.is_true("Running"), "{:?}", world.condition("Running"));
    }
}

#[test]
fn a_lost_pod_of_a_former_job_of_the_same_name_is_none_of_the_new_one() {
    let mut world = World::new(false);
    world.join(Some("1"));
    let clock = world.clock.clone();
    let pod = world.pods.last_mut().expect("it has joined");
    pod.metadata.deletion_timestamp = Some(Time(clock.now()));
    let owner = pod.metadata.owner_references.iter_mut().flatten().next().expect("it has one");
    owner.name = "j-1".into();
    world.dead.insert("node-0".into());
    world.clock.second += 60;
    rest(&mut world);
    assert!(world.is_true("Running"), "{:?}", world.condition("Running"));
    assert_eq!(attempts(&world), ["1"]);
}
