//! Links: rows go where the way is short and the link is fast.

use cadre_planner::{
    Assignment, Costs, Document, DocumentId, Error, Heads, Layout, Link, Links, Mask, NOMINAL_RATE,
    Prices, Problem, Pulls, SlotId, Stretch, Traffic, plan, reassign,
};
use proptest::prelude::*;

use crate::problems::{PLENTY, causal, dedicated, full, in_place, problem, problems};

const NEAR: Prices = Prices { node: 10, rail: 100, leaf: 120, far: 150 };

fn link(node: u32) -> Link {
    Link { node, rail: node, leaf: 0, out: NOMINAL_RATE, into: NOMINAL_RATE }
}

fn by_distance(places: Vec<Link>) -> Links {
    Links { places, prices: NEAR, ..Links::equal() }
}

/// Four ranks, the first two with one long document each, the others with short ones.
fn two_long(nodes: [u32; 4]) -> Problem {
    let lengths = [8_192, 8_192].into_iter().chain([256; 64]);
    let documents = lengths.map(|rows| Document { rows, mask: Mask::Causal }).collect();
    let mut problem = problem(documents, 8_192, (0..4).map(in_place).collect());
    problem.links = by_distance(nodes.map(link).to_vec());
    problem
}

#[test]
fn surplus_goes_to_the_same_node() {
    for (nodes, to) in [([0, 1, 1, 0], [3, 2]), ([0, 1, 0, 1], [2, 3])] {
        let problem = two_long(nodes);
        let plan = plan(&problem).unwrap();
        for (document, to) in (0..).zip(to) {
            let mut slots: Vec<SlotId> = plan
                .bundles()
                .iter()
                .filter(|it| it.document.0 == document)
                .map(|it| it.slot)
                .collect();
            slots.dedup();
            assert_eq!(slots, [SlotId(document), SlotId(to)], "{nodes:?}");
        }
        let far = Problem { links: Links::equal(), ..problem.clone() };
        let [near, far] = [&problem, &far].map(|it| Traffic::of(it, &plan).busiest());
        assert!(near <= far / 9, "{near} {far}");
    }
}

/// Who is near is found among many that are as large.
#[test]
fn surplus_goes_to_the_same_node_among_many() {
    let nodes = 96;
    let lengths = (0..nodes).flat_map(|_| std::iter::once(8_192).chain([256; 32]));
    let slots = (0..2 * nodes).map(in_place).collect();
    let mut problem = problem(lengths.map(causal).collect(), 8_192, slots);
    problem.lanes = problem.heads.kv;
    // Every other rank has short documents; they stand on the nodes in another order.
    let node = |rank: u32| {
        if rank.is_multiple_of(2) { rank / 2 } else { (rank / 2 * 7 + 3) % nodes }
    };
    problem.links = by_distance((0..2 * nodes).map(|rank| link(node(rank))).collect());
    let plan = plan(&problem).unwrap();
    let pulls = Pulls::of(&problem, &plan);
    let (mut near, mut far) = (0, 0);
    for slot in 0..2 * nodes {
        for it in pulls.queries_of(SlotId(slot)) {
            let rows = u64::from(it.rows.end - it.rows.start);
            *if node(it.rank.0) == node(slot) { &mut near } else { &mut far } += rows;
        }
    }
    assert!(near > 0 && far * 10 <= near, "{far} rows leave their node, {near} do not");
}

#[test]
fn a_document_without_a_home_goes_near_its_rank() {
    let mut problem = two_long([0; 4]);
    problem.slots = vec![dedicated(100); 4];
    let places = [0, 1, 2, 3, 3, 2, 1, 0].map(link);
    problem.links = by_distance(places.to_vec());
    let near = plan(&problem).unwrap();
    let anywhere = plan(&Problem { links: Links::equal(), ..problem.clone() }).unwrap();
    let time = |plan| -> u64 {
        Traffic::of(&problem, plan).forward.places.iter().map(|it| it.receiving).sum()
    };
    // One head of each document has room near its rank.
    assert!(time(&near) < time(&anywhere) * 3 / 4, "{} {}", time(&near), time(&anywhere));
}

#[test]
fn half_the_rate_takes_twice_the_time() {
    let mut problem = two_long([0, 1, 2, 3]);
    let before = Traffic::of(&problem, &plan(&problem).unwrap()).forward;
    for it in &mut problem.links.places {
        (it.out, it.into) = (it.out / 2, it.into / 2);
    }
    let after = Traffic::of(&problem, &plan(&problem).unwrap()).forward;
    for (before, after) in before.places.iter().zip(&after.places) {
        assert!(after.sending.abs_diff(2 * before.sending) <= 1);
        assert!(after.receiving.abs_diff(2 * before.receiving) <= 1);
    }
    assert_eq!(before.queries, after.queries);
}

