//! Pools: from any state to rest, with no server lost that had something to hand over.

mod cluster;
#[path = "../world/mod.rs"]
mod world;

use cadre_crds::contract::{ANNOTATION_DRAIN, LABEL_REVISION, SERVER_CONTAINER};
use cadre_crds::validate::Refusal;
use cadre_crds::{ScaleDecision, ScalingMode};
use cadre_desired::pool::{Link, Report, decide, status};
use cadre_desired::{Action, Applied, Failure, Object};
use cluster::{Event, World, events};
use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;
use serde_json::json;
use world::{end, name, on_node, set_phase, settings};

/// Lets things calm down. Out: rounds until nothing was left to do.
fn rest(world: &mut World) -> usize {
    for round in 0..400 {
        world.calm();
        if world.reconcile(usize::MAX) && world.reconcile(usize::MAX) {
            let before = world.pool.status.clone();
            let pods = world.pods.clone();
            // Longer than any pause.
            world.clock.second += 400;
            world.calm();
            if world.reconcile(usize::MAX) && world.pods == pods && world.pool.status == before {
                return round;
            }
        }
    }
    panic!("no rest: {:#?}", decide(&world.observe(), &settings(), world.clock.now()));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn any_state_comes_to_rest_with_the_wanted_servers(replicas in 0_u32..9, events in events()) {
        let mut world = World::new(replicas);
        for event in &events {
            world.happen(event);
        }
        rest(&mut world);
        let status = world.pool.status.clone().expect("it was reported");
        prop_assert_eq!(status.ready, world.pool.spec.replicas);
        prop_assert_eq!(status.replicas, world.pool.spec.replicas);
        prop_assert_eq!((status.draining, status.quarantined), (0, 0));
        prop_assert_eq!(world.pods.len(), world.pool.spec.replicas as usize);
        for condition in &status.conditions {
            if condition.type_ == "Degraded" || condition.type_ == "Progressing" {
                prop_assert_eq!(&condition.status, "False", "{:?}", condition);
            }
        }
        prop_assert_eq!(for_tools(&world), ["Ready True Ready"]);
        for _ in 0..20 {
            world.calm();
            prop_assert!(world.reconcile(usize::MAX), "rest stays rest");
            prop_assert_eq!(world.pool.status.as_ref(), Some(&status), "and writes nothing");
        }
    }

    #[test]
    fn a_deleted_pool_drains_and_is_gone(events in events()) {
        let mut world = World::new(4);
        for event in &events {
            world.happen(event);
        }
        rest(&mut world);
        world.pool.spec.replicas = 4;
        rest(&mut world);
        prop_assert!(world.pool.metadata.finalizers.is_some(), "it has servers that serve");
        world.happen(&Event::Delete);
        rest(&mut world);
        prop_assert!(world.gone);
    }
}

/// The conditions that tools know of any kind.
fn for_tools(world: &World) -> Vec<String> {
    let conditions = world.pool.status.iter().flat_map(|it| &it.conditions);
    let known = ["Ready", "Stalled", "Reconciling"];
    let told = conditions.filter(|it| known.contains(&it.type_.as_str()));
    told.map(|it| format!("{} {} {}", it.type_, it.status, it.reason)).collect()
}

#[test]
fn tools_are_told_whether_a_pool_comes_is_there_or_waits_for_somebody() {
    let mut world = World::new(2);
    world.reconcile(usize::MAX);
    assert_eq!(for_tools(&world), ["Ready False Starting", "Reconciling True Starting"]);
    rest(&mut world);
    assert_eq!(for_tools(&world), ["Ready True Ready"]);
    let look = |world: &World, reason| {
        let failure = Failure { reason, message: "words of the API server".into() };
        let mut world = world.clone();
        let applied = Applied::new(world.observe(), Some(failure));
        world.pool.status = Some(status(&applied, &settings(), world.clock.now()));
        for_tools(&world)
    };
    assert_eq!(look(&world, "Refused"), ["Ready False Refused", "Stalled True Refused"]);
    // A quota may have room again.
    assert_eq!(look(&world, "Forbidden"), ["Ready False Forbidden"]);
    world.pool.spec.replicas = 3;
    world.reconcile(usize::MAX);
    assert_eq!(look(&world, "Forbidden"), ["Ready False Forbidden", "Reconciling True Starting"]);
}

