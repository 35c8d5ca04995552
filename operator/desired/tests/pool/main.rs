//! Pools: from any state to rest, with no server lost that had something to hand over.

mod automatic;
mod clocks;
mod cluster;
mod events;
mod nodes;
mod owned;
#[path = "../world/replicas.rs"]
mod replicas;
mod rollout;
mod told;
#[path = "../world/mod.rs"]
mod world;

use cadre_crds::UpdateType;
use cadre_crds::contract::{LABEL_REVISION, SERVER_CONTAINER};
use cadre_crds::validate::Refusal;
use cadre_desired::pool::decide;
use cadre_desired::{Action, Object, Settings};
use cluster::{World, image_of, name_requirements};
use events::{Event, events};
use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use proptest::prelude::*;
use serde_json::json;
use world::{end, name, on_node, set_condition, set_phase, settings};

/// Lets things calm down until all is tried that may be, and nothing changes any more.
fn settle(world: &mut World) {
    for _ in 0..400 {
        let before = (world.pods.clone(), world.pool.status.clone(), world.revisions.clone());
        // Longer than any pause.
        world.clock.second += 400;
        world.calm();
        world.reconcile(usize::MAX);
        if (&world.pods, &world.pool.status, &world.revisions) == (&before.0, &before.1, &before.2)
        {
            return;
        }
    }
    panic!("it never settles: {:#?}", decide(&world.observe(), &settings(), world.clock.now()));
}

/// Lets things calm down. Out: rounds until nothing was left to do.
fn rest(world: &mut World) -> usize {
    world.refused.clear();
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
        if !world.refused.is_empty() {
            settle(&mut world);
            prop_assert!(is_whole(&world) || says_what_is_refused(&world), "{:#?}", world);
        }
        rest(&mut world);
        prop_assert!(is_whole(&world), "{:#?}", world);
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
    fn a_deleted_pool_drains_and_is_gone(events in events(), takeover in any::<bool>()) {
        let mut world = World::new(4);
        for event in &events {
            world.happen(event);
        }
        rest(&mut world);
        world.pool.spec.replicas = 4;
        rest(&mut world);
        prop_assert!(world.pool.metadata.finalizers.is_some(), "it has servers that serve");
        world.happen(&Event::Delete);
        if takeover {
            world.reconcile(1);
            world.happen(&Event::Takeover);
            world.reconcile(usize::MAX);
            prop_assert!(!world.gone, "its servers serve");
        }
        rest(&mut world);
        prop_assert!(world.gone);
    }
}

#[test]
fn a_deleted_pool_waits_for_servers_that_come_back_to_a_new_leader_and_for_no_others() {
    // Servers that have not come back in time are not connected; those whose pods are gone never come.
    for is_in_time in [false, true] {
        let mut world = World::new(3);
        rest(&mut world);
        world.happen(&Event::Delete);
        world.happen(&Event::Takeover);
        for _ in 0..3 {
            world.reconcile(usize::MAX);
            assert!(!world.gone, "all of its servers may come back");
            let (decision, _) = decide(&world.observe(), &settings(), world.clock.now());
            let again = decision.again.expect("nothing else may lead to a look");
            assert!((1..=15).contains(&again), "it looks again after {again} s");
            world.clock.second += again;
        }
        world.doing.clear();
        if is_in_time {
            world.is_complete = true;
        } else {
            world.pods.clear();
        }
        world.reconcile(usize::MAX);
        assert!(world.gone, "{:#?}", world.pool.metadata);
    }
}

/// Whether all is as the spec says, or as who deletes servers for a new template has left it.
fn is_whole(world: &World) -> bool {
    let Some(status) = &world.pool.status else { return false };
    let spec = &world.pool.spec;
    let wanted = world.wanted_image();
    let new = world.pods.iter().filter(|it| image_of(it) == wanted).count();
    let is_kept = |it: &Pod| {
        let digest = label(&it.metadata);
        world.revisions.iter().filter(|it| label(&it.metadata) == digest).count() == 1
    };
    let servers = spec.replicas as usize;
    let is_updated = match spec.update_strategy.r#type {
        UpdateType::OnDelete => world.has_lost_revisions || world.pods.iter().all(is_kept),
        UpdateType::RollingUpdate => {
            let is_current = status.current_revision == status.update_revision;
            new == servers && world.revisions.len() == 1 && is_current
        }
    };
    let counts = [status.ready as usize, world.pods.len(), status.updated_replicas as usize];
    counts == [servers, servers, new] && is_updated
}

fn label(meta: &ObjectMeta) -> Option<&String> {
    meta.labels.as_ref()?.get(LABEL_REVISION)
}

/// Whether the first thing that the API server refuses is named.
fn says_what_is_refused(world: &World) -> bool {
    let mut conditions = world.pool.status.iter().flat_map(|it| &it.conditions);
    let degraded = conditions.rfind(|it| it.type_ == "Degraded");
    degraded.is_some_and(|it| {
        it.status == "True"
            && it.reason == "Forbidden"
            && world.refused.contains(it.message.as_str())
    })
}

