//! Small problems whose best plan is known.

use cadre_planner::{
    BundleId, Costs, Cuts, DocumentId, Layout, Least, Problem, RankId, Slot, SlotId, Stretch,
    imbalance_at_home, memory_of, plan, plan_at_home,
};

use crate::problems::{causal, dedicated, full, in_place, problem};

/// Rows under all heads by slot.
fn rows_of(problem: &Problem) -> Vec<u32> {
    let plan = plan(problem).unwrap();
    let rows = |slot| plan.bundles_of(SlotId(slot)).flat_map(|(id, _)| plan.tasks_of(id));
    (0..problem.slots.len() as u32)
        .map(|slot| {
            let of_heads =
                |it: &cadre_planner::Task| (it.rows.end - it.rows.start) * it.kv_heads.len() as u32;
            rows(slot).map(of_heads).sum::<u32>() / u32::from(problem.heads.kv)
        })
        .collect()
}

#[test]
fn equal_documents_at_equal_ranks_stay_at_home() {
    let problem = problem(vec![causal(1_000); 3], 1_000, (0..3).map(in_place).collect());
    let plan = plan(&problem).unwrap();
    assert_eq!(plan.bounds().gap_ppm, 0);
    let homes: Vec<_> = plan.bundles().iter().map(|it| (it.slot.0, it.document.0)).collect();
    assert_eq!(homes, [(0, 0), (1, 1), (2, 2)]);
    assert_eq!(imbalance_at_home(&problem).unwrap().0, plan.load(&problem, SlotId(0)));
}

#[test]
fn work_follows_the_weights() {
    let slots = vec![dedicated(100), dedicated(300)];
    assert_eq!(rows_of(&problem(vec![full(512)], 512, slots)), [128, 384]);
}

/// Ranks with so many documents of one tile each, which move as wholes.
fn tiles(documents: usize, weights: &[u32]) -> Problem {
    let each = documents / weights.len();
    let slot = |(rank, weight): (u32, &u32)| Slot { weight: *weight, ..in_place(rank) };
    let slots = (0..).zip(weights).map(slot).collect();
    let problem = problem(vec![causal(128); documents], 128 * each as u32, slots);
    Problem { lanes: 2, ..problem }
}

#[test]
fn a_slot_that_is_too_slow_for_one_tile_gives_all_of_them_away() {
    for (slow, fast, each) in [(10, 100, 5), (10, 400, 5), (1, 4_000_000, 3)] {
        let problem = tiles(8 * each, &[slow, fast, fast, fast, fast, fast, fast, fast]);
        let plan = plan(&problem).unwrap();
        assert_eq!(plan.load(&problem, SlotId(0)), 0, "weights {slow} and {fast}");
        let tiles = (8 * each).div_ceil(7) as u64;
        let one = plan.load(&problem, SlotId(1)) / plan.bundles_of(SlotId(1)).count() as u64;
        assert_eq!(plan.bounds().finish, tiles * one * 100 / u64::from(fast));
        let (most, mean) = imbalance_at_home(&problem).unwrap();
        assert!(most / mean >= u64::from(fast / slow) / 2, "it would finish so much later");
    }
}

/// No piece levels two ranks, and no two tiles differ by what would.
#[test]
fn a_tile_moves_though_its_receiver_then_finishes_last() {
    let ranks: Vec<(usize, u32)> = [(10, 128)].into_iter().chain([(9, 124); 9]).collect();
    let documents: Vec<_> = ranks.iter().flat_map(|it| vec![causal(it.1); it.0]).collect();
    let mut next = (0..).map(DocumentId);
    let stretches = |&(count, rows): &(usize, u32)| {
        let one = |document| Stretch { document, start: 0, end: rows };
        next.by_ref().take(count).map(one).collect()
    };
    let layout = Layout::new(documents.clone(), ranks.iter().map(stretches).collect()).unwrap();
    let slots = (0..10).map(in_place).collect();
    let problem = Problem { layout, lanes: 2, ..problem(documents, 1 << 20, slots) };
    let plan = plan(&problem).unwrap();
    let load = |rows: u64| rows * (rows + 1) / 2 * u64::from(problem.heads.query);
    assert_eq!(imbalance_at_home(&problem).unwrap().0, 10 * load(128));
    assert_eq!(plan.bounds().finish, 10 * load(124));
    assert_eq!(plan.check(&problem), Ok(()));
}

