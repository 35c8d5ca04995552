//! What no way to spread the items of a small problem is below: when the last bin finishes, and the bytes that travel.
//!
//! In: bins, what each item costs, a bound of bytes. Out: [`Floors`]. Who is at both has nothing left to look for.
//!
//! [`Self::finish`](Floors::finish) is found by counting: of many items some bin has several. Where that is not enough,
//! [`Floors::prove`] tries each item in each bin, for a bounded time.

use std::collections::BTreeSet;

use super::bins::Bins;

/// Items that a proof places at most.
const PLACED_AT_MOST: usize = 1_000;

/// See the module.
#[derive(Debug)]
pub(super) struct Floors {
    pub(super) finish: i64,
    pub(super) bytes: i64,
    /// What items cost, the dearest first.
    costs: Vec<u64>,
}

impl Floors {
    /// Of items with these costs, which move no fewer than `bytes`.
    pub(super) fn of(bins: &Bins<'_>, mut costs: Vec<u64>, bytes: i64) -> Self {
        costs.sort_unstable_by(|a, b| b.cmp(a));
        let count = bins.all.len();
        let earliest = |load: u64| bins.all.iter().map(|it| it.slot.finish(load)).min();
        // Of the dearest k · bins + 1 items some bin has more than k, and these cost no less than the cheapest of them.
        let dearest = (0..).map(|k| (k, k * count + 1)).take_while(|it| it.1 <= costs.len());
        let loads = dearest.map(|(k, of)| costs[of - 1 - k..of].iter().sum());
        let finish = loads.filter_map(earliest).max().unwrap_or(0);
        Self { finish: i64::try_from(finish).unwrap_or(i64::MAX), bytes, costs }
    }

    /// Raises the earliest finish to `finish`, if it is soon shown that no way is earlier.
    pub(super) fn prove(&mut self, bins: &Bins<'_>, finish: i64) {
        let by = u64::try_from(finish - 1).unwrap_or(0);
        let most = bins.all.iter().map(|it| it.most_by(by)).collect();
        let traits = |of: usize| (bins.all[of].slot.weight, bins.all[of].slot.head_start);
        let first = |of: usize| (0..of).find(|it| traits(*it) == traits(of)).unwrap_or(of);
        let alike = (0..bins.all.len()).map(first).collect();
        let mut proof = Proof { costs: &self.costs, most, alike, seen: BTreeSet::new(), placed: 0 };
        let rest = self.costs.iter().sum();
        if !proof.may_fit(0, rest, &mut vec![0; bins.all.len()]) {
            self.finish = self.finish.max(finish);
        }
    }
}

struct Proof<'a> {
    costs: &'a [u64],
    /// Most cost of each bin.
    most: Vec<u64>,
    /// By bin: the first one of its speed and head start.
    alike: Vec<usize>,
    /// Items placed, and loads by kind of bin: from there nothing fits.
    seen: BTreeSet<(usize, Vec<(usize, u64)>)>,
    placed: usize,
}

impl Proof<'_> {
    /// Whether the items from `at` on, which cost `rest`, fit beside the loads, or that is not known.
    fn may_fit(&mut self, at: usize, rest: u64, loads: &mut Vec<u64>) -> bool {
        let Some(cost) = self.costs.get(at) else { return true };
        let room: u64 = self.most.iter().zip(&*loads).map(|(most, load)| most - load).sum();
        if room < rest {
            return false;
        }
        let mut state: Vec<_> = self.alike.iter().copied().zip(loads.iter().copied()).collect();
        state.sort_unstable();
        if !self.seen.insert((at, state)) {
            return false;
        }
        for bin in 0..loads.len() {
            let is_same = |it: usize| self.alike[it] == self.alike[bin] && loads[it] == loads[bin];
            if loads[bin] + cost > self.most[bin] || (0..bin).any(is_same) {
                continue;
            }
            self.placed += 1;
            if self.placed > PLACED_AT_MOST {
                return true;
            }
            loads[bin] += cost;
            let may = self.may_fit(at + 1, rest - cost, loads);
            loads[bin] -= cost;
            if may {
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::super::limits::Limits;
    use super::*;
    use crate::plan::least_work;
    use crate::{Costs, Document, Heads, Layout, Links, Mask, Problem, Slot};

    /// Of every way to give so many items to the bins: when the last finishes.
    fn least(bins: &Bins<'_>, costs: &[u64]) -> u64 {
        let count = bins.all.len();
        let ways = 0..count.pow(costs.len() as u32);
        let finish = |way: usize| {
            let mut loads = vec![0; count];
            for (at, cost) in costs.iter().enumerate() {
                loads[way / count.pow(at as u32) % count] += cost;
            }
            let with_work = loads.iter().zip(&bins.all).filter(|it| *it.0 > 0);
            with_work.map(|(load, bin)| bin.slot.finish(*load)).max().unwrap_or(0)
        };
        ways.map(finish).min().unwrap_or(0)
    }

    #[test]
    fn no_way_to_spread_items_finishes_before_the_floor_and_proofs_reach_it() {
        let document = Document { rows: 1, mask: Mask::Causal };
        let (mut proved, mut state) = (0, 7_u64);
        let mut below = |bound: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) % bound
        };
        for _ in 0..300 {
            let count = 2 + below(2);
            let mut slot = || Slot {
                weight: 50 + 50 * below(2) as u32,
                head_start: 700 * below(2),
                home: None,
                memory: 1 << 50,
            };
            let problem = Problem {
                slots: (0..count).map(|_| slot()).collect(),
                layout: Layout::end_to_end(vec![document], 1).unwrap(),
                heads: Heads { query: 1, kv: 1, dim: 8 },
                element_bytes: 4,
                lanes: 1,
                costs: Costs::pairs_only(),
                links: Links::equal(),
                tolerance: crate::Tolerance::USUAL,
            };
            let bins = Bins::new(&problem, Limits::none(), least_work(&problem));
            let costs: Vec<u64> = (0..=below(7)).map(|_| 1 + below(400)).collect();
            let right = least(&bins, &costs) as i64;
            let mut floors = Floors::of(&bins, costs, 0);
            assert!(floors.finish <= right, "{floors:?} are above {right}");
            floors.prove(&bins, right + 1);
            assert!(floors.finish <= right, "{floors:?} are above {right}");
            floors.prove(&bins, right);
            proved += u32::from(floors.finish == right);
        }
        assert!(proved > 280, "{proved} of 300 floors were proved");
    }
}
