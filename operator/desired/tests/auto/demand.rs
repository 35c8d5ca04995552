//! What counts as demand besides busy servers: jobs that wait for their first server, and trainers that wait for attention.

use cadre_desired::pool::scale::Demand;
use cadre_views::{JobKey, Unserved};
use proptest::prelude::*;

use super::replay::{Replay, Trainers};

fn needs(servers: u32) -> Demand {
    Demand { servers: Some(servers), ..Demand::default() }
}

#[test]
fn a_job_that_waits_gets_what_it_needs_at_once_and_then_what_it_uses() {
    let mut replay = Replay::new(0, 64, 3);
    (replay.has_jobs, replay.demand) = (true, needs(6));
    assert_eq!(replay.run(0, 600), [0], "there is no job");
    assert_eq!(replay.run(1_400, 300), [6], "it has planned for six");
    assert_eq!(replay.run(1_400, 1_200).last(), Some(&3), "two and a bit are busy");
    assert_eq!(replay.run(0, 900).last(), Some(&0));

    // No more than there may be.
    let mut replay = Replay::new(0, 4, 3);
    (replay.has_jobs, replay.demand) = (true, needs(6));
    assert_eq!(replay.run(1_400, 60), [4]);

    // No more than one job may be given.
    let mut replay = Replay::new(0, 64, 3);
    (replay.has_jobs, replay.demand) = (true, needs(6));
    replay.pool.spec.access.max_servers_per_job = Some(5);
    assert_eq!(replay.run(1_400, 60), [5]);
}

/// With fewer, one of them would be without, and ask for what it needs again and again.
#[test]
fn each_job_keeps_a_server_however_little_it_computes() {
    let mut replay = Replay::new(0, 64, 3);
    (replay.has_jobs, replay.jobs, replay.demand) = (true, 2, needs(6));
    replay.run(200, 1_800);
    assert_eq!(replay.run(200, 3_600), [2]);
}

#[test]
fn a_job_whose_trainers_have_no_nodes_asks_for_one_server() {
    let mut replay = Replay::new(0, 64, 3);
    (replay.has_jobs, replay.demand, replay.trainers) = (true, needs(6), Trainers::WithoutNodes);
    replay.fits = 0;
    assert_eq!(replay.run(1_400, 60), [1]);
    replay.trainers = Trainers::Running;
    assert_eq!(replay.run(1_400, 60), [6]);
}

#[test]
fn a_job_that_cannot_start_holds_no_server() {
    let mut replay = Replay::new(0, 64, 3);
    (replay.has_jobs, replay.demand, replay.trainers) = (true, needs(6), Trainers::Stuck);
    assert_eq!(replay.run(1_400, 60), [0]);
    replay.trainers = Trainers::Running;
    assert_eq!(replay.run(1_400, 60), [6]);
}

/// As the control service says it of the only job, whose trainers are there.
fn unserved(replay: &mut Replay, why: Option<Unserved>) {
    let job = JobKey { namespace: String::new(), name: "j0".into(), attempt: 1 };
    replay.unserved = why.map(|it| (job, it)).into_iter().collect();
}

#[test]
fn a_job_of_another_build_gives_its_servers_up_and_asks_again_when_they_become_others() {
    let mut replay = Replay::new(0, 64, 3);
    (replay.has_jobs, replay.demand, replay.serves) = (true, needs(6), false);
    assert_eq!(replay.run(1_400, 60), [6]);
    let other = Some(Unserved::OtherBuild { data_version: 4 });
    unserved(&mut replay, other);
    assert_eq!(replay.run(1_400, 900), [6, 0], "no server works for it");
    assert_eq!(replay.run(1_400, 7_200), [0], "and none will");
    // A new leader tries it once.
    replay.take_over();
    unserved(&mut replay, None);
    assert_eq!(replay.run(1_400, 60), [6]);
    unserved(&mut replay, other);
    assert_eq!(replay.run(1_400, 900), [6, 0]);
    assert_eq!(replay.run(1_400, 7_200), [0]);
    // Another image of the chart may be of its build.
    replay.settings.server_image = "cadre:another".into();
    assert_eq!(replay.run(1_400, 900), [6, 0]);
    assert_eq!(replay.run(1_400, 7_200), [0]);
    // So may be another template.
    replay.make("server:another");
    assert_eq!(replay.run(1_400, 60), [6]);
    unserved(&mut replay, None);
    replay.serves = true;
    assert_eq!(replay.run(1_400, 1_200).last(), Some(&3), "and then what it uses");
}

#[test]
fn a_job_whose_trainers_do_not_come_asks_for_servers_when_they_do() {
    for why in [Unserved::NotCome, Unserved::NotWhole { come: 1, trainers: 2 }] {
        let mut replay = Replay::new(0, 64, 3);
        (replay.has_jobs, replay.demand, replay.serves) = (true, needs(6), false);
        assert_eq!(replay.run(1_400, 300), [6]);
        unserved(&mut replay, Some(why));
        assert_eq!(replay.run(1_400, 900), [6, 0], "{why:?}");
        unserved(&mut replay, None);
        assert_eq!(replay.run(1_400, 60), [6]);
    }
}

#[test]
fn a_new_leader_does_not_take_jobs_for_waiting_whose_servers_are_on_their_way_back() {
    let mut replay = Replay::new(0, 64, 3);
    (replay.has_jobs, replay.demand) = (true, needs(6));
    replay.run(700, 1_800);
    let few = u32::try_from(replay.servers.len()).expect("a few");
    assert!(few < 3, "{few}");
    replay.take_over();
    // None of them is connected.
    let since = std::mem::replace(&mut replay.servers, vec![replay.second; few as usize]);
    replay.is_complete = false;
    assert_eq!(replay.run(700, 30), [few]);
    (replay.servers, replay.is_complete) = (since, true);
    assert_eq!(replay.run(700, 600), [few]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn trainers_that_wait_get_more_servers_and_twice_as_many_at_most(
        load in 700_u64..14_000,
        wait in 0_u32..1_000_000,
        noise in any::<u64>(),
    ) {
        let settled = |wait| {
            let mut replay = Replay::new(2, 64, noise);
            replay.has_jobs = true;
            replay.demand = Demand { servers: None, exposed_wait_ppm: wait };
            replay.run(load, 3_600);
            let way = replay.run(load, 3_600);
            (way[way.len() - 1], way.len())
        };
        let (without, _) = settled(0);
        let (with, changes) = settled(wait);
        prop_assert!(changes <= 2, "it settles");
        // The edges of the band are 0.8 and 1.1 of the target apart.
        prop_assert!(with * 11 >= without * 8 && with <= without * 3 + 1, "{without} without, {with} with {wait}");
        // Work and the wait that counts: a tenth above the target, and the noise.
        let counted = |servers: u32| {
            let each = load * 1_000 / u64::from(servers);
            each + each.min(u64::from(wait))
        };
        prop_assert!(counted(with) <= 820_000, "{} with {with} servers", counted(with));
        if counted(without) > 820_000 {
            prop_assert!(with > without, "{without} without, {with} with {wait}");
        }
    }
}
