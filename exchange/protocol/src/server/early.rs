//! Doorbells for steps that have not begun here.
//!
//! In: doorbells that came before their step. Out: those of a step, once it begins. Whether they are believed is decided elsewhere.

use std::collections::BTreeMap;

use crate::{At, TrainerId};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Early {
    /// With their digests.
    rung: BTreeMap<(At, TrainerId), u64>,
    /// How many each trainer has in it.
    counts: BTreeMap<TrainerId, usize>,
}

impl Early {
    /// A doorbell of a trainer. Out: whether it had come before, and how many of the trainer are here.
    pub(super) fn insert(&mut self, from: TrainerId, at: At, digest: u64) -> (bool, usize) {
        let known = self.rung.insert((at, from), digest).is_some();
        let count = self.counts.entry(from).or_default();
        *count += usize::from(!known);
        (known, *count)
    }

    /// The doorbells of a step with their digests, which are gone from here.
    pub(super) fn take(&mut self, step: u64) -> Vec<(At, TrainerId, u64)> {
        let first = (At::new(step, 0), TrainerId(0));
        let last = (At::new(step, u32::MAX), TrainerId(u16::MAX));
        let of = self.rung.range(first..=last);
        let of: Vec<_> = of.map(|(&(at, from), &digest)| (at, from, digest)).collect();
        for &(at, from, _) in &of {
            self.remove(at, from);
        }
        of
    }

    /// Nothing up to a phase is rung any more.
    pub(super) fn pass(&mut self, last: At) {
        while let Some((&(at, from), _)) = self.rung.first_key_value().filter(|it| it.0.0 <= last) {
            self.remove(at, from);
        }
    }

    fn remove(&mut self, at: At, from: TrainerId) {
        self.rung.remove(&(at, from));
        if let Some(count) = self.counts.get_mut(&from) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&from);
            }
        }
    }
}
