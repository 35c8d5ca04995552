//! Lower bounds against every way there is to spread a few tiles.
//!
//! Every tile of every KV head (of all heads, where they move together) is put on every slot. Bytes, links and memory of
//! each way are counted row by row and share no code with the planner: no way may be below what [`least`] and
//! [`least_memory`] say of its own finish.

use std::ops::Range;

use cadre_planner::{
    Costs, Cuts, Document, DocumentId, Heads, Layout, Links, Mask, Problem, RankId, Slot,
    Tolerance, least, least_memory, plan,
};
use proptest::prelude::*;

use crate::problems::PLENTY;

const TILE: u32 = 128;

/// One tile under the heads that move together.
struct Tile {
    document: DocumentId,
    column: u16,
    rows: Range<u32>,
}

/// What a way to spread the tiles comes to.
#[derive(Debug)]
struct Way {
    finish: u64,
    pulled: u64,
    link: u64,
    memory: u64,
}

/// KV heads that move together, and how many such columns there are.
fn columns(problem: &Problem) -> (u64, u16) {
    let kv = problem.heads.kv;
    if problem.lanes == 1 { (1, kv) } else { (kv.into(), 1) }
}

fn tiles(problem: &Problem) -> Vec<Tile> {
    let mut tiles = Vec::new();
    for (document, it) in (0..).map(DocumentId).zip(problem.layout.documents()) {
        for column in 0..columns(problem).1 {
            for start in (0..it.rows).step_by(TILE as usize) {
                tiles.push(Tile { document, column, rows: start..it.rows.min(start + TILE) });
            }
        }
    }
    tiles
}

/// Counts a way; `owners` has the slot of each tile.
fn count(problem: &Problem, tiles: &[Tile], owners: &[usize]) -> Way {
    let (place_of, places) = problem.places();
    let (kv, _) = columns(problem);
    let heads = problem.heads;
    let group = u64::from(heads.query / heads.kv);
    let (dim, element) = (u64::from(heads.dim), u64::from(problem.element_bytes));
    let mut loads = vec![0; problem.slots.len()];
    let mut phases = vec![(0, 0); problem.slots.len()];
    let mut largest = 0;
    // By direction: bytes that leave a place, and that arrive.
    let mut flows = vec![[(0_u64, 0_u64); 2]; places];
    let mut pulled = 0;
    for (slot, &here) in place_of.iter().enumerate() {
        for (document, whole) in (0..).map(DocumentId).zip(problem.layout.documents()) {
            for column in 0..columns(problem).1 {
                let mine: Vec<&Range<u32>> = (tiles.iter().zip(owners))
                    .filter(|(it, owner)| {
                        **owner == slot && (it.document, it.column) == (document, column)
                    })
                    .map(|(it, _)| &it.rows)
                    .collect();
                if mine.is_empty() {
                    continue;
                }
                let pairs: u64 =
                    mine.iter().map(|it| whole.mask.pairs(whole.rows, (*it).clone())).sum();
                let overhead = u64::from(problem.costs.tile) * mine.len() as u64;
                loads[slot] += (pairs + overhead) * group * kv;
                // Tiles whose keys touch are one bundle.
                let mut bundles: Vec<(u64, Range<u32>)> = Vec::new();
                for it in &mine {
                    let keys = whole.mask.keys(whole.rows, (*it).clone());
                    let rows = u64::from(it.end - it.start);
                    match bundles.last_mut().filter(|last| keys.start <= last.1.end) {
                        Some(last) => {
                            *last = (last.0 + rows, last.1.start..last.1.end.max(keys.end));
                        }
                        None => bundles.push((rows, keys)),
                    }
                }
                let (query, key, statistic) =
                    (element * group * dim * kv, 2 * element * dim * kv, 4 * group * kv);
                for (rows, keys) in &bundles {
                    let keys = u64::from(keys.end - keys.start);
                    let forward = keys * key + rows * (2 * query + statistic);
                    let backward = keys * (key + 8 * dim * kv) + rows * (3 * query + 2 * statistic);
                    phases[slot].0 += forward;
                    phases[slot].1 += backward;
                    largest = largest.max(forward.max(backward));
                }
                let mut carry = |rows: Range<u32>, out: [u64; 2], back: [u64; 2]| {
                    for it in problem.layout.locate(document, rows) {
                        let (rank, rows) =
                            (it.rank.0 as usize, u64::from(it.rows.end - it.rows.start));
                        if rank == here {
                            continue;
                        }
                        pulled += rows * out[0];
                        for (phase, (out, back)) in out.into_iter().zip(back).enumerate() {
                            flows[rank][phase].0 += rows * out;
                            flows[here][phase].1 += rows * out;
                            flows[here][phase].0 += rows * back;
                            flows[rank][phase].1 += rows * back;
                        }
                    }
                };
                let back = [query + statistic, query];
                for rows in mine {
                    carry(rows.clone(), [query, 2 * (query + statistic)], back);
                }
                for (_, keys) in bundles {
                    carry(keys, [key, key], [0, 8 * dim * kv]);
                }
            }
        }
    }
    let finish = loads.iter().zip(&problem.slots).filter(|it| *it.0 > 0);
    let finish = finish.map(|(load, slot)| slot.finish(*load)).max().unwrap_or(0);
    let time = |phase: usize| {
        let of = |it: &[(u64, u64); 2]| it[phase].0.max(it[phase].1);
        let bytes = flows.iter().map(of).max().unwrap_or(0);
        bytes * 10 * 100 / (50_000 * u64::from(problem.lanes))
    };
    let memory = phases.iter().map(|it| 2 * it.0.max(it.1)).max().unwrap_or(0) + largest;
    Way { finish, pulled, link: time(0) + time(1), memory }
}

