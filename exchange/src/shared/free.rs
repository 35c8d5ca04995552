//! Which units of an arena are free.
//!
//! In: counts of units. Out: places. The lowest gap that is long enough is taken, so that memory that was written once is used
//! again first. No memory is touched here.
//!
//! Invariant: a unit is given out once until it is given back.

use std::collections::BTreeMap;

/// See the module.
#[derive(Debug)]
pub(super) struct Free {
    /// Gaps by their first unit, with their lengths; no two touch.
    gaps: BTreeMap<usize, usize>,
}

impl Free {
    /// All of `units` are free.
    pub(super) fn new(units: usize) -> Self {
        Self { gaps: BTreeMap::from([(0, units)]) }
    }

    /// The first of `units` units, at least one.
    pub(super) fn take(&mut self, units: usize) -> Option<usize> {
        let (&at, &length) = self.gaps.iter().find(|(_, length)| **length >= units)?;
        self.gaps.remove(&at);
        if length > units {
            self.gaps.insert(at + units, length - units);
        }
        Some(at)
    }

    /// Frees what was taken.
    pub(super) fn give_back(&mut self, at: usize, units: usize) {
        let (mut at, mut units) = (at, units);
        if let Some(behind) = self.gaps.remove(&(at + units)) {
            units += behind;
        }
        if let Some((&before, length)) = self.gaps.range_mut(..at).next_back()
            && before + *length == at
        {
            units += *length;
            at = before;
        }
        self.gaps.insert(at, units);
    }
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
                } else if let Some(at) = free.take(units) {
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
