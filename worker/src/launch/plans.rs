//! Plans of launches, made once for a step and run for every layer.
//!
//! In: which works of a step a launch is of. Out: its [`Made`] plan, if there was such a launch before. Works of one nano-batch have the
//! same tasks, masks and tiles in every layer of one kind; only the addresses of their rows differ, and these a plan does not hold. What runs need
//! beside lists belongs to their stream and not to a plan, so that plans are small and all of a step's have room.
//!
//! It makes no plan. Invariant: all plans are of the newest step that was asked for, and their lists take no more memory of the GPU than
//! allowed.

use std::collections::BTreeMap;
use std::ops::Range;

use cadre_kernels::device::{BackwardPlan, ForwardPlan};
use cadre_step::phases::Direction;

use super::{BundleRows, Work};

/// Which launch.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Key {
    step: u64,
    /// Which of the step's plans.
    plan: usize,
    direction: Direction,
    /// Rows lie as the trainer has them, not as a landing has.
    home: bool,
    works: Vec<u32>,
}

/// A plan, and what else a launch of it needs that is the same in every layer.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) plan: Plan,
    /// Which stream its runs are enqueued on: one at a time may run.
    pub(super) stream: usize,
    /// Rows of the query side, from the first of any work to the last, counted in rows of one KV head.
    pub(super) span: Range<u64>,
    /// Bytes of its results: O and LSE, or dQ, dK and dV.
    pub(super) bytes: [u64; 3],
    /// Bytes of each work in these results.
    pub(super) slices: Vec<Slices>,
    /// Memory of the GPU that its lists take.
    pub(super) weight: u64,
}

#[derive(Debug)]
pub(super) enum Plan {
    Forward(ForwardPlan),
    Backward(BackwardPlan),
}

/// Bytes of a work in the results of its launch.
#[derive(Debug)]
pub(super) enum Slices {
    /// Bytes of O and LSE, head by head.
    Forward([Vec<Range<u64>>; 2]),
    /// Bytes of dQ, task by task and head by head, and of dK and dV.
    Backward(Vec<Range<u64>>, Range<u64>),
}

/// See the module.
#[derive(Debug)]
pub(super) struct Plans {
    step: u64,
    made: BTreeMap<Key, Made>,
    weight: u64,
    most: u64,
}

impl Key {
    /// The key of works of one phase whose rows are in one memory.
    pub(super) fn of<M>(works: &[Work<M>]) -> Option<Self> {
        let first = works.first()?;
        let at = first.planned.order.at(first.phase);
        Some(Self {
            step: first.planned.header.step,
            plan: first.planned.plan_index(at),
            direction: at.direction,
            home: matches!(first.rows, BundleRows::Home(_)),
            works: works.iter().map(|it| it.work).collect(),
        })
    }
}

impl Plans {
    /// For at most `most` bytes of the GPU.
    pub(super) fn new(most: u64) -> Self {
        Self { step: 0, made: BTreeMap::new(), weight: 0, most }
    }

    /// Takes a plan out; [`Self::keep`] brings it back.
    pub(super) fn take(&mut self, key: &Key) -> Option<Made> {
        if key.step > self.step {
            // Launches of another step never come again. Memory that a launch still uses is freed
            // after it.
            self.clear();
            self.step = key.step;
        }
        let made = self.made.remove(key)?;
        self.weight -= made.weight;
        Some(made)
    }

    /// Keeps a plan for the next layer of its kind. The first ones stay where not all have room: layers come round in one order.
    pub(super) fn keep(&mut self, key: Key, made: Made) {
        if key.step == self.step && self.weight + made.weight <= self.most {
            self.weight += made.weight;
            self.made.insert(key, made);
        }
    }

    /// Drops all of them; whether there were any.
    pub(super) fn clear(&mut self) -> bool {
        self.weight = 0;
        !std::mem::take(&mut self.made).is_empty()
    }
}
