//! One pool with workers that behave as real ones do: a job from its start to its end, drains, another
//! controller, several jobs, trouble; and the same at random.

mod again;
mod lent;
mod random;
mod rest;
mod world;

use std::collections::BTreeSet;

use cadre_views::{Fate, ServerId, Trouble, Who};
use world::{World, key};

fn id(index: u32, incarnation: u32) -> ServerId {
    ServerId { index, incarnation }
}

#[test]
fn a_job_gets_all_servers_and_a_killed_one_is_replaced_in_its_slot() {
    let mut world = World::new(1, 2);
    world.start_job("j", 2, false);
    assert_eq!(world.view("j"), "1.3: D0.0 D1.0", "one view for each server that came");
    world.kill(id(1, 0));
    world.lose("j", id(1, 0));
    assert_eq!(world.view("j"), "1.4: D0.0 D-");
    world.start_server(id(1, 1));
    assert_eq!(world.view("j"), "1.5: D0.0 D1.1");
    world.finish("j");
    assert_eq!(world.waiting(), BTreeSet::from([id(0, 0), id(1, 1)]), "they wait for the next job");
    // However long: who serves nobody has nothing to report.
    world.pass(1000);
    world.start_job("k", 1, false);
    world.pass(1);
    assert_eq!(world.view("k"), "1.3: D0.0 D1.1");
}

#[test]
fn a_new_controller_does_not_take_an_unused_view_for_a_step() {
    let mut world = World::new(1, 2);
    world.start_job("j", 1, false);
    world.mark(id(1, 0), Fate::Drains);
    world.change_controller(2);
    assert!(!world.is_drained(id(1, 0)), "a step may still use the view before");
    world.step("j");
    assert!(world.is_drained(id(1, 0)));
}

#[test]
fn a_server_whose_job_ended_while_nobody_looked_is_free_again() {
    let mut world = World::new(1, 1);
    world.start_job("j", 1, false);
    world.vanish("j");
    world.change_controller(2);
    assert_eq!(world.waiting(), BTreeSet::from([id(0, 0)]));
}

#[test]
fn a_new_controller_gives_nothing_away_before_all_jobs_are_back() {
    let mut world = World::new(1, 2);
    world.start_job("a", 1, false);
    world.start_job("b", 1, false);
    world.step("a");
    let before = (world.view("a"), world.view("b"));
    world.change_controller(2);
    assert_eq!((world.view("a"), world.view("b")), before);
}

#[test]
fn trainers_of_another_data_version_are_refused_by_name_and_servers_wait_for_a_job_of_theirs() {
    let mut world = World::new(1, 2);
    world.start_job("older", 2, false);
    let before = world.view("older");
    assert_eq!(before, "1.3: D0.0 D1.0");
    world.refused = Some(Vec::new());
    // Another build: a server beside those of the job, and a trainer under its name.
    world.data_version = 4;
    world.kill(id(1, 0));
    world.lose("older", id(1, 0));
    world.start_server(id(1, 1));
    world.come_as(&Who::Trainer(key("older"), 1));
    let refused = world.refused.take().unwrap_or_default();
    assert_eq!(
        refused,
        ["trainer 1 of n/older/1 has data version 4, job n/older/1 3; start all workers of a job \
          from the same build"]
    );
    assert_eq!(world.view("older"), "1.4: D0.0 D-", "the others go on");
    assert_eq!(world.waiting(), BTreeSet::from([id(1, 1)]));
    // Another controller finds it as it is, and a job of the other build gets who waits.
    world.change_controller(2);
    assert_eq!(world.view("older"), "1.4: D0.0 D-");
    world.start_job("newer", 1, false);
    assert_eq!(
        (world.view("older"), world.view("newer")),
        ("2.1: D0.0".into(), "2.2: D1.1".into())
    );
    // Who is alone in its build gets its slot back with a server of it.
    world.finish("newer");
    world.kill(id(1, 1));
    world.lose("newer", id(1, 1));
    world.data_version = 3;
    world.start_server(id(1, 2));
    assert_eq!(world.view("older"), "2.3: D0.0 D1.2");
}

