//! How many restarts a job has: in a row without a newer checkpoint, and what happens when they are used up.

use super::cluster::World;
use super::kubernetes::has;
use super::{attempts, reason, rest};

#[test]
fn restarts_count_until_the_budget_is_used_up() {
    let mut world = World::new(false);
    for attempt in 1..=3 {
        rest(&mut world);
        let status = world.job.status.clone().expect("it was reported");
        assert_eq!((status.attempt, status.restarts), (attempt, attempt - 1));
        world.end_trainer(0, 1);
    }
    rest(&mut world);
    assert_eq!(reason(&world, "Failed"), "RestartsUsedUp");
    let message = world.condition("Failed").expect("it failed").message;
    assert_eq!(
        message,
        "pod j-3-0: exit code 1; 2 of 2 restarts used without a newer checkpoint; raise \
         spec.failurePolicy.maxRestarts, and the job goes on"
    );
    assert_eq!(world.jobs.len(), 1, "the last attempt stays for its logs");
    // Until somebody deletes it.
    world.jobs.clear();
    world.pods.clear();
    rest(&mut world);
    assert!(world.is_true("Failed") && world.jobs.is_empty(), "{:?}", world.condition("Failed"));
}

/// Attempt, restarts of the job, and those in a row.
fn counts(world: &World) -> (u32, u32, u32) {
    let status = world.job.status.clone().expect("it was reported");
    (status.attempt, status.restarts, status.in_a_row())
}

#[test]
fn attempts_in_a_row_wait_longer_each_time_whether_they_count_and_progress_sets_that_back() {
    type Ends = fn(&mut World) -> bool;
    let ways: [(Ends, &str); 2] = [
        (|it| it.end_trainer(0, 1), "exit code 1"),
        (|it| it.disrupt(0, "EvictionByEvictionAPI"), "words of EvictionByEvictionAPI"),
    ];
    for (ends, words) in ways {
        let mut world = World::new(false);
        world.job.spec.failure_policy.max_restarts = Some(9);
        let (mut pauses, mut is_told) = (Vec::new(), false);
        for attempt in 1..=8_u32 {
            rest(&mut world);
            if attempt == 8 {
                world.checkpoint = 20;
            }
            assert!(ends(&mut world), "a trainer runs");
            let mut failed = None;
            while counts(&world).0 == attempt {
                world.job_controller();
                world.kubelets();
                world.reconcile(usize::MAX);
                let has_failed = world.jobs.last().is_some_and(|it| has(it, "FailureTarget"));
                failed = failed.or(Some(world.clock.second).filter(|_| has_failed));
                if attempt == 2 && failed == Some(world.clock.second - 19) {
                    let told = world.condition("Running").expect("it is told");
                    let expected = format!(
                        "attempt 3 starts 20 s after the end of the one before; 2 in a row have ended without a newer \
                         checkpoint; pod j-2-0: {words}"
                    );
                    assert_eq!((told.reason.as_str(), told.message), ("Restarting", expected));
                    is_told = true;
                }
                let (decision, now) = (world.again(), world.clock.second);
                let due = decision.is_some_and(|it| it <= 300);
                assert!(counts(&world).0 > attempt || due, "nobody looks at {now}");
                world.clock.second += 1;
                world.done.clear();
            }
            pauses.push(world.clock.second - 1 - failed.expect("it has failed"));
        }
        assert_eq!(pauses, [10, 20, 40, 80, 160, 300, 300, 10], "{words}");
        assert!(is_told);
    }
}

#[test]
fn three_restarts_in_a_row_end_a_job_that_says_nothing() {
    let mut world = World::new(false);
    world.job.spec.failure_policy.max_restarts = None;
    for attempt in 1..=4 {
        rest(&mut world);
        assert_eq!(counts(&world), (attempt, attempt - 1, attempt - 1));
        world.end_trainer(0, 1);
    }
    rest(&mut world);
    let told = world.condition("Failed").expect("it failed").message;
    assert!(told.starts_with("pod j-4-0: exit code 1; 3 of 3 restarts used"), "{told}");
}

#[test]
fn a_newer_checkpoint_sets_the_restarts_back_and_an_old_one_does_not() {
    let mut world = World::new(false);
    for attempt in 1..=6 {
        rest(&mut world);
        world.checkpoint = u64::from(attempt) * 20;
        world.reconcile(usize::MAX);
        assert_eq!(counts(&world), (attempt, attempt - 1, 0), "progress");
        world.end_trainer(0, 1);
    }
    // The seventh goes on from the checkpoint of the sixth, which it writes once more.
    for in_a_row in 1..=2 {
        rest(&mut world);
        assert_eq!(counts(&world), (6 + in_a_row, 5 + in_a_row, in_a_row));
        assert_eq!(world.job.status.as_ref().map(|it| it.checkpoint_step), Some(120));
        world.end_trainer(0, 1);
    }
    rest(&mut world);
    assert_eq!(reason(&world, "Failed"), "RestartsUsedUp");
    assert_eq!(counts(&world), (8, 7, 2));
}

#[test]
fn a_checkpoint_counts_though_nobody_watched_the_attempt_that_wrote_it() {
    let mut world = World::new(false);
    rest(&mut world);
    world.end_trainer(0, 1);
    rest(&mut world);
    world.end_trainer(0, 1);
    rest(&mut world);
    assert_eq!(counts(&world), (3, 2, 2));
    // The conductor says what the job goes on from.
    world.checkpoint = 40;
    world.end_trainer(0, 1);
    rest(&mut world);
    assert_eq!((counts(&world), world.is_true("Running")), ((4, 3, 1), true));
    // A leader that has heard nothing knows it from the objects, also after a pause.
    world.checkpoint = 0;
    world.job.spec.suspend = true;
    rest(&mut world);
    world.job.spec.suspend = false;
    rest(&mut world);
    assert_eq!(counts(&world), (5, 3, 1));
    world.checkpoint = 40;
    world.end_trainer(0, 1);
    rest(&mut world);
    assert_eq!(counts(&world), (6, 4, 2), "that one is known");
}

