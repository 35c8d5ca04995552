//! Long words outside of the IO thread: encoded before they come there, checked and decoded after they have left it.
//!
//! In: what is said, or the parts of a word as they were pulled. Out: bytes that can be published as they are, or what was said.
//! Any thread may do it; which one does is said in [`crate::io::planning`] and [`crate::session`].
//!
//! Invariant: nothing here asks who may say what, and nothing is believed whose length and digest are not what the word says.

use cadre_exchange::Buffer;
use cadre_protocol::Peer;
use cadre_step::encoding::encoded;
use cadre_step::envelope::Said;
use cadre_step::words::{MAX_RIDING_BYTES, Published};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::memory;

/// Why the bytes of a word cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// No word.
    #[error("{from} says something unreadable: {source}; run one version everywhere")]
    Unreadable {
        /// Who.
        from: Peer,
        /// What is wrong.
        source: postcard::Error,
    },
    /// Other bytes than it published.
    #[error(
        "{bytes} bytes that {from} has published came with another digest; look for bad memory or a bad network there"
    )]
    Digest {
        /// Who.
        from: Peer,
        /// How many.
        bytes: u64,
    },
}

/// What is said, as bytes.
#[derive(Clone, Debug)]
pub enum Encoded {
    /// So few that they ride in a ring.
    Short(Vec<u8>),
    /// In memory that others can pull from.
    Long {
        /// The bytes, and room behind them.
        rows: Buffer,
        /// How many they are.
        bytes: u64,
        /// Their xxh3.
        digest: u64,
    },
}

impl Encoded {
    /// Takes as long as what is said is long.
    pub fn of(said: &Said) -> Self {
        let bytes = encoded(said).expect("words are plain data");
        if bytes.len() <= MAX_RIDING_BYTES { Self::Short(bytes) } else { Self::long(&bytes) }
    }

    /// Bytes that are published, however few they are.
    pub(super) fn long(bytes: &[u8]) -> Self {
        let mut rows = memory::rows(bytes.len());
        rows.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        Self::Long { rows, bytes: bytes.len() as u64, digest: xxh3_64(bytes) }
    }
}

/// A long word that has come whole, and that nobody has looked into.
#[derive(Debug)]
pub struct Unread {
    pub(super) from: Peer,
    /// Which one of this process; its author may have begun anew since.
    pub(super) reading: u64,
    pub(super) word: Published,
    /// Its parts, and how many bytes of each there are.
    pub(super) parts: Vec<(Buffer, usize)>,
}

/// A long word that was checked and decoded.
#[derive(Debug)]
pub struct Read {
    pub(super) from: Peer,
    pub(super) reading: u64,
    pub(super) said: Result<Said, ReadError>,
}

impl Unread {
    /// Takes as long as the word is long, and for a header as long as its layouts take to check.
    pub fn read(self) -> Read {
        let Self { from, reading, word, parts } = self;
        let parts: Vec<&[u8]> = parts.iter().map(|(rows, bytes)| &rows.bytes()[..*bytes]).collect();
        let mut digest = Xxh3::new();
        for it in &parts {
            digest.update(it);
        }
        let said = if digest.digest() == word.digest {
            match parts[..] {
                [part] => decoded(from, part),
                _ => decoded(from, &parts.concat()),
            }
        } else {
            Err(ReadError::Digest { from, bytes: word.bytes })
        };
        Read { from, reading, said }
    }
}

impl Read {
    /// Who said it.
    pub fn from(&self) -> Peer {
        self.from
    }
}

/// What the bytes of a word say.
pub(super) fn decoded(from: Peer, bytes: &[u8]) -> Result<Said, ReadError> {
    postcard::from_bytes(bytes).map_err(|source| ReadError::Unreadable { from, source })
}
