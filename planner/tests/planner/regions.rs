//! Plans in regions: what they promise on draws, and that every process can make its own part alone.

use std::ops::Range;

use cadre_planner::{
    DocumentId, Plan, Problem, Pulls, RankSum, Regions, Sent, SlotId, Tolerance, plan_in_regions,
};

use crate::checked;
use crate::draws::{Draw, Where, draw, links};
use crate::problems::PLENTY;
use crate::seeds::first_seeds;

const PLACES: [Where; 3] = [Where::InPlace, Where::Dedicated, Where::Mixed];
/// Slots of a region: so few that even small draws have several.
const SLOTS: u32 = 8;
/// How much later than a plan without regions one with regions of 8 slots may finish, as a part of the level. A region of 8
/// slots beside a document of the size of the whole draw has few documents to even out with.
const LATER: f64 = 0.025;
/// Bytes of such plans over those without regions, in the mean of all draws.
const MORE: f64 = 1.1;

/// Draws: every kind of place, one lane and several, every other one with links that differ.
fn problems() -> impl Iterator<Item = (String, Problem)> {
    (500..512).flat_map(|seed| {
        PLACES.into_iter().flat_map(move |place| {
            [false, true].map(move |one_lane| {
                let mut problem = draw(seed, place, one_lane);
                if seed % 2 == 1 {
                    problem.links = links(&problem, seed);
                }
                (format!("seed {seed}, {place:?}, one lane {one_lane}"), problem)
            })
        })
    })
}

#[test]
fn regions_end_together() {
    let (mut more, mut count) = (0.0, 0.0);
    for (name, problem) in problems() {
        let made = plan_in_regions(&problem, SLOTS).unwrap();
        assert_eq!(made.check(&problem), Ok(()), "{name}");
        let flat = plan_in_regions(&problem, u32::MAX).unwrap();
        let late = |it: &Plan| it.bounds().finish as f64 / it.bounds().level as f64;
        let later = late(&made) - late(&flat);
        assert!(later <= LATER, "{name}: {later}");
        more += made.bounds().pulled as f64 / flat.bounds().pulled.max(1) as f64;
        count += 1.0;
    }
    assert!(more / count <= MORE, "bytes {} in the mean", more / count);
}

/// A slot that several regions share has its memory for all of them: none of them refuses what fits together.
#[test]
fn memory_that_suffices_for_all_slots_suffices_for_their_regions() {
    for (name, mut problem) in problems() {
        problem.tolerance = Tolerance::new(1.05).unwrap();
        let free = plan_in_regions(&problem, SLOTS).unwrap().bounds();
        problem.slots.iter_mut().for_each(|it| it.memory = free.memory);
        let made = plan_in_regions(&problem, SLOTS).map(|it| it.bounds());
        assert_eq!(made, Ok(free), "{name}");
    }
}

/// What a slot computes of documents that do not lie whole at its rank, of the whole plan.
fn computed(
    problem: &Problem,
    made: &Plan,
    slot: SlotId,
) -> Vec<(DocumentId, Range<u16>, Range<u32>)> {
    let home = problem.slots[slot.0 as usize].home;
    let mut computed: Vec<(DocumentId, Range<u16>, Range<u32>)> = Vec::new();
    for (bundle, it) in made.bundles_of(slot) {
        if home.is_some() && problem.layout.holder(it.document) == home {
            continue;
        }
        let mut rows: Vec<Range<u32>> = Vec::new();
        for task in made.tasks_of(bundle) {
            match rows.last_mut() {
                Some(before) if before.end == task.rows.start => before.end = task.rows.end,
                _ => rows.push(task.rows.clone()),
            }
        }
        computed.extend(rows.into_iter().map(|rows| (it.document, it.kv_heads.clone(), rows)));
    }
    computed
}

