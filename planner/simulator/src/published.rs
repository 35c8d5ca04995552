//! The published evaluation, reproduced: what the model says beside what was published.
//!
//! In: a length set, a seed, a number of batches. Out: rows. Kernel, links, layer speeds and settings are the published
//! ones. [`crate::trial::ROOM_PERCENT`] is the only constant that was fitted, and only to the 8B rows without
//! pipeline; every other row is a prediction, its error shown and left alone.

use serde::Serialize;

use crate::SimulationError;
use crate::machine::{Kernel, Machine, Model};
use crate::packing;
use crate::sampler::{LengthSet, Sampler};
use crate::step::Overlap;
use crate::trial::{Planner, Setting, best_packing};

/// Tolerance of the published planner, in thousandths: that of its records.
pub const TOLERANCE: u64 = 50;

/// A group of rows that were published as one range.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub struct Range {
    /// Its name.
    pub name: &'static str,
    /// Least and most, in thousandths.
    pub published: (u64, u64),
    /// Whether constants were fitted to it.
    pub fitted: bool,
}

/// One setting, simulated.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PublishedRow {
    /// The range that it belongs to.
    pub range: Range,
    /// Model, documents, machine.
    pub setting: Setting,
    /// Ranks of a group in the best packing.
    pub group_ranks: usize,
    /// Mean step of the best packing.
    pub packed_nanos: u64,
    /// Mean step of the published planner, ping-pong.
    pub greedy_nanos: u64,
    /// Mean step of the published planner in one stream.
    pub one_stream_nanos: u64,
}

impl PublishedRow {
    /// How many times faster than the best packing.
    pub fn speedup(&self) -> f64 {
        self.packed_nanos as f64 / self.greedy_nanos.max(1) as f64
    }

    /// How much slower one stream is than ping-pong, as a fraction.
    pub fn one_stream(&self) -> f64 {
        self.one_stream_nanos as f64 / self.greedy_nanos.max(1) as f64 - 1.0
    }

    /// How far outside the published range: 0 inside, else a part of its nearer end.
    pub fn error(&self) -> f64 {
        let (least, most) = self.range.published;
        outside(self.speedup(), least as f64 / 1000.0, most as f64 / 1000.0)
    }
}

/// How far a value is outside a range, as a part of the nearer end.
pub fn outside(value: f64, least: f64, most: f64) -> f64 {
    if value < least {
        value / least - 1.0
    } else if value > most {
        value / most - 1.0
    } else {
        0.0
    }
}

/// All settings of the published table for a set.
pub fn settings(set: LengthSet) -> Vec<(Range, Setting)> {
    let published = |pretrain, prolong| match set {
        LengthSet::Pretrain => pretrain,
        LengthSet::Prolong => prolong,
    };
    let range = |name, published, fitted| Range { name, published, fitted };
    let groups = [
        (
            range("8B 3D", published((1070, 1200), (1050, 1120)), true),
            Model::B8,
            1,
            [8, 16, 32],
            512,
        ),
        (
            range("8B 4D", published((1150, 1300), (1100, 1350)), false),
            Model::B8,
            2,
            [8, 16, 32],
            512,
        ),
        (
            range("34B 4D", published((1000, 1150), (1000, 1250)), false),
            Model::B34,
            2,
            [16, 32, 64],
            384,
        ),
    ];
    let mut all = Vec::new();
    for (range, model, stages, ranks, longest) in groups {
        let three = [[8, 16, 32], [4, 8, 16], [2, 4, 8]];
        let four = [[32, 64, 128], [16, 32, 32], [8, 8, 16]];
        let batches = if stages == 1 { three } else { four };
        for (length, batches) in [128, 256, longest].into_iter().zip(batches) {
            for (ranks, batch) in ranks.into_iter().zip(batches) {
                let micro = match (stages, length) {
                    (1, _) => 1,
                    (_, 128) => 8,
                    _ => 4,
                };
                let longest = length * 1024;
                all.push((range, Setting { model, longest, batch, ranks, stages, micro }));
            }
        }
    }
    all
}

