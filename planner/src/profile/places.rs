//! Where the workers of a job are, as its calibration says, and how fast their links are.
//!
//! In: `links`, `places` and `unreachable` of a [`Profile`]. Out: a [`LinkMap`], which makes the [`Links`] of a header.
//!
//! Two measurements of one link differ a little, so rates are rounded to steps of at least 3 %: plans seldom see the difference.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Profile, ProfileError};
use crate::digest::Digest;
use crate::links::MOST;
use crate::{Link, Links, NOMINAL_RATE, Prices};

/// Machines, rails and groups that a file may number; those that it leaves out get higher numbers.
const MOST_NUMBERS: u32 = 1 << 20;
/// Steps of a rate between a power of two and the next one.
const STEPS_OF_AN_OCTAVE: u64 = 16;

/// Workers with equal links.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Site {
    /// `trainer-N`, by rank, and `server-N`, by the number among the job's dedicated slots.
    pub of: Vec<String>,
    /// Machine; none: each has one of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<u32>,
    /// Rail; none: each has one of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rail: Option<u32>,
    /// Group of switches; none: each has one of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leaf: Option<u32>,
    /// Bytes a microsecond that leave each, less what else the job sends; none: the fastest of the network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out: Option<u32>,
    /// Bytes a microsecond that arrive at each, less what else the job receives; none: the fastest of the network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub into: Option<u32>,
}

/// A worker, as a calibration names it.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Worker {
    Trainer(u16),
    Server(u16),
}

impl Worker {
    fn parse(name: &str) -> Option<Self> {
        let (kind, number) = name.split_once('-')?;
        let has_one_form = number == "0" || !number.starts_with(['0', '+']);
        let number = number.parse().ok().filter(|it| has_one_form && *it < u16::MAX)?;
        match kind {
            "trainer" => Some(Self::Trainer(number)),
            "server" => Some(Self::Server(number)),
            _ => None,
        }
    }
}

/// The link of a worker, where it is known.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Known {
    node: Option<u32>,
    rail: Option<u32>,
    leaf: Option<u32>,
    out: u32,
    into: u32,
}

/// What a calibration says of the links of a job's workers; the default knows nothing, and all links are equal.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct LinkMap {
    known: BTreeMap<Worker, Known>,
    /// Of workers that are not known.
    full: u32,
    prices: Prices,
    unreachable: Vec<[Worker; 2]>,
}

impl LinkMap {
    /// The links of a job's places: of so many ranks, then of so many dedicated slots. Workers that the calibration does not
    /// name are far from all others, with links at the full rate. Those that the job does not have count for nothing.
    pub fn links(&self, ranks: u16, dedicated: usize) -> Links {
        let ranks_before = usize::from(ranks);
        let place = |it: Worker| match it {
            Worker::Trainer(rank) => (rank < ranks).then_some(u32::from(rank)),
            Worker::Server(slot) => {
                (usize::from(slot) < dedicated).then(|| u32::from(ranks) + u32::from(slot))
            }
        };
        let pair = |[one, other]: &[Worker; 2]| Some((place(*one)?, place(*other)?));
        let unreachable = self.unreachable.iter().filter_map(pair).collect();
        if self.known.is_empty() {
            return Links { unreachable, ..Links::equal() };
        }
        let worker = |place: usize| match u16::try_from(place) {
            Ok(rank) if place < ranks_before => Some(Worker::Trainer(rank)),
            _ => u16::try_from(place - ranks_before).ok().map(Worker::Server),
        };
        let link = |place: usize| {
            let (out, into) = (self.full, self.full);
            let nobody = Known { node: None, rail: None, leaf: None, out, into };
            let known = worker(place).and_then(|it| self.known.get(&it)).unwrap_or(&nobody);
            let own = |number: Option<u32>| number.unwrap_or(MOST_NUMBERS + place as u32);
            let Known { node, rail, leaf, out, into } = *known;
            Link { node: own(node), rail: own(rail), leaf: own(leaf), out, into }
        };
        let places = (0..ranks_before + dedicated).map(link).collect();
        Links { places, prices: self.prices, unreachable }
    }

    /// The links of a job that has lost its first dedicated slots: the others have moved up.
    #[must_use]
    pub fn without_servers(&self, lost: u16) -> Self {
        let left = |it: &Worker| match *it {
            Worker::Server(slot) => slot.checked_sub(lost).map(Worker::Server),
            trainer @ Worker::Trainer(_) => Some(trainer),
        };
        let known = self.known.iter().filter_map(|it| Some((left(it.0)?, *it.1))).collect();
        let pair = |[one, other]: &[Worker; 2]| Some([left(one)?, left(other)?]);
        let unreachable = self.unreachable.iter().filter_map(pair).collect();
        Self { known, unreachable, ..self.clone() }
    }
}

