//! Documents under windows: what slots pull is their own rows and one halo of keys each, and nothing else.
//!
//! The construct that plans are held against walks all tiles along a line, document after document, and gives them to the
//! slots in order, so that each slot ends at the tile edge nearest to its share. Where heads may part it walks head after head
//! too, and the cheaper of both counts. It looks at nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use cadre_planner::{
    BundleId, Document, Heads, Layout, Mask, Plan, Problem, RankId, Slot, SlotId, Tolerance,
    Traffic, plan,
};

use crate::draws::{Draw, Where};
use crate::problems::{causal, dedicated, problem};
use crate::seeds::first_seeds;

const TILE: u32 = 128;
const K: u32 = 1_024;
/// Bytes of a plan over those of its construct.
const MOST: f64 = 1.03;
/// The same where the construct finishes later than 1.002 of the mean, and the plan earlier than it.
const UNEVEN: f64 = 1.1;
/// The last finish over the mean.
const EVEN: f64 = 1.002;
/// The earliest finish of cuts of a line is searched to less than this.
const ROUNDING: f64 = 0.000_05;

/// Rows of queries and of keys that slots pull, times KV heads.
#[derive(Clone, Copy, Debug, Default)]
struct Rows {
    queries: u64,
    keys: u64,
}

/// What the construct pulls, and the most of its loads over their mean.
struct Construct {
    rows: Rows,
    max_over_mean: f64,
}

/// Rows that a slot holds of a document under a KV head.
type Held = BTreeMap<(usize, u32, u16), Range<u32>>;

fn walk(problem: &Problem, column: u16) -> (Held, Vec<u64>) {
    let layout = &problem.layout;
    let pairs = |document: Document, rows: Range<u32>| document.mask.pairs(document.rows, rows);
    let all: u64 = layout.documents().iter().map(|it| pairs(*it, 0..it.rows)).sum();
    let all = all * u64::from(problem.heads.kv);
    let share = |slots: usize| all as f64 * slots as f64 / problem.slots.len() as f64;
    let (mut held, mut loads) = (Held::new(), vec![0; problem.slots.len()]);
    let (mut slot, mut done) = (0, 0);
    for (document, it) in (0..).zip(layout.documents()) {
        for first in (0..problem.heads.kv).step_by(column.into()) {
            for start in (0..it.rows).step_by(TILE as usize) {
                let rows = start..it.rows.min(start + TILE);
                let cost = pairs(*it, rows.clone()) * u64::from(column);
                while slot + 1 < loads.len() && done as f64 + cost as f64 / 2.0 > share(slot + 1) {
                    slot += 1;
                }
                done += cost;
                loads[slot] += cost;
                for head in first..first + column {
                    let run = held.entry((slot, document, head)).or_insert_with(|| rows.clone());
                    run.end = rows.end;
                }
            }
        }
    }
    (held, loads)
}

/// Rows that do not lie where a slot stands.
fn away(problem: &Problem, slot: usize, document: u32, rows: Range<u32>) -> u64 {
    let pieces = problem.layout.locate(cadre_planner::DocumentId(document), rows);
    let away = pieces.filter(|it| Some(it.rank) != problem.slots[slot].home);
    away.map(|it| u64::from(it.rows.end - it.rows.start)).sum()
}

fn construct(problem: &Problem) -> Construct {
    let columns =
        if problem.lanes == 1 { vec![1, problem.heads.kv] } else { vec![problem.heads.kv] };
    let made = columns.into_iter().map(|column| {
        let (held, loads) = walk(problem, column);
        let mut rows = Rows::default();
        for ((slot, document, _), run) in held {
            let it = problem.layout.documents()[document as usize];
            rows.queries += away(problem, slot, document, run.clone());
            rows.keys += away(problem, slot, document, it.mask.keys(it.rows, run));
        }
        let most = loads.iter().copied().max().unwrap() as f64;
        let max_over_mean = most * loads.len() as f64 / loads.iter().sum::<u64>() as f64;
        Construct { rows, max_over_mean }
    });
    made.min_by_key(|it| bytes(problem, it.rows)).unwrap()
}

