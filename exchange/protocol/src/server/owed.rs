//! Results that were made here and that their readers have not acknowledged.
//!
//! In: works that ran, acknowledgements. Out: whom a result is owed. Freeing the results is decided elsewhere ([`super::work`]).
//!
//! Invariant: what a trainer is owed is found by its name. Nobody looks at works that others read.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use crate::{At, TrainerId, Work};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Owed(BTreeSet<(TrainerId, At, Work)>);

impl Owed {
    /// A result waits for a reader.
    pub(super) fn owe(&mut self, reader: TrainerId, at: At, work: Work) {
        self.0.insert((reader, at, work));
    }

    /// The reader has a result, or nobody waits for it any more. Out: whether it was owed.
    pub(super) fn settle(&mut self, reader: TrainerId, at: At, work: Work) -> bool {
        self.0.remove(&(reader, at, work))
    }

    /// What a trainer is owed of some phases, ascending.
    pub(super) fn to(
        &self,
        reader: TrainerId,
        phases: RangeInclusive<At>,
    ) -> impl Iterator<Item = (At, Work)> {
        let (first, last) = phases.into_inner();
        let all = (reader, first, Work(0))..=(reader, last, Work(u32::MAX));
        self.0.range(all).map(|&(_, at, work)| (at, work))
    }
}
