//! The planner's problem for a cluster: the one place that makes a [`Problem`] and its slots.
//!
//! In: a model, ranks, slots, lengths of documents. Out: a problem whose cost is pairs alone, without limits of memory.

use cadre_planner::{
    Costs, Document, Error, Layout, Links, Mask, Problem, RankId, Slot, Tolerance,
};

use crate::machine::Model;

/// Memory of a slot: no limit.
const PLENTY: u64 = 1 << 60;

/// How documents that span ranks are laid out.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Lay {
    /// One piece after the other.
    EndToEnd,
    /// Each rank has a piece of the head and one of the tail.
    HeadTail,
}

/// Ranks and slots of a simulation.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// The model.
    pub model: Model,
    /// Places that hold rows; the layout may fill fewer.
    pub ranks: u32,
    /// Processors of a place.
    pub lanes: u16,
    /// Slots in place: at the first ranks, one each.
    pub in_place: u32,
    /// Weights of the slots in place, then of the dedicated ones.
    pub weights: Vec<u32>,
}

impl Cluster {
    /// One slot of weight 100 in place at every rank, eight lanes.
    pub fn in_place(model: Model, ranks: u32) -> Self {
        Self { model, ranks, lanes: 8, in_place: ranks, weights: vec![100; ranks as usize] }
    }

    /// The same cluster with dedicated slots added.
    #[must_use]
    pub fn with_dedicated(mut self, slots: u32) -> Self {
        self.weights.extend(std::iter::repeat_n(100, slots as usize));
        self
    }

    /// Dedicated slots of some weights alone, eight lanes.
    pub fn dedicated(model: Model, ranks: u32, weights: Vec<u32>) -> Self {
        Self { model, ranks, lanes: 8, in_place: 0, weights }
    }

    /// Lays documents over the ranks, as evenly as whole tokens allow, and asks for a plan.
    ///
    /// # Errors
    ///
    /// The planner's, for documents or ranks that it refuses.
    pub fn problem(&self, lengths: &[u32], lay: Lay) -> Result<Problem, Error> {
        let total: u64 = lengths.iter().map(|it| u64::from(*it)).sum();
        let each = total.div_ceil(u64::from(self.ranks.max(1)));
        let each =
            u32::try_from(each).map_err(|_| Error::LongRank { rank: RankId(0), rows: each })?;
        let documents = lengths.iter().map(|&rows| Document { rows, mask: Mask::Causal }).collect();
        let layout = match lay {
            Lay::EndToEnd => Layout::end_to_end(documents, each)?,
            Lay::HeadTail => Layout::head_tail(documents, each)?,
        };
        let ranks = layout.ranks().len();
        let slot = |(index, &weight): (usize, &u32)| Slot {
            weight,
            head_start: 0,
            home: (index < ranks.min(self.in_place as usize)).then_some(RankId(index as u32)),
            memory: PLENTY,
        };
        let problem = Problem {
            layout,
            heads: self.model.heads,
            element_bytes: 2,
            lanes: self.lanes,
            slots: self.weights.iter().enumerate().map(slot).collect(),
            costs: Costs::pairs_only(),
            links: Links::equal(),
            tolerance: Tolerance::USUAL,
        };
        problem.check()?;
        Ok(problem)
    }
}
