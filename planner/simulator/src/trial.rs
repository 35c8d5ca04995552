//! One batch of documents under every system: packing baselines, the published planner, ours.
//!
//! In: a [`Setting`] and sequences of documents. Out: nanoseconds of a step. Every system gets the same documents.

use cadre_planner::{Error, plan};
use serde::Serialize;

use crate::cluster::{Cluster, Lay};
use crate::greedy::greedy;
use crate::machine::{Machine, Model, Nanos};
use crate::packing::{fixed, phase as packed, variable};
use crate::phase::Phase;
use crate::pipeline::{one_forward_one_backward, ticks};
use crate::step::{Overlap, Step};

/// Tokens of a packed group over the mean, in percent: what memory lets a group hold. Fixed from the 8B rows without
/// pipeline, see [`crate::published`].
pub const ROOM_PERCENT: u64 = 150;

/// A row of a table: model, documents, machine.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub struct Setting {
    /// The model.
    pub model: Model,
    /// Tokens of a sequence, which is also the longest document.
    pub longest: u32,
    /// Sequences of a step.
    pub batch: usize,
    /// Places of eight processors.
    pub ranks: u16,
    /// Pipeline stages; one: no pipeline.
    pub stages: u16,
    /// Micro-batches of a step.
    pub micro: usize,
}

/// The planner of a pool's attention.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub enum Planner {
    /// The published greedy one, with its tolerance in thousandths.
    Greedy(u64),
    /// This project's.
    Ours,
}

/// The best packing of a sweep.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub struct Packed {
    /// Ranks of a group.
    pub ranks: usize,
    /// Whether documents were spread by time instead of kept as drawn.
    pub variable: bool,
    /// Time of the step.
    pub nanos: Nanos,
}

impl Setting {
    /// Processors.
    pub fn processors(&self) -> u32 {
        u32::from(self.ranks) * 8
    }

    /// Tokens of a step.
    pub fn tokens(&self) -> u64 {
        self.batch as u64 * u64::from(self.longest)
    }

    fn ranks_of_stage(&self) -> u16 {
        self.ranks / self.stages
    }

    /// A step of this setting.
    pub fn step(&self, machine: Machine, overlap: Overlap) -> Step {
        let layers = self.model.layers / u32::from(self.stages);
        // With stages, weights and gradients of both sides travel in the shadow of the pipeline.
        let replicas = if self.stages > 1 { 1 } else { self.ranks.into() };
        Step { model: self.model, machine, layers, overlap, replicas }
    }

    /// Every packing that the sweep allows, with its time for these sequences in one stream.
    pub fn packings(&self, machine: &Machine, sequences: &[Vec<u32>]) -> Vec<Packed> {
        self.packings_with(machine, Overlap::OneStream, sequences)
    }

    /// As [`Self::packings`], with another overlap; with stages there is none.
    pub fn packings_with(
        &self,
        machine: &Machine,
        overlap: Overlap,
        sequences: &[Vec<u32>],
    ) -> Vec<Packed> {
        let all = usize::from(self.ranks_of_stage());
        let mut found = Vec::new();
        let sizes = std::iter::successors(Some(1), |it| Some(it * 2)).take_while(|it| *it <= all);
        for ranks in sizes.filter(|it| all.is_multiple_of(*it)) {
            let bins = all / ranks * self.micro;
            let mut options = Vec::new();
            if sequences.len().is_multiple_of(bins) {
                options.push((false, fixed(sequences, bins)));
            }
            let spread = variable(machine, &self.model, sequences, bins, ROOM_PERCENT);
            options.extend(spread.map(|it| (true, it)));
            for (variable, bins) in options {
                let nanos = self.packed((machine, overlap), bins, ranks);
                found.push(Packed { ranks, variable, nanos });
            }
        }
        found
    }

    fn packed(
        &self,
        (machine, overlap): (&Machine, Overlap),
        bins: Vec<Vec<u32>>,
        ranks: usize,
    ) -> Nanos {
        if self.stages == 1 {
            let phase = packed(&self.model, &bins, ranks);
            return self.step(*machine, overlap).forward_and_backward(&[phase]).nanos;
        }
        let groups = usize::from(self.ranks_of_stage()) / ranks;
        let mut all = vec![Vec::new(); groups];
        for (index, bin) in bins.into_iter().enumerate() {
            all[index % groups].push(bin);
        }
        one_forward_one_backward(machine, &self.model, &all, ranks, self.stages.into())
    }

    /// What two nano-batches ask of a layer in each tick; without stages there is one tick.
    ///
    /// # Errors
    ///
    /// The planner's.
    pub fn phases(
        &self,
        planner: Planner,
        sequences: &[Vec<u32>],
    ) -> Result<Vec<Vec<Phase>>, Error> {
        let (stages, each) = (usize::from(self.stages), sequences.len() / (2 * self.micro));
        let tick = |tick: usize| {
            let nano = |nano: usize| {
                let active = (0..stages).filter_map(|stage| tick.checked_sub(stage));
                let active: Vec<usize> = active.filter(|micro| *micro < self.micro).collect();
                let documents: Vec<u32> = active
                    .iter()
                    .flat_map(|micro| &sequences[(2 * micro + nano) * each..][..each])
                    .flatten()
                    .copied()
                    .collect();
                let ranks = self.ranks_of_stage() * active.len() as u16;
                self.phase(planner, &documents, ranks)
            };
            (0..2).map(nano).collect()
        };
        (0..self.micro + stages - 1).map(tick).collect()
    }

    /// One nano-batch over some ranks; the other places serve without holding rows.
    fn phase(&self, planner: Planner, documents: &[u32], ranks: u16) -> Result<Phase, Error> {
        let cluster =
            Cluster::in_place(self.model, ranks.into()).with_dedicated((self.ranks - ranks).into());
        match planner {
            Planner::Ours => {
                let problem = cluster.problem(documents, Lay::EndToEnd)?;
                let plan = plan(&problem)?;
                Ok(Phase::of_plan(&self.model, &problem, &plan))
            }
            Planner::Greedy(tolerance) => {
                let layout = cluster.problem(documents, Lay::HeadTail)?.layout;
                let places = usize::from(self.ranks);
                let shares = greedy(&self.model, &layout, places, tolerance);
                Ok(Phase::new(&self.model, &layout, places, &shares))
            }
        }
    }

    /// Time of a pool's step.
    pub fn pool(&self, machine: Machine, overlap: Overlap, phases: &[Vec<Phase>]) -> Nanos {
        let step = self.step(machine, overlap);
        match phases {
            [nanos] if self.stages == 1 => step.forward_and_backward(nanos).nanos,
            _ => ticks(&step, phases),
        }
    }
}

/// The packing with the least time over all batches; each batch lists the same packings or fewer.
pub fn best_packing(batches: &[Vec<Packed>]) -> Option<(Packed, Nanos)> {
    let first = batches.first()?;
    let total = |packed: &Packed| -> Option<Nanos> {
        let same = |it: &&Packed| (it.ranks, it.variable) == (packed.ranks, packed.variable);
        batches.iter().map(|it| it.iter().find(same).map(|it| it.nanos)).sum()
    };
    first.iter().filter_map(|it| Some((*it, total(it)?))).min_by_key(|it| it.1)
}