fn bytes(problem: &Problem, rows: Rows) -> u64 {
    let row = u64::from(problem.heads.dim) * u64::from(problem.element_bytes);
    let group = u64::from(problem.heads.query / problem.heads.kv);
    (rows.queries * group + rows.keys * 2) * row
}

/// What slots pull by a plan, counted row by row from its tasks; every row of every head has to be computed once, with the keys
/// of its mask.
fn counted(problem: &Problem, plan: &Plan) -> Rows {
    let layout = &problem.layout;
    let heads = usize::from(problem.heads.kv);
    let mut done: Vec<Vec<u8>> =
        layout.documents().iter().map(|it| vec![0; it.rows as usize * heads]).collect();
    let mut rows = Rows::default();
    for (bundle, it) in (0..).map(BundleId).zip(plan.bundles()) {
        let document = layout.documents()[it.document.0 as usize];
        // Where the keys end that the rows so far keep: no key may be between two rows that none of them keeps.
        let mut kept: Option<Range<u32>> = None;
        for task in plan.tasks_of(bundle) {
            rows.queries += away(problem, it.slot.0 as usize, it.document.0, task.rows.clone())
                * it.kv_heads.len() as u64;
            for row in task.rows.clone() {
                let (first, end) = match document.mask {
                    Mask::Causal => (0, row + 1),
                    Mask::Full => (0, document.rows),
                    Mask::Window { left } => (row.saturating_sub(left), row + 1),
                };
                assert!(task.keys.start <= first && end <= task.keys.end, "{task:?}, row {row}");
                let all = kept.get_or_insert(first..end);
                assert!(first <= all.end, "{it:?} has keys that no row keeps before row {row}");
                *all = all.start.min(first)..all.end.max(end);
                for head in it.kv_heads.clone() {
                    done[it.document.0 as usize][row as usize * heads + usize::from(head)] += 1;
                }
            }
        }
        assert_eq!(Some(&it.keys), kept.as_ref(), "{it:?}");
        rows.keys += away(problem, it.slot.0 as usize, it.document.0, it.keys.clone())
            * it.kv_heads.len() as u64;
    }
    assert!(done.iter().flatten().all(|times| *times == 1), "a row is not computed once");
    rows
}

fn max_over_mean(problem: &Problem, plan: &Plan) -> f64 {
    let slots = (0..problem.slots.len() as u32).map(SlotId);
    let loads: Vec<u64> = slots.map(|it| plan.load(problem, it)).collect();
    let mean = loads.iter().sum::<u64>() as f64 / loads.len() as f64;
    *loads.iter().max().unwrap() as f64 / mean
}

fn case(documents: Vec<Document>, rank_rows: u32, slots: u32, place: Where, lanes: u16) -> Problem {
    let home = |slot: u32| match place {
        Where::InPlace => Some(RankId(slot)),
        Where::Dedicated => None,
        Where::Mixed => slot.is_multiple_of(2).then_some(RankId(slot)),
    };
    let layout = Layout::end_to_end(documents, rank_rows).unwrap();
    Problem {
        layout,
        heads: Heads { query: 32, kv: 8, dim: 128 },
        element_bytes: 2,
        lanes,
        ..problem(
            vec![causal(1)],
            1,
            (0..slots).map(|slot| Slot { home: home(slot), ..dedicated(100) }).collect(),
        )
    }
}