#[test]
fn a_checkpoint_that_is_written_on_the_way_out_of_a_pause_counts() {
    let mut world = World::new(false);
    for _ in 0..2 {
        rest(&mut world);
        world.end_trainer(0, 1);
    }
    rest(&mut world);
    assert_eq!(counts(&world), (3, 2, 2));
    world.job.spec.suspend = true;
    rest(&mut world);
    // The attempt's Job is gone when its trainers say what they have written; the one that failed before stays for its logs.
    assert_eq!(attempts(&world), ["2"]);
    world.checkpoint = 40;
    rest(&mut world);
    assert_eq!(counts(&world), (3, 2, 0));
    world.job.spec.suspend = false;
    rest(&mut world);
    world.end_trainer(0, 1);
    rest(&mut world);
    assert_eq!((counts(&world), world.is_true("Running")), ((5, 3, 1), true));
}

#[test]
fn a_job_whose_restarts_are_used_up_goes_on_when_more_are_allowed_and_no_other_does() {
    let mut world = World::new(false);
    world.job.spec.active_deadline_seconds = Some(500);
    for _ in 0..3 {
        rest(&mut world);
        world.end_trainer(0, 1);
    }
    rest(&mut world);
    assert_eq!((reason(&world, "Failed"), counts(&world)), ("RestartsUsedUp".into(), (3, 2, 2)));
    // A night passes.
    world.clock.second += 40_000;
    world.job.spec.failure_policy.max_restarts = Some(3);
    rest(&mut world);
    assert_eq!((reason(&world, "Failed"), counts(&world)), ("Reopened".into(), (4, 3, 3)));
    assert!(world.is_true("Running") && !world.is_true("Failed"));
    world.end_trainer(0, 2);
    rest(&mut world);
    assert_eq!(reason(&world, "Failed"), "BadInput");
    world.job.spec.failure_policy.max_restarts = Some(9);
    rest(&mut world);
    world.jobs.clear();
    world.pods.clear();
    rest(&mut world);
    assert_eq!((reason(&world, "Failed"), counts(&world)), ("BadInput".into(), (4, 3, 3)));
    assert_eq!(world.jobs, []);
}

#[test]
fn an_end_that_is_final_says_how_a_new_job_goes_on() {
    let check = |claim: Option<&str>, saved: u64, expected: &str| {
        let mut world = World::new(false);
        world.job.spec.checkpoint.claim_name = claim.map(str::to_owned);
        rest(&mut world);
        world.checkpoint = saved;
        let mut late = world.clone();
        world.end_trainer(0, 2);
        rest(&mut world);
        late.job.spec.active_deadline_seconds = Some(60);
        late.clock.second += 60;
        rest(&mut late);
        for (world, reason) in [(world, "BadInput"), (late, "DeadlineExceeded")] {
            let failed = world.condition("Failed").expect("it failed");
            assert_eq!(failed.reason, reason);
            assert!(failed.message.ends_with(expected), "{}", failed.message);
        }
    };
    let goes_on = "; create a new job, which goes on with spec.checkpoint.resumeFrom: j-uid-1";
    check(Some("shared"), 40, goes_on);
    check(Some("shared"), 0, "; create a new job");
    check(None, 40, "; create a new job");
}

#[test]
fn what_an_operator_wrote_that_knew_one_count_is_read_as_restarts_in_a_row() {
    let mut world = World::new(false);
    for _ in 0..2 {
        rest(&mut world);
        world.end_trainer(0, 1);
    }
    rest(&mut world);
    let forget = |world: &mut World| {
        let notes = world.jobs.iter_mut().filter_map(|it| it.metadata.annotations.as_mut());
        notes.for_each(|it| it.retain(|key, _| key == "cadre.dev/restarts"));
        let status = world.job.status.as_mut().expect("it was reported");
        (status.restarts_without_progress, status.checkpoint_step) = (None, 0);
    };
    forget(&mut world);
    rest(&mut world);
    assert_eq!(counts(&world), (3, 2, 2));
    assert_eq!(attempts(&world), ["2", "3"], "it runs on");
    world.end_trainer(0, 1);
    rest(&mut world);
    assert_eq!(reason(&world, "Failed"), "RestartsUsedUp");
    forget(&mut world);
    world.jobs.clear();
    rest(&mut world);
    assert!(world.is_true("Failed"), "a new operator reopens nothing by itself");
}

#[test]
fn a_job_has_a_folder_of_its_name_and_the_start_of_its_uid_and_says_so_to_the_next() {
    let mut world = World::new(false);
    world.job.metadata.uid = Some("0123abcd-4567-89ab-cdef-0123456789ab".into());
    world.job.spec.checkpoint.claim_name = Some("shared".into());
    rest(&mut world);
    let pod = world.jobs[0].spec.clone().and_then(|it| it.template.spec).expect("it has one");
    let env = pod.containers[0].env.clone().unwrap_or_default();
    let folder = env.iter().find(|it| it.name == "CADRE_CHECKPOINTS");
    let folder = folder.and_then(|it| it.value.as_deref());
    assert_eq!(folder, Some("/var/lib/cadre-checkpoints/j-0123abcd"));
    world.checkpoint = 40;
    world.end_trainer(0, 2);
    rest(&mut world);
    let failed = world.condition("Failed").expect("it failed").message;
    assert!(failed.ends_with("spec.checkpoint.resumeFrom: j-0123abcd"), "{failed}");
}
