//! Numbers of others in a pool of mode `Auto`: they take no server away, and nobody fights.

use proptest::prelude::*;

use super::WINDOW;
use super::replay::Replay;
use super::replicas::Way;
use cadre_desired::SCALER;

const FORCED: Way = Way::Apply { is_forced: true };
/// Seconds in which three numbers are taken over at most.
const HOUR: i64 = 3_600;

/// Somebody else, and how he writes: a user, tools that apply a manifest again, an autoscaler.
pub(crate) fn other() -> impl Strategy<Value = (&'static str, Way)> {
    prop_oneof![
        Just(("kubectl", Way::Scale)),
        Just(("kubectl-client-side-apply", Way::Update)),
        Just(("flux", FORCED)),
        Just(("kubectl", Way::Apply { is_forced: false })),
        Just(("kube-controller-manager", Way::Scale)),
    ]
}

/// Whether the operator has written the number.
fn is_ours(replay: &Replay) -> bool {
    let entries = replay.pool.metadata.managed_fields.iter().flatten();
    entries.into_iter().any(|it| it.manager.as_deref() == Some(SCALER))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn a_number_of_somebody_else_takes_no_server_away(
        (there, number) in (1_u32..20, prop::option::weighted(0.8, 0_u32..30)),
        (manager, way) in other(),
        is_first in any::<bool>(),
        takeover in any::<bool>(),
        load in 0_u64..20_000,
        noise in any::<u64>(),
    ) {
        let mut replay = Replay::new(there, 20, noise);
        if !is_first {
            replay.look(load);
        }
        let there = u32::try_from(replay.servers.len()).expect("a few");
        let is_ours_before = is_ours(&replay);
        let is_taken = replay.write(manager, way, number.or(Some(0).filter(|_| way == Way::Scale)));
        let may_conflict = way == (Way::Apply { is_forced: false });
        prop_assert!(is_taken || may_conflict, "{way:?} is taken");
        let is_applied = matches!(way, Way::Apply { .. });
        if is_ours_before && is_applied && number.is_none() {
            prop_assert_eq!(replay.pool.spec.replicas, there, "a manifest without a number changes none");
        }
        if takeover {
            replay.take_over();
        }
        // Fewer than are there are as many as are there; more are what a pool begins with.
        let begins = if is_taken { number.unwrap_or(0) } else { 0 }.max(there).min(20);
        prop_assert!(replay.look(load) >= begins, "{number:?} of somebody else, {there} are there");
        prop_assert!(replay.pool.spec.replicas >= begins);
        prop_assert!(is_ours(&replay), "{:?}", replay.pool.metadata.managed_fields);
        prop_assert_eq!(replay.drained, 0);
    }

    #[test]
    fn rivals_are_left_alone_and_the_pool_keeps_what_it_needs(
        writes in prop::collection::vec((other(), prop::option::of(0_u32..14), 1_i64..60, any::<bool>()), 1..60),
        noise in any::<u64>(),
    ) {
        let mut replay = Replay::new(8, 12, noise);
        let load = 4_800;
        replay.run(load, 600);
        let mut taken_over: Vec<i64> = Vec::new();
        let mut changes: Vec<(i64, bool)> = Vec::new();
        for ((manager, way), number, looks, takeover) in writes {
            replay.write(manager, way, number.or(Some(1).filter(|_| way == Way::Scale)));
            if takeover {
                replay.take_over();
            }
            for _ in 0..looks {
                let (before, was_ours) = (replay.servers.len(), is_ours(&replay));
                replay.look(load);
                let after = replay.servers.len();
                prop_assert!(after >= 7, "{after} servers for 4.8");
                if after != before {
                    changes.push((replay.second, after > before));
                }
                if !was_ours && is_ours(&replay) {
                    taken_over.push(replay.second);
                }
            }
        }
        prop_assert_eq!(replay.drained, 0, "nobody leaves whom the number still counts");
        for four in taken_over.windows(4) {
            prop_assert!(four[3] - four[0] >= HOUR, "taken over at {four:?}");
        }
        for (last, (now, _)) in changes.iter().enumerate() {
            let recent: Vec<_> = changes[..=last].iter().filter(|it| it.0 + WINDOW > *now).collect();
            let turns = recent.windows(2).filter(|it| it[0].1 != it[1].1).count();
            prop_assert!(turns <= 1, "{recent:?}");
        }
        // In the end nobody writes any more.
        replay.run(load, HOUR + 60);
        prop_assert!(is_ours(&replay));
        prop_assert_ne!(replay.told().0, "OthersScale");
    }
}

