//! What is told of trainers that do not come to train.

use std::collections::BTreeSet;

use cadre_desired::Failure;
use cadre_desired::job::{Arrived, decide};
use cadre_views::Unserved;

use super::cluster::World;
use super::world::{init_waits, set_condition, set_phase, set_up_since, settings, since};

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

/// All pods of the newest attempt are ready since now, and numbered as the Job controller does it.
fn ready(world: &mut World) {
    let clock = world.clock.clone();
    for (index, pod) in world.pods.iter_mut().enumerate() {
        let labels = pod.metadata.labels.get_or_insert_default();
        let index = (index % 2).to_string();
        labels.insert("batch.kubernetes.io/job-completion-index".into(), index);
        set_phase(pod, "Running", true);
        since(pod, "Ready", 0, &clock);
    }
}

#[test]
fn trainers_that_run_and_do_not_join_are_told_and_who_has_joined_once_is_not_asked_again() {
    let mut world = World::new(false);
    world.job.spec.procs_per_node = 2;
    world.reconcile(usize::MAX);
    world.job_controller();
    ready(&mut world);
    let running = |text: &str| ("Running".to_owned(), format!("2 of 2 pods are ready{text}"));
    assert_eq!((told(&mut world), world.again()), (running(""), None), "nobody knows");

    let joined =
        |ranks: &[u32]| Some(Arrived { attempt: 1, ranks: ranks.iter().copied().collect() });
    world.joined = Some(Arrived { attempt: 7, ranks: BTreeSet::from([0, 1, 2, 3]) });
    assert_eq!(told(&mut world), running(", 0 have joined"), "those of another attempt");
    world.joined = joined(&[0, 1, 2]);
    assert_eq!(told(&mut world), running(", 1 have joined"), "one of two ranks is missing");
    assert_eq!(world.again(), Some(600), "nothing else leads to a look");
    world.clock.second += 599;
    assert_eq!(told(&mut world), running(", 1 have joined"));
    world.clock.second += 1;
    let (reason, message) = told(&mut world);
    assert_eq!((reason.as_str(), world.is_true("Running")), ("NotJoined", false));
    let expected = "2 of 2 pods are ready, 1 have joined; pod j-1-1 is ready for 600 s and has not; let it reach";
    assert!(message.starts_with(expected), "{message}");
    assert!(message.contains("ca.crt"), "{message}");
    world.joined = joined(&[0, 1, 2, 3]);
    assert_eq!((told(&mut world), world.again()), (running(""), None));
    // A trainer that ends before its peers leaves the service.
    world.joined = joined(&[2, 3]);
    world.end_trainer(0, 0);
    assert_eq!(told(&mut world), running(""));
}

#[test]
fn an_attempt_whose_pods_do_not_come_says_why_none_is_made() {
    let mut world = World::new(false);
    world.reconcile(usize::MAX);
    let lacks = |world: &World| decide(&world.observe(), &settings(), world.clock.now()).lacks_pods;
    assert_eq!((lacks(&world), world.again()), (None, Some(5)), "its controller has just begun");
    world.clock.second += 5;
    assert_eq!(lacks(&world).as_deref(), Some("j-1"));
    let message = "try a pod of Job j-1: exceeded quota: team".to_owned();
    world.refused_pod = Some(Failure { reason: "Forbidden", message });
    let expected = "0 of 2 pods are made; try a pod of Job j-1: exceeded quota: team";
    assert_eq!(told(&mut world), ("Forbidden".to_owned(), expected.to_owned()));
    // Half of them fit.
    world.job_controller();
    let second = world.pods.pop().expect("two");
    let expected = expected.replace('0', "1");
    assert_eq!(lacks(&world).as_deref(), Some("j-1"));
    assert_eq!(told(&mut world), ("Forbidden".to_owned(), expected));
    world.pods.push(second);
    assert_eq!(lacks(&world), None);
    assert_eq!(told(&mut world).0, "Starting");
    // One that waits in a queue gets none.
    let mut world = World::new(true);
    world.reconcile(usize::MAX);
    world.clock.second += 9;
    assert_eq!((lacks(&world), world.again()), (None, None));
}

#[test]
fn an_attempt_that_no_server_works_for_says_why() {
    let mut world = World::new(false);
    world.reconcile(usize::MAX);
    let mut degraded = |unserved| {
        world.unserved = unserved;
        world.reconcile(usize::MAX);
        let mut conditions = world.job.status.iter().flat_map(|it| &it.conditions);
        let found = conditions.find(|it| it.type_ == "Degraded").expect("it is always said");
        (found.reason.clone(), found.message.clone())
    };
    assert_eq!(degraded(None).0, "AsItShould");
    let (reason, message) = degraded(Some((1, Unserved::OtherBuild { data_version: 4 })));
    let expected = "no server of the pool has data version 4, that of the job, which waits; give";
    assert!(reason == "OtherBuild" && message.starts_with(expected), "{message}");
    let (reason, message) = degraded(Some((1, Unserved::NotWhole { come: 1, trainers: 2 })));
    assert!(reason == "NotWhole" && message.starts_with("1 of 2 trainers of the job"), "{message}");
    let another = degraded(Some((2, Unserved::OtherBuild { data_version: 4 })));
    assert_eq!(another.0, "AsItShould", "of another attempt");
}
