//! A new template: whom it reaches, how many at a time, and what servers are made from that are lost meanwhile.

use cadre_crds::contract::{ANNOTATION_DRAIN, LABEL_REVISION};
use cadre_desired::pool::decide;
use cadre_desired::{Action, Object};
use k8s_openapi::api::core::v1::Pod;
use proptest::prelude::*;
use serde_json::json;

use super::cluster::{World, image_of, is_present, is_ready};
use super::events::{Event, events};
use super::world::settings;
use super::{for_tools, rest, settle};

#[test]
fn another_operator_version_replaces_no_pod_and_another_template_one_at_a_time() {
    let mut world = World::new(4);
    rest(&mut world);
    let other = cadre_desired::Settings { server_image: "cadre:9".into(), ..settings() };
    let (decision, _) = decide(&world.observe(), &other, world.clock.now());
    assert_eq!(decision.actions, []);
    world.happen(&Event::Template(1));
    let mut least = 4;
    for _ in 0..60 {
        world.calm();
        world.reconcile(usize::MAX);
        let draining = |it: &&Pod| {
            let notes = it.metadata.annotations.as_ref();
            notes.is_some_and(|it| it.contains_key(ANNOTATION_DRAIN))
                || it.metadata.deletion_timestamp.is_some()
        };
        least = least.min(world.pods.iter().filter(|it| !draining(it)).count());
    }
    assert_eq!(least, 3);
    rest(&mut world);
    assert!(world.pods.iter().all(|it| image_of(it).as_deref() == Some("server:1")));
}

#[test]
fn a_lost_server_of_a_job_has_a_successor_of_its_build_under_another_operator() {
    let newer = cadre_desired::Settings { server_image: "cadre:9".into(), ..settings() };
    let check = |job: Option<u32>, change: fn(&mut World), expected: &str| {
        let mut world = World::new(3);
        world.job = job;
        rest(&mut world);
        change(&mut world);
        world.happen(&Event::Fail { pod: 1, ran: 600 });
        world.clock.second += 400;
        let (decision, _) = decide(&world.observe(), &newer, world.clock.now());
        let made = decision.actions.into_iter().find_map(|it| {
            let Action::Create(Object::Pod(pod)) = it else { return None };
            Some(pod)
        });
        assert_eq!(image_of(&made.expect("a successor")).as_deref(), Some(expected));
    };
    check(Some(0), |_| {}, &settings().server_image);
    check(None, |_| {}, "cadre:9");
    // What the user names counts, whoever works.
    check(Some(0), |it| it.happen(&Event::Template(2)), "server:2");
    // Servers that work were made from a template that is no more.
    let no_more = |it: &mut World| {
        it.happen(&Event::Template(2));
        rest(it);
        it.pool.spec.template = None;
    };
    check(Some(0), no_more, "cadre:9");
}

/// Pods that run carry these: a build that makes others of the same spec replaces all servers of all pools.
#[test]
fn the_same_spec_has_the_same_revision_in_every_build() {
    let made = [
        json!({"replicas": 3, "drain": {"timeoutSeconds": 5}}),
        json!({"fabric": {"gpusPerServer": 8}}),
        json!({"fabric": {"rdmaResources": ["rdma/ib"], "minBandwidthMbps": 100}}),
        json!({"placement": {"levels": ["leaf"], "colocateWith": ["j"]}}),
        json!({"placement": {"colocation": "Required"}}),
        json!({"template": {"spec": {"containers": [{"name": "server", "image": "i"}]}}}),
    ]
    .map(|spec| {
        let mut world = World::new(1);
        world.pool.spec = serde_json::from_value(spec).expect("a spec");
        world.pool.spec.replicas = 1;
        world.reconcile(usize::MAX);
        world.pods[0].metadata.labels.clone().unwrap_or_default()[LABEL_REVISION].clone()
    });
    let expected = [
        "f9a1085a4c09a4a1",
        "01aa5113bddaba86",
        "2d1c7ae42c100cde",
        "461dfde3f5ac4a87",
        "1b7c06fcae2030d0",
        "6a92ba92e7a8b572",
    ];
    assert_eq!(made, expected);
}

