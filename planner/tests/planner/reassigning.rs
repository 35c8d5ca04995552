//! What holds when slots are lost, come back, or none is left.

use std::cmp::Reverse;

use cadre_planner::{
    Assignment, BundleId, Distance, Error, Link, NOMINAL_RATE, Plan, Prices, Problem, SlotId,
    memory_of, memory_of_slot, plan, reassign,
};
use proptest::prelude::*;

use crate::problems::{PLENTY, causal, dedicated, in_place, pools, problem, problems};

fn executors(problem: &Problem, plan: &Plan, lost: &[u32]) -> Vec<Option<u32>> {
    let mut alive = vec![true; problem.slots.len()];
    for &slot in lost {
        alive[slot as usize] = false;
    }
    let next = reassign(problem, plan, &Assignment::planned(plan), &alive).unwrap();
    next.executors().iter().map(|it| it.map(|slot| slot.0)).collect()
}

fn four_documents() -> (Problem, Plan) {
    let slots = vec![dedicated(100), dedicated(100), in_place(0), in_place(1)];
    let mut problem = problem(vec![causal(1_024); 4], 2_048, slots);
    for slot in &mut problem.slots[2..] {
        slot.weight = 0;
    }
    let plan = plan(&problem).unwrap();
    assert_eq!(plan.bundles().len(), 4);
    (problem, plan)
}

#[test]
fn bundles_of_the_lost_go_to_survivors_and_no_other_moves() {
    let (problem, plan) = four_documents();
    assert_eq!(executors(&problem, &plan, &[2, 3]), [Some(0), Some(0), Some(1), Some(1)]);
    assert_eq!(executors(&problem, &plan, &[0, 2, 3]), [Some(1); 4]);
}

#[test]
fn with_no_slot_alive_bundles_have_no_executor() {
    let (problem, plan) = four_documents();
    assert_eq!(executors(&problem, &plan, &[0, 1, 2, 3]), [None; 4]);
}

#[test]
fn standby_slots_take_a_lost_pool_where_its_rows_are() {
    let (problem, plan) = four_documents();
    let taken = executors(&problem, &plan, &[0, 1]);
    for (bundle, executor) in plan.bundles().iter().zip(taken) {
        let home = problem.layout.locate(bundle.document, 0..1).next().unwrap().rank;
        assert_eq!(executor, Some(home.0 + 2));
    }
}

#[test]
fn a_filled_slot_gets_the_bundles_back_that_have_no_executor() {
    let (problem, plan) = four_documents();
    let planned = Assignment::planned(&plan);
    let none = reassign(&problem, &plan, &planned, &[false; 4]).unwrap();
    assert!(none.has_gaps());
    assert_eq!(none.executor(BundleId(0)), None);
    let back = reassign(&problem, &plan, &none, &[true, true, false, false]).unwrap();
    assert_eq!(back, planned);
}

#[test]
fn a_bundle_that_no_survivor_can_hold_is_named() {
    let (mut problem, plan_before) = four_documents();
    let needed = memory_of(&problem, &plan_before, BundleId(0)).most();
    problem.slots[2].memory = needed - 1;
    let plan = plan(&problem).unwrap();
    let alive = [false, false, true, false];
    let refused = reassign(&problem, &plan, &Assignment::planned(&plan), &alive);
    let document = plan.bundles()[0].document;
    let error = Error::BundleFitsNowhere { bundle: BundleId(0), document, needed };
    assert_eq!(refused, Err(error));
}

