//! Every plan passes its check: small problems of every kind, whose tiles are few beside their slots.

use cadre_planner::{
    Costs, Document, Error, Heads, Layout, Links, Mask, Plan, Problem, RankId, Slot, Tolerance,
    check_beside, largest_bundle, memory_of_slots, plan, plan_beside,
};

use crate::draws::{Draw, links};
use crate::problems::PLENTY;
use crate::seeds::first_seeds;

const PROBLEMS: u64 = 300;

/// Up to some 50 slots in place, dedicated or both, and documents under any masks, from less than a tile to some dozens.
pub(crate) fn problem(draw: &mut Draw, seed: u64) -> Problem {
    let kv = draw.of(&[1_u16, 2, 2, 3, 3, 4, 5, 6, 8]);
    let of = |draw: &mut Draw, most: u32| (f64::from(most) * draw.share()) as u32;
    let longest = draw.of(&[100, 400, 1_600, 6_000]);
    let most = draw.of(&[8, 30, 100, 100]);
    let only = draw.of(&[None, Some(0), Some(1), Some(2), Some(2)]);
    let count = 1 + of(draw, most);
    let documents = (0..count).map(|_| {
        let rows = 1 + of(draw, longest);
        let mask = match only.unwrap_or_else(|| of(draw, 3)) {
            0 => Mask::Causal,
            1 => Mask::Full,
            _ => Mask::Window { left: draw.of(&[0, 60, 127, 128, 300, 1_000]) },
        };
        Document { rows, mask }
    });
    let documents: Vec<Document> = documents.collect();
    let rows: u32 = documents.iter().map(|it| it.rows).sum();
    let rank_rows = rows.div_ceil(draw.of(&[1, 2, 4, 8, 12, 16, 40])).max(1);
    let layout = if draw.of(&[true, true, false]) {
        Layout::end_to_end(documents, rank_rows)
    } else {
        Layout::head_tail(documents, rank_rows)
    };
    let layout = layout.expect("documents have rows");
    let ranks = layout.ranks().len() as u32;
    let (in_place, dedicated) = match draw.of(&[0, 1, 2]) {
        0 => (ranks, 0),
        1 => (0, draw.of(&[1, 2, 4, 9, 12, 13, 20, 40])),
        _ => (ranks.div_ceil(2), draw.of(&[1, 2, 5, 13])),
    };
    let (alike, memory) =
        (draw.of(&[true, false]), draw.of(&[PLENTY, PLENTY, PLENTY, PLENTY, PLENTY, 1 << 22]));
    let slot = |at: u32| Slot {
        weight: if alike || at == 0 { 100 } else { draw.of(&[0, 50, 100, 100, 170]) },
        head_start: if alike { 0 } else { draw.of(&[0, 0, 100_000]) },
        home: (at < in_place).then_some(RankId(at)),
        memory,
    };
    let slots = (0..in_place + dedicated).map(slot).collect();
    let divisors: Vec<u16> = (1..=kv).filter(|it| kv.is_multiple_of(*it)).collect();
    let costs = Costs { task_rows: draw.of(&[128, 512, 4_096]), ..Costs::default() };
    let mut problem = Problem {
        layout,
        heads: Heads { query: kv * draw.of(&[1, 2]), kv, dim: draw.of(&[16, 64]) },
        element_bytes: draw.of(&[2, 4]),
        lanes: draw.of(&divisors),
        slots,
        costs: draw.of(&[Costs::pairs_only(), Costs::default(), costs]),
        links: Links::equal(),
        tolerance: Tolerance::new(draw.of(&[1.0, 1.002, 1.002, 1.002, 1.002, 1.002, 1.002, 1.05]))
            .expect("in range"),
    };
    if draw.of(&[true, false, false, false]) {
        problem.links = links(&problem, seed);
    }
    problem
}

/// What every plan beside a bundle of so many bytes promises: it passes its check, the bundle has room beside two phases in every
/// slot with work, and no bundle of the plan is larger.
fn promised(problem: &Problem, plan: &Plan, beside: u64) -> Result<(), Error> {
    plan.check(problem)?;
    let largest = largest_bundle(problem, plan);
    assert!(beside == 0 || largest <= beside, "a bundle of {largest} bytes beside {beside}");
    for (slot, it) in problem.slots.iter().zip(memory_of_slots(problem, plan)) {
        let needed = 2 * it.phase + it.reserve.max(beside);
        assert!(it.phase == 0 || needed <= slot.memory, "{needed} of {} bytes", slot.memory);
    }
    check_beside(problem, plan, beside)
}

#[test]
fn plans_of_small_problems_pass_their_check() {
    let (mut planned, mut refused) = (0, 0);
    for (first, count) in first_seeds("checked", 480, PROBLEMS) {
        for seed in first..first + count {
            let mut draw = Draw::new(seed);
            let problem = problem(&mut draw, seed);
            // Plans of other kinds of layers have larger bundles than this one, or want smaller ones here.
            let parts = draw.of(&[0, 1, 2, 3, 4, 6, 40]);
            let free = plan(&problem);
            let beside =
                free.as_ref().map_or(1 << 18, |it| largest_bundle(&problem, it) / 4 * parts);
            for (made, beside) in [(free, 0), (plan_beside(&problem, beside), beside)] {
                match made.and_then(|plan| promised(&problem, &plan, beside)) {
                    Ok(()) => planned += 1,
                    Err(
                        Error::DocumentTooLarge { .. }
                        | Error::NoRoom { .. }
                        | Error::SlotFull { .. },
                    ) => refused += 1,
                    Err(error) => panic!("seed {seed}: {error}; {problem:?}"),
                }
            }
        }
    }
    println!("{planned} plans, {refused} refused");
    assert!(planned > 2 * refused, "{planned} plans, {refused} refused");
}