/// Simulates one row over `batches` batches.
///
/// # Errors
///
/// The sampler's or the planner's, and no packing that holds all documents.
pub fn row(
    (range, setting): (Range, Setting),
    set: LengthSet,
    lengths: &[u64],
    seed: u64,
    batches: usize,
) -> Result<PublishedRow, SimulationError> {
    let machine = Machine::h200(Kernel::FLASH_2);
    let (mut greedy, mut one_stream, mut packings) = (0, 0, Vec::new());
    for batch in 0..batches as u64 {
        let sequences = draw(&setting, set, lengths, seed + batch)?;
        packings.push(setting.packings(&machine, &sequences));
        let phases = setting.phases(Planner::Greedy(TOLERANCE), &sequences)?;
        greedy += setting.pool(machine, Overlap::PingPong, &phases);
        one_stream += setting.pool(machine, Overlap::OneStream, &phases);
    }
    let (best, packed) = best_packing(&packings).ok_or(SimulationError::NoPacking)?;
    let count = batches.max(1) as u64;
    Ok(PublishedRow {
        range,
        setting,
        group_ranks: best.ranks,
        packed_nanos: packed / count,
        greedy_nanos: greedy / count,
        one_stream_nanos: one_stream / count,
    })
}

/// Sequences of one batch.
pub(crate) fn draw(
    setting: &Setting,
    set: LengthSet,
    lengths: &[u64],
    seed: u64,
) -> Result<Vec<Vec<u32>>, SimulationError> {
    let mut sampler = Sampler::new(set, lengths, setting.longest, seed)?;
    Ok(sampler.stretches(setting.batch, setting.longest)?)
}

/// Part of a step that gathering keys and values takes when every document lies over all ranks: 8B, documents of 32K,
/// 128K tokens a node.
pub fn gather_share(nodes: u16) -> f64 {
    let machine = Machine::h200(Kernel::FLASH_2);
    let documents = vec![vec![32_768; usize::from(nodes) * 4]];
    let setting = Setting {
        model: Model::B8,
        longest: 131_072,
        batch: nodes.into(),
        ranks: nodes,
        stages: 1,
        micro: 1,
    };
    let mut phase = packing::phase(&Model::B8, &documents, nodes.into());
    let step = setting.step(machine, Overlap::OneStream);
    let with = step.forward_and_backward(std::slice::from_ref(&phase)).nanos;
    phase.wires.clear();
    1.0 - step.forward_and_backward(&[phase]).nanos as f64 / with.max(1) as f64
}

/// Part of the time that processors idle when documents are spread by time over `groups` groups: 8B, 512K, one
/// sequence a group.
///
/// # Errors
///
/// The sampler's, and no packing that holds all documents.
pub fn idle_share(
    groups: u16,
    set: LengthSet,
    lengths: &[u64],
    seed: u64,
    batches: usize,
) -> Result<f64, SimulationError> {
    let machine = Machine::h200(Kernel::FLASH_2);
    let setting = Setting {
        model: Model::B8,
        longest: 524_288,
        batch: groups.into(),
        ranks: groups,
        stages: 1,
        micro: 1,
    };
    let mut idle = 0.0;
    for batch in 0..batches as u64 {
        let sequences = draw(&setting, set, lengths, seed + batch)?;
        let room = crate::trial::ROOM_PERCENT;
        let bins = packing::variable(&machine, &Model::B8, &sequences, groups.into(), room);
        let bins = bins.ok_or(SimulationError::NoPacking)?;
        let phase = packing::phase(&Model::B8, &bins, 1);
        let time = setting.step(machine, Overlap::OneStream).forward_and_backward(&[phase]);
        idle += time.idle_ppm() as f64 / 1e6;
    }
    Ok(idle / batches.max(1) as f64)
}