#[test]
fn one_server_at_a_time_may_be_evicted_whoever_decides_how_many_there_are() {
    let decided = |from: u32, to: u32| ScaleDecision {
        time: Time(Timestamp::UNIX_EPOCH),
        from,
        to,
        utilization_percent: 70,
        reason: "a test".into(),
    };
    for (written, auto, expected) in
        [(4, None, 1), (10, Some(3), 1), (2, Some(6), 1), (0, None, 0), (1, None, 1)]
    {
        let mut world = World::new(written);
        if let Some(to) = auto {
            world.pool.spec.scaling.mode = ScalingMode::Auto;
            world.pool.spec.scaling.max = Some(20);
            world.memory.decision = Some(decided(written, to));
        }
        for _ in 0..6 {
            world.calm();
            world.reconcile(usize::MAX);
        }
        let ready = world.pool.status.as_ref().map(|it| it.ready);
        assert_eq!(ready, Some(auto.unwrap_or(written)));
        assert_eq!(world.evictions(), expected, "{written} written, {auto:?} decided");
    }
}

#[test]
fn a_pool_that_cannot_be_read_keeps_its_servers_says_why_and_can_be_deleted() {
    let mut world = World::new(3);
    rest(&mut world);
    let pods = world.pods.clone();
    // What is left of it when the part that cannot be read is left out.
    world.pool.spec.template = Some(PodTemplateSpec::default());
    world.unreadable = Some(Refusal {
        field: "spec.template".into(),
        problem: "cannot be read".into(),
        remedy: "correct it".into(),
    });
    rest(&mut world);
    assert_eq!(world.pods, pods);
    let status = world.pool.status.clone().expect("it was reported");
    let degraded = status.conditions.iter().find(|it| it.type_ == "Degraded");
    let told = degraded.map(|it| (it.reason.as_str(), it.message.as_str()));
    assert_eq!(told, Some(("Invalid", "spec.template cannot be read; correct it")));
    assert_eq!(for_tools(&world), ["Ready False Invalid", "Stalled True Invalid"]);
    assert_eq!((status.ready, status.registered), (3, 3));
    world.happen(&Event::Delete);
    rest(&mut world);
    assert!(world.gone, "its servers drain as those of any other");
}

#[test]
fn the_budget_of_an_earlier_build_is_replaced() {
    let mut world = World::new(3);
    rest(&mut world);
    let spec = world.budget.as_mut().and_then(|it| it.spec.as_mut()).expect("a budget");
    spec.min_available = None;
    spec.max_unavailable = Some(IntOrString::Int(1));
    let pods = world.pods.clone();
    rest(&mut world);
    let spec = world.budget.as_ref().and_then(|it| it.spec.as_ref()).expect("a budget");
    assert_eq!(spec.min_available, Some(IntOrString::Int(2)));
    assert_eq!((&spec.max_unavailable, world.pods == pods), (&None, true));
}

#[test]
fn victims_leave_in_the_order_of_the_page() {
    let mut world = World::new(6);
    rest(&mut world);
    // The trainer is on node-0: leaf 0 holds nodes 0 and 1, block 0 nodes 0 to 3.
    let place = [0, 1, 2, 4, 0, 5];
    for (pod, node) in world.pods.iter_mut().zip(place) {
        on_node(pod, &format!("node-{node}"));
    }
    world.pods[5].spec.as_mut().expect("made with one").node_name = None;
    set_phase(&mut world.pods[4], "Running", false);
    let names: Vec<_> = world.pods.iter().map(|it| name(&it.metadata)).collect();
    world.reports.get_mut(&names[0]).expect("it serves").slow_factor_percent = 180;
    for (at, name) in names.iter().enumerate() {
        if let Some(report) = world.reports.get_mut(name) {
            report.serves = at != 2;
        }
    }
    let mut order = Vec::new();
    while world.pool.spec.replicas > 0 {
        world.pool.spec.replicas -= 1;
        let (decision, _) = decide(&world.observe(), &settings(), world.clock.now());
        let drained = decision.actions.into_iter().find_map(|it| {
            let Action::Drain { pod, .. } = it else { return None };
            Some(pod.name)
        });
        let drained = drained.expect("one too many");
        order.push(names.iter().position(|it| *it == drained).expect("one of them"));
        world.pods.retain(|it| name(&it.metadata) != drained);
    }
    // Unscheduled, not ready, without a job, slowest, farthest (another block), then the near one.
    assert_eq!(order, [5, 4, 2, 0, 3, 1]);
}