#[test]
fn servers_of_a_job_of_another_build_are_replaced_when_that_job_has_ended() {
    let serving = |world: &World| world.reports.values().filter(|it| it.serves).count();
    let mut world = World::new(4);
    world.job = Some(0);
    rest(&mut world);
    // Of the same build: one after the other, under the job.
    world.happen(&Event::Template(2));
    let mut least = 4;
    for _ in 0..60 {
        world.calm();
        world.reconcile(usize::MAX);
        world.calm();
        least = least.min(serving(&world));
    }
    assert_eq!(least, 3);
    assert!(world.pods.iter().all(|it| image_of(it).as_deref() == Some("server:2")));
    // Of another: the first one shows it.
    world.happen(&Event::Template(1));
    rest(&mut world);
    assert_eq!(serving(&world), 3);
    assert_eq!(for_tools(&world), ["Ready False WaitsForJobs", "Reconciling True WaitsForJobs"]);
    world.job = None;
    rest(&mut world);
    assert!(world.pods.iter().all(|it| image_of(it).as_deref() == Some("server:1")));
    assert_eq!(for_tools(&world), ["Ready True Ready"]);
}

/// Servers of an image that are there.
fn of(world: &World, image: u8) -> usize {
    let image = Some(format!("server:{image}"));
    world.pods.iter().filter(|it| is_present(it) && image_of(it) == image).count()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn a_template_that_never_becomes_ready_takes_one_server_however_many_may_be_missing(
        replicas in 1_u32..9,
        most in 1_u32..4,
        events in events(),
    ) {
        let mut world = World::new(replicas);
        world.happen(&Event::Template(0));
        world.happen(&Event::Strategy(Some(most)));
        rest(&mut world);
        world.broken = Some(1);
        world.happen(&Event::Template(1));
        let changes = |it: &&Event| match it {
            Event::Replicas(_) | Event::Template(_) | Event::Strategy(_) | Event::Delete => false,
            // Nobody can come back with what is no more.
            Event::Lose(what) => *what != 2,
            Event::Fail { .. }
            | Event::Evict(_)
            | Event::Vanish(_)
            | Event::Takeover
            | Event::Refuse(_)
            | Event::Allow
            | Event::Cordon { .. }
            | Event::Slow(_)
            | Event::Reconcile(_)
            | Event::Calm
            | Event::Wait(_) => true,
        };
        for event in events.iter().filter(changes) {
            world.happen(event);
            prop_assert!(of(&world, 1) <= 1, "{:#?}", world.pods);
        }
        world.refused.clear();
        settle(&mut world);
        prop_assert_eq!((of(&world, 1), of(&world, 0)), (1, replicas as usize - 1));
        let status = world.pool.status.clone().expect("it was reported");
        prop_assert_eq!((status.ready, status.updated_replicas), (replicas - 1, 1));
        prop_assert_ne!(status.current_revision, status.update_revision);
        world.happen(&Event::Template(2));
        rest(&mut world);
        prop_assert_eq!((of(&world, 2), world.revisions.len()), (replicas as usize, 1));
    }
}

#[test]
fn who_deletes_servers_decides_when_a_template_reaches_them_if_the_pool_says_so() {
    let mut world = World::new(4);
    world.happen(&Event::Template(0));
    world.happen(&Event::Strategy(None));
    rest(&mut world);
    let pods = world.pods.clone();
    world.happen(&Event::Template(1));
    rest(&mut world);
    assert_eq!(world.pods, pods, "nobody is replaced");
    assert_eq!(for_tools(&world), ["Ready True Ready"]);
    let said = |world: &World| {
        let status = world.pool.status.clone().expect("it was reported");
        let progressing = status.conditions.into_iter().find(|it| it.type_ == "Progressing");
        let progressing = progressing.expect("it is always said");
        (status.updated_replicas, progressing.reason, progressing.message)
    };
    let (updated, reason, message) = said(&world);
    assert_eq!((updated, reason.as_str()), (0, "WaitsForDeletes"));
    assert!(message.starts_with("4 servers are of a former template; "), "{message}");
    world.happen(&Event::Vanish(2));
    world.happen(&Event::Fail { pod: 0, ran: 600 });
    rest(&mut world);
    assert_eq!((of(&world, 0), of(&world, 1)), (2, 2));
    world.happen(&Event::Strategy(Some(1)));
    rest(&mut world);
    assert_eq!((of(&world, 1), said(&world).1.as_str()), (4, "Settled"));
}