#[test]
fn a_head_start_counts_as_work() {
    let busy = Slot { head_start: 2 * 128 * 512 * 4, ..dedicated(100) };
    let slots = vec![busy, dedicated(100)];
    assert_eq!(rows_of(&problem(vec![full(512)], 512, slots)), [128, 384]);
    let busy = Slot { head_start: 1 << 40, ..dedicated(100) };
    assert_eq!(rows_of(&problem(vec![full(512)], 512, vec![busy, dedicated(100)])), [0, 512]);
}

#[test]
fn standby_slots_get_nothing() {
    let slots = vec![dedicated(0), dedicated(100), dedicated(0)];
    assert_eq!(rows_of(&problem(vec![causal(700)], 700, slots)), [0, 700, 0]);
}

#[test]
fn whole_documents_are_kept_whole_where_they_fit() {
    let documents = vec![causal(1_000), causal(1_000), causal(2_000), causal(2_000)];
    let problem = problem(documents, 6_000, vec![dedicated(100), dedicated(100)]);
    let plan = plan(&problem).unwrap();
    assert_eq!(plan.bundles().len(), 4);
    assert_eq!(plan.bounds().gap_ppm, 0);
}

#[test]
fn a_long_document_is_cut_into_few_pieces_that_are_even() {
    let slots = vec![dedicated(100); 4];
    let problem = problem(vec![causal(65_536)], 65_536, slots);
    let plan = plan(&problem).unwrap();
    assert!(plan.bounds().gap_ppm <= 2_000, "{:?}", plan.bounds());
    assert_eq!(plan.bundles().len(), 4);
    let longest = plan.tasks().iter().map(|it| it.rows.end - it.rows.start).max();
    assert!(longest <= Some(problem.costs.task_rows));
}

#[test]
fn surplus_moves_in_one_piece_to_an_idle_neighbour() {
    let documents = vec![causal(8_192), causal(64)];
    let mut problem = problem(documents, 8_192, vec![in_place(0), in_place(1)]);
    problem.costs = Costs { task: 0, ..Costs::default() };
    let plan = plan(&problem).unwrap();
    let away: Vec<_> = plan.bundles_of(SlotId(1)).map(|(_, it)| it.document).collect();
    assert_eq!(away, [DocumentId(0), DocumentId(1)]);
    assert!(plan.bounds().gap_ppm < 50_000, "{:?}", plan.bounds());
}

#[test]
fn at_home_no_query_row_moves_and_edges_cut_inside_tiles() {
    let documents = vec![causal(900), full(500), causal(100)];
    let mut problem = problem(documents, 500, (0..3).map(in_place).collect());
    problem.slots[1].weight = 0;
    let plan = plan_at_home(&problem).unwrap();
    assert_eq!(plan.cuts(), Cuts::RankEdges);
    for task in plan.tasks() {
        let slot = plan.bundle(task.bundle).unwrap().slot;
        let home = problem.slots[slot.0 as usize].home.unwrap();
        let ranks = problem.layout.locate(task.document, task.rows.clone()).map(|it| it.rank);
        assert!(ranks.into_iter().all(|rank| rank == home));
    }
    assert!(plan.tasks().iter().any(|it| it.rows == (500..900)));
    let loads: Vec<u64> = (0..3).map(|slot| plan.load(&problem, SlotId(slot))).collect();
    let (most, mean) = imbalance_at_home(&problem).unwrap();
    assert_eq!(most, *loads.iter().max().unwrap());
    assert_eq!(mean, loads.iter().sum::<u64>() / 3);
}

#[test]
fn nothing_is_known_of_what_standby_slots_at_home_have_to_pull() {
    let documents = vec![causal(4_096), causal(4_096)];
    let mut problem = problem(documents, 4_096, vec![in_place(0), in_place(1)]);
    problem.costs = Costs::pairs_only();
    problem.slots[1].weight = 0;
    let plan = plan_at_home(&problem).unwrap();
    assert_eq!((plan.bounds().pulled, plan.least(&problem)), (0, Least::default()));
    assert_eq!(plan.least_memory(&problem), 0);
}

