//! What holds for every plan of every problem.

use cadre_planner::{
    Costs, Document, DocumentId, Error, Heads, Layout, Link, Mask, Plan, Prices, Problem, RankId,
    Slot, SlotId, Stretch, TILE_ROWS, Tolerance, check_beside, imbalance_at_home, memory_of_slot,
    plan, plan_at_home, plan_beside,
};
use proptest::prelude::*;

use crate::problems::{PLENTY, pools, problems};

/// Time of the dearest tile row with one task at the slowest slot.
fn tile_time(problem: &Problem) -> u64 {
    let costs = &problem.costs;
    let row = |rows: u32| u64::from(TILE_ROWS) * u64::from(rows) + u64::from(costs.tile);
    let longest = problem.layout.documents().iter().map(|it| it.rows).max().unwrap_or(0);
    let cost = row(longest) * u64::from(problem.heads.query) + u64::from(costs.task);
    let slots = problem.slots.iter().filter(|it| !it.is_standby());
    slots.map(|it| it.finish(cost) - it.head_start).max().unwrap_or(0)
}

/// Tasks of whole documents.
fn least_tasks(problem: &Problem) -> u64 {
    let longest = problem.costs.task_rows;
    problem.layout.documents().iter().map(|it| u64::from(it.rows.div_ceil(longest))).sum()
}

