//! Jobs that do not use their servers for a while: these are lent to the other jobs of the pool, and given back.

use cadre_views::{Fate, Input, Report, Who};

use super::id;
use super::rest::Rest;
use super::world::{World, key};

/// Two jobs, of the same share, on six servers.
fn two() -> World {
    let mut world = World::new(1, 6);
    world.start_job("a", 1, false);
    world.start_job("b", 1, false);
    world.train(&["a", "b"], 10);
    assert_eq!(world.held(["a", "b"]), [3, 3]);
    world
}

#[test]
fn an_idle_jobs_servers_are_lent_and_come_back_by_drains_when_it_goes_on() {
    let mut world = two();
    world.rest("a");
    world.train(&["b"], 29);
    assert_eq!(world.held(["a", "b"]), [3, 3]);
    world.train(&["b"], 2);
    assert_eq!((world.held(["a", "b"]), world.lent_by("a")), ([1, 5], 2));
    let views = (world.view("a"), world.view("b"));
    world.train(&["b"], 1000);
    assert_eq!((world.view("a"), world.view("b")), views, "nothing moves when nothing changes");
    assert_eq!(world.view("a").matches("D0.0").count(), 1, "it can go on at once");
    world.go_on("a");
    world.live(1);
    // The other one has not ended a step without them yet.
    assert_eq!((world.held(["a", "b"]), world.lent_by("a")), ([1, 5], 0));
    world.step("b");
    assert_eq!(world.held(["a", "b"]), [3, 3]);
    assert_eq!(world.view("a").matches('D').count(), 3, "{}", world.view("a"));
}

#[test]
fn a_job_that_got_its_share_back_keeps_it_for_a_while() {
    let mut world = two();
    world.rest("a");
    world.train(&["b"], 31);
    world.go_on("a");
    world.train(&["a"], 100);
    assert_eq!(world.held(["a", "b"]), [1, 5], "a step of the other one lasts");
    world.train(&["a", "b"], 1);
    world.rest("a");
    // From when it has them.
    world.train(&["b"], 299);
    assert_eq!(world.held(["a", "b"]), [3, 3]);
    world.train(&["b"], 2);
    assert_eq!(world.held(["a", "b"]), [1, 5]);
}

#[test]
fn a_job_that_has_lent_goes_on_at_the_first_sign_and_is_given_what_leaves_it() {
    let mut world = two();
    // Servers do not hear at once that they are lent.
    world.loses_drains = true;
    world.rest("a");
    world.train(&["b"], 31);
    assert_eq!((world.held(["a", "b"]), world.lent_by("a")), ([3, 3], 2));
    world.go_on("a");
    world.loses_drains = false;
    for server in [id(1, 0), id(2, 0)] {
        world.reconnect(server);
    }
    world.train(&["a", "b"], 3);
    assert_eq!((world.held(["a", "b"]), world.lent_by("a")), ([3, 3], 0));
    let view = world.view("a");
    assert!(view.contains("D0.0") && !view.contains("D-"), "{view}");
}

#[test]
fn a_job_whose_step_is_long_is_not_idle() {
    let mut world = two();
    world.resting.insert(key("a"), Rest::Within);
    world.train(&["b"], 2000);
    assert_eq!((world.held(["a", "b"]), world.lent_by("a")), ([3, 3], 0));
}

#[test]
fn a_pause_of_less_than_four_usual_steps_is_none() {
    let mut world = two();
    for _ in 0..6 {
        // It evaluates for a minute after each step.
        world.rest("a");
        world.train(&["b"], 60);
        world.go_on("a");
        world.train(&["a", "b"], 1);
    }
    // Once it had been idle, and was given its share back.
    world.train(&["a", "b"], 400);
    for _ in 0..8 {
        world.live(20);
        world.step("a");
        world.step("b");
    }
    world.rest("a");
    world.train(&["b"], 79);
    assert_eq!(world.held(["a", "b"]), [3, 3]);
    world.train(&["b"], 2);
    assert_eq!(world.held(["a", "b"]), [1, 5]);
}

