//! What a pool's status tells: for tools, of who holds which server, of measured links.

use std::collections::BTreeMap;

use cadre_desired::pool::{Link, Observed, Report, decide, status};
use cadre_desired::{Applied, Failure};
use cadre_views::JobKey;

use super::cluster::World;
use super::events::Event;
use super::world::{end, init_waits, name, on_node, set_phase, set_up_since, settings, since};
use super::{for_tools, rest};

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
fn who_holds_which_server_is_told_with_the_time_since_when_whoever_leads() {
    let mut world = World::new(3);
    world.job = Some(0);
    rest(&mut world);
    let told = |world: &World| {
        let holders = world.pool.status.iter().flat_map(|it| it.holders.clone());
        holders.map(|it| (it.name, it.since.0.as_second(), it.servers)).collect::<Vec<_>>()
    };
    let first = told(&world);
    let [(job, since, servers)] = &first[..] else { panic!("{first:?}") };
    assert_eq!((job.as_str(), servers.len()), ("j", 3));
    // Another leader: who is back and who is awaited holds as before.
    world.happen(&Event::Takeover);
    world.reconcile(usize::MAX);
    assert_eq!(told(&world), first);
    // One that is lost has a successor, which begins anew.
    rest(&mut world);
    world.happen(&Event::Vanish(0));
    rest(&mut world);
    let both = told(&world);
    let times: Vec<_> = both.iter().map(|it| (it.1 > *since, it.2.len())).collect();
    assert_eq!(times, [(false, 2), (true, 1)], "{both:?}");
    // The pool's job is over.
    world.job = None;
    rest(&mut world);
    assert_eq!(told(&world), []);
}

#[test]
fn what_a_job_lends_is_told_once_with_the_servers_that_it_has_had_longest() {
    let mut world = World::new(3);
    world.job = Some(0);
    rest(&mut world);
    world.happen(&Event::Vanish(0));
    rest(&mut world);
    let told = |world: &World| {
        let holders = world.pool.status.iter().flat_map(|it| it.holders.clone());
        holders.map(|it| (it.servers.len(), it.lent)).collect::<Vec<_>>()
    };
    assert_eq!(told(&world), [(2, None), (1, None)]);
    let job = |name: &str| JobKey { namespace: "n".into(), name: name.into(), attempt: 1 };
    world.lent = BTreeMap::from([(job("j"), 2), (job("of another name"), 1)]);
    rest(&mut world);
    assert_eq!(told(&world), [(2, Some(2)), (1, None)]);
}

#[test]
fn a_pool_at_the_edge_of_balance_does_not_change_its_mind_at_each_look() {
    let mut world = World::new(2);
    rest(&mut world);
    let names: Vec<_> = world.pods.iter().map(|it| name(&it.metadata)).collect();
    let mut told = Vec::new();
    for other in [900_000, 740_000, 600_000, 740_000, 900_000, 740_000] {
        for (pod, busy) in names.iter().zip([1_000_000, other]) {
            let report = Report { busy_ppm: Some(busy), ..Report::default() };
            world.reports.insert(pod.clone(), report);
        }
        world.reconcile(usize::MAX);
        let conditions = world.pool.status.iter().flat_map(|it| &it.conditions);
        let balanced = conditions.filter(|it| it.type_ == "Balanced").map(|it| it.reason.clone());
        told.extend(balanced);
    }
    let [yes, no] = ["Balanced", "Imbalanced"];
    assert_eq!(told, [yes, yes, no, no, yes, yes]);
}

#[test]
fn a_trainer_that_has_ended_and_stays_for_its_logs_is_nobody_to_be_near_to() {
    let mut world = World::new(2);
    rest(&mut world);
    let mut observed = world.observe();
    let told = |observed: &Observed| {
        let status = status(&Applied::new(observed.clone(), None), &settings(), world.clock.now());
        let mut said = status.conditions.into_iter();
        said.find(|it| it.type_ == "PlacementSatisfied").map(|it| it.reason).unwrap_or_default()
    };
    assert_ne!(told(&observed), "NoTrainer");
    let mut ended = observed.trainers[0].as_ref().clone();
    end(&mut ended, "trainer", 1, 5, &world.clock);
    observed.trainers = vec![ended.into()];
    assert_eq!(told(&observed), "NoTrainer");
}

#[test]
fn trainers_in_place_are_those_that_the_control_service_counts_also_under_a_new_leader() {
    let mut world = World::new(0);
    let mut observed = world.observe();
    // Its trainer is ready, which says nothing.
    for (complete, counted, expected) in [
        (true, 0, (0, "NoTrainer")),
        (true, 3, (3, "Serving")),
        (false, 1, (3, "Serving")),
        (true, 1, (1, "Serving")),
    ] {
        observed.pool.status.clone_from(&world.pool.status);
        observed.reports_complete = complete;
        observed.in_place = counted;
        let status = status(&Applied::new(observed.clone(), None), &settings(), world.clock.now());
        let said = status.conditions.iter().find(|it| it.type_ == "Available");
        let reason = said.map(|it| it.reason.as_str()).unwrap_or_default();
        assert_eq!((status.in_place_servers, reason), expected, "{complete} {counted}");
        world.pool.status = Some(status);
    }
}