/// The conditions that tools know of any kind.
fn for_tools(world: &World) -> Vec<String> {
    let conditions = world.pool.status.iter().flat_map(|it| &it.conditions);
    let known = ["Ready", "Stalled", "Reconciling"];
    let told = conditions.filter(|it| known.contains(&it.type_.as_str()));
    told.map(|it| format!("{} {} {}", it.type_, it.status, it.reason)).collect()
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
fn servers_without_a_template_are_as_the_chart_says_and_others_as_their_template_says() {
    let settings: Settings = serde_json::from_value(json!({
        "serverPullSecrets": [{"name": "registry"}],
        "serverTolerations": [{"key": "gpu", "operator": "Exists"}],
        "serverResources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "4Gi"}},
    }))
    .expect("good settings");
    let mut world = World::new(1);
    world.pool.spec.fabric.gpus_per_server = 2;
    let made = |world: &World| {
        let (decision, _) = decide(&world.observe(), &settings, world.clock.now());
        let pod = decision.actions.into_iter().find_map(|it| {
            let Action::Create(Object::Pod(pod)) = it else { return None };
            pod.spec
        });
        let pod = serde_json::to_value(pod.expect("a server")).expect("plain data");
        let resources = pod["containers"][0]["resources"].clone();
        (pod["imagePullSecrets"].clone(), pod["tolerations"].clone(), resources)
    };
    let limits = json!({"memory": "4Gi", "nvidia.com/gpu": "2"});
    let expected = json!({"limits": limits, "requests": {"memory": "2Gi"}});
    let (secrets, tolerations) = (json!([{"name": "registry"}]), &json!("gpu"));
    let (told, tolerated, resources) = made(&world);
    assert_eq!((told, &tolerated[0]["key"], resources), (secrets, tolerations, expected));
    world.happen(&Event::Template(1));
    world.pool.spec.fabric.gpus_per_server = 0;
    assert_eq!(made(&world), (json!(null), json!(null), json!(null)));
}

#[test]
fn the_budget_of_an_earlier_build_is_replaced() {
    let mut world = World::new(3);
    rest(&mut world);
    let spec = world.budget.as_mut().and_then(|it| it.spec.as_mut()).expect("a budget");
    spec.min_available = Some(IntOrString::Int(2));
    spec.max_unavailable = None;
    let pods = world.pods.clone();
    rest(&mut world);
    let spec = world.budget.as_ref().and_then(|it| it.spec.as_ref()).expect("a budget");
    assert_eq!(spec.max_unavailable, Some(IntOrString::Int(1)));
    assert_eq!((&spec.min_available, world.pods == pods), (&None, true));
}

#[test]
fn a_server_may_be_evicted_though_others_find_no_node() {
    let mut world = World::new(4);
    rest(&mut world);
    for pod in &mut world.pods[2..] {
        pod.spec.get_or_insert_default().node_name = None;
        set_phase(pod, "Pending", false);
        set_condition(pod, "PodScheduled", false);
    }
    let names: Vec<_> = world.pods[2..].iter().map(|it| name(&it.metadata)).collect();
    world.reports.retain(|it, _| !names.contains(it));
    world.done.clear();
    world.reconcile(usize::MAX);
    world.reconcile(usize::MAX);
    assert_eq!(world.evictions(), 1, "one of the two that serve");
    rest(&mut world);
    assert_eq!(world.evictions(), 1, "one of four");
}

#[test]
fn a_server_may_be_evicted_though_others_may_not_be_made() {
    let mut world = World::new(2);
    rest(&mut world);
    world.refused.insert("create Pod");
    world.pool.spec.replicas = 5;
    let look = |world: &mut World, seconds: i64| {
        world.done.clear();
        world.clock.second += seconds;
        world.reconcile(usize::MAX);
        world.evictions()
    };
    // A successor may have to wait for the quota of the one before.
    assert_eq!([0, 59].map(|it| look(&mut world, it)), [0, 0]);
    let (decision, _) = decide(&world.observe(), &settings(), world.clock.now());
    assert_eq!(decision.again, Some(1), "nothing else leads to a look");
    assert_eq!(look(&mut world, 1), 1, "one of the two that serve");
    world.happen(&Event::Evict(0));
    world.pods.retain(|it| it.metadata.deletion_timestamp.is_none());
    world.reports.retain(|it, _| *it == name(&world.pods[0].metadata));
    assert_eq!(look(&mut world, 1), 1, "that one has no successor either");
    world.refused.clear();
    rest(&mut world);
    assert_eq!(world.evictions(), 1, "one of five");
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
fn a_slot_that_fails_pauses_longer_each_time_and_leaves_its_nodes() {
    let mut world = World::new(1);
    rest(&mut world);
    let mut pauses = Vec::new();
    for at in [3, 3, 3, 4, 3, 4, 5] {
        let pod = world.pods.last_mut().expect("one server");
        on_node(pod, &format!("node-{at}"));
        end(pod, SERVER_CONTAINER, 1, 3, &world.clock);
        let failed = world.clock.second;
        let before = name(&pod.metadata);
        world.reports.clear();
        world.doing.clear();
        while world.pods.last().is_some_and(|it| name(&it.metadata) == before) {
            world.reconcile(usize::MAX);
            world.clock.second += 1;
        }
        pauses.push(world.clock.second - 1 - failed);
        world.reconcile(usize::MAX);
        world.pods.retain(|it| it.metadata.deletion_timestamp.is_none());
    }
    assert_eq!(pauses, [10, 20, 40, 80, 160, 300, 300]);
    let avoided = name_requirements(world.pods.last().expect("one server"));
    let node = |must, at: u32| (must, vec![format!("node-{at}")]);
    assert_eq!(avoided, [node(true, 5), node(false, 3), node(false, 4)], "the last one for sure");
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