#[test]
fn several_servers_are_replaced_at_a_time_if_the_pool_says_so_after_the_first_one_is_ready() {
    let check = |job: Option<u32>, most: u32| {
        let mut world = World::new(13);
        world.happen(&Event::Template(0));
        world.happen(&Event::Strategy(Some(most)));
        world.job = job;
        rest(&mut world);
        world.happen(&Event::Template(2));
        let mut missing = Vec::new();
        for rounds in 1..100 {
            world.reconcile(usize::MAX);
            missing.push(13 - world.pods.iter().filter(|it| stays(it)).count());
            world.calm();
            if of(&world, 2) == 13 && world.pods.iter().all(is_ready) {
                return (missing[0], missing.into_iter().max(), rounds);
            }
        }
        panic!("it never ends: {:#?}", world.pods);
    };
    let [one, three] = [1, 3].map(|it| check(None, it));
    assert_eq!((one.0, one.1, three.0, three.1), (1, Some(1), 1, Some(3)));
    assert!(three.2 < one.2 / 2, "{} rounds, {} one by one", three.2, one.2);
    let of_job = check(Some(0), 3);
    assert_eq!((of_job.0, of_job.1), (1, Some(3)));
}

#[test]
fn servers_that_are_lost_together_show_one_of_another_build_what_it_is() {
    let mut world = World::new(6);
    world.happen(&Event::Template(0));
    world.happen(&Event::Strategy(Some(3)));
    world.job = Some(0);
    rest(&mut world);
    world.happen(&Event::Template(1));
    for _ in 0..3 {
        world.happen(&Event::Vanish(0));
    }
    for lost in 0..4 {
        world.reconcile(usize::MAX);
        assert!(of(&world, 1) <= 1, "{:#?}", world.pods);
        world.happen(&Event::Vanish(lost));
        // Servers become ready before they report.
        let (reports, doing) = (world.reports.clone(), world.doing.clone());
        world.calm();
        (world.reports, world.doing) = (reports, doing);
    }
    rest(&mut world);
    assert_eq!((of(&world, 0), of(&world, 1)), (5, 1), "the job goes on with the others");
}

#[test]
fn a_pool_that_comes_back_from_nothing_is_made_from_what_it_says_now() {
    let mut world = World::new(4);
    world.happen(&Event::Template(0));
    rest(&mut world);
    world.happen(&Event::Replicas(0));
    rest(&mut world);
    // In one edit.
    world.happen(&Event::Replicas(4));
    world.happen(&Event::Template(1));
    world.reconcile(usize::MAX);
    let made = |world: &World| (of(world, 0), of(world, 1), world.revisions.len());
    assert_eq!(made(&world), (0, 4, 1));
    // None of them is ready, and those that are lost come back as they were.
    world.happen(&Event::Vanish(0));
    world.happen(&Event::Vanish(0));
    world.reconcile(usize::MAX);
    assert_eq!(made(&world), (0, 4, 1));
    // All are lost at once, and nobody has looked: what they were made from was good.
    rest(&mut world);
    world.pods.clear();
    world.happen(&Event::Template(2));
    world.reconcile(usize::MAX);
    assert_eq!((of(&world, 1), of(&world, 2)), (3, 1));
}

fn stays(pod: &Pod) -> bool {
    let notes = pod.metadata.annotations.as_ref();
    let drains = notes.is_some_and(|it| it.contains_key(ANNOTATION_DRAIN));
    is_ready(pod) && !drains
}

#[test]
fn a_lost_server_has_a_successor_of_its_template_while_that_waits_for_a_job() {
    let mut world = World::new(4);
    world.happen(&Event::Template(0));
    world.job = Some(0);
    rest(&mut world);
    // Of another build: the first one shows it.
    world.happen(&Event::Template(1));
    rest(&mut world);
    assert_eq!((of(&world, 0), of(&world, 1)), (3, 1));
    for lost in 0..4 {
        world.happen(&Event::Vanish(lost));
        rest(&mut world);
        assert!(of(&world, 0) >= 3, "{:#?}", world.pods);
    }
    world.job = None;
    rest(&mut world);
    assert_eq!(of(&world, 1), 4);
}

#[test]
fn what_was_kept_by_a_later_build_or_cannot_be_read_is_in_nobodys_way() {
    let mut world = World::new(2);
    world.happen(&Event::Template(0));
    rest(&mut world);
    let data = world.revisions[0].data.as_mut().expect("it has some");
    data.0["spec"]["template"] = json!({"spec": {"containers": "none"}});
    world.broken = Some(1);
    world.happen(&Event::Template(1));
    settle(&mut world);
    world.happen(&Event::Vanish(1));
    world.happen(&Event::Vanish(0));
    settle(&mut world);
    assert_eq!((of(&world, 1), world.pods.len()), (2, 2), "there is no other");
    world.broken = None;
    rest(&mut world);
    assert_eq!(world.revisions.len(), 1);
}
