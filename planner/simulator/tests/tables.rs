//! Tables over a length set that is made here: what must hold whatever the lengths.

use cadre_simulator::{LengthSet, churn, ours, published};

/// Mostly short documents, one of 50 long.
fn lengths() -> Vec<u64> {
    (0..40_000_u64).map(|it| if it % 50 == 0 { 66_000 } else { 500 + it * 37 % 9_000 }).collect()
}

#[test]
fn each_gain_of_ours_is_one_and_none_beats_the_ideal() {
    for set in [LengthSet::Pretrain, LengthSet::Prolong] {
        let setting = ours::settings(&[8])[0];
        let row = ours::row(setting, set, &lengths(), 3, 1).unwrap();
        assert_eq!(
            row,
            ours::row(setting, set, &lengths(), 3, 1).unwrap(),
            "the same seed, the same row"
        );
        let [greedy, kernel, _, wire, overlap] = row.stages;
        assert!(kernel < greedy && wire <= kernel && overlap <= wire, "{row:?}");
        assert!(row.ideal_nanos <= overlap && overlap < row.packed_hopper_nanos, "{row:?}");
        assert!(row.imbalance_ppm[1] <= 1_002_000 && row.imbalance_ppm[0] > 1_002_000, "{row:?}");
        assert!(
            row.ours_overlaps[2] < row.ours_overlaps[0],
            "ping-pong hides what one stream shows"
        );
        let [one, in_call, ping_pong, both] = row.greedy_overlaps;
        assert_eq!(ping_pong, kernel, "the published system overlaps by ping-pong");
        assert!(both <= in_call && both <= ping_pong && ping_pong < one, "{row:?}");
        let [in_call, one] = [row.packed_in_call_nanos, row.packed_hopper_nanos];
        assert!(in_call < one && row.ideal_nanos < in_call, "packing hides keys, too: {row:?}");
        assert!(row.greedy_own_nanos > 0 && row.greedy_own_nanos <= one, "{row:?}");
        assert!(
            row.link_bound_nanos > 0 && row.link_bound_nanos <= row.ours_overlaps[0],
            "{row:?}"
        );
        assert!(row.reached() > 0.5 && row.reached() <= 1.0, "{row:?}");
    }
}

#[test]
fn the_published_settings_are_all_simulated() {
    for set in [LengthSet::Pretrain, LengthSet::Prolong] {
        let settings = published::settings(set);
        assert_eq!(settings.len(), 27);
        for at in [0, 9] {
            let row = published::row(settings[at], set, &lengths(), 1, 1).unwrap();
            assert!(row.speedup() > 0.8 && row.speedup() < 2.0, "{row:?}");
            assert!(row.one_stream() > 0.0, "{row:?}");
        }
    }
    assert!(published::gather_share(32) > 5.0 * published::gather_share(2));
    assert!((published::outside(1.3, 1.0, 1.2) - 1.0 / 12.0).abs() < 1e-9);
}

#[test]
fn a_known_speed_costs_nothing_and_a_loss_is_bounded() {
    let rows = churn::spreads(LengthSet::Pretrain, &lengths(), 1).unwrap();
    for row in &rows {
        let known = !row.name.contains("not known");
        assert_eq!(row.spread_ppm < 40_000, known, "{row:?}");
    }
    // Weights are what noisy reports taught, not the true speeds.
    let learnt = rows.iter().filter(|it| it.name.contains(", learnt"));
    let learnt: Vec<[u32; 2]> = learnt.flat_map(|it| it.weights.clone()).collect();
    assert!(learnt.iter().any(|it| it[0] != it[1]), "{learnt:?}");
    assert!(learnt.iter().all(|it| it[0].abs_diff(it[1]) <= 2), "{learnt:?}");
    let rows = churn::churn(LengthSet::Pretrain, &lengths(), 1).unwrap();
    let quiet: Vec<_> = rows.iter().filter(|it| it.alive == 16).collect();
    assert!(quiet.iter().all(|it| it.nanos == quiet[0].nanos), "all steps have the same documents");
    for row in &rows {
        let lost = row.event.contains("is lost");
        assert_eq!(row.lost_nanos > churn::DETECTION, lost, "{row:?}");
        assert_eq!(row.bundles_moved > 0, row.alive < 16, "{row:?}");
        assert!(row.alive < 16 || row.imbalance_ppm <= 2_000, "{row:?}");
        // A new plan for 15 slots is faster than what the plan for 16 leaves to 15.
        assert!(row.alive == 16 || row.anew_nanos < row.nanos, "{row:?}");
    }
    assert_eq!(rows.iter().filter(|it| it.event.contains("is lost")).count(), 4);
}
