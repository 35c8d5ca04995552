//! Clocks that go ahead or behind: of the leader before, of a node, of the API server.

use cadre_crds::contract::{ANNOTATION_DRAIN_SINCE, SERVER_CONTAINER};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::cluster::World;
use super::events::Event;
use super::rest;
use super::world::end;

const AHEAD: i64 = 7_200;

#[test]
fn a_drain_that_begins_in_the_time_to_come_is_late_after_its_own_time() {
    let mut world = World::new(3);
    rest(&mut world);
    world.pool.spec.replicas = 2;
    world.clock.second += AHEAD;
    world.reconcile(usize::MAX);
    // Another operator leads. Its clock is right, and the server does not hand over.
    world.clock.second -= AHEAD;
    let reports = world.reports.clone();
    world.happen(&Event::Takeover);
    (world.reports, world.is_complete) = (reports, true);
    let timeout = i64::from(world.pool.spec.drain.timeout_seconds);
    let goes = |world: &World| {
        world.pods.iter().filter(|it| it.metadata.deletion_timestamp.is_some()).count()
    };
    world.reconcile(usize::MAX);
    let since = |world: &World| {
        let notes = world.pods.iter().filter_map(|it| it.metadata.annotations.as_ref());
        let since = notes.filter_map(|it| it.get(ANNOTATION_DRAIN_SINCE)?.parse().ok());
        since.collect::<Vec<Timestamp>>()
    };
    assert_eq!(since(&world), [world.clock.now()]);
    world.clock.second += timeout - 1;
    world.reconcile(usize::MAX);
    assert_eq!(goes(&world), 0, "it has all of its time");
    world.clock.second += 1;
    world.reconcile(usize::MAX);
    assert_eq!(goes(&world), 1);
}

#[test]
fn a_slot_does_not_wait_for_the_clock_of_its_node() {
    let mut world = World::new(1);
    rest(&mut world);
    let mut ahead = world.clock.clone();
    ahead.second += AHEAD;
    end(&mut world.pods[0], SERVER_CONTAINER, 1, 3, &ahead);
    world.reports.clear();
    world.doing.clear();
    for _ in 0..300 {
        world.clock.second += 1;
        world.reconcile(usize::MAX);
    }
    assert!(world.pods.len() > 1, "it has a successor after five minutes at most");
}

#[test]
fn a_slot_pauses_for_as_long_whatever_the_clocks_of_its_node_and_of_the_api_server() {
    for (node, api) in [(0, 0), (AHEAD, AHEAD), (-AHEAD, -AHEAD), (AHEAD, 0), (-AHEAD, 0)] {
        let mut world = World::new(1);
        rest(&mut world);
        // The newest server fails as soon as it is made; the operator looks each second until it has a successor.
        let fails = |world: &mut World| {
            let mut clock = world.clock.clone();
            clock.second += node;
            let there = world.pods.len();
            let pod = world.pods.last_mut().expect("one");
            end(pod, SERVER_CONTAINER, 1, 3, &clock);
            clock.second += api - node;
            pod.metadata.creation_timestamp = Some(Time(clock.now()));
            let failed = pod.metadata.name.clone();
            world.reports.clear();
            world.doing.clear();
            for second in 0..400 {
                world.reconcile(usize::MAX);
                let newest = world.pods.last().and_then(|it| it.metadata.name.clone());
                if newest != failed && world.pods.len() >= there {
                    return second;
                }
                world.clock.second += 1;
                world.doing.clear();
            }
            panic!("it has no successor: {node} {api}")
        };
        fails(&mut world);
        assert_eq!(fails(&mut world), 20, "{node} {api}");
        assert_eq!(fails(&mut world), 40, "{node} {api}");
    }
}