#[test]
fn a_slot_that_fails_pauses_longer_each_time_and_leaves_its_node() {
    let mut world = World::new(1);
    rest(&mut world);
    let mut pauses = Vec::new();
    for _ in 0..7 {
        let pod = world.pods.last_mut().expect("one server");
        on_node(pod, "node-3");
        end(pod, SERVER_CONTAINER, 1, 3, &world.clock);
        let failed = world.clock.second;
        let before = name(&pod.metadata);
        world.reports.clear();
        while world.pods.last().is_some_and(|it| name(&it.metadata) == before) {
            world.reconcile(usize::MAX);
            world.clock.second += 1;
        }
        pauses.push(world.clock.second - 1 - failed);
        world.reconcile(usize::MAX);
        world.pods.retain(|it| it.metadata.deletion_timestamp.is_none());
    }
    assert_eq!(pauses, [10, 20, 40, 80, 160, 300, 300]);
    let spec = world.pods.last().and_then(|it| it.spec.clone()).expect("one server");
    let text = serde_json::to_string(&spec.affinity).expect("plain data");
    assert!(text.contains(r#""operator":"NotIn","values":["node-3"]"#), "{text}");
}

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
    let image = |it: &Pod| it.spec.as_ref().and_then(|it| it.containers[0].image.clone());
    assert!(world.pods.iter().all(|it| image(it).as_deref() == Some("server:1")));
}

#[test]
fn a_lost_server_of_a_job_has_a_successor_of_its_build_under_another_operator() {
    let image = |it: &Pod| it.spec.as_ref().and_then(|it| it.containers[0].image.clone());
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
        assert_eq!(image(&made.expect("a successor")).as_deref(), Some(expected));
    };
    check(Some(0), |_| {}, &settings().server_image);
    check(None, |_| {}, "cadre:9");
    // What the user names counts, whoever works.
    check(Some(0), |it| it.happen(&Event::Template(2)), "server:2");
    // Those that work were made from a template that is no more.
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
    let image = |it: &Pod| it.spec.as_ref().and_then(|it| it.containers[0].image.clone());
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
    assert!(world.pods.iter().all(|it| image(it).as_deref() == Some("server:2")));
    // Of another: the first one shows it.
    world.happen(&Event::Template(1));
    rest(&mut world);
    assert_eq!(serving(&world), 3);
    assert_eq!(for_tools(&world), ["Ready False WaitsForJobs", "Reconciling True WaitsForJobs"]);
    world.job = None;
    rest(&mut world);
    assert!(world.pods.iter().all(|it| image(it).as_deref() == Some("server:1")));
    assert_eq!(for_tools(&world), ["Ready True Ready"]);
}

#[test]
fn measured_links_are_told_by_the_worst() {
    let link = |mbps, is_tcp| Some(Link { mbps, trainer: 1, is_tcp });
    for (least, rdma, one, other, expected) in [
        (None, false, link(90_000, true), link(80_000, true), "Near"),
        (Some(50_000), false, link(90_000, true), link(49_123, true), "SlowLink"),
        (Some(50_000), false, link(90_000, true), None, "Near"),
        (None, true, link(90_000, false), link(80_000, true), "Tcp"),
        (None, true, link(90_000, false), link(80_000, false), "Near"),
        (None, false, link(90_000, true), link(0, true), "NotReached"),
    ] {
        let mut world = World::new(2);
        rest(&mut world);
        world.pool.spec.fabric.min_bandwidth_mbps = least;
        world.pool.spec.fabric.rdma_resources = vec!["rdma/ib".to_owned(); usize::from(rdma)];
        let names: Vec<_> = world.pods.iter().map(|it| name(&it.metadata)).collect();
        for (pod, link) in names.iter().zip([one, other]) {
            world.reports.insert(pod.clone(), Report { link, ..Report::default() });
        }
        let mut observed = world.observe();
        // A trainer on each server's node.
        observed.trainers.clone_from(&observed.pods);
        let status = status(&Applied::new(observed, None), &settings(), world.clock.now());
        let placement = status.conditions.iter().find(|it| it.type_ == "PlacementSatisfied");
        let placement = placement.expect("it is always said");
        assert_eq!(placement.reason, expected, "{}", placement.message);
        if expected == "SlowLink" {
            let end = "reaches trainer 1 with 49000 Mbit/s, spec.fabric.minBandwidthMbps is 50000";
            assert!(placement.message.ends_with(end), "{}", placement.message);
        }
    }
}

#[test]
fn a_large_pool_is_made_in_parts_and_one_look_leads_to_the_next() {
    let mut world = World::new(600);
    let mut parts = Vec::new();
    while world.pods.len() < 600 {
        let (decision, _) = decide(&world.observe(), &settings(), world.clock.now());
        let before = world.pods.len();
        assert!(!world.reconcile(usize::MAX), "{before} of 600 servers and nothing to do");
        parts.push(world.pods.len() - before);
        assert!(world.pods.len() == 600 || decision.again.is_some(), "nobody looks again");
    }
    assert!(parts.iter().all(|it| *it <= 250), "{parts:?}");
}
