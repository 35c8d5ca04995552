//! The free units of an arena.
//!
//! In: counts of units. Out: positions. It takes the lowest gap that is long enough, so that memory that was written once is used
//! again first. No memory is touched here.
//!
//! Invariant: a unit has one owner at a time.

use std::collections::{BTreeMap, BTreeSet};

/// See the module.
#[derive(Debug)]
pub(super) struct Free {
    /// Gaps by their first unit, with their lengths; no two touch.
    gaps: BTreeMap<usize, usize>,
    /// First units of gaps, by the binary logarithm of the length: thousands of gaps may be too short for most parts.
    by_length: Vec<BTreeSet<usize>>,
}

impl Free {
    /// All of `units` are free.
    pub(super) fn new(units: usize) -> Self {
        let mut free = Self { gaps: BTreeMap::new(), by_length: Vec::new() };
        free.add(0, units);
        free
    }

    fn add(&mut self, at: usize, units: usize) {
        let class = class(units);
        if self.by_length.len() <= class {
            self.by_length.resize_with(class + 1, BTreeSet::new);
        }
        self.by_length[class].insert(at);
        self.gaps.insert(at, units);
    }

    /// Removes the gap that begins at `at`, if there is one, and returns its length.
    fn remove(&mut self, at: usize) -> Option<usize> {
        let units = self.gaps.remove(&at)?;
        self.by_length[class(units)].remove(&at);
        Some(units)
    }

    /// Takes `units` units, at least one. Returns the first of them.
    pub(super) fn take(&mut self, units: usize) -> Option<usize> {
        let class = class(units);
        // Every gap of a higher class is long enough.
        let longer = self.by_length.iter().skip(class + 1).filter_map(BTreeSet::first).min();
        let longer = longer.copied();
        let alike = self.by_length.get(class).into_iter().flatten().copied();
        let mut alike = alike.take_while(|it| longer.is_none_or(|longer| *it < longer));
        let at = alike.find(|it| self.gaps[it] >= units).or(longer)?;
        let length = self.remove(at)?;
        if length > units {
            self.add(at + units, length - units);
        }
        Some(at)
    }

    /// Frees units that [`Self::take`] has returned.
    pub(super) fn give_back(&mut self, at: usize, units: usize) {
        let (mut at, mut units) = (at, units);
        if let Some(behind) = self.remove(at + units) {
            units += behind;
        }
        if let Some((&before, &length)) = self.gaps.range(..at).next_back()
            && before + length == at
        {
            self.remove(before);
            units += length;
            at = before;
        }
        self.add(at, units);
    }
}

fn class(units: usize) -> usize {
    units.max(1).ilog2() as usize
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_unit_is_given_out_twice_and_none_is_lost(
            steps in prop::collection::vec((1..20_usize, any::<prop::sample::Index>(), any::<bool>()), 1..200),
        ) {
            let mut free = Free::new(100);
            let mut held: Vec<(usize, usize)> = Vec::new();
            for (units, which, gives) in steps {
                if gives && !held.is_empty() {
                    let (at, units) = held.swap_remove(which.index(held.len()));
                    free.give_back(at, units);
                    continue;
                }
                let lowest = free.gaps.iter().find(|it| *it.1 >= units).map(|it| *it.0);
                let taken = free.take(units);
                prop_assert_eq!(taken, lowest);
                if let Some(at) = taken {
                    for &(other, length) in &held {
                        prop_assert!(at + units <= other || other + length <= at);
                    }
                    prop_assert!(at + units <= 100);
                    held.push((at, units));
                }
                let lent: usize = held.iter().map(|it| it.1).sum();
                prop_assert_eq!(free.gaps.values().sum::<usize>(), 100 - lent);
            }
            for (at, units) in held {
                free.give_back(at, units);
            }
            prop_assert_eq!(free.gaps, BTreeMap::from([(0, 100)]));
        }
    }
}
