//! Links: rows go where the way is short and the link is fast.

use cadre_planner::{
    Costs, Document, DocumentId, Error, Heads, Layout, Link, Links, Mask, NOMINAL_RATE, Prices,
    Problem, SlotId, Stretch, Traffic, plan,
};
use proptest::prelude::*;

use crate::problems::{PLENTY, causal, dedicated, full, in_place, problem, problems};

const NEAR: Prices = Prices { node: 10, rail: 100, leaf: 120, far: 150 };

fn link(node: u32) -> Link {
    Link { node, rail: node, leaf: 0, out: NOMINAL_RATE, into: NOMINAL_RATE }
}

/// Four ranks, the first two with one long document each, the others with short ones.
fn two_long(nodes: [u32; 4]) -> Problem {
    let lengths = [8_192, 8_192].into_iter().chain([256; 64]);
    let documents = lengths.map(|rows| Document { rows, mask: Mask::Causal }).collect();
    let mut problem = problem(documents, 8_192, (0..4).map(in_place).collect());
    problem.links = Links { places: nodes.map(link).to_vec(), prices: NEAR };
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
            assert_eq!(slots, [SlotId(document as u16), SlotId(to)], "{nodes:?}");
        }
        let far = Problem { links: Links::equal(), ..problem.clone() };
        let [near, far] = [&problem, &far].map(|it| Traffic::of(it, &plan).busiest());
        assert!(near <= far / 9, "{near} {far}");
    }
}

#[test]
fn a_document_without_a_home_goes_near_its_rank() {
    let mut problem = two_long([0; 4]);
    problem.slots = vec![dedicated(100); 4];
    let places = [0, 1, 2, 3, 3, 2, 1, 0].map(link);
    problem.links = Links { places: places.to_vec(), prices: NEAR };
    let near = plan(&problem).unwrap();
    let anywhere = plan(&Problem { links: Links::equal(), ..problem.clone() }).unwrap();
    let time = |plan| -> u64 {
        Traffic::of(&problem, plan).forward.places.iter().map(|it| it.receiving).sum()
    };
    assert!(time(&near) < time(&anywhere) / 2, "{} {}", time(&near), time(&anywhere));
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
        prop_assert!(bounds.least_link <= bounds.link);
    }
}
