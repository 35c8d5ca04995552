//! Mode `Auto` replayed against loads: it finds a number and stays, follows a change, shrinks late, goes to 0 and comes
//! back, and spends a day hardly more than who knows the day before.

mod demand;
mod others;
mod replay;
#[path = "../world/replicas.rs"]
mod replicas;

use proptest::prelude::*;
use replay::{LOOK, Replay, START};

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn constant_load_changes_the_number_for_a_while_and_then_never(
        replicas in 1_u32..40,
        load in 0_u64..40_000,
        noise in any::<u64>(),
    ) {
        let mut replay = Replay::new(replicas, 64, noise);
        replay.run(load, 1_800);
        let settled = replay.run(load, 7_200);
        // At the very edge noise may change the number once more, late, up or down; then it is well inside.
        prop_assert!(settled.len() <= 2, "{settled:?} at {load} thousandths");
        // Busy for about the target, 70 %: never above a sixth beyond it, and not twice what is needed.
        let servers = u64::from(settled[settled.len() - 1]);
        prop_assert!(load * 100 <= servers * 82_000 || servers == 64, "{servers} for {load}");
        prop_assert!(servers <= (load * 2 / 700).max(1) + 1, "{servers} for {load}");
    }

    #[test]
    fn it_never_swings(load in 0_u64..40_000, noise in any::<u64>()) {
        let mut replay = Replay::new(4, 64, noise);
        let way = replay.run(load, 3_600);
        let rises = way.windows(2).filter(|it| it[1] > it[0]).count();
        let falls = way.windows(2).filter(|it| it[1] < it[0]).count();
        prop_assert!(rises == 0 || falls <= 1, "{:?} at {} thousandths", way, load);
    }
}

/// Most servers of a day's pool, the window in which fewer must have sufficed, and how long a rise takes: two looks, a
/// third one until it is asked for, and the start of a server.
const MOST: u32 = 64;
const WINDOW: i64 = 300;
const REACTION: i64 = 3 * LOOK + START;
/// Looks of six hours.
const DAY: usize = 6 * 3600 / LOOK as usize;

/// A job of a day: its first look, how many, and its load in thousandths of a server.
fn jobs() -> impl Strategy<Value = Vec<(usize, usize, u64)>> {
    let job = (0..DAY, 40_usize..480, 300_u64..12_000);
    prop::collection::vec(job, 4..24)
}

