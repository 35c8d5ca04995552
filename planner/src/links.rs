//! Links: how fast each place sends and receives, and what a byte costs from here to there.
//!
//! In: numbers from the step's header. Out: the price of a byte between two places, and the time that bytes take
//! at one. A **place** is where a processor and its network interface are: the ranks by number, then the
//! dedicated slots by number; a slot in place is at its rank's.
//!
//! The model is that of a full-bisection network: every place has a link of its own, each way, and the way
//! between is never the bottleneck but for the price of its distance.

use std::rc::Rc;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::{Error, Problem};

/// Rate of a nominal link in bytes a microsecond: 400 Gbit/s.
pub const NOMINAL_RATE: u32 = 50_000;

/// Most that a rate or a price may be.
pub(crate) const MOST: u32 = 10_000_000;

/// The link of one place, and where it is.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Link {
    /// Machine: places of one reach each other without the network.
    pub node: u32,
    /// Switch of the interfaces of one rank number in several nodes.
    pub rail: u32,
    /// Group of switches.
    pub leaf: u32,
    /// Bytes a microsecond that leave one lane, less what else the job sends (such as all-gathers of weights).
    pub out: u32,
    /// Bytes a microsecond that arrive at one lane, less what else the job receives.
    pub into: u32,
}

/// How far two places are from each other.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Distance {
    /// The same place.
    Itself,
    /// The same machine.
    Node,
    /// Another machine on the same rail.
    Rail,
    /// Another rail of the same leaf.
    Leaf,
    /// Anywhere else.
    Far,
}

/// Time of a byte by distance, as percent of its time on a link at full rate.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Prices {
    /// Inside a machine.
    pub node: u32,
    /// On a rail.
    pub rail: u32,
    /// Inside a leaf.
    pub leaf: u32,
    /// Anywhere else.
    pub far: u32,
}

impl Default for Prices {
    /// Every distance costs the same.
    fn default() -> Self {
        Self { node: 100, rail: 100, leaf: 100, far: 100 }
    }
}

/// Links of all places.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Links {
    /// By place: the ranks, then the dedicated slots. Empty: all nominal and far from each other.
    pub places: Vec<Link>,
    /// Time of a byte by distance.
    pub prices: Prices,
    /// Pairs of places between which nothing can travel, in either direction. No plan makes one use
    /// the other.
    #[serde(default)]
    pub unreachable: Vec<(u32, u32)>,
}

impl Links {
    /// All places nominal and far from each other.
    pub fn equal() -> Self {
        Self::default()
    }

    /// Whether every byte costs the same wherever it goes.
    pub(crate) fn are_equal(&self) -> bool {
        self.places.is_empty()
    }

    /// How far two places are from each other.
    pub fn distance(&self, from: usize, to: usize) -> Distance {
        if from == to {
            return Distance::Itself;
        }
        match (self.places.get(from), self.places.get(to)) {
            (Some(a), Some(b)) if a.node == b.node => Distance::Node,
            (Some(a), Some(b)) if a.rail == b.rail => Distance::Rail,
            (Some(a), Some(b)) if a.leaf == b.leaf => Distance::Leaf,
            _ => Distance::Far,
        }
    }

    /// Time of a byte on the way, as percent of its time on a link at full rate.
    pub(crate) fn percent(&self, from: usize, to: usize) -> u32 {
        let Prices { node, rail, leaf, far } = self.prices;
        match self.distance(from, to) {
            Distance::Itself => 0,
            Distance::Node => node,
            Distance::Rail => rail,
            Distance::Leaf => leaf,
            Distance::Far => far,
        }
    }

    /// Time of a byte from place to place at the slower end, as percent of that on a nominal link.
    pub(crate) fn price(&self, from: usize, to: usize) -> u64 {
        if self.are_equal() {
            return if from == to { 0 } else { 100 };
        }
        let rate = u64::from(self.rates(from).0.min(self.rates(to).1));
        u64::from(self.percent(from, to)) * u64::from(NOMINAL_RATE) / rate
    }

    /// Bytes a microsecond that leave a place and that arrive there.
    pub(crate) fn rates(&self, place: usize) -> (u32, u32) {
        self.places.get(place).map_or((NOMINAL_RATE, NOMINAL_RATE), |it| (it.out, it.into))
    }

    /// The least percent that a byte between two places may cost.
    pub(crate) fn least_percent(&self) -> u32 {
        let Prices { node, rail, leaf, far } = self.prices;
        if self.are_equal() { far } else { node.min(rail).min(leaf).min(far) }
    }