fn assert_memory(problem: &Problem, plan: &Plan) {
    for (slot, it) in problem.slots.iter().enumerate() {
        let memory = memory_of_slot(problem, plan, SlotId(slot as u32));
        assert!(memory.phase == 0 || memory.needed() <= it.memory);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn pools_of_short_documents_finish_within_two_in_a_thousand(problem in pools()) {
        let plan = plan(&problem).unwrap();
        let bounds = plan.bounds();
        let tasks = plan.tasks().len() as u64 - least_tasks(&problem);
        let weights: u64 = problem.slots.iter().map(|it| u64::from(it.weight)).sum();
        let costs = u64::from(problem.costs.task) * tasks * 100 / weights;
        let latest = bounds.level + bounds.level / 500 + tile_time(&problem) + costs;
        prop_assert!(bounds.finish <= latest, "{:?} beyond {}, {} more tasks", bounds, latest, tasks);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn plans_pass_their_check_and_are_even(problem in problems(Just(PLENTY))) {
        let plan = plan(&problem).unwrap();
        prop_assert_eq!(plan.check(&problem), Ok(()));
        let loads = (0..problem.slots.len() as u32).map(|slot| plan.load(&problem, SlotId(slot)));
        let bounds = plan.bounds();
        // Cuts cost tasks that the level does not know.
        let costs = u64::from(problem.costs.task) * plan.tasks().len() as u64;
        let weights: u64 = problem.slots.iter().map(|it| u64::from(it.weight)).sum();
        let latest = bounds.level + 2 * tile_time(&problem) + costs * 100 / weights.min(100);
        prop_assert!(bounds.finish <= latest, "{:?} beyond {}", bounds, latest);
        for (load, slot) in loads.zip(&problem.slots) {
            prop_assert!(load == 0 || slot.finish(load) <= bounds.finish);
        }
    }

    #[test]
    fn the_same_problem_gives_the_same_plan(problem in problems(Just(PLENTY))) {
        let again = problem.clone();
        let (first, second) = (plan(&problem).unwrap(), plan(&again).unwrap());
        prop_assert_eq!(first.digest(), second.digest());
        prop_assert_eq!(first, second);
    }

    #[test]
    fn another_problem_gives_another_digest(problem in problems(Just(PLENTY))) {
        let mut other = problem.clone();
        other.slots[0].head_start += 1;
        prop_assert_ne!(problem.digest(), other.digest());
        let plan = plan(&problem).unwrap();
        let other_digest = other.digest();
        let refused = Error::OtherProblem { planned: problem.digest(), given: other_digest };
        prop_assert_eq!(plan.check(&other), Err(refused));
    }

    #[test]
    fn tight_memory_is_kept_or_refused(problem in problems(100_000_u64..60_000_000)) {
        match plan(&problem) {
            Ok(plan) => {
                prop_assert_eq!(plan.check(&problem), Ok(()));
                assert_memory(&problem, &plan);
            }
            Err(error) => prop_assert!(
                matches!(error, Error::DocumentTooLarge { .. } | Error::NoRoom { .. } | Error::SlotFull { .. }),
                "{error}"
            ),
        }
    }

    #[test]
    fn a_bundle_of_another_plan_finds_room(problem in problems(1_000_000_u64..60_000_000), beside in 0_u64..8_000_000) {
        match plan_beside(&problem, beside) {
            Ok(plan) => {
                prop_assert_eq!(plan.check(&problem), Ok(()));
                prop_assert_eq!(check_beside(&problem, &plan, beside), Ok(()));
                for (slot, it) in (0..).map(SlotId).zip(&problem.slots) {
                    let phase = memory_of_slot(&problem, &plan, slot).phase;
                    prop_assert!(phase == 0 || 2 * phase + beside <= it.memory);
                }
            }
            Err(error) => prop_assert!(
                matches!(error, Error::DocumentTooLarge { .. } | Error::NoRoom { .. } | Error::SlotFull { .. }),
                "{error}"
            ),
        }
    }

    #[test]
    fn a_plan_at_home_has_the_imbalance_of_home(problem in problems(Just(PLENTY))) {
        match plan_at_home(&problem) {
            Ok(plan) => {
                prop_assert_eq!(plan.check(&problem), Ok(()));
                let loads: Vec<u64> =
                    (0..problem.slots.len() as u32).map(|it| plan.load(&problem, SlotId(it))).collect();
                let (most, _) = imbalance_at_home(&problem).unwrap();
                let time = |(slot, load): (&Slot, &u64)| {
                    load * 100 / if slot.is_standby() { 100 } else { u64::from(slot.weight) }
                };
                prop_assert_eq!(problem.slots.iter().zip(&loads).map(time).max().unwrap(), most);
                let (bounds, least) = (plan.bounds(), plan.least(&problem));
                prop_assert!(bounds.memory >= plan.least_memory(&problem), "{:?}", bounds);
                prop_assert!(bounds.pulled >= least.pulled, "{:?} {:?}", bounds, least);
                prop_assert!(bounds.link >= least.link, "{:?} {:?}", bounds, least);
                if problem.slots.iter().zip(&loads).all(|(slot, load)| *load == 0 || !slot.is_standby()) {
                    // The level is rounded up, a finish down.
                    prop_assert!(bounds.finish + 1 >= bounds.level, "{:?}", bounds);
                    prop_assert!(bounds.finish >= bounds.indivisible, "{:?}", bounds);
                }
            }
            Err(error) => prop_assert!(matches!(error, Error::NoSlotAtHome { .. }), "{error}"),
        }
    }

    #[test]
    fn a_layout_and_a_plan_survive_the_wire(problem in problems(Just(PLENTY))) {
        let bytes = serde_json::to_vec(&problem).unwrap();
        let read: Problem = serde_json::from_slice(&bytes).unwrap();
        prop_assert_eq!(&read, &problem);
        let plan = plan(&problem).unwrap();
        let read: Plan = serde_json::from_slice(&serde_json::to_vec(&plan).unwrap()).unwrap();
        prop_assert_eq!(read, plan);
    }

    #[test]
    fn every_row_is_located_once(problem in problems(Just(PLENTY))) {
        let layout: &Layout = &problem.layout;
        for (document, it) in (0..).map(DocumentId).zip(layout.documents()) {
            let mut next = 0;
            for piece in layout.locate(document, 0..it.rows) {
                prop_assert_eq!(piece.rows.start, next);
                next = piece.rows.end;
                let found = layout.pieces_of(piece.rank).any(|(id, held)| {
                    let shift = held.rows.start.abs_diff(held.local.start);
                    id == document
                        && held.rows.start <= piece.rows.start
                        && piece.rows.end <= held.rows.end
                        && piece.rows.start.abs_diff(piece.local.start) == shift
                });
                prop_assert!(found);
            }
            prop_assert_eq!(next, it.rows);
        }
    }

    /// Any outcome but a panic, also of overflow checks where they are on.
    #[test]
    fn numbers_of_any_size_give_a_plan_or_an_error(
        problem in problems(any::<u64>()),
        numbers in any::<[u16; 3]>(),
        costs in any::<[u32; 3]>(),
        weights in prop::collection::vec((any::<u32>(), 0_u32..32, any::<u64>(), 0_u32..64), 6),
        beside in (any::<u64>(), 0_u32..64),
        rates in prop::option::of(prop::collection::vec((any::<u32>(), 0_u32..32), 18)),
        tolerance in prop_oneof![6 => Just(1.002), 1 => 1.0..=2.0, 1 => Just(2.0)],
    ) {
        let mut problem = problem;
        for (slot, (weight, small, head_start, shift)) in problem.slots.iter_mut().zip(weights) {
            slot.weight = weight >> small;
            slot.head_start = head_start >> shift;
        }
        problem.tolerance = Tolerance::new(tolerance).unwrap();
        if let Some(rates) = rates {
            let rate = |(rate, small): (u32, u32)| (rate >> small).clamp(1, 10_000_000);
            let places = problem.places().1;
            let link = |at: usize| Link {
                node: at as u32 / 2,
                rail: 0,
                leaf: 0,
                out: rate(rates[at % 12]),
                into: rate(rates[(at + 3) % 12]),
            };
            problem.links.places = (0..places).map(link).collect();
            let [node, rail, leaf, far] = [12, 13, 14, 15].map(|at| rate(rates[at]));
            problem.links.prices = Prices { node, rail, leaf, far };
        }
        let [tile, task, backward_percent] = costs;
        problem.costs = Costs { tile, task, backward_percent, ..problem.costs };
        let _ = plan(&problem);
        if problem.tolerance == Tolerance::USUAL {
            let _ = plan_beside(&problem, beside.0 >> beside.1);
        }
        let [query, kv, dim] = numbers;
        problem.heads = Heads { query: (query % 64).saturating_mul(kv), kv, dim };
        let _ = (plan(&problem), plan_at_home(&problem), imbalance_at_home(&problem));
        if let Ok(plan) = plan(&problem) {
            prop_assert_eq!(plan.check(&problem), Ok(()));
            let most = plan.bounds();
            prop_assert!(most.finish < u64::MAX && most.link < u64::MAX, "{:?}", most);
        }
    }

    #[test]
    fn any_layout_is_taken_or_refused(
        documents in prop::collection::vec(0_u32..40, 0..4),
        ranks in prop::collection::vec(
            prop::collection::vec((0_u32..4, 0_u32..40, 0_u32..40), 0..4), 0..4
        ),
    ) {
        let documents = documents.into_iter().map(|rows| Document { rows, mask: Mask::Causal });
        let stretch = |(document, start, end)| Stretch { document: DocumentId(document), start, end };
        let ranks = ranks.into_iter().map(|it| it.into_iter().map(stretch).collect());
        let layout = Layout::new(documents.collect(), ranks.collect());
        if let Ok(layout) = layout {
            let rows: u64 = layout.documents().iter().map(|it| u64::from(it.rows)).sum();
            let held = (0..layout.ranks().len() as u32).map(|it| u64::from(layout.rank_rows(RankId(it))));
            prop_assert_eq!(held.sum::<u64>(), rows);
        }
    }
}
