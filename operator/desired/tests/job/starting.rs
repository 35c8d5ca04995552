//! What is told of trainers that do not come to train.

use super::cluster::World;
use super::world::{init_waits, set_condition, set_up_since};

/// Reason and message of `Running`, as the next look tells them.
fn told(world: &mut World) -> (String, String) {
    world.done.clear();
    world.reconcile(usize::MAX);
    let running = world.condition("Running").expect("it is always said");
    (running.reason, running.message)
}

#[test]
fn a_pod_that_does_not_start_is_named_with_the_cause() {
    let mut world = World::new(false);
    world.reconcile(usize::MAX);
    world.job_controller();
    let clock = world.clock.clone();
    set_up_since(&mut world.pods[1], 0, &clock);
    let starting = ("Starting".to_owned(), "0 of 2 pods are ready".to_owned());
    assert_eq!(told(&mut world), starting);
    assert_eq!(world.again(), Some(60), "nothing else leads to a look");
    world.clock.second += 59;
    assert_eq!(told(&mut world), starting);
    world.clock.second += 1;
    let (reason, message) = told(&mut world);
    assert_eq!(reason, "NotStarting");
    let expected = "0 of 2 pods are ready; pod j-1-1: for 60 s its node has not got its volumes and its network ready";
    assert!(message.starts_with(expected), "{message}");
    // Whoever pulls an image for long has both.
    set_condition(&mut world.pods[1], "PodReadyToStartContainers", true);
    assert_eq!((told(&mut world), world.again()), (starting.clone(), None));

    init_waits(&mut world.pods[0], "PodInitializing");
    assert_eq!(told(&mut world), starting);
    init_waits(&mut world.pods[0], "ImagePullBackOff");
    let expected = "0 of 2 pods are ready; pod j-1-0: container prepare: ImagePullBackOff words of the kubelet";
    assert_eq!(told(&mut world), ("NotStarting".to_owned(), expected.to_owned()));
}
