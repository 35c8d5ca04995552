//! The tokens of a document.
//!
//! In: bytes, or ids of a vocabulary. Out: ids by their place. Ids below 256 take a byte each, others four.
//!
//! Invariant: the same ids are equal and have the same digest, whether they came as text or as numbers.

use std::ops::Range;

use xxhash_rust::xxh3::Xxh3;

/// See the module.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Tokens(Ids);

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
enum Ids {
    /// All are below 256.
    Narrow(Vec<u8>),
    /// One at least is not.
    Wide(Vec<u32>),
}

impl Tokens {
    /// How many there are.
    pub fn count(&self) -> usize {
        match &self.0 {
            Ids::Narrow(ids) => ids.len(),
            Ids::Wide(ids) => ids.len(),
        }
    }

    /// The token at a place, if there is one.
    pub fn get(&self, at: usize) -> Option<u32> {
        match &self.0 {
            Ids::Narrow(ids) => ids.get(at).copied().map(u32::from),
            Ids::Wide(ids) => ids.get(at).copied(),
        }
    }

    /// Appends the tokens at these places.
    ///
    /// # Panics
    ///
    /// When there are fewer.
    pub(crate) fn append(&self, at: Range<usize>, to: &mut Vec<u32>) {
        match &self.0 {
            Ids::Narrow(ids) => to.extend(ids[at].iter().copied().map(u32::from)),
            Ids::Wide(ids) => to.extend_from_slice(&ids[at]),
        }
    }

    /// All of them.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let (narrow, wide): (&[u8], &[u32]) = match &self.0 {
            Ids::Narrow(ids) => (ids, &[]),
            Ids::Wide(ids) => (&[], ids),
        };
        narrow.iter().copied().map(u32::from).chain(wide.iter().copied())
    }

    pub(super) fn add_to(&self, digest: &mut Xxh3) {
        digest.update(&(self.count() as u64).to_le_bytes());
        match &self.0 {
            Ids::Narrow(ids) => digest.update(ids),
            Ids::Wide(ids) => ids.iter().for_each(|it| digest.update(&it.to_le_bytes())),
        }
    }
}

impl From<Vec<u8>> for Tokens {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Ids::Narrow(bytes))
    }
}

impl From<Vec<u32>> for Tokens {
    fn from(ids: Vec<u32>) -> Self {
        let narrow = ids.iter().map(|&it| u8::try_from(it)).collect::<Result<_, _>>();
        Self(narrow.map_or_else(|_| Ids::Wide(ids), Ids::Narrow))
    }
}