impl Profile {
    /// What this calibration says of the links of a job with so many trainers.
    ///
    /// # Errors
    ///
    /// The first field of `links`, `places` or `unreachable` that cannot be. A server that the job does not have is none: pools
    /// grow.
    pub fn link_map(&self, trainers: u16) -> Result<LinkMap, ProfileError> {
        let named = |field: String, name: &str| match Worker::parse(name) {
            None => Err(ProfileError::Worker { field, found: name.into() }),
            Some(Worker::Trainer(rank)) if rank >= trainers => {
                Err(ProfileError::UnknownTrainer { field, rank, trainers })
            }
            Some(worker) => Ok(worker),
        };
        let (full, prices) = self.rates()?;
        let mut known = BTreeMap::new();
        for (index, site) in self.places.iter().enumerate() {
            let Site { ref of, node, rail, leaf, out, into } = *site;
            let field = |name: &str| format!("places[{index}].{name}");
            if of.is_empty() {
                return Err(ProfileError::NoWorker { index });
            }
            for (name, number) in [("node", node), ("rail", rail), ("leaf", leaf)] {
                if let Some(found) = number.filter(|it| *it >= MOST_NUMBERS) {
                    let (field, below) = (field(name), MOST_NUMBERS);
                    return Err(ProfileError::Number { field, found, below });
                }
            }
            let rate = |name, rate: Option<u32>| match rate {
                None => Ok(full),
                Some(rate) => checked_rate(field(name), rate),
            };
            let link =
                Known { node, rail, leaf, out: rate("out", out)?, into: rate("into", into)? };
            for (at, name) in of.iter().enumerate() {
                let field = field(&format!("of[{at}]"));
                let worker = named(field.clone(), name)?;
                if known.insert(worker, link).is_some() {
                    return Err(ProfileError::PlacedTwice { field, worker: name.clone() });
                }
            }
        }
        let mut unreachable = Vec::new();
        for (index, [one, other]) in self.unreachable.iter().enumerate() {
            let field = |at: usize| format!("unreachable[{index}][{at}]");
            let pair = [named(field(0), one)?, named(field(1), other)?];
            if pair[0] == pair[1] {
                return Err(ProfileError::Itself { index, worker: one.clone() });
            }
            unreachable.push(pair);
        }
        Ok(LinkMap { known, full, prices, unreachable })
    }

    pub(super) fn encode_places(&self, digest: &mut Digest) {
        let text = |digest: &mut Digest, text: &str| {
            digest.u64(text.len() as u64);
            text.bytes().for_each(|it| digest.u64(it.into()));
        };
        digest.u64(self.places.len() as u64);
        for Site { of, node, rail, leaf, out, into } in &self.places {
            digest.u64(of.len() as u64);
            for it in of {
                text(digest, it);
            }
            for it in [node, rail, leaf, out, into] {
                digest.u64(it.map_or(0, |it| u64::from(it) + 1));
            }
        }
        digest.u64(self.unreachable.len() as u64);
        self.unreachable.iter().flatten().for_each(|it| text(digest, it));
    }

    /// The fastest rate of the network, and what a byte costs by distance. A distance that is not measured is like the next
    /// farther one that is, or else like the farthest.
    fn rates(&self) -> Result<(u32, Prices), ProfileError> {
        let mut measured = [None; 4];
        for (index, it) in self.links.iter().enumerate() {
            let rate = checked_rate(format!("links[{index}].rate"), it.rate)?;
            let distances = ["node", "rail", "leaf", "far"];
            if let Some(at) = distances.iter().position(|name| *name == it.distance) {
                measured[at] = Some(rate);
            }
        }
        let network = measured[1..].iter().flatten().max().copied();
        let full = network.or(measured[0]).unwrap_or(NOMINAL_RATE);
        let percent = |at: usize| {
            let farther = measured[at..].iter().flatten().next();
            let rate = farther.or(measured.iter().flatten().last()).copied().unwrap_or(full);
            let (rate, whole) = (u64::from(rate), 100 * u64::from(full));
            ((whole + rate / 2) / rate).clamp(1, MOST.into()) as u32
        };
        let [node, rail, leaf, far] = [0, 1, 2, 3].map(percent);
        Ok((full, Prices { node, rail, leaf, far }))
    }
}

/// A rate that plans may be made with.
fn checked_rate(field: String, rate: u32) -> Result<u32, ProfileError> {
    if (1..=MOST).contains(&rate) {
        Ok(rounded(rate))
    } else {
        Err(ProfileError::Rate { field, rate, most: MOST })
    }
}

/// The nearest of all rates that are the nominal one, times a power of two, times 16 to 31 sixteenths.
fn rounded(rate: u32) -> u32 {
    // Parts of a byte, so that low rates have steps.
    const PART_BITS: u32 = 20;
    let rate = u64::from(rate) << PART_BITS;
    let mut power = u64::from(NOMINAL_RATE) << PART_BITS;
    while power > rate {
        power /= 2;
    }
    while power * 2 <= rate {
        power *= 2;
    }
    let steps = ((rate - power) * STEPS_OF_AN_OCTAVE + power / 2) / power;
    let near = power + power * steps / STEPS_OF_AN_OCTAVE;
    (((near + (1 << (PART_BITS - 1))) >> PART_BITS) as u32).clamp(1, MOST)
}

#[cfg(test)]
mod tests;