/// Few tiles, slots of unlike weight, links that are all but cut: cheap moves alone end far from even.
#[test]
fn slow_links_do_not_make_a_plan_uneven() {
    let documents = vec![full(517), causal(525), causal(710)];
    let all = |document, rows| Stretch { document: DocumentId(document), start: 0, end: rows };
    let ranks = vec![vec![all(0, 517)], vec![all(2, 710)], vec![all(1, 525)]];
    let slots = [150, 201, 342].map(dedicated).to_vec();
    let mut problem = Problem {
        layout: Layout::new(documents, ranks).unwrap(),
        heads: Heads { query: 32, kv: 8, dim: 128 },
        element_bytes: 2,
        lanes: 8,
        costs: Costs { tile: 8_128, task: 16_384, task_rows: 2_048, ..Costs::default() },
        ..problem(vec![causal(1)], 1, slots)
    };
    let even = plan(&problem).unwrap().bounds().finish;
    let link = |node, leaf, out| Link { node, rail: node + 10, leaf, out, into: 1 };
    let (near, wide, other) = (link(0, 0, 1), link(0, 0, 22_456), link(1, 1, 1));
    problem.links.places = vec![near, near, wide, other, near, link(1, 0, 1)];
    problem.links.prices = NEAR;
    assert!(plan(&problem).unwrap().bounds().finish <= even);
}

#[test]
fn links_that_cannot_be_are_refused() {
    let refused = |change: &dyn Fn(&mut Links), expected: Error| {
        let mut problem = two_long([0; 4]);
        change(&mut problem.links);
        assert_eq!(plan(&problem), Err(expected));
    };
    let most = 10_000_000;
    refused(&|it| it.places.truncate(3), Error::LinkCount { found: 3, expected: 4 });
    let rate = |place, way, rate| Error::BadRate { place, way, rate, most };
    refused(&|it| it.places[1].out = 0, rate(1, "out", 0));
    refused(&|it| it.places[2].into = u32::MAX, rate(2, "into", u32::MAX));
    refused(&|it| it.prices.far = 0, Error::BadPrice { distance: "far", price: 0, most });
    for (a, b) in [(1, 1), (0, 4), (9, 2)] {
        refused(&|it| it.unreachable.push((a, b)), Error::BadPair { a, b, places: 4 });
    }
}

