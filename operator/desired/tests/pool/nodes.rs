//! What nodes do to servers: many are cordoned at a time, one has too little memory. And what outlives a pool.

use cadre_crds::contract::ANNOTATION_INCARNATION;
use k8s_openapi::api::core::v1::Pod;

use super::cluster::World;
use super::rest;

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
