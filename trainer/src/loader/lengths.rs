//! What a loader draws: lengths of documents, and the generators of a job's seed.
//!
//! In: a list of lengths, a seed. Out: numbers that are the same wherever they are drawn.
//!
//! Knows no corpus: documents that end at the edges of files are the loader's.

use std::num::NonZeroU32;
use std::path::Path;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::Deserialize;
use xxhash_rust::xxh3::xxh3_64;

use super::{LoaderError, Settings};

/// Lengths of documents that a loader draws from, each entry with the same chance.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Lengths(Vec<NonZeroU32>);

impl Lengths {
    /// The list that comes with the program: `examples/lengths.json`.
    pub fn shipped() -> Self {
        let text = include_str!("../../../examples/lengths.json");
        Self::parse(text, Path::new("examples/lengths.json"))
            .expect("a test parses the shipped list")
    }

    /// Reads a list: a JSON array of positive integers, or an object with one under `lengths`.
    pub fn read(path: &Path) -> Result<Self, LoaderError> {
        let refuse = |why: String| LoaderError::Lengths { path: path.to_path_buf(), why };
        let text = std::fs::read_to_string(path).map_err(|source| refuse(source.to_string()))?;
        Self::parse(&text, path)
    }

    /// A list of lengths; `None` if it is empty.
    pub fn new(lengths: Vec<NonZeroU32>) -> Option<Self> {
        (!lengths.is_empty()).then_some(Self(lengths))
    }

    /// Names the list.
    pub fn digest(&self) -> u64 {
        let bytes: Vec<u8> = self.0.iter().flat_map(|it| it.get().to_le_bytes()).collect();
        xxh3_64(&bytes)
    }

    /// Lengths of a nano-batch's documents as a loader draws them, but for the edges of files.
    pub fn documents(&self, settings: Settings, step: u64, nano: u32) -> Vec<u32> {
        let mut random = stream_random(&settings, step, nano);
        let mut left = u64::from(settings.trainers.get()) * u64::from(settings.tokens.get());
        let mut documents = Vec::new();
        while left > 0 {
            let drawn = self.draw(&mut random);
            // A loader draws the document's place in the corpus next.
            random.next_u64();
            let rows = u64::from(drawn.get().min(settings.cap.get())).min(left);
            documents.push(rows as u32);
            left -= rows;
        }
        documents
    }

    /// The next document's length, before anything cuts it.
    pub(super) fn draw(&self, random: &mut ChaCha8Rng) -> NonZeroU32 {
        self.0[below(random, self.0.len() as u64) as usize]
    }

    fn parse(text: &str, path: &Path) -> Result<Self, LoaderError> {
        /// The file's format: the one that ships with Cadre, or a plain list.
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum File {
            Named { lengths: Vec<NonZeroU32> },
            Plain(Vec<NonZeroU32>),
        }
        let refuse = |why: String| LoaderError::Lengths { path: path.to_path_buf(), why };
        let file: File = serde_json::from_str(text).map_err(|source| refuse(source.to_string()))?;
        let (File::Named { lengths } | File::Plain(lengths)) = file;
        Self::new(lengths).ok_or_else(|| refuse("the list is empty".into()))
    }
}

/// The generator of one nano-batch's documents.
pub(super) fn stream_random(settings: &Settings, step: u64, nano: u32) -> ChaCha8Rng {
    let mut random = random(settings.seed, *b"documents");
    random.set_stream(step * u64::from(settings.nano_batches.get()) + u64::from(nano));
    random
}

/// A generator of the job's seed for one purpose.
pub(crate) fn random<const N: usize>(seed: u64, purpose: [u8; N]) -> ChaCha8Rng {
    const { assert!(N <= 24, "a purpose shares the key with the seed") }
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..8 + N].copy_from_slice(&purpose);
    ChaCha8Rng::from_seed(key)
}

/// A number below `bound`, which is not zero; uneven by less than 2⁻³² for the bounds in use.
pub(super) fn below(random: &mut ChaCha8Rng, bound: u64) -> u64 {
    ((u128::from(random.next_u64()) * u128::from(bound)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_malformed_list_is_refused() {
        for text in ["", "{}", r#"{"lengths": []}"#, r#"{"lengths": [0]}"#] {
            let error = Lengths::parse(text, Path::new("mine.json")).unwrap_err().to_string();
            assert!(error.starts_with("mine.json is no list of lengths"), "{error}");
        }
        assert!(Lengths::read(Path::new("/nowhere/lengths.json")).is_err());
    }
}
