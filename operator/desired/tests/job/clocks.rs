//! Clocks of the API server and the Job controller that are ahead of the operator's, or behind it.

use super::cluster::World;
use super::kubernetes::has;
use super::world::name;
use super::{attempts, rest};

const SKEWS: [i64; 3] = [0, 7_200, -7_200];

/// Seconds until this holds, with a look each second.
fn until(world: &mut World, holds: impl Fn(&World) -> bool) -> i64 {
    let from = world.clock.second;
    while !holds(world) {
        assert!(world.clock.second < from + 1_000, "never: {:?}", world.condition("Running"));
        world.clock.second += 1;
        world.done.clear();
        world.reconcile(usize::MAX);
    }
    world.clock.second - from
}

#[test]
fn an_attempt_pauses_for_as_long_whatever_the_clock_of_who_says_that_the_one_before_has_failed() {
    for ahead in SKEWS {
        let mut world = World::new(false);
        world.ahead = ahead;
        for pause in [10, 20] {
            rest(&mut world);
            world.end_trainer(0, 1);
            for _ in 0..50 {
                world.job_controller();
                world.kubelets();
            }
            assert!(world.jobs.last().is_some_and(|it| has(it, "FailureTarget")));
            world.done.clear();
            world.reconcile(usize::MAX);
            let there = world.jobs.len();
            let before = attempts(&world);
            let waited = until(&mut world, |it| it.jobs.len() > there || attempts(it) != before);
            assert_eq!(waited, pause, "{ahead}");
        }
        // A new leader takes no time for over that is still to come, and waits for none longer than for its own.
        rest(&mut world);
        world.job.spec.failure_policy.max_restarts = Some(9);
        world.end_trainer(0, 1);
        world.job_controller();
        world.kubelets();
        world.job_controller();
        world.watched = None;
        world.reconcile(usize::MAX);
        let before = attempts(&world);
        let waited = until(&mut world, |it| attempts(it) != before);
        assert!(waited <= 40, "{ahead}: {waited}");
    }
}

#[test]
fn a_pod_that_is_deleted_counts_as_lost_after_its_time_whatever_the_clock_of_who_says_so() {
    for ahead in SKEWS {
        let mut world = World::new(false);
        world.ahead = ahead;
        rest(&mut world);
        world.lose_node_of(0);
        world.done.clear();
        world.reconcile(usize::MAX);
        // Its grace period, and ten seconds.
        let lost = until(&mut world, |it| it.jobs.is_empty());
        assert_eq!(lost, 40, "{ahead}");
        world.calm();
        assert!(world.pods.iter().any(|it| name(&it.metadata) == "j-1-0"), "its kubelet is dead");
    }
}

#[test]
fn a_job_is_active_for_as_long_as_it_may_whatever_the_clock_of_who_says_that_it_has_started() {
    for ahead in SKEWS {
        let mut world = World::new(false);
        world.job.spec.active_deadline_seconds = Some(500);
        world.ahead = ahead;
        rest(&mut world);
        assert!(world.is_true("Running"), "{ahead}: {:?}", world.condition("Failed"));
        let late = until(&mut world, |it| it.is_true("Failed"));
        assert!((450..=500).contains(&late), "{ahead}: {late}");
        // A leader before had a clock that was ahead.
        let mut world = World::new(false);
        world.job.spec.active_deadline_seconds = Some(500);
        rest(&mut world);
        world.clock.second -= 7_200;
        world.watched = None;
        world.done.clear();
        world.reconcile(usize::MAX);
        assert_eq!(until(&mut world, |it| it.is_true("Failed")), 500);
    }
}