#[test]
fn a_job_of_another_build_takes_no_server_from_one_that_trains() {
    let mut world = World::new(1, 3);
    world.start_job("older", 1, false);
    let before = world.view("older");
    world.refused = Some(Vec::new());
    world.data_version = 4;
    world.start_job("newer", 1, false);
    world.step("older");
    assert_eq!((world.view("older"), world.view("newer")), (before, "1.1:".into()));
    let [told] = world.notices.as_slice() else { panic!("{:?}", world.notices) };
    let expected =
        "OtherBuild: no server of the pool has data version 4, that of job n/newer/1, which waits;";
    assert!(told.starts_with(expected), "{told}");
    // A server of its build comes into a slot of the other's.
    world.kill(id(1, 0));
    world.lose("older", id(1, 0));
    world.start_server(id(1, 1));
    assert_eq!(
        (world.view("older"), world.view("newer")),
        ("1.6: D0.0 D2.0".into(), "1.3: D1.1".into())
    );
    // Jobs of one build share what is of their build.
    world.start_job("newest", 1, false);
    world.finish("older");
    for job in ["newer", "newest"] {
        world.step(job);
    }
    assert_eq!(world.view("newer"), "1.3: D1.1", "nobody serves another build's job");
    assert_eq!(world.waiting(), BTreeSet::from([id(0, 0), id(2, 0)]));
    assert_eq!(world.refused, Some(Vec::new()), "nobody is sent away");
}

#[test]
fn who_has_no_servers_of_its_build_is_told_until_one_comes() {
    let mut world = World::new(1, 2);
    world.start_job("older", 1, false);
    world.data_version = 4;
    world.start_job("newer", 1, false);
    assert_eq!(world.unserved("newer"), Some("OtherBuild"));
    // Of a pool that has become empty nothing else is known.
    world.finish("older");
    world.want(0);
    assert_eq!((world.unserved("newer"), world.unserved("older")), (Some("OtherBuild"), None));
    world.want(1);
    world.kill(id(0, 0));
    world.lose("older", id(0, 0));
    world.start_server(id(0, 1));
    assert_eq!(world.unserved("newer"), None);
    assert_eq!(world.held_by("newer"), 1);
}

#[test]
fn a_job_whose_trainers_do_not_come_gives_its_servers_to_others_until_they_do() {
    let mut world = World::new(1, 4);
    world.start_job("whole", 1, false);
    world.begin_job("part", 2);
    world.step("whole");
    assert_eq!((world.held_by("whole"), world.held_by("part")), (2, 2), "they may come soon");
    world.live(299);
    assert_eq!((world.held_by("part"), world.unserved("part")), (2, None));
    world.live(2);
    world.step("whole");
    world.step("whole");
    assert_eq!((world.held_by("whole"), world.held_by("part")), (4, 0));
    assert_eq!((world.unserved("part"), world.unserved("whole")), (Some("NotWhole"), None));
    let told = world
        .notices
        .iter()
        .filter(|it| it.starts_with("NotWhole: 1 of 2 trainers of job n/part/1"));
    assert_eq!(told.count(), 1, "{:?}", world.notices);
    world.complete_job("part", 2);
    world.step("whole");
    world.step("part");
    assert_eq!((world.held_by("whole"), world.held_by("part")), (2, 2));
    assert_eq!(world.unserved("part"), None);
    // Who trains keeps its servers, whoever does not come back to a new controller.
    world.hold_back(Who::Trainer(key("part"), 1));
    world.change_controller(2);
    world.live(600);
    assert_eq!((world.held_by("part"), world.unserved("part")), (2, None));
}

#[test]
fn a_job_of_which_nobody_comes_is_told_after_minutes() {
    let mut world = World::new(1, 2);
    world.make_trainers("late", 2);
    world.live(299);
    assert_eq!(world.unserved("late"), None);
    world.live(1);
    assert_eq!(world.unserved("late"), Some("NotCome"));
    world.begin_job("late", 2);
    assert_eq!((world.unserved("late"), world.held_by("late")), (None, 2));
    world.live(299);
    assert_eq!(world.unserved("late"), None, "the others have as long");
}

#[test]
fn a_server_leaves_only_after_a_step_without_it() {
    let mut world = World::new(1, 2);
    world.start_job("j", 1, false);
    world.mark(id(1, 0), Fate::Drains);
    assert_eq!(world.view("j"), "1.4: D0.0 D-");
    assert!(!world.is_drained(id(1, 0)), "its last view is in use");
    world.step("j");
    assert!(world.is_drained(id(1, 0)));
    assert!(!world.is_drained(id(0, 0)));
}

#[test]
fn a_pool_that_shrinks_takes_the_slot_away_and_one_that_grows_appends() {
    let mut world = World::new(1, 2);
    world.start_job("j", 1, true);
    assert_eq!(world.view("j"), "1.3: D0.0 D1.0 I0.0");
    world.want(1);
    assert_eq!(world.view("j"), "1.4: D0.0 I0.0");
    world.want(3);
    world.start_server(id(2, 0));
    assert_eq!(world.view("j"), "1.6: D0.0 D- I0.0 D2.0");
}

#[test]
fn a_server_that_is_asked_to_end_hands_its_work_over() {
    let mut world = World::new(1, 2);
    world.start_job("j", 1, false);
    world.terminate(id(0, 0));
    assert_eq!(world.view("j"), "1.4: D- D1.0");
    world.step("j");
    assert!(world.is_drained(id(0, 0)));
}

