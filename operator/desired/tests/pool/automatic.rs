//! Mode `Auto` in a whole cluster: the number stands in `spec.replicas`, and neither others who write it nor a leader or a
//! status that is lost take a server away.

use std::collections::BTreeSet;

use cadre_crds::contract::{ANNOTATION_DRAIN, LABEL_SLOT};
use cadre_crds::{AttentionPoolStatus, ScaleDecision, Scaling, ScalingMode};
use cadre_desired::SCALER;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;

use super::cluster::World;
use super::events::Event;
use super::replicas::{Way, write};
use super::rest;

const FORCED: Way = Way::Apply { is_forced: true };

fn auto(min: u32, max: u32) -> Scaling {
    Scaling { mode: ScalingMode::Auto, min, max: Some(max), ..Scaling::default() }
}

fn settle(world: &mut World) {
    for _ in 0..6 {
        world.calm();
        world.reconcile(usize::MAX);
    }
}

fn told(world: &World) -> AttentionPoolStatus {
    world.pool.status.clone().expect("it was reported")
}

fn drains(pod: &Pod) -> bool {
    pod.metadata.annotations.as_ref().is_some_and(|it| it.contains_key(ANNOTATION_DRAIN))
}

#[test]
fn one_server_at_a_time_may_be_evicted_whoever_decides_how_many_there_are() {
    for (written, automatic, expected) in
        [(4, None, 1), (10, Some(3), 1), (2, Some(6), 1), (0, None, 0), (1, None, 1)]
    {
        let mut world = World::new(written);
        if let Some(number) = automatic {
            world.pool.spec.scaling = auto(0, 20);
            write(&mut world.pool, SCALER, FORCED, Some(number));
        }
        settle(&mut world);
        assert_eq!(told(&world).ready, automatic.unwrap_or(written));
        assert_eq!(world.evictions(), expected, "{written} written, {automatic:?} decided");
        let first = world.budget.clone();
        world.pool.spec.replicas += 1;
        settle(&mut world);
        assert_eq!(world.budget, first, "the budget is the same for any number");
    }
}

#[test]
fn another_mode_goes_on_with_the_number_that_mode_auto_wrote() {
    let mut world = World::new(2);
    let mut scaling = |scaling| {
        world.pool.spec.scaling = scaling;
        settle(&mut world);
        let status = told(&world);
        let told = status.last_scale_decision.map(|it| (it.from, it.to));
        (world.pool.spec.replicas, status.ready, told)
    };
    assert_eq!(scaling(auto(4, 20)), (4, 4, Some((2, 4))));
    assert_eq!(scaling(Scaling::default()), (4, 4, None));
    assert_eq!(scaling(auto(0, 3)), (3, 3, Some((4, 3))));
}

#[test]
fn a_pool_that_lost_its_status_keeps_its_servers() {
    let mut world = World::new(4);
    rest(&mut world);
    world.pool.spec.scaling = auto(0, 8);
    write(&mut world.pool, "kubectl-create", Way::Update, Some(1));
    // As if it came back from a backup, to an operator that has just begun.
    world.pool.status = None;
    world.happen(&Event::Takeover);
    for _ in 0..3 {
        world.reconcile(usize::MAX);
        world.calm();
    }
    let status = told(&world);
    assert_eq!((status.desired, status.draining, status.ready), (4, 0, 4));
    assert_eq!(world.pool.spec.replicas, 4);
}

#[test]
fn a_server_that_is_lost_while_no_operator_leads_is_still_wanted() {
    for lost in [Event::Evict(1), Event::Fail { pod: 1, ran: 90 }] {
        let mut world = World::new(4);
        rest(&mut world);
        world.pool.spec.scaling = auto(0, 8);
        settle(&mut world);
        write(&mut world.pool, "kubectl", Way::Scale, Some(1));
        world.happen(&lost);
        world.happen(&Event::Takeover);
        world.reconcile(usize::MAX);
        assert_eq!(world.pool.spec.replicas, 4, "{lost:?}");
    }
}