#[test]
fn a_bundle_needs_its_inputs_and_results() {
    let problem = problem(vec![causal(256)], 256, vec![in_place(0)]);
    let plan = plan(&problem).unwrap();
    let memory = memory_of(&problem, &plan, BundleId(0));
    let (q, kv, statistic) = (256 * 4 * 64 * 4, 256 * 2 * 64 * 4, 256 * 4 * 4);
    // Q, O; K, V; LSE.
    assert_eq!(memory.forward, 2 * q + 2 * kv + statistic);
    // Q, dO, dQ; K, V, dK, dV; LSE, Δ.
    assert_eq!(memory.backward, 3 * q + 4 * kv + 2 * statistic);
    assert_eq!(problem.layout.rank_rows(RankId(0)), 256);
}

#[test]
fn digest_of_a_plan_is_fixed() {
    let documents = vec![causal(5_000), full(300), causal(1_000)];
    let mut problem = problem(documents, 3_150, vec![in_place(0), in_place(1), dedicated(150)]);
    problem.costs = Costs::default();
    assert_eq!(plan(&problem).unwrap().digest(), 7_597_068_808_406_387_116);
}

/// 128K tokens a rank in documents of one length: slots by weight, so many of them in place, rows of a document.
#[test]
fn pools_of_equal_short_documents_are_even() {
    let all = |weights: [u32; 2], slots: usize| weights.repeat(slots / 2);
    for (weights, in_place, rows) in [
        (all([100, 100], 32), 16, 1_024),
        (all([100, 100], 32), 16, 512),
        (all([50, 100], 64), 64, 512),
        (all([80, 100], 64), 64, 256),
    ] {
        for lanes in [8, 1] {
            let slot = |(at, weight): (u32, u32)| Slot {
                home: (at < in_place).then_some(RankId(at)),
                ..dedicated(weight)
            };
            let slots = (0..).zip(weights.clone()).map(slot).collect();
            let documents = vec![causal(rows); in_place as usize * (131_072 / rows as usize)];
            let mut problem = problem(documents, 131_072, slots);
            problem.heads = cadre_planner::Heads { query: 32, kv: 8, dim: 128 };
            problem.lanes = lanes;
            let bounds = plan(&problem).unwrap().bounds();
            assert!(bounds.gap_ppm <= 2_000, "{rows} rows, {lanes} lanes: {bounds:?}");
        }
    }
}

/// Heads of one document in one slot are several bundles only where the tasks that this adds are little of its work.
#[test]
fn bundles_that_are_split_stay_even() {
    // With fewer query heads a task is dearer against its rows, also where heads part between slots.
    for (query, most) in [(32, 2_000), (8, 10_000)] {
        let documents = [vec![causal(1_024); 8], vec![causal(128); 280]].concat();
        let mut problem = problem(documents, 4_096, vec![dedicated(100); 16]);
        problem.heads = cadre_planner::Heads { query, kv: 8, dim: 128 };
        problem.costs = Costs::default();
        let bounds = plan(&problem).unwrap().bounds();
        assert!(bounds.gap_ppm <= most, "{query} heads: {bounds:?}");
    }
}

/// Ranks cut documents inside of tiles, so a bundle at home may be smaller than any that holds a whole tile.
#[test]
fn bounds_of_plans_at_home_allow_for_cuts_inside_tiles() {
    for (query, kv, ranks) in [(32, 8, 2), (64, 8, 2), (32, 2, 32), (32, 1, 2)] {
        let slots = (0..ranks).map(in_place).collect();
        let mut problem = problem(vec![causal(128)], 128 / ranks, slots);
        problem.heads = cadre_planner::Heads { query, kv, dim: 128 };
        (problem.element_bytes, problem.lanes) = (2, kv);
        let plan = plan_at_home(&problem).unwrap();
        let bounds = plan.bounds();
        assert!(bounds.memory >= plan.least_memory(&problem), "{query}/{kv}: {bounds:?}");
        assert!(bounds.finish >= bounds.indivisible, "{query}/{kv}: {bounds:?}");
    }
}