/// At most `tiles` tiles under all heads, on two or three slots.
fn small() -> impl Strategy<Value = Problem> {
    let masks = prop_oneof![
        4 => Just(Mask::Causal),
        1 => Just(Mask::Full),
        1 => (0_u32..300).prop_map(|left| Mask::Window { left }),
    ];
    let documents = prop::collection::vec((1_u32..700, masks), 1..4);
    let slot = (prop_oneof![3 => Just(100_u32), 1 => 50_u32..200], any::<bool>(), 0_u64..100_000);
    let slots = prop::collection::vec(slot, 2..4);
    (documents, slots, any::<bool>(), prop_oneof![Just(0_u32), 1_u32..2_000], 100_u32..600)
        .prop_map(|(documents, slots, one_lane, tile, rank_rows)| {
            // Up to six items on three slots, eight on two.
            let most = if slots.len() == 3 { 6 } else { 8 } / if one_lane { 2 } else { 1 };
            let mut left = most * TILE;
            let mut kept = Vec::new();
            for (rows, mask) in documents {
                let rows = rows.min(left);
                left -= rows.next_multiple_of(TILE).min(left);
                if rows > 0 {
                    kept.push(Document { rows, mask });
                }
            }
            let layout = Layout::head_tail(kept, rank_rows).unwrap();
            let ranks = layout.ranks().len();
            let slot = |(index, (weight, at_home, head_start)): (usize, (u32, bool, u64))| Slot {
                weight,
                head_start,
                home: (at_home && index < ranks).then_some(RankId(index as u32)),
                memory: PLENTY,
            };
            Problem {
                layout,
                heads: Heads { query: 4, kv: 2, dim: 64 },
                element_bytes: 2,
                lanes: if one_lane { 1 } else { 2 },
                slots: slots.into_iter().enumerate().map(slot).collect(),
                costs: Costs { tile, task: 0, ..Costs::default() },
                links: Links::equal(),
                tolerance: Tolerance::USUAL,
            }
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn no_way_to_spread_tiles_is_below_the_bounds(problem in small()) {
        let tiles = tiles(&problem);
        let slots = problem.slots.len();
        let mut owners = vec![0; tiles.len()];
        loop {
            let way = count(&problem, &tiles, &owners);
            let bound = least(&problem, way.finish).unwrap();
            prop_assert!(bound.pulled <= way.pulled, "{bound:?} {way:?} {owners:?}");
            prop_assert!(bound.link <= way.link, "{bound:?} {way:?} {owners:?}");
            let memory = least_memory(&problem, Cuts::Tiles, way.finish);
            prop_assert!(memory <= way.memory, "{memory} {way:?} {owners:?}");
            let Some(next) = owners.iter().position(|it| *it + 1 < slots) else { break };
            owners[next] += 1;
            owners[..next].fill(0);
        }
    }
}

/// Slots that a document needs are whole: where it is cut into equal runs, nothing is between the plan and the bound.
#[test]
fn bounds_are_what_equal_runs_of_a_document_move() {
    for slots in [2, 3, 5, 9] {
        let mut problem = crate::problems::problem(
            vec![crate::problems::causal(131_072)],
            131_072,
            vec![crate::problems::dedicated(100); slots],
        );
        (problem.heads, problem.element_bytes, problem.lanes) =
            (Heads { query: 32, kv: 8, dim: 128 }, 2, 8);
        let bounds = plan(&problem).unwrap().bounds();
        let gap = bounds.pulled as f64 / bounds.least_pulled as f64;
        assert!((1.0..1.01).contains(&gap), "{slots} slots: {gap}, {bounds:?}");
        // Whoever has the last rows needs all keys, and is full.
        assert!(
            bounds.least_memory as f64 > 0.6 * bounds.memory as f64,
            "{slots} slots: {bounds:?}"
        );
    }
}

/// A whole document a slot: the largest bundle is kept free in every slot, and smaller ones hold keys of their own.
#[test]
fn small_bundles_of_a_long_document_need_more_memory_together() {
    let documents = vec![crate::problems::causal(65_536); 8];
    let slots = (0..8).map(crate::problems::in_place).collect();
    let mut problem = crate::problems::problem(documents, 65_536, slots);
    (problem.heads, problem.element_bytes, problem.lanes) =
        (Heads { query: 32, kv: 8, dim: 128 }, 2, 8);
    let bounds = plan(&problem).unwrap().bounds();
    let known = bounds.least_memory as f64 / bounds.memory as f64;
    assert!((0.97..=1.0).contains(&known), "{known} of what is needed: {bounds:?}");
}
