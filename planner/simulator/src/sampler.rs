//! Draws documents from a published set of lengths, by the rules of the published evaluations.
//!
//! In: the lengths of a set, a seed, the longest document. Out: lengths of documents that fill stretches exactly.
//!
//! 1. Lengths below 65,536 are short, the others long. The first half of the short ones is kept, the long ones are
//!    repeated four times.
//! 2. Pretrain: all lengths grow by `longest / 65,536`. `ProLong`: each long one becomes `longest` with probability 0.3,
//!    all others keep their length (this is what the recorded workloads show).
//! 3. Documents are drawn without replacement, rounded up to 16 and laid end to end; where a stretch ends the document
//!    is cut, and what is left of it opens the next stretch as a document of its own.
//!
//! The same seed draws the same documents on every machine. It does not draw what the published generator draws from
//! its seed, only from the same distribution.

use std::collections::VecDeque;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::Serialize;

/// Lengths from here on are long.
const SPLIT: u64 = 65_536;
/// How often a long length is in the urn.
const REPEATS: usize = 4;
/// Lengths are multiples of this, but for documents cut at an edge.
const GRAIN: u64 = 16;
/// Longest document that a planner counts.
const MOST_ROWS: u32 = 1 << 24;

/// Which rules apply to a set.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LengthSet {
    /// All lengths grow with the longest document.
    Pretrain,
    /// Some long documents become as long as the longest.
    Prolong,
}

impl LengthSet {
    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pretrain => "Pretrain",
            Self::Prolong => "ProLong",
        }
    }
}

/// Why nothing can be drawn.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum SampleError {
    /// No length at all.
    #[error("lengths is empty; give at least one")]
    NoLength,
    /// A document without tokens.
    #[error("lengths[{index}] is 0; every document has a token")]
    ZeroLength { index: usize },
    /// A length that no document can have.
    #[error("lengths[{index}] is {length}, more than {MOST_ROWS}; leave it out")]
    LongLength { index: usize, length: u64 },
    /// A longest document below the split or beyond the planner's.
    #[error("longest is {longest}; give a number from {SPLIT} to {MOST_ROWS}")]
    BadLongest { longest: u32 },
    /// Stretches of nothing.
    #[error("stretch is {stretch} tokens; give at least {GRAIN}")]
    BadStretch { stretch: u32 },
    /// The urn is empty before all stretches are full.
    #[error(
        "{wanted} stretches of {stretch} tokens need more than the {documents} documents of the set; draw fewer"
    )]
    Exhausted { wanted: usize, stretch: u32, documents: usize },
}

/// An urn of documents.
#[derive(Clone, Debug)]
pub struct Sampler {
    random: ChaCha8Rng,
    urn: Vec<u32>,
    /// Documents before the first draw.
    documents: usize,
    /// Rest of a document that was cut at an edge.
    rest: VecDeque<u32>,
}

impl Sampler {
    /// Fills an urn.
    ///
    /// # Errors
    ///
    /// Names the field that is wrong.
    pub fn new(
        set: LengthSet,
        lengths: &[u64],
        longest: u32,
        seed: u64,
    ) -> Result<Self, SampleError> {
        if lengths.is_empty() {
            return Err(SampleError::NoLength);
        }
        for (index, &length) in lengths.iter().enumerate() {
            if length == 0 {
                return Err(SampleError::ZeroLength { index });
            }
            if length > u64::from(MOST_ROWS) {
                return Err(SampleError::LongLength { index, length });
            }
        }
        if u64::from(longest) < SPLIT || longest > MOST_ROWS {
            return Err(SampleError::BadLongest { longest });
        }
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let short: Vec<u64> = lengths.iter().copied().filter(|it| *it < SPLIT).collect();
        let long: Vec<u64> = lengths.iter().copied().filter(|it| *it >= SPLIT).collect();
        let mut urn: Vec<u64> = short[..short.len().div_ceil(2)].to_vec();
        let kept = urn.len();
        for _ in 0..REPEATS {
            urn.extend(&long);
        }
        for (index, length) in urn.iter_mut().enumerate() {
            *length = match set {
                LengthSet::Pretrain => *length * u64::from(longest) / SPLIT,
                LengthSet::Prolong if index >= kept && below(&mut random, 10) < 3 => longest.into(),
                LengthSet::Prolong => *length,
            };
            *length = length.next_multiple_of(GRAIN).min(longest.into());
        }
        let urn: Vec<u32> = urn.into_iter().map(|it| it as u32).collect();
        Ok(Self { random, documents: urn.len(), urn, rest: VecDeque::new() })
    }

