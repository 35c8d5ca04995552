//! Transfer lists and the account of bytes, against rows counted one by one.

use std::collections::BTreeMap;

use cadre_planner::{
    Costs, Mask, Plan, Problem, Pull, Pulls, SlotId, Traffic, least, memory_of_slot, plan,
    plan_at_home,
};
use proptest::prelude::*;

use crate::problems::{PLENTY, causal, dedicated, in_place, problem, problems};

/// How often a slot pulls a row of a document under a KV head.
type Counts = BTreeMap<(u32, u32, u16), u32>;

fn counts(pulls: &[Pull]) -> Counts {
    let mut counts = Counts::new();
    for it in pulls {
        for row in it.rows.clone() {
            for head in it.kv_heads.clone() {
                *counts.entry((it.document.0, row, head)).or_default() += 1;
            }
        }
    }
    counts
}

/// Whether a row keeps a key of its document.
fn keeps(mask: Mask, row: u32, key: u32) -> bool {
    match mask {
        Mask::Causal => key <= row,
        Mask::Full => true,
        Mask::Window { left } => key <= row && row - key <= left,
    }
}

/// What a slot lacks for the rows that the plan gives it, by the masks alone: of the query side, and of keys.
fn lacks(problem: &Problem, plan: &Plan, slot: SlotId) -> (Counts, Counts) {
    let home = problem.slots[slot.0 as usize].home;
    let (mut queries, mut keys) = (Counts::new(), Counts::new());
    for (bundle, of) in plan.bundles_of(slot) {
        let whole = problem.layout.documents()[of.document.0 as usize];
        let rows: Vec<u32> = plan.tasks_of(bundle).iter().flat_map(|it| it.rows.clone()).collect();
        // Keys that some row keeps: of those at or behind a key the first keeps it if any does, but under a full mask.
        let is_kept = |key: &u32| match whole.mask {
            Mask::Full => true,
            Mask::Causal | Mask::Window { .. } => {
                let next = rows.partition_point(|row| row < key);
                rows.get(next).is_some_and(|row| keeps(whole.mask, *row, *key))
            }
        };
        let kept: Vec<u32> = (0..whole.rows).filter(is_kept).collect();
        for (counts, rows) in [(&mut queries, &rows), (&mut keys, &kept)] {
            for &row in rows {
                let at = problem.layout.locate(of.document, row..row + 1).next().unwrap();
                if Some(at.rank) != home {
                    for head in of.kv_heads.clone() {
                        counts.insert((of.document.0, row, head), 1);
                    }
                }
            }
        }
    }
    (queries, keys)
}

