//! What nodes do to servers: many are cordoned at a time, one has too little memory. And what outlives a pool.

use cadre_crds::contract::{ANNOTATION_INCARNATION, SERVER_CONTAINER};
use k8s_openapi::api::core::v1::Pod;

use super::cluster::{World, is_ready, name_requirements};
use super::rest;
use super::world::{end, name, on_node, set_condition};

#[test]
fn a_cordon_of_all_nodes_takes_a_quarter_of_the_servers_until_successors_are_ready() {
    let mut world = World::new(8);
    rest(&mut world);
    for node in world.nodes.values_mut() {
        node.cordoned = true;
    }
    world.done.clear();
    // Each that leaves has nothing to hand over; no successor finds a node.
    for _ in 0..30 {
        world.clock.second += 1;
        for report in world.reports.values_mut().chain(world.doing.values_mut()) {
            report.drained = true;
        }
        world.reconcile(usize::MAX);
        world.pods.retain(|it| it.metadata.deletion_timestamp.is_none());
        let there: Vec<_> = world.pods.iter().map(|it| name(&it.metadata)).collect();
        world.reports.retain(|it, _| there.contains(it));
        world.doing.retain(|it, _| there.contains(it));
    }
    assert_eq!((world.pods.len(), world.pods.iter().filter(|it| is_ready(it)).count()), (8, 6));
    // New nodes come.
    for node in ["node-0", "node-1"] {
        world.nodes.get_mut(node).expect("made with six").cordoned = false;
    }
    rest(&mut world);
    let stays = |it: &Pod| {
        let node = it.spec.as_ref().and_then(|it| it.node_name.as_deref());
        node.is_some_and(|it| it == "node-0" || it == "node-1")
    };
    assert!(world.pods.iter().all(stays), "{:#?}", world.pods);
}

#[test]
fn a_server_that_its_node_puts_out_waits_longer_each_time_and_says_why() {
    for (beside, expected) in [("Evicted", [10, 20, 40, 80]), ("Terminated", [0; 4])] {
        let mut world = World::new(1);
        rest(&mut world);
        let mut pauses = Vec::new();
        for _ in expected {
            let clock = world.clock.clone();
            let pod = world.pods.last_mut().expect("one server");
            on_node(pod, "node-3");
            end(pod, SERVER_CONTAINER, 137, 3, &clock);
            set_condition(pod, "DisruptionTarget", true);
            let status = pod.status.as_mut().expect("it has ended");
            status.reason = Some(beside.to_owned());
            status.message = Some("The node was low on resource: memory.".to_owned());
            for said in status.conditions.iter_mut().flatten() {
                said.reason = Some("TerminationByKubelet".to_owned());
            }
            let before = name(&pod.metadata);
            world.reports.clear();
            world.doing.clear();
            world.done.clear();
            world.reconcile(usize::MAX);
            let status = world.pool.status.as_ref().expect("it was reported");
            let degraded = status.conditions.iter().find(|it| it.type_ == "Degraded");
            let told = degraded.map(|it| it.message.as_str()).unwrap_or_default();
            assert_eq!(
                told.ends_with("in a row; The node was low on resource: memory."),
                beside == "Evicted"
            );
            while world.pods.last().is_some_and(|it| name(&it.metadata) == before) {
                world.reconcile(usize::MAX);
                world.clock.second += 1;
            }
            pauses.push((world.clock.second - 1 - clock.second).max(0));
            world.reconcile(usize::MAX);
            world.pods.retain(|it| it.metadata.deletion_timestamp.is_none());
        }
        assert_eq!(pauses, expected, "{beside}");
        let avoided = name_requirements(world.pods.last().expect("one server"));
        assert_eq!(avoided.len(), usize::from(beside == "Evicted"), "{avoided:?}");
    }
}

#[test]
fn servers_of_a_pool_that_is_made_anew_are_newer_than_those_of_the_one_before() {
    let mut world = World::new(2);
    let mut newest = [0; 2];
    for seconds in [86_400, 3, 60] {
        rest(&mut world);
        let now: Vec<u32> = world.pods.iter().map(incarnation).collect();
        for (now, newest) in now.iter().zip(&mut newest) {
            assert!(now > newest, "{now} after {newest}");
            *newest = *now;
        }
        // Workers of a job outlive the pool, and remember its servers.
        let mut clock = world.clock.clone();
        clock.second += seconds;
        world = World::new(2);
        clock.born(&mut world.pool.metadata);
        world.clock = clock;
    }
}

fn incarnation(pod: &Pod) -> u32 {
    let notes = pod.metadata.annotations.as_ref().expect("made with some");
    notes[ANNOTATION_INCARNATION].parse().expect("a number")
}
