//! Memory bends a plan and does not break it.
//!
//! Each case is drawn from a seed that is printed. Its plan without limits says what it needs (`memory`), and less than what no
//! plan needs (`least_memory`); then all slots get the middle of both; of some seeds 1.4 and 1.05 times the bound, too.

use cadre_planner::{Bounds, Links, Plan, Problem, RankId, Slot, Tolerance, plan};

use crate::draws::{Where, draw, links};
use crate::seeds::first_seeds;

const SEEDS: std::ops::Range<u64> = 600..606;
/// Seeds below this one are tried near the bound, too.
const NEAR: u64 = 603;

/// The plan where every slot has so many bytes.
fn within(problem: &Problem, bytes: u64) -> Option<Plan> {
    let mut problem = problem.clone();
    problem.slots.iter_mut().for_each(|it| it.memory = bytes);
    let plan = plan(&problem).ok()?;
    plan.check(&problem).unwrap();
    assert!(plan.bounds().memory <= bytes);
    Some(plan)
}

/// The same beside slots that stand by at the ranks, as of a pool whose trainers may take over: one for each 32 tiles.
fn stood_by(problem: &Problem) -> Problem {
    let mut problem = problem.clone();
    let ranks = problem.layout.ranks().len() as u32;
    let rows: u64 = problem.layout.documents().iter().map(|it| u64::from(it.rows)).sum();
    let slot = |it: u32| Slot { weight: 0, home: Some(RankId(it % ranks)), ..problem.slots[0] };
    let standby: Vec<_> = (0..(rows / 4_096) as u32).map(slot).collect();
    problem.slots.extend(standby);
    problem
}

fn late(it: &Bounds) -> f64 {
    it.finish as f64 / it.level.max(it.indivisible) as f64
}

#[test]
fn memory_bends_a_plan_and_does_not_break_it() {
    let (mut bad, mut even, mut cases, mut near, mut found) = (Vec::new(), 0, 0, 0, 0);
    for place in [Where::InPlace, Where::Dedicated, Where::Mixed] {
        for one_lane in [false, true] {
            for seed in SEEDS {
                let problem = draw(seed, place, one_lane);
                let free = plan(&problem).unwrap();
                let (least, free) = (free.least_memory(&problem), free.bounds());
                let need = free.memory as f64 / least as f64;
                let mut line =
                    format!("{place:?}, {} lanes, seed {seed}: {need:.2}", problem.lanes);
                // Where the plan needs hardly more than the bound, there is nothing to bend.
                let middle = within(&problem, least.midpoint(free.memory));
                if let Some(middle) = &middle {
                    let it = middle.bounds();
                    let moved = it.pulled as f64 / free.pulled.max(1) as f64;
                    line = format!("{line}, middle {:.4} moves {moved:.2}", late(&it));
                    cases += 1;
                    if place == Where::Dedicated {
                        let bytes = least.midpoint(free.memory);
                        let beside = within(&stood_by(&problem), bytes).map(|it| it.bounds());
                        assert_eq!(beside.map(|it| it.finish), Some(it.finish), "{line}");
                    }
                    even += usize::from(late(&it) <= 1.002);
                    let is_far = late(&it) > 1.01 || (place == Where::Dedicated && moved > 1.5);
                    if is_far && need > 1.2 {
                        bad.push(format!("{line}: far from the free plan"));
                    }
                } else if need > 1.1 {
                    bad.push(format!("{line}: no plan in the middle"));
                }
                if seed >= NEAR {
                    println!("{line}");
                    continue;
                }
                let at = |bytes| {
                    let plan = within(&problem, bytes);
                    plan.map_or(f64::INFINITY, |it| late(&it.bounds()))
                };
                let more = at(least / 5 * 7);
                let little = at(least / 20 * 21);
                println!("{line}, 1.4 times the bound {more:.4}, 1.05 times {little:.4}");
                (near, found) = (near + 1, found + usize::from(little.is_finite()));
                if more > 1.02 {
                    bad.push(format!("{line}: {more:.4} with 1.4 times the bound"));
                }
            }
        }
    }
    println!("{even} of {cases} finish within 1.002");
    assert!(bad.is_empty(), "{}", bad.join("\n"));
    println!("{found} of {near} have a plan at 1.05 times the bound");
    assert!(even * 6 >= cases * 5, "{even} of {cases} finish within 1.002");
    assert!(found * 3 >= near * 2, "{found} of {near} have a plan at 1.05 times the bound");
}

/// Where slots have half of the memory between what no plan needs and what the free plan does, to know links is not worse than to
/// ignore them, and more tolerance does not load the busiest link more.
#[test]
fn bent_plans_keep_the_promises_of_links_and_of_tolerance() {
    let (mut worse, mut cases) = (Vec::new(), 0);
    for (first, count) in first_seeds("bent", 700, 6) {
        for seed in first..first + count {
            let place = [Where::InPlace, Where::Mixed, Where::Dedicated][seed as usize % 3];
            let one_lane = seed.is_multiple_of(2);
            let mut blind = draw(seed, place, one_lane);
            // Bending takes seconds.
            if blind.slots.len() > 24 {
                continue;
            }
            let free = plan(&blind).unwrap();
            let (least, free) = (free.least_memory(&blind), free.bounds());
            let memory = least.midpoint(free.memory);
            blind.slots.iter_mut().for_each(|it| it.memory = memory);
            let known = Problem { links: links(&blind, seed), ..blind.clone() };
            let wide = Tolerance::new(1.05).unwrap();
            let Ok(usual) = plan(&blind) else { continue };
            cases += 1;
            let name = format!("seed {seed}, {place:?}, one lane {one_lane}");
            // Late by how much, then the busiest link.
            let told = |problem: &Problem, plan: &Plan| {
                let it = plan.bounds();
                let link = cadre_planner::Traffic::of(problem, plan).busiest();
                (it.finish.saturating_sub(it.level + it.level / 504), link)
            };
            let (with, without) = (plan(&known).unwrap(), told(&known, &usual));
            assert_eq!(with.check(&known), Ok(()), "{name}");
            let with = told(&known, &with);
            println!("{name}: links known {:.3}", with.1 as f64 / without.1.max(1) as f64);
            if with > without {
                worse.push(format!("{name}: links known {with:?}, ignored {without:?}"));
            }
            let loose = Problem { tolerance: wide, links: Links::equal(), ..blind.clone() };
            let loose_plan = plan(&loose).unwrap();
            assert_eq!(loose_plan.check(&loose), Ok(()), "{name}");
            let (it, before) = (loose_plan.bounds(), usual.bounds());
            println!("{name}: 1.05 tolerated {:.3}", it.link as f64 / before.link.max(1) as f64);
            if before.finish <= it.level + it.level / 20 && it.link > before.link {
                worse.push(format!("{name}: 1.05 tolerated {it:?}, usual {before:?}"));
            }
        }
    }
    assert!(cases > 0 && worse.is_empty(), "{} of {cases}:\n{}", worse.len(), worse.join("\n"));
}