#[test]
fn who_writes_again_and_again_is_named_and_not_fought() {
    let mut replay = Replay::new(8, 20, 1);
    let quiet = |replay: &mut Replay, seconds| assert_eq!(replay.run(4_800, seconds), [8]);
    quiet(&mut replay, 60);
    // Now and then, as a manifest that is applied again does.
    for _ in 0..4 {
        replay.write("flux", FORCED, Some(2));
        quiet(&mut replay, 2_400);
        assert_eq!((replay.pool.spec.replicas, is_ours(&replay)), (8, true));
    }
    assert_ne!(replay.told().0, "OthersScale");
    quiet(&mut replay, HOUR);

    for _ in 0..3 {
        replay.write("autoscaler", Way::Scale, Some(2));
        quiet(&mut replay, 60);
        assert_ne!(replay.told().0, "OthersScale");
    }
    let written = replay.written.len();
    for number in [2, 3, 4, 2, 5] {
        replay.write("autoscaler", Way::Scale, Some(number));
        quiet(&mut replay, 1_800);
        let (reason, words) = replay.told();
        assert_eq!(reason, "OthersScale");
        assert!(words.starts_with("autoscaler writes spec.replicas again and again"), "{words}");
    }
    assert_eq!((replay.written.len(), replay.pool.spec.replicas), (written, 5));
    replay.write("autoscaler", Way::Scale, Some(6));
    assert_eq!(replay.drained, 0, "the pool keeps its servers meanwhile");
    quiet(&mut replay, HOUR + 60);
    assert_eq!((replay.pool.spec.replicas, is_ours(&replay)), (8, true));
    assert_ne!(replay.told().0, "OthersScale");
}

/// Also where no look has seen the operator's own number between two of theirs.
#[test]
fn who_writes_the_same_number_in_each_look_is_left_alone_after_three() {
    let mut replay = Replay::new(8, 20, 1);
    replay.run(4_800, HOUR + 60);
    let before = replay.written.len();
    for _ in 0..20 {
        replay.write("autoscaler", Way::Scale, Some(2));
        assert_eq!(replay.look(4_800), 8);
    }
    assert_eq!(replay.written.len() - before, 3);
    assert_eq!(replay.told().0, "OthersScale");
}

#[test]
fn a_new_leader_does_not_begin_the_fight_anew() {
    let mut replay = Replay::new(8, 20, 1);
    replay.run(4_800, 60);
    for number in 1..20 {
        replay.write("autoscaler", Way::Scale, Some(number % 8));
        replay.take_over();
        assert_eq!(replay.run(4_800, 30), [8]);
    }
    assert_eq!(replay.written, [8, 8, 8], "the first of them took over the manifest's");
    assert_eq!((replay.told().0.as_str(), replay.drained), ("OthersScale", 0));
}

/// `kubectl replace` writes the whole object, without what the operator has noted there.
#[test]
fn who_replaces_the_object_does_not_begin_the_fight_anew() {
    for is_led_on in [true, false] {
        let mut replay = Replay::new(8, 20, 1);
        replay.run(4_800, 60);
        for number in 1..20 {
            replay.write("kubectl-replace", Way::Update, Some(number % 8));
            replay.pool.metadata.annotations = None;
            if !is_led_on {
                replay.take_over();
            }
            assert_eq!(replay.run(4_800, 30), [8]);
        }
        assert_eq!(replay.written, [8, 8, 8], "the first of them took over the manifest's");
        assert_eq!((replay.told().0.as_str(), replay.drained), ("OthersScale", 0));
    }
}

#[test]
fn a_take_over_that_is_not_done_yet_counts_once() {
    let mut replay = Replay::new(8, 20, 1);
    replay.run(4_800, HOUR + 60);
    replay.write("autoscaler", Way::Scale, Some(2));
    let foreign = replay.pool.clone();
    for _ in 0..5 {
        // The API server has not taken it: somebody else has written something at the same time.
        replay.pool = foreign.clone();
        assert_eq!(replay.look(4_800), 8);
        assert_ne!(replay.told().0, "OthersScale");
    }
    assert_eq!(replay.run(4_800, 60), [8]);
    for number in [3, 4] {
        replay.write("autoscaler", Way::Scale, Some(number));
        assert_eq!(replay.run(4_800, 60), [8]);
    }
    assert_ne!(replay.told().0, "OthersScale");
}

/// The clock of the leader before went ahead, or goes behind.
#[test]
fn another_leaders_clock_does_not_lengthen_the_time_for_which_others_are_left_alone() {
    for ahead in [-2 * HOUR, 2 * HOUR, 100 * HOUR] {
        let mut replay = Replay::new(8, 20, 1);
        replay.second += 200 * HOUR;
        replay.run(4_800, 60);
        replay.second += ahead;
        for number in [2, 3, 4] {
            replay.write("autoscaler", Way::Scale, Some(number));
            assert_eq!(replay.run(4_800, 30), [8]);
        }
        replay.second -= ahead;
        replay.take_over();
        for number in [2, 3, 4] {
            replay.write("autoscaler", Way::Scale, Some(number));
            assert_eq!(replay.run(4_800, 30), [8]);
        }
        replay.write("autoscaler", Way::Scale, Some(5));
        replay.run(4_800, 30);
        assert_eq!(replay.told().0, "OthersScale", "{ahead}");
        assert_eq!(replay.run(4_800, HOUR + 60), [8]);
        assert!(is_ours(&replay), "{ahead}");
    }
}

#[test]
fn who_asks_for_more_has_them_for_a_window() {
    let mut replay = Replay::new(4, 20, 1);
    assert_eq!(replay.run(2_400, 1_800), [4]);
    replay.write("kubectl", Way::Scale, Some(10));
    assert_eq!(replay.run(2_400, WINDOW), [10]);
    assert_eq!(replay.run(2_400, 150).last(), Some(&4), "and then what suffices");
}
