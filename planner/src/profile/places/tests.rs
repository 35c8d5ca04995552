//! Places of a calibration: what headers get of them, what noise changes, what is refused.

use super::*;
use crate::LinkTimes;

fn profile(rates: &[(&str, u32)], places: Vec<Site>) -> Profile {
    let link = |&(distance, rate): &(&str, u32)| {
        let distance = distance.into();
        LinkTimes { distance, rate, latency: 1 }
    };
    let links = rates.iter().map(link).collect();
    Profile { links, places, ..Profile::builtin("h200-hopper").unwrap() }
}

fn site(of: &[&str]) -> Site {
    let of = of.iter().map(|it| (*it).to_owned()).collect();
    Site { of, node: None, rail: None, leaf: None, out: None, into: None }
}

fn pairs(of: &[[&str; 2]]) -> Vec<[String; 2]> {
    of.iter().map(|it| it.map(str::to_owned)).collect()
}

const ALL: &[(&str, u32)] = &[("node", 400_000), ("rail", 50_000), ("far", 25_000)];

#[test]
fn places_are_ranks_and_then_dedicated_slots_and_who_is_not_named_is_far() {
    let places = vec![
        Site { node: Some(3), out: Some(12_500), ..site(&["server-1", "trainer-0"]) },
        Site { rail: Some(3), ..site(&["server-0"]) },
    ];
    let unreachable = pairs(&[["trainer-1", "server-2"], ["server-1", "trainer-0"]]);
    let profile = Profile { unreachable, ..profile(ALL, places) };
    let map = profile.link_map(2).unwrap();
    let links = map.links(2, 2);
    let far = |place: u32| {
        let own = MOST_NUMBERS + place;
        Link { node: own, rail: own, leaf: own, out: 50_000, into: 50_000 }
    };
    let near = |place| Link { node: 3, out: 12_500, ..far(place) };
    assert_eq!(links.places, [near(0), far(1), Link { rail: 3, ..far(2) }, near(3)]);
    assert_eq!(links.prices, Prices { node: 13, rail: 100, leaf: 200, far: 200 });
    // The third server is not there yet.
    assert_eq!(links.unreachable, [(3, 0)]);
    assert_eq!(map.links(2, 3).unreachable, [(1, 4), (3, 0)]);
    assert_eq!(map.links(2, 0).places.len(), 2);
    // Servers move up when the first one is lost.
    let left = map.without_servers(1).links(2, 2);
    assert_eq!(left.places, [near(0), far(1), near(2), far(3)]);
    assert_eq!(left.unreachable, [(1, 3), (2, 0)]);
}

#[test]
fn who_says_nothing_of_places_has_equal_links_and_a_distance_left_out_is_like_a_farther_one() {
    let map = profile(ALL, Vec::new()).link_map(4).unwrap();
    assert_eq!(map.links(4, 4), Links::equal());
    assert_eq!(LinkMap::default().links(4, 4), Links::equal());
    let unreachable = pairs(&[["trainer-1", "trainer-0"]]);
    let map = Profile { unreachable, ..profile(ALL, Vec::new()) }.link_map(4).unwrap();
    assert_eq!(map.links(4, 4), Links { unreachable: vec![(1, 0)], ..Links::equal() });
    for (rates, [node, rail, leaf, far], full) in [
        (&ALL[..0], [100; 4], 50_000),
        (&ALL[..1], [100; 4], 400_000),
        (&ALL[..2], [13, 100, 100, 100], 50_000),
        (&ALL[1..], [100, 100, 200, 200], 50_000),
        (&ALL[2..], [100; 4], 25_000),
    ] {
        let links = profile(rates, vec![site(&["trainer-0"])]).link_map(1).unwrap().links(1, 0);
        assert_eq!(links.prices, Prices { node, rail, leaf, far }, "{rates:?}");
        assert_eq!(links.places[0].out, full, "{rates:?}");
    }
}

#[test]
fn rates_are_rounded_so_that_noise_is_seldom_seen() {
    for rate in [1_250, 3_125, 12_500, 25_000, 50_000, 75_000, 400_000, 450_000] {
        let middle = rounded(rate);
        assert!(middle.abs_diff(rate) * 32 <= rate, "{rate}: {middle}");
        for permille in 990..=1010 {
            let noisy = u64::from(middle) * permille / 1000;
            assert_eq!(rounded(noisy as u32), middle, "{rate} at {permille}");
        }
    }
    let mut last = 0;
    for rate in (1..5_000).chain((5_000..=MOST).step_by(997)) {
        let near = rounded(rate);
        assert!(near >= last && near.abs_diff(rate) <= rate / 31 + 1, "{rate}: {near}");
        assert_eq!(rounded(near), near, "{rate}");
        last = near;
    }
}

#[test]
fn places_that_cannot_be_are_refused_with_field_and_remedy() {
    let refused = |change: &dyn Fn(&mut Profile), expected: &str| {
        let mut it = profile(ALL, vec![site(&["trainer-0"]), site(&["server-7", "trainer-1"])]);
        assert!(it.link_map(2).is_ok());
        change(&mut it);
        let error = it.link_map(2).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error} does not begin with {expected}");
        assert!(error.contains(';'), "{error} has no remedy");
    };
    for name in ["", "trainer", "trainer-", "server--1", "server-01", "worker-1", "trainer-65535"] {
        let expected = format!("places[1].of[0] is {name:?}; write");
        refused(&|it| it.places[1].of[0] = name.into(), &expected);
    }
    refused(
        &|it| it.places[0].of[0] = "trainer-2".into(),
        "places[0].of[0] is trainer-2, and the job has 2",
    );
    refused(&|it| it.places[1].of[1] = "trainer-0".into(), "places[1].of[1] is trainer-0, which");
    refused(&|it| it.places[1].of.clear(), "places[1].of is empty");
    refused(&|it| it.places[1].node = Some(1 << 20), "places[1].node is 1048576");
    refused(&|it| it.places[1].rail = Some(u32::MAX), "places[1].rail is 4294967295");
    refused(&|it| it.places[0].out = Some(0), "places[0].out is 0");
    refused(&|it| it.places[0].into = Some(MOST + 1), "places[0].into is 10000001");
    refused(&|it| it.links[2].rate = MOST + 1, "links[2].rate is 10000001");
    let pair = |one: &str, other: &str| pairs(&[[one, other]]);
    refused(
        &|it| it.unreachable = pair("trainer-0", "trainer-0"),
        "unreachable[0] is trainer-0 twice",
    );
    refused(&|it| it.unreachable = pair("trainer-0", "x"), "unreachable[0][1] is \"x\"");
    refused(&|it| it.unreachable = pair("trainer-5", "server-0"), "unreachable[0][0] is trainer-5");
}

#[test]
fn places_are_in_the_digest_of_a_calibration_and_none_leaves_it_as_it_was() {
    let plain = profile(ALL, Vec::new());
    let placed = profile(ALL, vec![site(&["trainer-0"])]);
    let node = profile(ALL, vec![Site { node: Some(0), ..site(&["trainer-0"]) }]);
    let cut = Profile { unreachable: pairs(&[["trainer-0", "server-0"]]), ..plain.clone() };
    let digests: std::collections::BTreeSet<u64> =
        [&plain, &placed, &node, &cut].map(Profile::digest).into();
    assert_eq!(digests.len(), 4);
    let text = serde_json::to_string(&plain).unwrap();
    assert!(!text.contains("places") && !text.contains("unreachable"), "{text}");
}
