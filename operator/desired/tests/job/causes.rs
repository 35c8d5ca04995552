//! Why an attempt ended: who is the cause, whether it counts, and what is told of it.

use cadre_crds::contract::ANNOTATION_ENDED;
use cadre_crds::{FailureAction, FailureRule};
use cadre_desired::job::decide;

use super::cluster::World;
use super::events::{PUT_OUT, REASONS};
use super::world::{name, settings};
use super::{reason, rest};

/// What goes on beside an operator until all of it is over.
fn calm(world: &mut World, looks: bool) {
    for _ in 0..20 {
        world.calm();
        if looks {
            world.reconcile(usize::MAX);
        }
    }
}

#[test]
fn a_trainer_that_is_taken_away_costs_no_restart_whether_or_not_an_operator_watched() {
    for taken in REASONS.into_iter().filter(|it| *it != PUT_OUT) {
        for watches in [true, false] {
            let mut world = World::new(false);
            world.job.spec.failure_policy.max_restarts = Some(0);
            rest(&mut world);
            for index in [1, 0] {
                assert!(world.disrupt(index, taken), "a trainer runs");
                calm(&mut world, watches);
                rest(&mut world);
            }
            let status = world.job.status.clone().expect("it was reported");
            let told = (status.attempt, status.restarts, reason(&world, "Running"));
            assert_eq!(told, (3, 0, "Running".to_owned()), "{taken}, watched: {watches}");
        }
    }
}

#[test]
fn a_trainer_that_is_put_out_for_lack_of_memory_counts_and_one_whose_node_shuts_down_does_not() {
    let check = |beside: &str, expected: (u32, &str)| {
        for watches in [true, false] {
            let mut world = World::new(false);
            for _ in 0..3 {
                rest(&mut world);
                assert!(world.disrupt(1, PUT_OUT), "a trainer runs");
                let pod = world.pods.iter_mut().rfind(|it| name(&it.metadata).ends_with("-1"));
                let status = pod.and_then(|it| it.status.as_mut()).expect("it has ended");
                status.reason = Some(beside.to_owned());
                calm(&mut world, watches);
            }
            rest(&mut world);
            let status = world.job.status.clone().expect("it was reported");
            let told = (status.restarts, reason(&world, "Failed"));
            assert_eq!((told.0, told.1.as_str()), expected, "{beside}, watched: {watches}");
        }
    };
    check("Evicted", (2, "RestartsUsedUp"));
    check("Terminated", (0, ""));
}