/// What a plan has more than its construct; empty if it is as good.
fn behind(name: &str, problem: &Problem) -> Option<String> {
    let known = construct(problem);
    let plan = plan(problem).unwrap();
    let rows = counted(problem, &plan);
    let flow = Traffic::of(problem, &plan).forward;
    assert_eq!(flow.queries + flow.keys, bytes(problem, rows), "{name}");
    assert_eq!(flow.keys, bytes(problem, Rows { queries: 0, ..rows }), "{name}");
    let ratio = bytes(problem, rows) as f64 / bytes(problem, known.rows).max(1) as f64;
    let keys = rows.keys as f64 / known.rows.keys.max(1) as f64;
    let even = max_over_mean(problem, &plan);
    let text = format!(
        "{name}: Q+KV x {ratio:.3}, KV x {keys:.3} ({:.2} GB), max/mean {even:.5} (construct {:.5})",
        flow.keys as f64 / 1e9,
        known.max_over_mean
    );
    println!("{text}");
    // Slots in place may have more keys for fewer queries.
    let is_pool = problem.slots.iter().all(|it| it.home.is_none());
    // A construct that is less even needs fewer cuts.
    let most = if known.max_over_mean > even.max(EVEN) { UNEVEN } else { MOST };
    let is_worse = ratio > most || (is_pool && keys > most);
    (is_worse || even > known.max_over_mean.max(EVEN) + ROUNDING).then_some(text)
}

#[test]
fn rows_of_a_window_bring_their_halo_and_nothing_else() {
    let mut worse = Vec::new();
    for (place, slots) in [
        (Where::Dedicated, 48),
        (Where::Dedicated, 16),
        (Where::InPlace, 64),
        (Where::InPlace, 16),
        (Where::Mixed, 16),
        (Where::Mixed, 64),
    ] {
        for lanes in [1, 8] {
            for rows in [512, 4_096, 32_768] {
                let documents =
                    vec![Document { rows: K * K, mask: Mask::Window { left: rows - 1 } }];
                let name = format!("1M, window {rows}, {place:?}, {slots} slots, {lanes} lanes");
                let rank_rows = if place == Where::Dedicated { 64 * K } else { K * K / slots };
                worse.extend(behind(&name, &case(documents, rank_rows, slots, place, lanes)));
            }
        }
    }
    assert!(worse.is_empty(), "{} behind the construct:\n{}", worse.len(), worse.join("\n"));
}

/// Several documents, some shorter than their window, and numbers of slots that nothing divides.
#[test]
fn windows_of_fresh_draws_bring_their_halo_and_nothing_else() {
    let mut worse = Vec::new();
    for (first, count) in first_seeds("windows", 300, 12) {
        for seed in first..first + count {
            let (name, problem) = fresh(seed);
            worse.extend(behind(&name, &problem));
        }
    }
    assert!(worse.is_empty(), "{} behind the construct:\n{}", worse.len(), worse.join("\n"));
}

/// A draw of some documents under one window, dedicated, in place or both, 8 to 46 slots.
fn fresh(seed: u64) -> (String, Problem) {
    let mut draw = Draw::new(seed);
    let place = draw.of(&[Where::Dedicated, Where::Dedicated, Where::InPlace, Where::Mixed]);
    let slots = 2 * (4 + (draw.share() * 20.0) as u32);
    let left = draw.of(&[127_u32, 1_023, 4_095, 8_191]);
    let lanes = draw.of(&[1_u16, 8]);
    let rank_rows = 16 * K;
    let (mut documents, mut all) = (Vec::new(), 0);
    while all < slots * rank_rows {
        let rows = (draw.share().powi(4) * f64::from(K * K)) as u32;
        let rows = rows.max(1_000).min(slots * rank_rows - all);
        all += rows;
        documents.push(Document { rows, mask: Mask::Window { left } });
    }
    let name = format!(
        "seed {seed}: {} documents, window {}, {place:?}, {slots} slots, {lanes} lanes",
        documents.len(),
        left + 1
    );
    (name, case(documents, rank_rows, slots, place, lanes))
}