#[test]
fn lists_of_another_problem_are_refused() {
    let (problem, planned) = four_documents();
    let assignment = Assignment::planned(&planned);
    let check = |problem: &Problem, assignment: &Assignment, alive: &[bool], expected: Error| {
        assert_eq!(reassign(problem, &planned, assignment, alive), Err(expected));
    };
    let what = "list of slots alive";
    check(&problem, &assignment, &[true; 3], Error::Mismatch { what, found: 3, expected: 4 });

    let mut other = problem.clone();
    other.slots[0].weight = 50;
    let (given, was) = (other.digest(), problem.digest());
    check(&other, &assignment, &[true; 4], Error::OtherProblem { planned: was, given });

    let read = |text: &str| serde_json::from_str::<Assignment>(text).unwrap();
    let what = "assignment";
    let short = read(r#"{"executors":[0]}"#);
    check(&problem, &short, &[true; 4], Error::Mismatch { what, found: 1, expected: 4 });
    let beyond = read(r#"{"executors":[0,0,9,1]}"#);
    let (bundle, slot) = (BundleId(2), SlotId(9));
    check(&problem, &beyond, &[true; 4], Error::UnknownSlot { bundle, slot, slots: 4 });
}

/// The rule as it reads: every bundle that moves is compared at every slot alive.
fn by_the_rule(
    problem: &Problem,
    plan: &Plan,
    current: &Assignment,
    alive: &[bool],
) -> Option<Vec<Option<SlotId>>> {
    let is_alive = |slot: &SlotId| alive[slot.0 as usize];
    let heads = problem.heads;
    let (places, _) = problem.places();
    let cost = |bundle| plan.bundle_cost(problem, bundle);
    let mut executors: Vec<Option<SlotId>> = (plan.bundles().iter().zip(current.executors()))
        .map(|(it, now)| now.filter(is_alive).or(Some(it.slot).filter(is_alive)))
        .collect();
    let (mut loads, mut moved) = (vec![0; alive.len()], Vec::new());
    for (bundle, executor) in (0..).map(BundleId).zip(&executors) {
        match executor {
            Some(slot) => loads[slot.0 as usize] += cost(bundle),
            None => moved.push((Reverse(cost(bundle)), bundle)),
        }
    }
    moved.sort_unstable();
    for (Reverse(cost), bundle) in moved.into_iter().filter(|_| alive.contains(&true)) {
        let it = plan.bundle(bundle).unwrap();
        // Rows and the heads that need them.
        let queries = plan.tasks_of(bundle).iter().map(|task| task.rows.clone());
        let queries = queries.map(|rows| (rows, heads.query_heads(it.kv_heads.clone()).len()));
        let pieces: Vec<_> = queries
            .chain([(it.keys.clone(), it.kv_heads.len())])
            .flat_map(|(rows, heads)| {
                problem.layout.locate(it.document, rows).map(move |piece| (piece, heads))
            })
            .collect();
        let fits = |slot: &u32| {
            let place = places[*slot as usize];
            let is_cut = |rank: u32| {
                let (a, b) = (rank, place as u32);
                problem.links.unreachable.iter().any(|it| *it == (a, b) || *it == (b, a))
            };
            let own = 2 * memory_of_slot(problem, plan, SlotId(*slot)).phase;
            let reserve = problem.slots[*slot as usize].memory.saturating_sub(own);
            alive[*slot as usize]
                && reserve >= memory_of(problem, plan, bundle).most()
                && !pieces.iter().any(|it| is_cut(it.0.rank.0))
        };
        let slots: Vec<u32> = (0..alive.len() as u32).filter(fits).collect();
        let finish = |slot: u32| problem.slots[slot as usize].finish(loads[slot as usize] + cost);
        let earliest = slots.iter().map(|it| finish(*it)).min()?;
        let at_home = |slot: u32| {
            let home = problem.slots[slot as usize].home;
            let here = pieces.iter().filter(|it| Some(it.0.rank) == home);
            here.map(|(piece, heads)| piece.rows.len() * heads).sum::<usize>()
        };
        let early = slots.into_iter().filter(|it| finish(*it) <= earliest + earliest / 16);
        let time = |slot: u32| -> u64 {
            let to = places[slot as usize];
            let way = |(piece, heads): &(cadre_planner::Piece, usize)| {
                let from = piece.rank.0 as usize;
                (piece.rows.len() * heads) as u64 * price(problem, from, to)
            };
            pieces.iter().map(way).sum()
        };
        let best = if problem.links.places.is_empty() {
            early.min_by_key(|it| (Reverse(at_home(*it)), *it))?
        } else {
            early.min_by_key(|it| (time(*it), *it))?
        };
        loads[best as usize] += cost;
        executors[bundle.0 as usize] = Some(SlotId(best));
    }
    Some(executors)
}

/// Time of a byte on its way, at the slower end.
fn price(problem: &Problem, from: usize, to: usize) -> u64 {
    let Prices { node, rail, leaf, far } = problem.links.prices;
    let percent = match problem.links.distance(from, to) {
        Distance::Itself => 0,
        Distance::Node => node,
        Distance::Rail => rail,
        Distance::Leaf => leaf,
        Distance::Far => far,
    };
    let rate = problem.links.places[from].out.min(problem.links.places[to].into);
    u64::from(percent) * u64::from(NOMINAL_RATE) / u64::from(rate)
}

/// Two places a node, every third with a slow interface.
fn nodes(places: u32) -> Vec<Link> {
    let link = |place: u32| {
        let rate = NOMINAL_RATE / if place.is_multiple_of(3) { 4 } else { 1 };
        Link { node: place / 2, rail: place % 2, leaf: place / 4, out: rate, into: rate }
    };
    (0..places).map(link).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn bundles_go_where_the_rule_says(
        problem in prop_oneof![
            2 => problems(Just(PLENTY)),
            2 => problems(5_000_000_u64..100_000_000),
            1 => pools(),
        ],
        pairs in prop_oneof![Just(Vec::new()), prop::collection::vec((0_u32..12, 0_u32..12), 1..6)],
        standby in prop::collection::vec(prop::bool::weighted(0.2), 8),
        first in prop::collection::vec(any::<bool>(), 11),
        second in prop::collection::vec(any::<bool>(), 7),
        known in any::<bool>(),
    ) {
        let mut problem = problem;
        for (slot, _) in problem.slots.iter_mut().zip(standby.iter().cycle()).skip(1).filter(|it| *it.1) {
            slot.weight = 0;
        }
        let places = problem.places().1 as u32;
        let is_pair = |(a, b): &(u32, u32)| a != b && *a < places && *b < places;
        problem.links.unreachable = pairs.into_iter().filter(is_pair).collect();
        if known {
            problem.links.places = nodes(places);
            problem.links.prices = Prices { node: 12, rail: 100, leaf: 120, far: 150 };
        }
        let Ok(plan) = plan(&problem) else {
            return Ok(());
        };
        let mut current = Assignment::planned(&plan);
        for alive in [&first, &second] {
            let alive: Vec<bool> = alive.iter().copied().cycle().take(problem.slots.len()).collect();
            let expected = by_the_rule(&problem, &plan, &current, &alive);
            let next = reassign(&problem, &plan, &current, &alive);
            prop_assert_eq!(next.as_ref().ok().map(|it| it.executors().to_vec()), expected);
            let Ok(next) = next else { break };
            current = next;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn only_orphans_move_and_all_find_a_slot(
        problem in problems(Just(PLENTY)),
        first in prop::collection::vec(any::<bool>(), 6),
        second in prop::collection::vec(any::<bool>(), 6),
    ) {
        let plan = plan(&problem).unwrap();
        let mut current = Assignment::planned(&plan);
        for alive in [&first[..], &second[..]] {
            let alive = &alive.iter().copied().cycle().take(problem.slots.len()).collect::<Vec<_>>();
            let is_alive = |slot: SlotId| alive[slot.0 as usize];
            let next = reassign(&problem, &plan, &current, alive).unwrap();
            prop_assert_eq!(&next, &reassign(&problem, &plan, &current, alive).unwrap());
            for (before, after) in current.executors().iter().zip(next.executors()) {
                match before {
                    Some(slot) if is_alive(*slot) => prop_assert_eq!(before, after),
                    _ if alive.contains(&true) => prop_assert!(after.is_some_and(is_alive)),
                    _ => prop_assert_eq!(*after, None),
                }
            }
            current = next;
        }
    }

    #[test]
    fn a_plan_within_memory_survives_the_loss_of_any_slot(
        problem in problems(10_000_000_u64..100_000_000),
    ) {
        let Ok(plan) = plan(&problem) else {
            return Ok(());
        };
        // Standby slots and slots left empty hold what they can.
        let working = |slot: usize| plan.bundles_of(SlotId(slot as u32)).next().is_some();
        let count = (0..problem.slots.len()).filter(|it| working(*it)).count();
        for lost in 0..problem.slots.len() {
            let alive: Vec<bool> =
                (0..problem.slots.len()).map(|it| it != lost && working(it)).collect();
            if count < 2 {
                continue;
            }
            let next = reassign(&problem, &plan, &Assignment::planned(&plan), &alive).unwrap();
            prop_assert!(!next.has_gaps());
        }
    }
}

/// A slot's long documents are bundles of few heads, so that what it leaves behind spreads.
#[test]
fn what_one_of_sixteen_leaves_behind_is_dealt_out_by_kv_head() {
    for (documents, rank_rows, homes) in
        [(16, 1 << 17, false), (16, 1 << 17, true), (48, 1 << 16, false)]
    {
        let slot = |it: u32| if homes { in_place(it) } else { dedicated(100) };
        let mut problem =
            problem(vec![causal(rank_rows); documents], rank_rows, (0..16).map(slot).collect());
        problem.heads = cadre_planner::Heads { query: 32, kv: 8, dim: 128 };
        let plan = plan(&problem).unwrap();
        let mean: u64 = (0..16).map(|it| plan.load(&problem, SlotId(it))).sum::<u64>() / 16;
        for lost in 0..16 {
            let mut loads = [0; 16];
            let of = executors(&problem, &plan, &[lost]);
            for (bundle, slot) in (0..).map(BundleId).zip(of) {
                loads[slot.unwrap() as usize] += plan.bundle_cost(&problem, bundle);
            }
            let most = *loads.iter().max().unwrap();
            assert!(
                most <= mean + mean / 4,
                "{documents} documents, slot {lost}: {most} of {mean}"
            );
        }
    }
}