#[test]
fn the_cause_of_a_restart_is_told_and_stays_on_the_attempts_job() {
    let check = |happens: fn(&mut World), expected: &str| {
        let mut world = World::new(false);
        rest(&mut world);
        happens(&mut world);
        world.reconcile(usize::MAX);
        // The next attempt waits for the pool: nothing is made over what was seen.
        world.pool = None;
        calm(&mut world, true);
        let job = world.jobs.first().cloned().expect("the attempt that ended");
        let noted = job.metadata.annotations.and_then(|it| it.get(ANNOTATION_ENDED).cloned());
        assert_eq!(noted.as_deref(), Some(expected));
        world.make_pool();
        rest(&mut world);
        assert!(world.is_true("Running"));
    };
    check(
        |it| {
            it.disrupt(1, "EvictionByEvictionAPI");
        },
        r#"{"pod":"j-1-1","how":{"disrupted":"EvictionByEvictionAPI"},"words":"words of EvictionByEvictionAPI"}"#,
    );
    check(|it| assert!(it.delete_pod(0)), r#"{"pod":"j-1-0","how":"deleted"}"#);
    check(|it| assert!(it.end_trainer(0, 7)), r#"{"pod":"j-1-0","how":{"exit":7}}"#);
}

#[test]
fn a_deleted_trainer_costs_no_restart_where_an_operator_watched() {
    let mut world = World::new(false);
    world.job.spec.failure_policy.max_restarts = Some(0);
    rest(&mut world);
    world.delete_pod(0);
    world.reconcile(usize::MAX);
    // The other trainer gives up before this one has ended itself.
    world.end_trainer(1, 3);
    rest(&mut world);
    let status = world.job.status.clone().expect("it was reported");
    assert_eq!((status.attempt, status.restarts), (2, 0));
    assert!(world.is_true("Running"));
}

#[test]
fn a_lost_node_costs_no_restart_whoever_speaks_first() {
    for peer_gives_up in [true, false] {
        let mut world = World::new(false);
        world.job.spec.failure_policy.max_restarts = Some(0);
        rest(&mut world);
        if peer_gives_up {
            // Long before the controller of nodes takes the pod away.
            world.dead.insert("node-0".into());
            world.end_trainer(1, 3);
            calm(&mut world, true);
            assert!(!world.is_true("Failed"), "{:?}", world.condition("Failed"));
        } else {
            world.lose_node_of(0);
        }
        rest(&mut world);
        let status = world.job.status.clone().expect("it was reported");
        assert_eq!((status.attempt, status.restarts), (2, 0), "gave up: {peer_gives_up}");
        assert!(world.is_true("Running"));
    }
}

#[test]
fn a_trainer_that_stands_still_counts_though_its_pod_is_deleted_in_the_end() {
    let mut world = World::new(false);
    rest(&mut world);
    world.end_trainer(1, 3);
    // The Job controller deletes the other one.
    rest(&mut world);
    let status = world.job.status.clone().expect("it was reported");
    assert_eq!((status.attempt, status.restarts), (2, 1));
}

#[test]
fn a_pod_that_fails_before_its_trainer_has_begun_counts_though_its_peers_are_deleted() {
    let check = |code: Option<i32>, expected: &str| {
        let mut world = World::new(false);
        for _ in 0..3 {
            rest(&mut world);
            assert!(world.spoil(0, code), "a trainer is to run");
            // The other trainer goes before the Job says that it fails.
            world.job_controller();
            world.reconcile(usize::MAX);
        }
        rest(&mut world);
        assert_eq!(reason(&world, "Failed"), "RestartsUsedUp");
        let told = world.condition("Failed").expect("it failed").message;
        assert!(
            told.starts_with(&format!("pod j-3-0: {expected}; 2 of 2 restarts used")),
            "{told}"
        );
    };
    check(None, "it failed before its trainer began: UnexpectedAdmissionError: no healthy device");
    check(Some(5), "it failed before its trainer began: container prepare: exit code 5");
}

#[test]
fn who_says_why_is_heard_before_who_gives_up_in_the_same_second() {
    let mut world = World::new(false);
    rest(&mut world);
    world.end_trainer(0, 3);
    world.end_trainer(1, 2);
    rest(&mut world);
    assert_eq!(reason(&world, "Failed"), "BadInput");
}

#[test]
fn what_a_trainer_does_when_its_job_has_failed_is_no_cause() {
    let mut world = World::new(false);
    world.job.spec.failure_policy.max_restarts = Some(0);
    rest(&mut world);
    world.end_trainer(1, 7);
    // All of it before anybody looks, in one second.
    world.job_controller();
    world.job_controller();
    world.kubelets();
    rest(&mut world);
    let told = world.condition("Failed").expect("it failed").message;
    assert!(told.starts_with("pod j-1-1: exit code 7; 0 of 0 restarts used"), "{told}");
}

#[test]
fn a_disruption_that_is_taken_back_excuses_nothing() {
    let mut world = World::new(false);
    world.job.spec.failure_policy.max_restarts = Some(0);
    rest(&mut world);
    world.nominate(0, true);
    world.reconcile(usize::MAX);
    world.nominate(0, false);
    world.end_trainer(0, 1);
    rest(&mut world);
    assert_eq!(reason(&world, "Failed"), "RestartsUsedUp");
}

#[test]
fn failures_end_the_job_with_their_reason() {
    let check = |code: i32, rule: Option<FailureRule>, expected: &str| {
        let mut world = World::new(false);
        world.job.spec.failure_policy.rules = rule.into_iter().collect();
        rest(&mut world);
        world.end_trainer(0, code);
        rest(&mut world);
        assert_eq!(reason(&world, "Failed"), expected);
        assert_eq!(world.job.status.as_ref().map(|it| it.attempt), Some(1));
    };
    check(2, None, "BadInput");
    let rule = FailureRule { action: FailureAction::FailJob, exit_codes: vec![42] };
    check(42, Some(rule), "FailureRule");
}

#[test]
fn a_container_beside_the_trainer_that_fails_is_named_and_the_trainer_is_not_blamed() {
    let mut world = World::new(false);
    for _ in 0..3 {
        rest(&mut world);
        assert!(world.fail_beside(0, 5), "a trainer runs");
    }
    rest(&mut world);
    assert_eq!(reason(&world, "Failed"), "RestartsUsedUp");
    let told = world.condition("Failed").expect("it failed").message;
    let expected = "pod j-3-0: its trainer did not fail, but container proxy: exit code 5; 2 of 2 restarts used";
    assert!(told.starts_with(expected), "{told}");
}

#[test]
fn peers_are_asked_though_the_pod_that_the_job_names_is_gone() {
    let check = |peer: Option<i32>, expected: &str| {
        let mut world = World::new(false);
        world.job.spec.failure_policy.max_restarts = Some(0);
        rest(&mut world);
        // Both trainers end before anybody looks; the Job controller names the one that gave up.
        world.end_trainer(0, 3);
        if let Some(code) = peer {
            world.end_trainer(1, code);
        }
        world.job_controller();
        world.job_controller();
        world.pods.retain(|it| it.metadata.name.as_deref() != Some("j-1-0"));
        rest(&mut world);
        assert_eq!(reason(&world, "Failed"), expected);
    };
    check(Some(2), "BadInput");
    check(Some(3), "RestartsUsedUp");
    // A peer that only does what its deletion asks for is no cause.
    check(None, "RestartsUsedUp");
}

#[test]
fn an_attempt_that_its_conductor_has_given_up_and_that_does_not_end_is_ended() {
    let check = |exit_code: i32, max_restarts: u32, expected: &[&str]| {
        let mut world = World::new(false);
        world.job.spec.failure_policy.max_restarts = Some(max_restarts);
        rest(&mut world);
        world.give_up(exit_code, "trainer 0 stands still in step 7");
        world.reconcile(usize::MAX);
        assert_eq!(world.jobs.len(), 1, "it may end by itself");
        assert!(world.is_true("Running"));
        rest(&mut world);
        let status = world.job.status.clone().expect("it was reported");
        let (attempt, restarts) = (status.attempt.to_string(), status.restarts.to_string());
        assert_eq!([&attempt, &restarts, &reason(&world, "Failed")], expected);
        assert_eq!(world.is_true("Running"), !world.is_true("Failed"));
        world
    };
    check(3, 1, &["2", "1", ""]);
    let world = check(3, 0, &["1", "0", "RestartsUsedUp"]);
    let told = world.condition("Failed").expect("it failed").message;
    let expected = "pod j-1-0: the attempt has failed and did not end: trainer 0 stands still in step 7; 0 of 0 restarts";
    assert!(told.starts_with(expected), "{told}");
    check(2, 1, &["1", "0", "BadInput"]);
}

#[test]
fn a_restart_counts_though_who_has_noted_it_does_not_live_to_tell_it() {
    let mut world = World::new(false);
    rest(&mut world);
    world.give_up(3, "trainer 0 stands still");
    world.clock.second += 60;
    // The look that notes it is not told in a status.
    let decision = decide(&world.observe(), &settings(), world.clock.now());
    assert_eq!(decision.actions.len(), 1, "it is noted before anything follows from it");
    for action in decision.actions {
        world.carry_out(action);
    }
    rest(&mut world);
    let status = world.job.status.clone().expect("it was reported");
    assert_eq!((status.attempt, status.restarts), (2, 1));
}

#[test]
fn trainers_that_end_by_themselves_are_believed_before_their_conductors_words() {
    let mut world = World::new(false);
    rest(&mut world);
    world.give_up(3, "trainer 1 is gone");
    world.end_trainer(1, 2);
    rest(&mut world);
    assert_eq!(reason(&world, "Failed"), "BadInput");
}