/// Where the heads of a tile row are far less than what is tolerated, evenness that is asked for is kept, however many more bytes
/// that takes.
#[test]
fn windows_keep_the_tolerance() {
    let (mut late, mut cases) = (Vec::new(), 0);
    for (first, count) in first_seeds("late windows", 340, 24) {
        for seed in first..first + count {
            let (name, drawn) = fresh(seed);
            for ratio in [1.0, 1.002, 1.004, 1.05] {
                let tolerance = Tolerance::new(ratio).unwrap();
                let problem = Problem { tolerance, lanes: 1, ..drawn.clone() };
                let it = plan(&problem).unwrap().bounds();
                let reached = it.finish as f64 / it.level as f64;
                cases += 1;
                if reached > ratio.max(EVEN) + ROUNDING {
                    late.push(format!("{name}, one lane, {ratio}: {reached:.5}"));
                }
            }
        }
    }
    assert!(late.is_empty(), "{} of {cases} late:\n{}", late.len(), late.join("\n"));
}

/// A pair of places that cannot reach each other changes what its own slots take, and no more.
#[test]
fn a_pair_out_of_reach_does_not_scatter_a_window() {
    let mut worse = Vec::new();
    for (place, slots) in [(Where::Dedicated, 16), (Where::InPlace, 16), (Where::Mixed, 32)] {
        for lanes in [1, 8] {
            for window in [512, 4_096] {
                let documents =
                    vec![Document { rows: K * K, mask: Mask::Window { left: window - 1 } }];
                let free = case(documents, K * K / slots, slots, place, lanes);
                let ranks = slots;
                let last = free.places().1 as u32 - 1;
                // Neighbours, places far apart, and one that is cut off from the first half.
                let half: Vec<(u32, u32)> = (0..ranks / 2).map(|it| (it, last)).collect();
                for pairs in [vec![(5, 6)], vec![(1, last)], vec![(3, 7), (7, 8)], half] {
                    let mut cut = free.clone();
                    cut.links.unreachable = pairs.clone();
                    let name = format!(
                        "window {window}, {place:?}, {slots} slots, {lanes} lanes, {pairs:?}"
                    );
                    let [before, after] = [&free, &cut].map(|it| plan(it).unwrap());
                    assert_eq!(after.check(&cut), Ok(()), "{name}");
                    let [a, b] = [&before, &after].map(|it| bytes(&cut, counted(&cut, it)));
                    let [even, late] = [&before, &after].map(|it| max_over_mean(&cut, it));
                    let text = format!(
                        "{name}: bytes x {:.3}, max/mean {late:.5} (was {even:.5})",
                        b as f64 / a as f64
                    );
                    println!("{text}");
                    // Whoever takes rows for a neighbour that cannot reach them has keys between.
                    let keys = Rows { queries: 0, keys: u64::from(K * K / slots) * 8 };
                    let most = 1.25 * a as f64 + 2.0 * bytes(&cut, keys) as f64;
                    if b as f64 > most || late > even.max(EVEN) + ROUNDING {
                        worse.push(text);
                    }
                }
            }
        }
    }
    assert!(worse.is_empty(), "{} scattered:\n{}", worse.len(), worse.join("\n"));
}

/// What no window asks for is not made worse by one that does: masks of all kinds in one problem.
#[test]
fn documents_of_every_mask_in_one_problem_are_covered_and_even() {
    let masks = [Mask::Causal, Mask::Window { left: 1_023 }, Mask::Full, Mask::Window { left: 90 }];
    for place in [Where::Dedicated, Where::InPlace, Where::Mixed] {
        for lanes in [1, 8] {
            let lengths = [40_000, 90_000, 12_345, 60_000, 9_000, 35_000, 7_777, 8_022];
            let documents =
                (0..).zip(lengths).map(|(at, rows)| Document { rows, mask: masks[at % 4] });
            let problem = case(documents.collect(), 16_384, 16, place, lanes);
            let plan = plan(&problem).unwrap();
            counted(&problem, &plan);
            let used: BTreeSet<SlotId> = plan.bundles().iter().map(|it| it.slot).collect();
            let even = max_over_mean(&problem, &plan);
            println!("{place:?}, {lanes} lanes: max/mean {even:.5}");
            assert!(used.len() == 16 && even <= EVEN, "{place:?}, {lanes} lanes: {even}");
        }
    }
}
