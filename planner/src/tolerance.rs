//! How uneven a plan may be.
//!
//! In: the ratio of the last finish to the level that the user chose. Out: a [`Tolerance`], which is a ratio in range, and how
//! late by it a slot may finish.
//!
//! What others rely on: it counts in millionths, so every process allows the same.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Error;

/// Millionths of a whole.
const WHOLE: u64 = 1_000_000;
/// Millionths of [`Tolerance::USUAL`] beyond the level.
const USUAL: u32 = 2_000;
/// A usual plan counts as even if its last slot finishes after the level by at most one part in this many of it.
const ENOUGH: u64 = 504;
/// The balance stops where the last slot finishes after the level by at most one part in this many of it: 0.2 %.
const TOLERATED: u64 = 508;
/// Tolerances that plans are made for where a wide one is allowed, in millionths beyond the level: each up to that one. A wider one
/// has all plans of a narrower one to choose from, so it is never worse. Finer steps waste less of what is allowed and take longer:
/// with these the busiest links of the bench `peer` are within 0.2 % in the mean of those with a plan for the very ratio.
const STEPS: [u32; 23] = [
    USUAL, 5_000, 10_000, 14_000, 20_000, 24_000, 31_000, 34_000, 40_000, 50_000, 58_000, 65_000,
    75_000, 81_000, 90_000, 100_000, 115_000, 130_000, 142_000, 170_000, 300_000, 500_000,
    1_000_000,
];

/// By how much the last slot may finish after the level at which all would finish together: a ratio from 1 to 2. Beyond the
/// usual one unevenness is spent on links: the plan whose busiest link has the least to do is taken.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Tolerance {
    /// Beyond 1.
    millionths: u32,
}

impl Tolerance {
    /// What plans keep where nobody says anything: 1.002.
    pub const USUAL: Self = Self { millionths: USUAL };

    /// A ratio, rounded to millionths.
    ///
    /// # Errors
    ///
    /// [`Error::BadTolerance`], below 1, above 2 or no number.
    pub fn new(ratio: f64) -> Result<Self, Error> {
        if !(1.0..=2.0).contains(&ratio) {
            return Err(Error::BadTolerance { given: ratio.to_string() });
        }
        let all = (ratio * WHOLE as f64 + 0.5) as u64;
        Ok(Self { millionths: all.saturating_sub(WHOLE) as u32 })
    }

    /// The ratio.
    pub fn ratio(self) -> f64 {
        (WHOLE + u64::from(self.millionths)) as f64 / WHOLE as f64
    }

    /// Whether it is more than the usual one.
    pub(crate) fn is_wide(self) -> bool {
        self > Self::USUAL
    }

    /// Those that plans are made for: where this one is wide, all steps up to it, else this one.
    pub(crate) fn tried(self) -> impl Iterator<Item = Self> {
        let steps = STEPS.into_iter().map(|millionths| Self { millionths });
        let own = (!self.is_wide()).then_some(self);
        own.into_iter().chain(steps.take_while(move |it| *it <= self && self.is_wide()))
    }

    /// The level that slots are filled to: what is tolerated beyond the usual, above the one at which all finish together.
    pub(crate) fn raised(self, level: u64) -> u64 {
        let usual = WHOLE + u64::from(USUAL);
        let all = u128::from(WHOLE + u64::from(self.millionths.max(USUAL)));
        u64::try_from(u128::from(level) * all / u128::from(usual)).unwrap_or(u64::MAX)
    }

    /// How much after a raised level the last slot may finish in an even plan.
    pub(crate) fn enough(self, raised: u64) -> u64 {
        self.part(raised, ENOUGH)
    }

    /// How much after a raised level the last slot may finish when the balance stops.
    pub(crate) fn aim(self, raised: u64) -> u64 {
        self.part(raised, TOLERATED)
    }

    /// One part in this many; less where less than the usual is tolerated.
    fn part(self, raised: u64, parts: u64) -> u64 {
        let part = u128::from(raised) * u128::from(self.millionths.min(USUAL));
        u64::try_from(part / (u128::from(USUAL) * u128::from(parts))).unwrap_or(u64::MAX)
    }

    /// Millionths beyond 1, for a digest; none for the usual one.
    pub(crate) fn told(self) -> Option<u32> {
        (self != Self::USUAL).then_some(self.millionths)
    }
}

impl Default for Tolerance {
    fn default() -> Self {
        Self::USUAL
    }
}

impl TryFrom<f64> for Tolerance {
    type Error = Error;

    fn try_from(ratio: f64) -> Result<Self, Error> {
        Self::new(ratio)
    }
}

impl From<Tolerance> for f64 {
    fn from(it: Tolerance) -> Self {
        it.ratio()
    }
}

impl FromStr for Tolerance {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let refused = |_| Error::BadTolerance { given: text.to_owned() };
        Self::new(text.parse().map_err(refused)?)
    }
}

impl fmt::Display for Tolerance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.ratio())
    }
}