#[test]
fn two_idle_jobs_lend_to_a_third_and_nobody_lends_where_nobody_uses() {
    let mut world = World::new(1, 6);
    let jobs = ["a", "b", "c"];
    for job in jobs {
        world.start_job(job, 1, false);
    }
    world.train(&jobs, 10);
    assert_eq!(world.held(jobs), [2, 2, 2]);
    world.rest("a");
    world.rest("b");
    world.train(&["c"], 31);
    assert_eq!(world.held(jobs), [1, 1, 4]);
    assert_eq!((world.lent_by("a"), world.lent_by("b")), (1, 1));
    world.rest("c");
    let views = jobs.map(|it| world.view(it));
    world.live(1000);
    assert_eq!(jobs.map(|it| world.view(it)), views, "all are idle");
    // The one that has them ends no step, so they come at once.
    world.go_on("b");
    world.live(3);
    assert_eq!(world.held(jobs), [1, 4, 1]);
    world.go_on("a");
    world.go_on("c");
    world.train(&jobs, 3);
    assert_eq!(world.held(jobs), [2, 2, 2]);
    // None of them has been idle when all rest.
    world.train(&jobs, 400);
    for job in jobs {
        world.rest(job);
    }
    world.live(1000);
    assert_eq!(world.held(jobs), [2, 2, 2]);
    // So the first that goes on has nothing to keep for a while.
    for job in jobs {
        world.go_on(job);
    }
    world.train(&jobs, 10);
    world.rest("a");
    world.train(&["b", "c"], 31);
    assert_eq!((world.held_by("a"), world.lent_by("a")), (1, 1));
}

#[test]
fn servers_that_say_nothing_are_not_lent_and_one_that_leaves_brings_the_share_back() {
    let mut world = two();
    world.rest("a");
    world.train(&["b"], 20);
    for _ in 0..15 {
        world.pass(1);
        for index in 3..6 {
            let report = Report { cost: 1, busy_nanoseconds: 1, ..Report::default() };
            world.put(Input::Reported(Who::Server(id(index, 0)), report));
        }
        world.step("b");
    }
    assert_eq!(world.held(["a", "b"]), [3, 3]);
    world.train(&["b"], 2);
    assert_eq!((world.held(["a", "b"]), world.lent_by("a")), ([1, 5], 2));
    // Its node goes: the one that was kept is to end.
    world.mark(id(0, 0), Fate::Drains);
    world.train(&["b"], 2);
    assert_eq!(world.lent_by("a"), 0);
    assert_eq!(world.servers_of("a").len(), 2, "{}", world.view("a"));
}

#[test]
fn a_new_controller_leaves_lent_servers_where_they_are_until_it_sees_a_sign() {
    let mut world = two();
    world.rest("a");
    world.train(&["b"], 31);
    let before = (world.view("a"), world.view("b"));
    world.change_controller(2);
    world.train(&["b"], 1);
    // What it told of its last step the conductor tells again.
    world.step("a");
    world.train(&["b"], 1000);
    assert_eq!((world.view("a"), world.view("b")), before);
    assert_eq!(world.lent_by("a"), 2);
    world.change_controller(3);
    world.go_on("a");
    world.train(&["a", "b"], 3);
    assert_eq!((world.held(["a", "b"]), world.lent_by("a")), ([3, 3], 0));
    // The window has begun anew.
    world.rest("a");
    world.train(&["b"], 290);
    assert_eq!(world.held(["a", "b"]), [3, 3]);
    world.train(&["b"], 20);
    assert_eq!(world.held(["a", "b"]), [1, 5]);
}

#[test]
fn a_job_alone_in_its_pool_keeps_all_servers() {
    let mut world = World::new(1, 3);
    world.start_job("a", 1, false);
    world.train(&["a"], 10);
    let before = world.view("a");
    world.rest("a");
    world.live(2000);
    world.change_controller(1);
    world.live(2000);
    assert_eq!(world.view("a"), before);
    // Who lends has its share back when nobody else is there.
    let mut world = two();
    world.rest("a");
    world.train(&["b"], 31);
    world.finish("b");
    world.live(1);
    assert_eq!((world.held_by("a"), world.lent_by("a")), (6, 0));
}

