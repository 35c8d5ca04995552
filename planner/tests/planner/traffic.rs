//! Transfer lists and the account of bytes, against rows counted one by one.

use std::collections::BTreeMap;

use cadre_planner::{Costs, Mask, Plan, Problem, Pull, Pulls, SlotId, Traffic, least, plan};
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

/// What a slot lacks, by the plan: of the query side, and of keys.
fn lacks(problem: &Problem, plan: &Plan, slot: SlotId) -> (Counts, Counts) {
    let home = problem.slots[usize::from(slot.0)].home;
    let (mut queries, mut keys) = (Counts::new(), Counts::new());
    for (_, bundle) in plan.bundles_of(slot) {
        let tasks = plan.tasks().iter().filter(|it| plan.bundle(it.bundle) == Some(bundle));
        let mut rows: Vec<u32> = tasks.flat_map(|it| it.rows.clone()).collect();
        rows.sort_unstable();
        for (counts, rows) in [(&mut queries, rows), (&mut keys, bundle.keys.clone().collect())] {
            for row in rows {
                let at = problem.layout.locate(bundle.document, row..row + 1).next().unwrap();
                if Some(at.rank) != home {
                    for head in bundle.kv_heads.clone() {
                        counts.insert((bundle.document.0, row, head), 1);
                    }
                }
            }
        }
    }
    (queries, keys)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_row_that_a_slot_lacks_is_pulled_once(problem in problems(Just(PLENTY))) {
        let plan = plan(&problem).unwrap();
        let pulls = Pulls::of(&problem, &plan);
        let (mut queries, mut keys) = (0, 0);
        for slot in (0..problem.slots.len() as u16).map(SlotId) {
            let lacks = lacks(&problem, &plan, slot);
            prop_assert_eq!(&counts(pulls.queries_of(slot)), &lacks.0);
            prop_assert_eq!(&counts(pulls.keys_of(slot)), &lacks.1);
            queries += lacks.0.len() as u64;
            keys += lacks.1.len() as u64;
            for it in pulls.queries_of(slot).iter().chain(pulls.keys_of(slot)) {
                let piece = problem.layout.locate(it.document, it.rows.clone()).next().unwrap();
                prop_assert_eq!((piece.rank, piece.local, piece.rows), (it.rank, it.local.clone(), it.rows.clone()));
            }
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

    #[test]
    fn no_plan_pulls_less_than_the_bound(mut problem in problems(Just(PLENTY))) {
        problem.costs = Costs::pairs_only();
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
    two.costs = Costs::default();
    assert_eq!(least(&two, 1 << 40), None, "overheads have no bound yet");
    let full = problem(
        vec![cadre_planner::Document { rows: 300, mask: Mask::Full }],
        300,
        vec![in_place(0)],
    );
    assert_eq!(least(&full, 1 << 40), None, "other masks have no bound yet");
}