    /// The least rate of a link, and the most percent that a byte may cost.
    pub(crate) fn slowest(&self) -> (u32, u32) {
        let Prices { node, rail, leaf, far } = self.prices;
        let rates = self.places.iter().flat_map(|it| [it.out, it.into]);
        (rates.min().unwrap_or(NOMINAL_RATE), node.max(rail).max(leaf).max(far))
    }

    /// Whether every place reaches every other.
    pub(crate) fn reach_all(&self) -> bool {
        self.unreachable.is_empty()
    }

    /// By place, up to the last that cannot reach another: places that it cannot reach, ascending.
    pub(crate) fn beyond_reach(&self) -> Vec<Rc<[usize]>> {
        let places = self.unreachable.iter().map(|&(a, b)| a.max(b) as usize + 1).max();
        let mut beyond = vec![Vec::new(); places.unwrap_or(0)];
        for &(a, b) in &self.unreachable {
            beyond[a as usize].push(b as usize);
            beyond[b as usize].push(a as usize);
        }
        for it in &mut beyond {
            it.sort_unstable();
            it.dedup();
        }
        beyond.into_iter().map(Rc::from).collect()
    }

    pub(crate) fn check(&self, places: usize) -> Result<(), Error> {
        for &(a, b) in &self.unreachable {
            if a == b || a.max(b) as usize >= places {
                return Err(Error::BadPair { a, b, places: places as u32 });
            }
        }
        let found = self.places.len();
        if found != 0 && found != places {
            let (found, expected) = (found as u64, places as u64);
            return Err(Error::LinkCount { found, expected });
        }
        for (place, it) in self.places.iter().enumerate() {
            for (way, rate) in [("out", it.out), ("into", it.into)] {
                if rate == 0 || rate > MOST {
                    return Err(Error::BadRate { place: place as u32, way, rate, most: MOST });
                }
            }
        }
        let Prices { node, rail, leaf, far } = self.prices;
        for (distance, price) in [("node", node), ("rail", rail), ("leaf", leaf), ("far", far)] {
            if price == 0 || price > MOST {
                return Err(Error::BadPrice { distance, price, most: MOST });
            }
        }
        Ok(())
    }

    pub(crate) fn encode(&self, digest: &mut Digest) {
        let Self { places, prices, unreachable } = self;
        digest.u64(places.len() as u64);
        for &Link { node, rail, leaf, out, into } in places {
            digest.u32s([node, rail, leaf, out, into]);
        }
        let Prices { node, rail, leaf, far } = *prices;
        digest.u32s([node, rail, leaf, far]);
        // Last, so that problems without any keep their digest.
        for &(a, b) in unreachable {
            digest.u32s([a, b]);
        }
    }
}

impl Problem {
    /// The place of each slot, and how many places there are.
    pub fn places(&self) -> (Vec<usize>, usize) {
        let mut next = self.layout.ranks().len();
        let place = |slot: &crate::Slot| {
            slot.home.map_or_else(
                || {
                    next += 1;
                    next - 1
                },
                |rank| rank.0 as usize,
            )
        };
        let places = self.slots.iter().map(place).collect();
        (places, next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_place_is_told_of_all_that_it_cannot_reach() {
        let links = Links { unreachable: vec![(0, 3), (1, 0), (3, 0), (0, 1)], ..Links::equal() };
        let beyond: Vec<Vec<usize>> = links.beyond_reach().iter().map(|it| it.to_vec()).collect();
        assert_eq!(beyond, [vec![1, 3], vec![0], vec![], vec![0]]);
        assert!(Links::equal().beyond_reach().is_empty());
    }

    #[test]
    fn the_nearest_class_counts_and_the_slower_end_sets_the_price() {
        let link = |node, rail, leaf, out| Link { node, rail, leaf, out, into: NOMINAL_RATE };
        let places = vec![link(0, 0, 0, 50_000), link(0, 1, 0, 25_000), link(1, 0, 0, 50_000)];
        let prices = Prices { node: 10, rail: 100, leaf: 120, far: 150 };
        let links = Links { places, prices, ..Links::equal() };
        assert_eq!(links.distance(0, 1), Distance::Node);
        assert_eq!(links.distance(0, 2), Distance::Rail);
        assert_eq!(links.distance(1, 2), Distance::Leaf);
        assert_eq!(links.distance(1, 9), Distance::Far);
        assert_eq!((links.price(0, 1), links.price(1, 0)), (10, 20));
        assert_eq!((links.price(0, 2), links.price(1, 2), links.price(2, 2)), (100, 240, 0));
        assert_eq!((Links::equal().price(0, 1), Links::equal().price(3, 3)), (100, 0));
    }
}