/// Bytes of the inputs and results of a phase backward, and of one forward, by what a slot computes and the masks.
fn phases(problem: &Problem, plan: &Plan, slot: SlotId) -> [u64; 2] {
    let nowhere = Problem { slots: vec![dedicated(100); problem.slots.len()], ..problem.clone() };
    let (queries, keys) = lacks(&nowhere, plan, slot);
    let (queries, keys) = (queries.len() as u64, keys.len() as u64);
    let row = u64::from(problem.heads.dim) * u64::from(problem.element_bytes);
    let group = u64::from(problem.heads.query / problem.heads.kv);
    let key = 2 * row;
    [
        keys * (key + 8 * u64::from(problem.heads.dim)) + queries * group * (3 * row + 8),
        keys * key + queries * group * (2 * row + 4),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_row_that_a_slot_lacks_is_pulled_once(problem in problems(Just(PLENTY))) {
        for plan in [plan(&problem), plan_at_home(&problem)].into_iter().flatten() {
            let pulls = Pulls::of(&problem, &plan);
            let (mut queries, mut keys) = (0, 0);
            for slot in (0..problem.slots.len() as u32).map(SlotId) {
                let lacks = lacks(&problem, &plan, slot);
                prop_assert_eq!(&counts(pulls.queries_of(slot)), &lacks.0);
                prop_assert_eq!(&counts(pulls.keys_of(slot)), &lacks.1);
                queries += lacks.0.len() as u64;
                keys += lacks.1.len() as u64;
                for it in pulls.queries_of(slot).iter().chain(pulls.keys_of(slot)) {
                    let piece = problem.layout.locate(it.document, it.rows.clone()).next().unwrap();
                    prop_assert_eq!((piece.rank, piece.local, piece.rows), (it.rank, it.local.clone(), it.rows.clone()));
                }
                let phase = phases(&problem, &plan, slot).into_iter().max().unwrap();
                prop_assert_eq!(memory_of_slot(&problem, &plan, slot).phase, phase);
            }
            let Traffic { forward, backward } = Traffic::of(&problem, &plan);
            let heads = problem.heads;
            let row = u64::from(heads.dim) * u64::from(problem.element_bytes);
            let group = u64::from(heads.query / heads.kv);
            prop_assert_eq!(forward.queries, queries * row * group);
            prop_assert_eq!((forward.keys, backward.keys), (keys * 2 * row, keys * 2 * row));
            prop_assert_eq!(forward.results, queries * group * (row + 4));
            prop_assert_eq!(backward.queries, queries * group * (2 * row + 8));
            prop_assert_eq!(backward.results, queries * group * row + keys * 8 * u64::from(heads.dim));
            for flow in [forward, backward] {
                let sum = |of: fn(&cadre_planner::Place) -> u64| flow.places.iter().map(of).sum::<u64>();
                prop_assert_eq!(sum(|it| it.sent()), flow.queries + flow.keys + flow.results);
                prop_assert_eq!(sum(|it| it.received()), flow.queries + flow.keys + flow.results);
            }
        }
    }

    #[test]
    fn no_plan_pulls_less_than_the_bound(problem in problems(Just(PLENTY))) {
        let plan = plan(&problem).unwrap();
        let traffic = Traffic::of(&problem, &plan);
        let bounds = plan.bounds();
        prop_assert_eq!(bounds.pulled, traffic.forward.queries + traffic.forward.keys);
        prop_assert_eq!(bounds.link, traffic.busiest());
        if let Some(least) = least(&problem, bounds.finish) {
            prop_assert_eq!((least.pulled, least.link), (bounds.least_pulled, bounds.least_link));
            prop_assert!(least.pulled <= bounds.pulled, "{least:?} {bounds:?}");
            prop_assert!(least.link <= bounds.link, "{least:?} {bounds:?}");
        }
        prop_assert!(bounds.least_memory <= bounds.memory, "{:?}", bounds);
        let needed = (0..problem.slots.len() as u32).map(SlotId);
        let needed = needed.filter(|it| plan.bundles_of(*it).next().is_some());
        let needed = needed.map(|it| memory_of_slot(&problem, &plan, it).needed()).max();
        prop_assert_eq!(Some(bounds.memory), needed);
    }
}

/// Where one row is much of a document.
#[test]
fn the_bound_holds_for_a_few_rows() {
    for rows in [1, 2, 3, 127, 128, 129] {
        let mut one = problem(vec![causal(rows)], rows, vec![dedicated(100)]);
        one.lanes = one.heads.kv;
        let bounds = plan(&one).unwrap().bounds();
        assert!(bounds.least_pulled <= bounds.pulled, "{rows} rows: {bounds:?}");
        assert!(bounds.least_link <= bounds.link, "{rows} rows: {bounds:?}");
    }
}

#[test]
fn the_bound_is_what_half_a_document_costs() {
    let slots = vec![in_place(0), in_place(1)];
    let mut two = problem(vec![causal(8_192), causal(1)], 8_192, slots);
    two.lanes = two.heads.kv;
    let plan = plan(&two).unwrap();
    let bounds = plan.bounds();
    let bytes = bounds.pulled as f64 / bounds.least_pulled as f64;
    let link = bounds.link as f64 / bounds.least_link as f64;
    assert!((1.0..1.05).contains(&bytes) && (1.0..1.10).contains(&link), "{bytes} {link}");
    // With overheads the bound is as tight.
    two.costs = Costs::default();
    let bounds = cadre_planner::plan(&two).unwrap().bounds();
    let bytes = bounds.pulled as f64 / bounds.least_pulled as f64;
    assert!((1.0..1.06).contains(&bytes), "{bounds:?}");
    assert_eq!(least(&two, 0), None, "no slot has begun");
}

/// Where every slot is dedicated every row travels, whatever its mask.
#[test]
fn the_bound_of_a_pool_is_all_rows() {
    for mask in [Mask::Causal, Mask::Full, Mask::Window { left: 100 }] {
        let document = cadre_planner::Document { rows: 4_096, mask };
        let mut pool = problem(vec![document; 8], 8_192, vec![dedicated(100); 4]);
        pool.costs = Costs::default();
        let bounds = plan(&pool).unwrap().bounds();
        let ratio = bounds.pulled as f64 / bounds.least_pulled as f64;
        assert!((1.0..1.001).contains(&ratio), "{mask}: {bounds:?}");
        // Four ranks send all that there is.
        let link = bounds.link as f64 / bounds.least_link as f64;
        assert!((1.0..1.01).contains(&link), "{mask}: {bounds:?}");
    }
}

/// A document over many ranks, and one over many slots: the bound is no longer that of a single piece.
#[test]
fn the_bound_of_documents_that_span_ranks_is_near_what_plans_reach() {
    let heads = cadre_planner::Heads { query: 32, kv: 8, dim: 128 };
    let long = |slots: Vec<cadre_planner::Slot>, rank_rows| {
        let mut it = problem(vec![causal(1 << 18)], rank_rows, slots);
        (it.heads, it.element_bytes) = (heads, 2);
        it
    };
    let cases = [
        ("64 in place", long((0..64).map(in_place).collect(), 4_096), 1.25),
        ("64 dedicated", long(vec![dedicated(100); 64], 4_096), 1.15),
        ("16 dedicated", long(vec![dedicated(100); 16], 1 << 18), 1.15),
        ("8 dedicated", long(vec![dedicated(100); 8], 1 << 18), 1.01),
    ];
    let few = (0..4).map(in_place).chain(vec![dedicated(100); 28]).collect();
    let mut few = long(few, 1 << 16);
    few.lanes = few.heads.kv;
    let cases = cases.into_iter().chain([("32, of which 4 in place", few, 1.3)]);
    for (name, problem, most) in cases {
        let bounds = plan(&problem).unwrap().bounds();
        let ratio = bounds.pulled as f64 / bounds.least_pulled as f64;
        println!("{name}: {ratio:.3}, link {:.3}", bounds.link as f64 / bounds.least_link as f64);
        assert!((1.0..most).contains(&ratio), "{name}: {ratio}");
    }
}