#[test]
fn a_job_keeps_what_it_says_that_it_needs_and_lends_nothing_where_it_must_not() {
    for (keeps, reproducible, expected) in [
        (Some(2), false, [2, 4]),
        (Some(9), false, [3, 3]),
        (None, false, [3, 3]),
        (Some(1), true, [3, 3]),
    ] {
        let mut world = World::new(1, 6);
        (world.keeps, world.reproducible) = (keeps, reproducible);
        world.start_job("a", 1, false);
        (world.keeps, world.reproducible) = (Some(1), false);
        world.start_job("b", 1, false);
        world.train(&["a", "b"], 10);
        world.rest("a");
        world.train(&["b"], 100);
        assert_eq!(world.held(["a", "b"]), expected, "{keeps:?}, {reproducible}");
    }
    // Nor is such a job lent to: its slots do not depend on what others do.
    let mut world = World::new(1, 6);
    world.start_job("a", 1, false);
    world.reproducible = true;
    world.start_job("b", 1, false);
    world.train(&["a", "b"], 10);
    world.rest("a");
    world.train(&["b"], 100);
    assert_eq!((world.held(["a", "b"]), world.lent_by("a")), ([3, 3], 0));
}

#[test]
fn a_server_that_no_other_job_may_have_is_not_lent() {
    let mut world = World::new(1, 6);
    world.facts.cap = Some(4);
    world.tell_facts();
    world.start_job("a", 1, false);
    world.start_job("b", 1, false);
    world.train(&["a", "b"], 10);
    world.rest("a");
    world.train(&["b"], 100);
    assert_eq!((world.held(["a", "b"]), world.lent_by("a")), ([2, 4], 1));
}

#[test]
fn a_job_that_loses_what_it_has_kept_gets_its_share_back_and_lends_nothing_more_if_it_lacked_any() {
    let mut world = two();
    world.rest("a");
    world.train(&["b"], 31);
    world.kill(id(0, 0));
    world.lose("a", id(0, 0));
    world.train(&["b"], 2);
    assert_eq!((world.held(["a", "b"]), world.lent_by("a")), ([2, 3], 0));
    world.start_server(id(0, 1));
    world.train(&["b"], 299);
    assert_eq!(world.held(["a", "b"]), [3, 3]);
    world.train(&["b"], 2);
    assert_eq!(world.held(["a", "b"]), [1, 5]);
    // No header goes out that needs more memory than the servers have, so nobody computes anything.
    world.put(Input::Lacking(key("a")));
    world.train(&["b"], 2000);
    assert_eq!(world.held(["a", "b"]), [3, 3]);
}

#[test]
fn a_server_of_an_idle_job_that_is_to_end_waits_for_no_step() {
    let mut world = two();
    world.rest("a");
    world.train(&["b"], 20);
    world.terminate(id(1, 0));
    assert!(!world.is_drained(id(1, 0)), "a step may follow");
    world.train(&["b"], 11);
    assert!(world.is_drained(id(1, 0)));
    assert!(world.view("a").contains("D0.0") && !world.view("a").contains("D1.0"));
    assert_eq!(world.last("a").map(|it| it.slots.len()), Some(3), "{}", Who::Server(id(1, 0)));
}

#[test]
fn a_job_that_has_not_trained_yet_lends_nothing() {
    let mut world = World::new(1, 6);
    world.start_job("a", 1, false);
    // It loads its model, and another one comes.
    world.rest("a");
    world.start_job("b", 1, false);
    world.train(&["b"], 100);
    assert_eq!((world.held(["a", "b"]), world.lent_by("a")), ([3, 3], 0));
}

#[test]
fn the_last_server_of_an_idle_job_stays_until_it_has_another() {
    let mut world = two();
    world.rest("a");
    world.train(&["b"], 31);
    assert_eq!(world.held(["a", "b"]), [1, 5]);
    // The other one begins a step, and stays in it.
    world.go_on("b");
    world.resting.insert(key("b"), Rest::Within);
    world.mark(id(0, 0), Fate::Drains);
    world.live(60);
    let job = |world: &World| world.workers[&Who::Server(id(0, 0))].job.clone();
    assert_eq!(job(&world), Some(key("a")), "nobody else serves the job");
    world.go_on("b");
    world.train(&["b"], 2);
    assert_eq!(job(&world), None, "others do");
}

#[test]
fn a_job_that_lacked_servers_while_they_came_back_lends_nothing_more() {
    let mut world = two();
    world.rest("a");
    world.train(&["b"], 31);
    world.go_on("a");
    world.live(1);
    world.put(Input::Lacking(key("a")));
    world.train(&["a", "b"], 10);
    world.rest("a");
    world.train(&["b"], 400);
    assert_eq!(world.held(["a", "b"]), [3, 3]);
}
