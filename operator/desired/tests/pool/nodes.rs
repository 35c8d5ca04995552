//! What nodes do to servers: many are cordoned at a time, one has too little memory. And what outlives a pool.

use cadre_crds::contract::ANNOTATION_INCARNATION;
use k8s_openapi::api::core::v1::Pod;

use super::cluster::{World, is_ready};
use super::rest;
use super::world::name;

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
