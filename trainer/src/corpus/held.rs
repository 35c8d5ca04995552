//! Documents that are held out: the model is evaluated on them and learns nothing from them.
//!
//! In: what the user wrote, a part of the corpus or a path. Out: the corpus to train on, and the one to evaluate on.
//!
//! Invariant: which documents of a corpus are held out depends on their paths and sizes alone, not on the seed, so that runs
//! with other seeds can be compared. Documents are held out whole, and no document is trained on that has the tokens of one.

use std::collections::HashSet;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use xxhash_rust::xxh3::xxh3_64;

use super::{Corpus, CorpusError, Document};

/// What a model is evaluated on.
#[derive(Clone, Debug, PartialEq)]
pub enum HeldOut {
    /// A share of the tokens of the corpus, above 0 and below 1.
    Part(f64),
    /// A file, or every file below a folder.
    Path(PathBuf),
}

/// Why documents cannot be held out.
#[derive(Debug, thiserror::Error)]
pub enum HeldOutError {
    /// A number that is not above 0 and below 1.
    #[error(
        "\"{0}\" is no part of the documents; write a number above 0 and below 1, such as 0.05, or the path of documents"
    )]
    Part(String),
    /// The path holds no documents.
    #[error("--validate: {0}")]
    Path(CorpusError),
    /// Nothing would be left to train on.
    #[error(
        "--validate: the corpus has {documents} document of two tokens or more, and documents are held out whole; give more documents, or the path of others"
    )]
    TooFew {
        /// How many there are.
        documents: usize,
    },
    /// All documents are held out.
    #[error(
        "--validate: every document of the corpus is one that is held out, token for token; hold out other documents, or a part such as 0.05"
    )]
    All,
}

impl FromStr for HeldOut {
    type Err = HeldOutError;

    fn from_str(text: &str) -> Result<Self, HeldOutError> {
        match text.parse::<f64>() {
            Ok(part) if part > 0.0 && part < 1.0 => Ok(Self::Part(part)),
            Ok(_) => Err(HeldOutError::Part(text.into())),
            Err(_) => Ok(Self::Path(text.into())),
        }
    }
}

impl HeldOut {
    /// Splits the corpus into the documents to train on and those to evaluate on.
    ///
    /// # Errors
    ///
    /// [`HeldOutError`].
    pub fn split(&self, corpus: Corpus) -> Result<(Corpus, Corpus), HeldOutError> {
        let (corpus, held) = match self {
            Self::Path(path) => (corpus, Corpus::read_any(path).map_err(HeldOutError::Path)?),
            Self::Part(part) => cut_off(corpus, *part)?,
        };
        let known: HashSet<_> = held.documents.iter().map(|it| &it.tokens).collect();
        let kept = corpus.documents.into_iter().filter(|it| !known.contains(&it.tokens));
        let kept: Vec<_> = kept.collect();
        if kept.is_empty() {
            return Err(HeldOutError::All);
        }
        Ok((Corpus::from_documents(kept), held))
    }
}

/// Holds out documents in the order of their paths' digests, but those that would make the part larger; where all would, the
/// shortest one.
fn cut_off(corpus: Corpus, part: f64) -> Result<(Corpus, Corpus), HeldOutError> {
    let digest = |it: &Path| xxh3_64(it.as_os_str().as_encoded_bytes());
    // The loss needs a token and its successor.
    let long = |(_, it): &(usize, &Document)| it.tokens.count() > 1;
    let mut order: Vec<_> = corpus.documents.iter().enumerate().filter(long).collect();
    if order.len() < 2 {
        return Err(HeldOutError::TooFew { documents: order.len() });
    }
    order.sort_by_key(|(at, it)| (digest(&it.path), *at));
    let wanted = part * corpus.tokens as f64;
    let mut held = vec![false; corpus.documents.len()];
    let shortest = order.iter().min_by_key(|it| it.1.tokens.count()).map(|it| it.0);
    let (mut bytes, mut left) = (0, order.len());
    for (at, document) in order {
        let with = bytes + document.tokens.count() as u64;
        if with as f64 <= wanted && left > 1 {
            (held[at], bytes, left) = (true, with, left - 1);
        }
    }
    if bytes == 0
        && let Some(shortest) = shortest
    {
        held[shortest] = true;
    }
    let (mut kept, mut out) = (Vec::new(), Vec::new());
    for (document, is_held) in corpus.documents.into_iter().zip(held) {
        let to = if is_held { &mut out } else { &mut kept };
        to.push(document);
    }
    Ok((Corpus::from_documents(kept), Corpus::from_documents(out)))
}

/// A stretch of a document that is evaluated as one: its rows see no others.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Piece {
    /// Index among the documents.
    pub(crate) document: usize,
    /// First token.
    pub(crate) start: usize,
    /// Token after the last.
    pub(crate) end: usize,
}