proptest! {
    #[test]
    fn any_links_give_a_plan_as_even(
        mut problem in problems(Just(PLENTY)),
        rates in prop::collection::vec((0_u32..3, 0_u32..3, 1_u32..100_000, 1_u32..100_000), 16),
    ) {
        let even = plan(&problem).unwrap().bounds();
        let places = problem.places().1;
        let link = |(node, leaf, out, into)| Link { node, rail: node + 10, leaf, out, into };
        problem.links.places = rates.into_iter().take(places).map(link).collect();
        problem.links.prices = NEAR;
        let plan = plan(&problem).unwrap();
        plan.check(&problem).unwrap();
        let bounds = plan.bounds();
        prop_assert_eq!(bounds.level, even.level);
        prop_assert!(bounds.finish <= even.finish.max(even.level + even.level / 500), "{:?} {:?}", bounds, even);
        prop_assert!(plan.least(&problem).link <= bounds.link);
    }

    #[test]
    fn knowing_links_is_never_worse_than_ignoring_them(
        mut problem in problems(Just(PLENTY)),
        rates in prop::collection::vec((0_u32..3, 0_u32..3, 1_u32..100_000, 1_u32..100_000), 16),
    ) {
        let blind = plan(&problem).unwrap();
        let places = problem.places().1;
        let link = |(node, leaf, out, into)| Link { node, rail: node + 10, leaf, out, into };
        problem.links = by_distance(rates.into_iter().take(places).map(link).collect());
        let known = plan(&problem).unwrap().bounds();
        // The blind plan on the links as they are.
        let link = Traffic::of(&problem, &blind).busiest();
        let late = |finish: u64| finish.saturating_sub(known.level + known.level / 504);
        prop_assert!(
            (late(known.finish), known.link) <= (late(blind.bounds().finish), link),
            "{:?}: blind {} and {}", known, blind.bounds().finish, link
        );
    }

    #[test]
    fn places_that_cannot_reach_each_other_never_meet(
        mut problem in problems(Just(PLENTY)),
        pairs in prop::collection::vec((0_u32..12, 0_u32..12), 1..8),
        lost in prop::collection::vec(any::<bool>(), 6),
    ) {
        let (place_of, places) = problem.places();
        let is_pair = |&(a, b): &(u32, u32)| a != b && a.max(b) < places as u32;
        problem.links.unreachable = pairs.into_iter().filter(is_pair).collect();
        let cut = problem.links.unreachable.clone();
        let meet = |a: usize, b: usize| {
            let (a, b) = (a as u32, b as u32);
            !cut.contains(&(a, b)) && !cut.contains(&(b, a))
        };
        match plan(&problem) {
            Ok(plan) => {
                prop_assert_eq!(plan.check(&problem), Ok(()));
                let pulls = Pulls::of(&problem, &plan);
                for (slot, place) in (0..).map(SlotId).zip(&place_of) {
                    for it in pulls.queries_of(slot).iter().chain(pulls.keys_of(slot)) {
                        prop_assert!(meet(*place, it.rank.0 as usize));
                    }
                }
                let alive: Vec<bool> = lost.iter().copied().cycle().take(place_of.len()).collect();
                if let Ok(next) = reassign(&problem, &plan, &Assignment::planned(&plan), &alive) {
                    for (it, executor) in plan.bundles().iter().zip(next.executors()) {
                        let Some(slot) = executor else { continue };
                        let mut ranks = problem.layout.locate(it.document, it.keys.clone());
                        prop_assert!(ranks.all(|rank| meet(place_of[slot.0 as usize], rank.rank.0 as usize)));
                    }
                }
            }
            Err(Error::OutOfReach { document, start, end }) => {
                let whole = problem.layout.documents()[document.0 as usize];
                let keys = whole.mask.keys(whole.rows, start..end);
                for (slot, place) in problem.slots.iter().zip(&place_of) {
                    let mut pieces = problem.layout.locate(document, keys.clone())
                        .chain(problem.layout.locate(document, start..end));
                    let reaches = pieces.all(|it| meet(*place, it.rank.0 as usize));
                    // Rows that a slot has already may ask for keys between: only masks that let go of keys.
                    let holes = matches!(whole.mask, Mask::Window { .. });
                    prop_assert!(slot.is_standby() || !reaches || holes);
                }
            }
            Err(error) => prop_assert!(
                matches!(error, Error::NoRoom { .. })
                    && problem.layout.documents().iter().any(|it| matches!(it.mask, Mask::Window { .. })),
                "{error}"
            ),
        }
    }
}

/// Dedicated slots, one document: whoever ignored links put half of its rows behind a slow one.
#[test]
fn a_slot_that_no_rank_reaches_gets_nothing() {
    let slots = vec![dedicated(100), dedicated(100), dedicated(100)];
    let mut problem = problem(vec![causal(8_192)], 8_192, slots);
    problem.links.unreachable = vec![(2, 0)];
    let plan = plan(&problem).unwrap();
    assert_eq!(plan.bundles_of(SlotId(1)).count(), 0);
    // Another's plan is refused by name.
    problem.links.unreachable.clear();
    let before = cadre_planner::plan(&problem).unwrap();
    problem.links.unreachable = vec![(2, 0)];
    let mut value = serde_json::to_value(&before).unwrap();
    value["problem"] = problem.digest().into();
    let before: cadre_planner::Plan = serde_json::from_value(value).unwrap();
    let refused = before.check(&problem);
    assert!(matches!(refused, Err(Error::CannotReach { slot: SlotId(1), .. })), "{refused:?}");
}

#[test]
fn a_lost_bundle_goes_only_where_its_rows_can_be_pulled() {
    let mut problem = problem(vec![causal(1_024); 2], 2_048, vec![dedicated(100); 3]);
    problem.slots[2].weight = 0;
    problem.links.unreachable = vec![(0, 3)];
    let plan = plan(&problem).unwrap();
    let planned = Assignment::planned(&plan);
    let next = reassign(&problem, &plan, &planned, &[false, true, true]).unwrap();
    assert!(next.executors().iter().all(|it| *it == Some(SlotId(1))));
    let refused = reassign(&problem, &plan, &planned, &[false, false, true]);
    assert!(matches!(refused, Err(Error::BundleOutOfReach { .. })), "{refused:?}");
}