#[test]
fn a_pool_of_the_build_that_kept_its_number_in_the_status_goes_on_without_a_drain() {
    // The servers that it decided on are there; spec.replicas is what the user wrote once.
    let mut world = World::new(6);
    rest(&mut world);
    world.pool.spec.scaling = auto(0, 8);
    write(&mut world.pool, "kubectl-client-side-apply", Way::Update, Some(2));
    let reason = "a job waits for a server".to_owned();
    let decision = ScaleDecision {
        time: Time(Timestamp::UNIX_EPOCH),
        from: 2,
        to: 6,
        utilization_percent: 70,
        reason,
    };
    world.pool.status.as_mut().expect("it was reported").last_scale_decision = Some(decision);
    let pods = world.pods.clone();
    world.happen(&Event::Takeover);
    settle(&mut world);
    assert_eq!((world.pool.spec.replicas, told(&world).ready), (6, 6));
    assert_eq!(world.pods, pods);
}

#[test]
fn a_number_that_the_api_server_refuses_counts_for_nothing() {
    let mut world = World::new(2);
    rest(&mut world);
    world.refused.insert("scale");
    world.pool.spec.scaling = auto(4, 8);
    world.reconcile(usize::MAX);
    let status = told(&world);
    let degraded = status.conditions.iter().find(|it| it.type_ == "Degraded");
    assert_eq!(degraded.map(|it| it.message.as_str()), Some("scale"));
    assert_eq!(status.last_scale_decision, None, "nothing was changed");
    rest(&mut world);
    let decision = told(&world).last_scale_decision.expect("it was changed");
    assert_eq!((decision.from, decision.to, world.pool.spec.replicas), (2, 4, 4));
}

/// What happens to a pool of mode `Auto`.
#[derive(Clone, Debug)]
enum Happens {
    Written(&'static str, Way, Option<u32>),
    Other(Event),
    StatusLost,
    ScaleRefused,
}

fn happens() -> impl Strategy<Value = Happens> {
    let way = prop_oneof![
        Just(("kubectl", Way::Scale)),
        Just(("kubectl-client-side-apply", Way::Update)),
        Just(("flux", FORCED)),
        Just(("kubectl", Way::Apply { is_forced: false })),
    ];
    let written = (way, prop::option::weighted(0.7, 0_u32..8)).prop_map(|((who, way), number)| {
        Happens::Written(who, way, number.or(Some(0).filter(|_| way == Way::Scale)))
    });
    let other = prop_oneof![
        2 => Just(Event::Takeover),
        2 => any::<usize>().prop_map(Event::Evict),
        1 => (any::<usize>(), 0_i64..120).prop_map(|(pod, ran)| Event::Fail { pod, ran }),
        6 => (0_usize..3).prop_map(Event::Reconcile),
        4 => Just(Event::Reconcile(usize::MAX)),
        4 => Just(Event::Calm),
        1 => (0_i64..4_000).prop_map(Event::Wait),
        1 => Just(Event::Allow),
    ];
    prop_oneof![
        4 => written,
        8 => other.prop_map(Happens::Other),
        1 => Just(Happens::StatusLost),
        1 => Just(Happens::ScaleRefused),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn whoever_writes_and_whoever_leads_no_server_is_told_to_leave(
        events in prop::collection::vec(happens(), 0..60),
    ) {
        let mut world = World::new(4);
        world.pool.spec.scaling = auto(1, 8);
        // Its load is for just as many servers as there are.
        (world.job, world.busy_ppm) = (Some(0), 650_000);
        rest(&mut world);
        for event in &events {
            match event {
                Happens::Written(manager, way, number) => {
                    write(&mut world.pool, manager, *way, *number);
                    world.done.clear();
                }
                Happens::Other(event) => world.happen(event),
                Happens::StatusLost => world.pool.status = None,
                Happens::ScaleRefused => drop(world.refused.insert("scale")),
            }
            prop_assert!(!world.pods.iter().any(drains), "{event:?}: {:#?}", world.pool);
        }
        // Nobody writes for an hour.
        world.clock.second += 3_600;
        rest(&mut world);
        let slot = |it: &Pod| it.metadata.labels.as_ref()?.get(LABEL_SLOT).cloned();
        let slots: BTreeSet<_> = world.pods.iter().filter_map(slot).collect();
        let status = told(&world);
        prop_assert_eq!((status.ready as usize, status.draining), (slots.len(), 0));
        prop_assert_eq!(world.pool.spec.replicas as usize, slots.len());
        let entries = world.pool.metadata.managed_fields.iter().flatten();
        let mut writers = entries.filter_map(|it| it.manager.as_deref());
        prop_assert!(writers.any(|it| it == SCALER));
    }
}