impl Corpus {
    /// All documents in pieces of at most `cap` rows. Where these have more than `most` rows together, pieces from all over the
    /// corpus that have about as many; at least one.
    pub(crate) fn pieces(&self, cap: NonZeroU32, most: NonZeroU32) -> Vec<Piece> {
        let cap = cap.get() as usize;
        let pieces: Vec<_> = self
            .documents
            .iter()
            .enumerate()
            .flat_map(|(document, it)| {
                let length = it.tokens.count();
                let piece = move |start| Piece { document, start, end: length.min(start + cap) };
                (0..length).step_by(cap).map(piece)
            })
            // The last token of a document has no successor.
            .filter(|it| it.start + 1 < self.documents[it.document].tokens.count())
            .collect();
        let rows: u64 = pieces.iter().map(|it| (it.end - it.start) as u64).sum();
        let count = pieces.len() as u64;
        let taken = match u64::from(most.get()) {
            most if most < rows => (count * most / rows).max(1),
            _ => count,
        };
        let is_taken = |at: u64| (at + 1) * taken / count > at * taken / count;
        (0..).zip(pieces).filter(|(at, _)| is_taken(*at)).map(|it| it.1).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn corpus(sizes: &[usize]) -> Corpus {
        let document =
            |(at, size): (usize, &usize)| Document::text(format!("{at}"), vec![at as u8; *size]);
        Corpus::from_documents(sizes.iter().enumerate().map(document).collect())
    }

    fn some(number: u32) -> NonZeroU32 {
        NonZeroU32::new(number).unwrap()
    }

    #[test]
    fn documents_are_held_out_whole_and_each_is_in_one_corpus() {
        let all = corpus(&[100; 40]);
        for (part, expected) in [(0.001, 1), (0.1, 4), (0.101, 4), (0.999, 39)] {
            let (train, held) = HeldOut::Part(part).split(all.clone()).unwrap();
            assert_eq!(held.documents().len(), expected, "{part}");
            let mut both = [train.documents(), held.documents()].concat();
            both.sort_by_key(|it| it.tokens.get(0));
            assert_eq!(both, all.documents(), "{part}");
        }
        // More of them hold out the same ones, and others.
        let held = |part| HeldOut::Part(part).split(all.clone()).unwrap().1;
        let (few, many) = (held(0.1), held(0.2));
        assert!(few.documents().iter().all(|it| many.documents().contains(it)));
        assert_ne!(few.documents(), &all.documents()[..4], "not those that come first");
    }

    #[test]
    fn a_part_is_never_larger_than_asked_if_one_document_is_not() {
        for large in 0..8 {
            let sizes: Vec<_> = (0..8).map(|it| if it == large { 1000 } else { 10 }).collect();
            let (_, held) = HeldOut::Part(0.05).split(corpus(&sizes)).unwrap();
            assert_eq!(held.documents().len(), 5, "the long one is number {large}");
            let (_, held) = HeldOut::Part(0.001).split(corpus(&sizes)).unwrap();
            assert_eq!(held.documents()[0].tokens.count(), 10, "the long one is number {large}");
        }
    }

    #[test]
    fn a_copy_of_what_is_held_out_is_not_trained_on() {
        let twice = [corpus(&[30; 6]).documents, corpus(&[30; 6]).documents].concat();
        let twice = Corpus::from_documents(twice);
        let (train, held) = HeldOut::Part(0.2).split(twice).unwrap();
        let is_held = |it: &&Document| held.documents().iter().any(|held| held.tokens == it.tokens);
        assert_eq!(train.documents().iter().find(is_held), None);
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a"), [0; 9]).unwrap();
        let path = HeldOut::Path(folder.path().to_path_buf());
        let (train, _) = path.split(corpus(&[9, 9])).unwrap();
        assert_eq!(train.documents().len(), 1);
        let all = path.split(corpus(&[9])).unwrap_err().to_string();
        assert!(all.contains("every document of the corpus is one that is held out"), "{all}");
    }

    #[test]
    fn what_cannot_be_held_out_is_refused() {
        for text in ["0", "1", "-0.1", "1.5", "NaN"] {
            let refused = text.parse::<HeldOut>().unwrap_err().to_string();
            assert!(refused.contains("above 0 and below 1"), "{text}: {refused}");
        }
        assert_eq!("0.05".parse::<HeldOut>().unwrap(), HeldOut::Part(0.05));
        let lone = HeldOut::Part(0.5).split(corpus(&[100, 1])).unwrap_err().to_string();
        assert!(lone.contains("has 1 document of two tokens"), "{lone}");
        let missing = "/nowhere/held".parse::<HeldOut>().unwrap().split(corpus(&[9]));
        let missing = missing.unwrap_err().to_string();
        assert!(missing.starts_with("--validate: cannot read /nowhere/held"), "{missing}");
    }

    #[test]
    fn a_file_or_a_folder_may_be_held_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("held.jsonl");
        std::fs::write(&path, "{\"text\": \"one\"}\n{\"text\": \"two\"}\n").unwrap();
        for path in [&path, folder.path()] {
            let (train, held) = HeldOut::Path(path.to_path_buf()).split(corpus(&[9])).unwrap();
            assert_eq!((train.documents().len(), held.documents().len()), (1, 2));
        }
        std::fs::write(&path, "{\"text\": \"one\"}\n{}\n").unwrap();
        let refused = HeldOut::Path(path).split(corpus(&[9])).unwrap_err().to_string();
        assert!(
            refused.contains("held.jsonl, line 2: it has neither text nor tokens"),
            "{refused}"
        );
    }

    #[test]
    fn pieces_cover_documents_or_are_spread_over_them() {
        let all = corpus(&[10, 1, 25, 21]);
        let piece = |document, start, end| Piece { document, start, end };
        assert_eq!(
            all.pieces(some(10), some(1000)),
            [
                piece(0, 0, 10),
                piece(2, 0, 10),
                piece(2, 10, 20),
                piece(2, 20, 25),
                piece(3, 0, 10),
                piece(3, 10, 20),
            ],
            "the last token of the last document has no successor"
        );
        assert_eq!(
            all.pieces(some(10), some(28)),
            [piece(2, 0, 10), piece(2, 20, 25), piece(3, 10, 20)]
        );
        assert_eq!(all.pieces(some(10), some(1)).len(), 1);
    }
}