#[test]
fn another_controller_goes_on_from_what_the_workers_say() {
    let mut world = World::new(4, 3);
    world.start_job("j", 2, false);
    world.kill(id(1, 0));
    world.lose("j", id(1, 0));
    let before = world.view("j");
    assert_eq!(before, "4.5: D0.0 D- D2.0");
    world.change_controller(7);
    assert_eq!(world.view("j"), before, "nothing has changed");
    world.start_server(id(1, 1));
    assert_eq!(world.view("j"), "7.1: D0.0 D1.1 D2.0");
    // One with the same term, as after a restart of the process that holds the lease.
    world.change_controller(7);
    world.kill(id(2, 0));
    world.lose("j", id(2, 0));
    assert_eq!(world.view("j"), "7.2: D0.0 D1.1 D-");
}

#[test]
fn a_new_controller_waits_for_servers_before_it_calls_them_gone() {
    let mut world = World::new(1, 2);
    world.start_job("j", 1, false);
    world.hold_back(Who::Server(id(1, 0)));
    world.change_controller(2);
    assert_eq!(world.view("j"), "1.3: D0.0 D1.0");
    world.pass(14);
    assert_eq!(world.view("j"), "1.3: D0.0 D1.0");
    world.pass(2);
    assert_eq!(world.view("j"), "2.1: D0.0 D-");
}

#[test]
fn two_jobs_share_and_a_server_changes_hands_after_its_drain() {
    let mut world = World::new(1, 4);
    world.start_job("a", 1, false);
    world.start_job("b", 1, false);
    assert_eq!(world.view("a"), "1.6: D0.0 D1.0", "the other two are taken away");
    assert_eq!(world.view("b"), "1.1: D- D-");
    world.step("a");
    assert_eq!(world.view("b"), "1.3: D2.0 D3.0");
    world.finish("b");
    world.step("a");
    assert_eq!(world.view("a").matches('D').count(), 4, "{}", world.view("a"));
}

#[test]
fn an_edited_share_moves_servers_by_drains_and_moves_them_back() {
    let mut world = World::new(1, 8);
    world.start_job("a", 1, false);
    world.start_job("b", 1, false);
    for (shares, expected) in [((100, 100), (4, 4)), ((300, 100), (6, 2)), ((100, 300), (2, 6))] {
        world.share("a", shares.0);
        world.share("b", shares.1);
        for _ in 0..4 {
            world.step("a");
            world.step("b");
        }
        assert_eq!((world.held_by("a"), world.held_by("b")), expected, "{shares:?}");
    }
}

#[test]
fn a_slow_server_is_kept_out_and_one_of_two_stays() {
    let mut world = World::new(1, 3);
    world.start_job("j", 1, false);
    for _ in 0..4 {
        world.pass(1);
        world.report(&[1_000_000, 1_000_000, 400_000]);
    }
    assert_eq!(world.trouble(id(2, 0)), Some(Trouble::Slow));
    assert!(world.view("j").ends_with("D0.0 D1.0 D-"), "{}", world.view("j"));
    // A quarter at most, and the rest has to hold.
    for _ in 0..8 {
        world.pass(1);
        world.report(&[1_000_000, 300_000]);
    }
    assert_eq!(world.trouble(id(1, 0)), None);
}

#[test]
fn a_slow_server_stays_while_the_only_other_one_leaves() {
    let mut world = World::new(1, 2);
    world.start_job("j", 1, false);
    world.terminate(id(1, 0));
    for _ in 0..8 {
        world.pass(1);
        world.report(&[300_000, 1_000_000]);
    }
    assert_eq!(world.trouble(id(0, 0)), None, "nobody would be left");
    assert!(world.view("j").ends_with("D0.0 D-"), "{}", world.view("j"));
}

#[test]
fn weights_follow_reports_unless_the_job_is_reproducible() {
    for (reproducible, expected) in [(false, [100, 100, 80]), (true, [100, 100, 100])] {
        let mut world = World::new(1, 3);
        world.reproducible = reproducible;
        world.start_job("j", 1, false);
        for _ in 0..30 {
            world.pass(1);
            world.report(&[1_000_000, 1_000_000, 800_000]);
        }
        assert_eq!(world.weights("j"), expected, "reproducible: {reproducible}");
        world.pass(20);
        assert_eq!(world.weights("j"), [100; 3], "stale");
    }
}

#[test]
fn keys_are_read_as_they_are_written() {
    let written = key("j").to_string();
    assert_eq!(cadre_views::JobKey::parse(&written), Some(key("j")));
    for text in ["", "a", "a/b", "a/b/c", "a/b/1/2"] {
        assert_eq!(cadre_views::JobKey::parse(text), None, "{text}");
    }
}