#[test]
fn measured_links_are_told_by_the_worst() {
    let link = |mbps, is_tcp| {
        let why = if is_tcp { "it offers no UCX".to_owned() } else { String::new() };
        Some(Link { mbps, trainer: 1, is_tcp, why })
    };
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
            let paths = BTreeMap::from([("ucx".to_owned(), 2), ("shm".to_owned(), 1)]);
            world.reports.insert(pod.clone(), Report { link, paths, ..Report::default() });
        }
        let mut observed = world.observe();
        // A trainer on each server's node.
        observed.trainers.clone_from(&observed.pods);
        let status = status(&Applied::new(observed, None), &settings(), world.clock.now());
        let placement = status.conditions.iter().find(|it| it.type_ == "PlacementSatisfied");
        let placement = placement.expect("it is always said");
        assert_eq!(placement.reason, expected, "{}", placement.message);
        let end = match expected {
            "SlowLink" => {
                "reaches trainer 1 with 49000 Mbit/s, spec.fabric.minBandwidthMbps is 50000"
            }
            "Tcp" => {
                "over TCP with 80000 Mbit/s although spec.fabric.rdmaResources are asked for: it offers no UCX"
            }
            "Near" => {
                "2 of 2 servers are near to a trainer; rows come by shm (2 pairs), ucx (4 pairs)"
            }
            _ => "allow traffic between pods of the pool and its jobs",
        };
        assert!(placement.message.ends_with(end), "{}", placement.message);
    }
}

/// Reason and message of `Degraded`, as the next look tells them.
fn told(world: &mut World) -> (String, String) {
    world.done.clear();
    world.reconcile(usize::MAX);
    let mut conditions = world.pool.status.iter().flat_map(|it| &it.conditions);
    let degraded = conditions.find(|it| it.type_ == "Degraded").expect("it is always said");
    (degraded.reason.clone(), degraded.message.clone())
}

#[test]
fn a_server_that_runs_and_does_not_join_is_named_with_what_to_do() {
    let mut world = World::new(2);
    rest(&mut world);
    let clock = world.clock.clone();
    for pod in &mut world.pods {
        set_phase(pod, "Running", true);
        since(pod, "Ready", 0, &clock);
    }
    let pod = name(&world.pods[1].metadata);
    let report = world.reports.remove(&pod).expect("it has joined");
    assert_eq!(told(&mut world).0, "AsItShould");
    let (decision, _) = decide(&world.observe(), &settings(), world.clock.now());
    assert_eq!(decision.again, Some(30), "nothing else leads to a look");
    world.clock.second += 30;
    world.is_complete = false;
    assert_eq!(told(&mut world).0, "AsItShould", "it may come back to a new leader");
    world.is_complete = true;
    let (reason, message) = told(&mut world);
    let expected = format!("pod {pod}: it is ready and has not joined for 30 s; let it reach");
    assert!(reason == "NotJoined" && message.starts_with(&expected), "{message}");
    world.reports.insert(pod.clone(), report);
    assert_eq!(told(&mut world).0, "AsItShould");
    // One that loses its connection has as long to come back.
    world.reports.remove(&pod);
    world.lost.insert(pod, world.clock.now());
    world.clock.second += 29;
    assert_eq!(told(&mut world).0, "AsItShould");
    world.clock.second += 1;
    assert_eq!(told(&mut world).0, "NotJoined");
}

#[test]
fn a_server_that_does_not_start_is_named_with_the_cause() {
    let mut world = World::new(1);
    world.reconcile(usize::MAX);
    on_node(&mut world.pods[0], "node-0");
    let clock = world.clock.clone();
    set_up_since(&mut world.pods[0], 0, &clock);
    assert_eq!(told(&mut world).0, "AsItShould");
    let (decision, _) = decide(&world.observe(), &settings(), world.clock.now());
    assert_eq!(decision.again, Some(60), "nothing else leads to a look");
    world.clock.second += 60;
    let (reason, message) = told(&mut world);
    let pod = name(&world.pods[0].metadata);
    let expected = format!("pod {pod}: for 60 s its node has not got");
    assert!(reason == "NotStarting" && message.starts_with(&expected), "{message}");
    set_phase(&mut world.pods[0], "Running", false);
    assert_eq!(told(&mut world).0, "AsItShould", "it runs");
    set_phase(&mut world.pods[0], "Pending", false);
    init_waits(&mut world.pods[0], "CreateContainerConfigError");
    let expected =
        format!("pod {pod}: container prepare: CreateContainerConfigError words of the kubelet");
    assert_eq!(told(&mut world), ("NotStarting".to_owned(), expected));
}