    /// Draws documents for `count` stretches of exactly `stretch` tokens each.
    ///
    /// # Errors
    ///
    /// A stretch of less than 16 tokens, or an urn that is empty too soon.
    pub fn stretches(&mut self, count: usize, stretch: u32) -> Result<Vec<Vec<u32>>, SampleError> {
        if u64::from(stretch) < GRAIN {
            return Err(SampleError::BadStretch { stretch });
        }
        let exhausted =
            SampleError::Exhausted { wanted: count, stretch, documents: self.documents };
        (0..count).map(|_| self.stretch(stretch).ok_or_else(|| exhausted.clone())).collect()
    }

    fn stretch(&mut self, stretch: u32) -> Option<Vec<u32>> {
        let mut documents = Vec::new();
        let mut room = stretch;
        while room > 0 {
            let length = self.rest.pop_front().or_else(|| self.draw())?;
            let kept = length.min(room);
            if length > kept {
                self.rest.push_back(length - kept);
            }
            documents.push(kept);
            room -= kept;
        }
        Some(documents)
    }

    fn draw(&mut self) -> Option<u32> {
        if self.urn.is_empty() {
            return None;
        }
        let at = below(&mut self.random, self.urn.len() as u64) as usize;
        Some(self.urn.swap_remove(at))
    }
}

/// A number below `bound`, which is not zero.
fn below(random: &mut ChaCha8Rng, bound: u64) -> u64 {
    ((u128::from(random.next_u64()) * u128::from(bound)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SETS: [LengthSet; 2] = [LengthSet::Pretrain, LengthSet::Prolong];

    #[test]
    fn bad_input_is_refused_by_field() {
        let check = |lengths: &[u64], longest, expected| {
            let refused = Sampler::new(LengthSet::Pretrain, lengths, longest, 1);
            assert_eq!(refused.map(|_| ()), Err(expected));
        };
        check(&[], 65_536, SampleError::NoLength);
        check(&[3, 0], 65_536, SampleError::ZeroLength { index: 1 });
        let length = 1 << 40;
        check(&[length], 65_536, SampleError::LongLength { index: 0, length });
        check(&[1], 65_535, SampleError::BadLongest { longest: 65_535 });
        let mut sampler = Sampler::new(LengthSet::Prolong, &[100, 100], 65_536, 1).unwrap();
        assert_eq!(sampler.stretches(1, 15), Err(SampleError::BadStretch { stretch: 15 }));
        let exhausted = SampleError::Exhausted { wanted: 2, stretch: 100, documents: 1 };
        assert_eq!(sampler.stretches(2, 100), Err(exhausted));
    }

    #[test]
    fn a_document_cut_at_an_edge_goes_on_in_the_next_stretch() {
        let mut sampler = Sampler::new(LengthSet::Prolong, &[1000; 8], 65_536, 1).unwrap();
        let drawn = sampler.stretches(2, 1500).unwrap();
        assert_eq!(drawn, [vec![1008, 492], vec![516, 984]]);
    }

    #[test]
    fn long_documents_are_drawn_more_often_and_grow() {
        let lengths: Vec<u64> = [vec![1000; 800], vec![70_000; 100]].concat();
        for (set, expected) in [
            (LengthSet::Pretrain, [(4000, 400), (262_144, 400)].as_slice()),
            (LengthSet::Prolong, [(1008, 400), (70_000, 280), (262_144, 120)].as_slice()),
        ] {
            let urn = Sampler::new(set, &lengths, 262_144, 7).unwrap().urn;
            for &(length, count) in expected {
                let found = urn.iter().filter(|it| **it == length).count();
                assert!(found.abs_diff(count) <= 40, "{set:?}: {found} of {length}");
            }
        }
    }

    proptest! {
        #[test]
        fn stretches_are_full_and_the_same_for_the_same_seed(
            lengths in prop::collection::vec(1_u64..200_000, 40..200),
            seed in any::<u64>(),
            stretch in 16_u32..8192,
        ) {
            for set in SETS {
                let draw = |seed| Sampler::new(set, &lengths, 131_072, seed).unwrap().stretches(2, stretch);
                let drawn = draw(seed);
                prop_assert_eq!(&drawn, &draw(seed));
                for documents in drawn.into_iter().flatten() {
                    prop_assert_eq!(documents.iter().sum::<u32>(), stretch);
                    prop_assert!(!documents.contains(&0));
                }
            }
        }
    }
}
