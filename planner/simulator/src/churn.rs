//! Slots of unlike speed, and slots that come and go.
//!
//! In: documents over ranks of one lane group, a pool. Out: how far apart slots finish, what a change moves, what a
//! loss costs.
//!
//! Finishing times are those at the true speeds, which the plan may know (a learnt weight) or not (a nominal one).
//! A loss in the middle of a step costs the time until it is declared, then the moved bundles run on survivors; the
//! rest of the step goes on with the assignment of `reassign`.

use cadre_planner::{Assignment, BundleId, Learnt, Plan, Problem, SlotId, plan, reassign};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::Serialize;

use crate::SimulationError;
use crate::cluster::{Cluster, Lay};
use crate::machine::{Direction, Kernel, Machine, Model, Nanos};
use crate::phase::Phase;
use crate::sampler::{LengthSet, Sampler};
use crate::step::{Overlap, Pass, Step};

/// From a server's death until it is declared: three missed heartbeats of 200 ms.
pub const DETECTION: Nanos = 600_000_000;
/// Places that hold rows.
const RANKS: u16 = 16;
/// Dedicated slots of the pool.
const SLOTS: u16 = 16;
/// Reports from which a weight is learnt.
const REPORTS: usize = 16;
/// Steps of the churn.
const STEPS: usize = 12;

/// A plan for slots of unlike speeds, timed at their true speeds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SpreadRow {
    /// How the slots' speeds differ.
    pub name: String,
    /// Slots.
    pub slots: usize,
    /// By slot: the weight that it is planned with, and its true speed.
    pub weights: Vec<[u32; 2]>,
    /// Finish of the last slot over the mean finish, minus one, in millionths.
    pub last_over_mean_ppm: u64,
    /// Finish of the last slot over that of the first, minus one, in millionths.
    pub spread_ppm: u64,
}

/// One step of a pool that changes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChurnRow {
    /// Number of the step.
    pub step: usize,
    /// What happened in it.
    pub event: String,
    /// Slots with a server at its end.
    pub alive: usize,
    /// Attention of the busiest slot over the mean of the slots that are alive at the end of the
    /// step, minus one, in millionths.
    pub imbalance_ppm: u64,
    /// Bundles that changed their server.
    pub bundles_moved: usize,
    /// Q, K and V bytes of a layer and nano-batch that these pull again.
    pub bytes_moved: u64,
    /// Time of the step.
    pub nanos: Nanos,
    /// The part of it that a loss costs: the time until it is declared, and that of the moved bundles of both phases in flight.
    pub lost_nanos: Nanos,
    /// Time of a step that is planned for the slots that are alive at its end.
    pub anew_nanos: Nanos,
}

/// How far apart slots of unlike speed finish.
///
/// # Errors
///
/// The sampler's or the planner's.
pub fn spreads(
    set: LengthSet,
    lengths: &[u64],
    seed: u64,
) -> Result<Vec<SpreadRow>, SimulationError> {
    let same = vec![100; usize::from(SLOTS)];
    let mixed: Vec<u32> = (0..u32::from(SLOTS)).map(|it| 100 << (it % 3)).collect();
    let mut slow = same.clone();
    slow[0] = 80;
    // What reports of steps teach, each up to 3 % off.
    let learnt = |speeds: &[u32]| learnt(speeds, seed);
    let mut noisy = same.clone();
    for (index, speed) in noisy.iter_mut().enumerate() {
        *speed = 97 + index as u32 % 7;
    }
    let cases = [
        ("all alike", same.clone(), same.clone()),
        ("weights 1:2:4", mixed.clone(), mixed),
        ("one slot at 0.8, not known", same.clone(), slow.clone()),
        ("one slot at 0.8, learnt in 16 steps", learnt(&slow), slow),
        ("up to 3 % apart, not known", same, noisy.clone()),
        ("up to 3 % apart, learnt in 16 steps", learnt(&noisy), noisy),
    ];
    let row = |(name, weights, speeds): (&str, Vec<u32>, Vec<u32>)| {
        let both = weights.iter().zip(&speeds).map(|(weight, speed)| [*weight, *speed]).collect();
        let problem = problem(set, lengths, seed, weights)?;
        let plan = plan(&problem)?;
        let times: Vec<u64> = (0..)
            .map(SlotId)
            .zip(&speeds)
            .map(|(slot, speed)| plan.load(&problem, slot) * 100 / u64::from(*speed))
            .collect();
        let (least, most) = (least(&times), times.iter().copied().max().unwrap_or(0));
        let mean = times.iter().sum::<u64>() / times.len().max(1) as u64;
        Ok(SpreadRow {
            name: name.to_owned(),
            slots: times.len(),
            weights: both,
            last_over_mean_ppm: over(most, mean),
            spread_ppm: over(most, least),
        })
    };
    cases.into_iter().map(row).collect()
}

/// Weights after [`REPORTS`] reports of each slot, of which each is off by up to 3 %.
fn learnt(speeds: &[u32], seed: u64) -> Vec<u32> {
    const EXPECTED: u64 = 1_000_000_000;
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let of_slot = |speed: &u32| {
        let mut learnt = Learnt::new(100);
        for _ in 0..REPORTS {
            let off = 9_700 + random.next_u64() % 601;
            learnt.report(EXPECTED, EXPECTED * off / (100 * u64::from(*speed)));
        }
        learnt.weight
    };
    speeds.iter().map(of_slot).collect()
}