#[test]
fn every_process_makes_its_own_part_of_the_whole_plan() {
    for (name, problem) in problems().step_by(3) {
        let made = plan_in_regions(&problem, SLOTS).unwrap();
        let pulls = Pulls::of(&problem, &made);
        let regions = Regions::of(&problem.slots, &RankSum::of(&problem), SLOTS);
        let slots = || (0..problem.slots.len() as u32).map(SlotId);
        let mut all_sent = 0;
        for slot in slots() {
            let part = regions.part(&problem, slot).unwrap();
            assert_eq!(part.queries, pulls.queries_of(slot), "{name}: {slot:?}");
            assert_eq!(part.keys, pulls.keys_of(slot), "{name}: {slot:?}");
            assert_eq!(part.computed, computed(&problem, &made, slot), "{name}: {slot:?}");
            let home = problem.slots[slot.0 as usize].home;
            let mut sent = Vec::new();
            for other in slots().filter(|it| *it != slot) {
                let of_both = [(true, pulls.keys_of(other)), (false, pulls.queries_of(other))];
                for (is_keys, rows) in of_both {
                    let from_here = rows.iter().filter(|it| Some(it.rank) == home);
                    sent.extend(from_here.map(|it| Sent {
                        slot: other,
                        is_keys,
                        rows: it.clone(),
                    }));
                }
            }
            assert_eq!(part.sent, sent, "{name}: {slot:?}");
            all_sent += sent.len();
        }
        assert!(all_sent > 0 || problem.slots.iter().all(|it| it.home.is_none()), "{name}");
    }
}

/// Small problems of every kind whose slots begin at any time, many of them after all others could be done, and of which
/// every fourth has pairs of places that cannot reach each other; slot 0 computes and reaches all.
fn late(seed: u64) -> Problem {
    let mut draw = Draw::new(seed);
    let mut problem = checked::problem(&mut draw, seed);
    let work: u64 = RankSum::of(&problem).iter().map(|it| it.begins).sum();
    let share = work / problem.slots.len() as u64;
    let always = draw.of(&[0, 0, 1, 20]);
    for it in &mut problem.slots {
        let late = draw.of(&[0, 0, 1, 3, 30]);
        it.head_start = share / 2 * (late + always);
        it.weight = draw.of(&[0, 1, 30, 100, 100, 400]);
        it.memory = PLENTY;
    }
    problem.slots[0].weight = 100;
    if draw.of(&[true, false, false, false]) {
        let (place_of, places) = problem.places();
        let any = |draw: &mut Draw| ((places as f64 * draw.share()) as u32).min(places as u32 - 1);
        for _ in 0..draw.of(&[1, 2, 5]) {
            let pair = (any(&mut draw), any(&mut draw));
            let first = place_of[0] as u32;
            if pair.0 != pair.1 && pair.0 != first && pair.1 != first {
                problem.links.unreachable.push(pair);
            }
        }
    }
    problem
}

#[test]
fn whoever_has_a_slot_gets_a_plan_in_regions_whenever_slots_begin() {
    let mut several = 0;
    for (first, count) in first_seeds("late", 7_000, 400) {
        for seed in first..first + count {
            let problem = late(seed);
            let slots = Draw::new(seed ^ 0x5EED).of(&[1, 1, 2, 4]);
            let name = format!("seed {seed}, regions of {slots}");
            let made = plan_in_regions(&problem, slots).unwrap_or_else(|it| panic!("{name}: {it}"));
            assert_eq!(made.check(&problem), Ok(()), "{name}");
            let regions = Regions::of(&problem.slots, &RankSum::of(&problem), slots);
            several += usize::from(regions.count() > 1);
            for slot in (0..problem.slots.len() as u32).map(SlotId).step_by(3) {
                let part = regions.part(&problem, slot).unwrap();
                assert_eq!(part.computed, computed(&problem, &made, slot), "{name}: {slot:?}");
            }
        }
    }
    assert!(several > 100, "{several} problems had several regions");
}