/// Servers that a schedule has which knows all loads: they are there when they are needed, and are kept as long as `Auto`
/// has to keep them.
fn omniscient(loads: &[u64], fits: usize) -> Vec<usize> {
    // 70 % busy is the target.
    let need = |load: &u64| usize::try_from(load.div_ceil(700)).unwrap_or(fits).min(fits);
    let need: Vec<_> = loads.iter().map(need).collect();
    let (before, after) = ((WINDOW / LOOK) as usize, (START as usize).div_ceil(LOOK as usize));
    let around = |at: usize| &need[at.saturating_sub(before)..(at + after + 1).min(need.len())];
    (0..need.len()).map(|at| around(at).iter().copied().max().unwrap_or(0)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn a_day_costs_hardly_more_than_who_knows_it_before_and_never_swings(
        jobs in jobs(),
        fits in prop_oneof![3 => Just(MOST as usize), 1 => 8_usize..40],
        takeovers in prop::collection::btree_set(0..DAY, 0..3),
        // Two numbers of others: three within an hour are left alone, and the load with them.
        others in prop::collection::vec((0..DAY, others::other(), 0_usize..64), 0..3),
        noise in any::<u64>(),
    ) {
        let at = |look: usize| {
            let there = jobs.iter().filter(|(from, looks, _)| (*from..from + looks).contains(&look));
            // More than the most servers can bear tells nothing of `Auto`.
            there.map(|it| it.2).sum::<u64>().min(700 * u64::from(MOST))
        };
        let loads: Vec<u64> = (0..DAY).map(at).collect();
        let mut replay = Replay::new(0, MOST, noise);
        (replay.fits, replay.has_jobs) = (fits, true);
        let best = omniscient(&loads, fits);
        let (mut spent, mut lacked) = (0, 0);
        let mut changes: Vec<(i64, bool)> = Vec::new();
        for (look, &load) in loads.iter().enumerate() {
            if takeovers.contains(&look) {
                replay.take_over();
            }
            let before = replay.servers.len();
            // No more than there are; of more the day would cost more.
            for (_, (manager, way), number) in others.iter().filter(|it| it.0 == look) {
                let number = u32::try_from(number % (before + 1)).expect("a few");
                replay.write(manager, *way, Some(number).filter(|it| it % 4 > 0));
            }
            let after = replay.look(load) as usize;
            if after != before {
                changes.push((replay.second, after > before));
            }
            spent += after.min(fits);
            // Who knows the day has as many servers as fit, too.
            let bears = |servers: usize| servers as u64 * 1_000 >= load;
            lacked += i64::from(!bears(replay.serving()) && bears(best[look]));
        }
        prop_assert_eq!(replay.drained, 0, "nobody leaves whom the number still counts");
        let known: usize = best.iter().sum();
        prop_assert!(spent * 100 <= known * 110, "{spent} looks of a server, {known} would do");
        let rises = changes.iter().filter(|it| it.1).count() as i64;
        prop_assert!(lacked * LOOK <= rises * REACTION, "{lacked} looks lack some, {rises} rises");
        for (last, (now, _)) in changes.iter().enumerate() {
            let recent: Vec<_> = changes[..=last].iter().filter(|it| it.0 + WINDOW > *now).collect();
            let turns = recent.windows(2).filter(|it| it[0].1 != it[1].1).count();
            prop_assert!(turns <= 1, "{recent:?}");
        }
        let idle = loads.iter().rev().take_while(|it| **it == 0).count();
        // A new leader waits for a window of its own.
        let led = takeovers.last().map_or(DAY, |it| DAY - it);
        let idle = idle.min(led) as i64 * LOOK;
        prop_assert!(idle < 2 * WINDOW || replay.servers.is_empty(), "idle for {idle} s");
    }
}

#[test]
fn a_pool_goes_to_nothing_when_its_jobs_are_gone_and_comes_back() {
    let mut replay = Replay::new(4, 64, 3);
    replay.has_jobs = true;
    assert_eq!(replay.run(0, 240), [4]);
    assert_eq!(replay.run(0, 240).last(), Some(&0), "nobody reports load, since nobody has a job");
    assert_eq!(replay.run(0, 7_200), [0]);
    assert_eq!(replay.run(2_000, 15), [1], "a job waits for a server");
    assert_eq!(replay.run(2_000, 1_200).last(), Some(&3));
}

#[test]
fn while_a_server_that_works_is_silent_the_number_stays() {
    for load in [100, 9_000] {
        let mut replay = Replay::new(8, 64, 9);
        (replay.has_jobs, replay.silent) = (true, Some(3));
        assert_eq!(replay.run(load, 3_600), [8], "its part of {load} is not known");
    }
}

#[test]
fn servers_that_find_no_node_are_not_taken_for_idle() {
    let mut replay = Replay::new(8, 64, 5);
    (replay.has_jobs, replay.fits) = (true, 2);
    assert_eq!(replay.run(9_000, 3_600), [8], "two are busy, six wait for a node");
    replay.fits = 8;
    assert!(replay.run(9_000, 3_600).last().is_some_and(|it| *it >= 12), "and now it grows");
}

#[test]
fn more_load_is_followed_in_minutes_and_less_only_after_the_window() {
    let mut replay = Replay::new(2, 64, 7);
    replay.run(1_400, 1_800);
    assert_eq!(replay.written, [2], "two servers at 70 %, as the manifest said");
    let up = replay.run(14_000, 600);
    assert!((19..=22).contains(up.last().expect("some look")), "{up:?}");
    let first = replay.run(1_400, 240);
    assert_eq!(first, up[up.len() - 1..], "the window is 300 s");
    let down = replay.run(1_400, 900);
    assert!((2..=3).contains(down.last().expect("some look")), "{down:?}");
}

#[test]
fn without_reports_the_number_stays_while_a_job_is_there() {
    for (has_jobs, expected) in [(true, 3), (false, 0)] {
        let mut replay = Replay::new(3, 8, 1);
        replay.has_jobs = has_jobs;
        let numbers = (0..100).map(|_| {
            replay.servers.clear();
            replay.look(100)
        });
        let numbers: Vec<_> = numbers.collect();
        assert!(numbers.iter().take(20).all(|it| *it == 3), "the window is 300 s: {numbers:?}");
        assert_eq!(numbers.last(), Some(&expected), "{has_jobs}");
    }
}

#[test]
fn a_time_in_which_a_server_was_silent_does_not_count_as_one_of_little_load() {
    let mut replay = Replay::new(8, 64, 9);
    replay.has_jobs = true;
    assert_eq!(replay.run(5_600, 900), [8]);
    replay.silent = Some(3);
    assert_eq!(replay.run(5_600, 900), [8]);
    replay.silent = None;
    assert_eq!(replay.run(1_400, 240), [8], "the window begins when it is heard again");
    assert!(replay.run(1_400, 240).last().is_some_and(|it| *it < 4));
}