fn least(times: &[u64]) -> u64 {
    times.iter().copied().min().unwrap_or(0)
}

fn over(most: u64, base: u64) -> u64 {
    (u128::from(most - base.min(most)) * 1_000_000 / u128::from(base.max(1))) as u64
}

/// A pool that loses a slot in the middle of every third step. Two steps later the slot is filled again. All steps have the same
/// documents, so that they differ by what happens alone.
///
/// # Errors
///
/// The sampler's or the planner's.
pub fn churn(set: LengthSet, lengths: &[u64], seed: u64) -> Result<Vec<ChurnRow>, SimulationError> {
    let mut alive = vec![true; usize::from(SLOTS)];
    let mut rows = Vec::new();
    let problem = problem(set, lengths, seed, vec![100; alive.len()])?;
    let whole = plan(&problem)?;
    for number in 0..STEPS {
        let lost = (number % 3 == 1).then_some(number % usize::from(SLOTS));
        let plan = &whole;
        let before = reassign(&problem, plan, &Assignment::planned(plan), &alive)?;
        let mut event = String::from("none");
        if number % 3 == 0 && number > 0 {
            event = "the vacant slot is filled".into();
        }
        if let Some(slot) = lost {
            alive[slot] = false;
            event = format!("slot {slot} is lost between forward and backward");
        }
        let after = reassign(&problem, plan, &before, &alive)?;
        let row = step(number, event, &problem, plan, [&before, &after], &alive);
        rows.push(ChurnRow { anew_nanos: anew(&problem, &alive)?, ..row });
        if number % 3 == 2 {
            alive.fill(true);
        }
    }
    Ok(rows)
}

fn step(
    number: usize,
    event: String,
    problem: &Problem,
    plan: &Plan,
    [before, after]: [&Assignment; 2],
    alive: &[bool],
) -> ChurnRow {
    let model = Model::B8;
    let machine = Machine::h200(Kernel::HOPPER);
    let phase = |assignment| Phase::of_assignment(&model, problem, plan, assignment);
    let (first, second) = (phase(before), phase(after));
    let mut moved = Phase::new(&model, &problem.layout, first.cost.len(), &[]);
    let mut bundles_moved = 0;
    // Counts every bundle that is not at its planned slot, also those of a vacant slot.
    for bundle in (0..plan.bundles().len() as u32).map(BundleId) {
        let planned = plan.bundle(bundle).map(|it| it.slot);
        if after.executor(bundle) != planned {
            bundles_moved += 1;
            moved.add_bundle(&model, problem, plan, bundle, after);
        }
    }
    let lost_now = before != after;
    let redo = moved.cost.iter().copied().max().unwrap_or(0);
    let lost_nanos = if lost_now {
        DETECTION + 2 * machine.attention(&model, redo, Direction::Backward)
    } else {
        0
    };
    let loads: Vec<u64> = (0..)
        .zip(alive)
        .filter(|(_, alive)| **alive)
        .map(|(slot, _): (usize, _)| second.cost[usize::from(RANKS) + slot])
        .collect();
    let mean = loads.iter().sum::<u64>() / loads.len().max(1) as u64;
    ChurnRow {
        step: number,
        event,
        alive: loads.len(),
        imbalance_ppm: over(loads.iter().copied().max().unwrap_or(0), mean),
        bundles_moved,
        bytes_moved: moved.total().inputs,
        nanos: time(first, second) + lost_nanos,
        lost_nanos,
        anew_nanos: 0,
    }
}

/// Time of a step of two nano-batches, each a phase forward and a phase backward.
fn time(forward: Phase, backward: Phase) -> Nanos {
    let model = Model::B8;
    let step = Step {
        model,
        machine: Machine::h200(Kernel::HOPPER),
        layers: model.layers,
        overlap: Overlap::Both,
        replicas: RANKS.into(),
    };
    let (forward, backward) = ([forward.clone(), forward], [backward.clone(), backward]);
    let passes = [
        Pass { direction: Direction::Forward, nanos: &forward },
        Pass { direction: Direction::Backward, nanos: &backward },
    ];
    step.run(&passes).nanos
}

/// Time of a step that is planned for the slots that are alive.
fn anew(problem: &Problem, alive: &[bool]) -> Result<Nanos, SimulationError> {
    let mut problem = problem.clone();
    for (slot, _) in problem.slots.iter_mut().zip(alive).filter(|it| !*it.1) {
        slot.weight = 0;
    }
    let plan = plan(&problem)?;
    let phase = Phase::of_plan(&Model::B8, &problem, &plan);
    Ok(time(phase.clone(), phase))
}

/// One nano-batch of 64K tokens a rank, and dedicated slots of some weights.
fn problem(
    set: LengthSet,
    lengths: &[u64],
    seed: u64,
    weights: Vec<u32>,
) -> Result<Problem, SimulationError> {
    let longest = 131_072;
    let sequences =
        Sampler::new(set, lengths, longest, seed)?.stretches(RANKS.into(), longest / 2)?;
    let cluster = Cluster::dedicated(Model::B8, RANKS.into(), weights);
    Ok(cluster.problem(&sequences.concat(), Lay::EndToEnd)?)
}
