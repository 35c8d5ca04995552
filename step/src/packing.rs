//! A nano-batch: documents and which rank holds which of their rows, whatever layers let them attend to.
//!
//! In: lengths of documents, stretches of each rank. Out: a [`Packing`], and of it the [`Layout`] that a kind of layers is
//! planned from ([`Packing::layout`]). It plans nothing.
//!
//! Layers with chunks are planned from a layout whose documents are the chunks: attention crosses no chunk, as it crosses no
//! document, so planner, kernels and costs know no chunks.
//!
//! Invariant: that of [`Layout`]: every row of every document is at exactly one place, in all layouts of a packing the same.

use std::num::NonZeroU32;

use cadre_planner::{Document, DocumentId, Error, Layout, Mask, RankId, Stretch};
use serde::{Deserialize, Serialize, Serializer};

use crate::layers::Kind;

/// See the module.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
#[serde(try_from = "Parts")]
pub struct Packing {
    /// Documents and where their rows are; its masks are not used.
    rows: Layout,
}

/// The serialized form of [`Packing`].
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Parts {
    /// Rows of each document.
    documents: Vec<u32>,
    ranks: Vec<Vec<Stretch>>,
}

/// [`Parts`], as they are written.
#[derive(Serialize)]
struct Written<'a> {
    documents: Lengths<'a>,
    ranks: &'a [Vec<Stretch>],
}

/// Rows of each document.
struct Lengths<'a>(&'a [Document]);

impl Packing {
    /// Takes the rows of each document, and the stretches of each rank in the order of its stream.
    ///
    /// # Errors
    ///
    /// Those of [`Layout::new`].
    pub fn new(documents: &[u32], ranks: Vec<Vec<Stretch>>) -> Result<Self, Error> {
        let document = |&rows: &u32| Document { rows, mask: Mask::Causal };
        Ok(Self { rows: Layout::new(documents.iter().map(document).collect(), ranks)? })
    }

    /// How many ranks hold it.
    pub fn ranks(&self) -> usize {
        self.rows.ranks().len()
    }

    /// How many stretches all ranks hold.
    pub(crate) fn stretches(&self) -> usize {
        self.rows.ranks().iter().map(Vec::len).sum()
    }

    /// Writes it as `serde_json` does.
    pub(crate) fn write(&self, text: &mut Vec<u8>) {
        text.extend_from_slice(br#"{"documents":"#);
        list(text, self.rows.documents(), |it, text| number(text, it.rows));
        text.extend_from_slice(br#","ranks":"#);
        list(text, self.rows.ranks(), |stretches, text| {
            list(
                text,
                stretches,
                |Stretch { document: DocumentId(document), start, end }, text| {
                    text.extend_from_slice(br#"{"document":"#);
                    number(text, *document);
                    text.extend_from_slice(br#","start":"#);
                    number(text, *start);
                    text.extend_from_slice(br#","end":"#);
                    number(text, *end);
                    text.push(b'}');
                },
            );
        });
        text.push(b'}');
    }

    /// Rows that a rank holds.
    pub fn rank_rows(&self, rank: RankId) -> u32 {
        self.rows.rank_rows(rank)
    }

    /// What a kind of layers is planned from: all documents, or their chunks, have its mask.
    ///
    /// # Errors
    ///
    /// [`Error::TooMany`]: more chunks than can be numbered.
    pub fn layout(&self, kind: Kind) -> Result<Layout, Error> {
        match kind.chunk {
            None => Ok(self.rows.masked(kind.mask)),
            Some(chunk) => cut(&self.rows, kind, chunk),
        }
    }

    /// The document that a document of [`Self::layout`] is of, and which of its rows is the first there. `None` if there is no
    /// such.
    pub fn origin(&self, kind: Kind, id: DocumentId) -> Option<(DocumentId, u32)> {
        let mut pieces =
            (0..).map(DocumentId).zip(self.rows.documents()).flat_map(|(whole, it)| {
                let first = kind.pieces(it.rows).scan(0, |next, rows| {
                    *next += rows;
                    Some(*next - rows)
                });
                first.map(move |row| (whole, row))
            });
        pieces.nth(id.0 as usize)
    }
}

/// Writes a list of JSON.
pub(crate) fn list<T>(text: &mut Vec<u8>, list: &[T], write: impl Fn(&T, &mut Vec<u8>)) {
    text.push(b'[');
    for (at, it) in list.iter().enumerate() {
        if at > 0 {
            text.push(b',');
        }
        write(it, text);
    }
    text.push(b']');
}

/// Writes a number in digits.
fn number(text: &mut Vec<u8>, mut number: u32) {
    const MOST_DIGITS: usize = 10;
    let count = number.checked_ilog10().map_or(1, |it| it as usize + 1);
    let mut digits = [0; MOST_DIGITS];
    for it in digits[..count].iter_mut().rev() {
        *it = b'0' + (number % 10) as u8;
        number /= 10;
    }
    // To copy as many as there can be takes less time than to copy some.
    text.extend_from_slice(&digits);
    text.truncate(text.len() - (MOST_DIGITS - count));
}

/// The layout whose documents are the chunks.
fn cut(rows: &Layout, kind: Kind, chunk: NonZeroU32) -> Result<Layout, Error> {
    let (mut documents, mut firsts) = (Vec::new(), Vec::new());
    for whole in rows.documents() {
        // `Layout::new` refuses more than it can number.
        firsts.push(documents.len() as u32);
        let causal = |rows| Document { rows, mask: Mask::Causal };
        documents.extend(kind.pieces(whole.rows).map(causal));
    }
    let parts = |it: &Stretch| {
        let (first, Stretch { start, end, .. }) = (firsts[it.document.0 as usize], *it);
        (start / chunk..end.div_ceil(chunk.get())).map(move |piece| {
            let begin = piece * chunk.get();
            Stretch {
                document: DocumentId(first + piece),
                start: start.max(begin) - begin,
                end: (end - begin).min(chunk.get()),
            }
        })
    };
    let ranks = rows.ranks().iter().map(|it| it.iter().flat_map(parts).collect());
    Ok(Layout::new(documents, ranks.collect())?.masked(kind.mask))
}

impl From<&Layout> for Packing {
    /// The documents and stretches without masks.
    fn from(layout: &Layout) -> Self {
        Self { rows: layout.masked(Mask::Causal) }
    }
}

impl Serialize for Packing {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let documents = Lengths(self.rows.documents());
        Written { documents, ranks: self.rows.ranks() }.serialize(serializer)
    }
}

impl Serialize for Lengths<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(|it| it.rows))
    }
}

impl TryFrom<Parts> for Packing {
    type Error = Error;

    fn try_from(Parts { documents, ranks }: Parts) -> Result<Self, Error> {
        Self::new(&documents, ranks)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CAUSAL: Kind = Kind::causal(cadre_planner::Heads { query: 2, kv: 1, dim: 8 });

    #[test]
    fn a_packing_says_where_rows_are_and_nothing_of_what_they_keep() {
        let stretch = |start, end| Stretch { document: DocumentId(0), start, end };
        let packing = Packing::new(&[9], vec![vec![stretch(0, 4)], vec![stretch(4, 9)]]).unwrap();
        assert_eq!(packing.ranks(), 2);
        for mask in [Mask::Causal, Mask::Full, Mask::Window { left: 3 }] {
            let layout = packing.layout(Kind { mask, ..CAUSAL }).unwrap();
            assert_eq!(layout.documents(), [Document { rows: 9, mask }]);
            assert_eq!(layout.locate(DocumentId(0), 0..9).count(), 2);
            assert_eq!(Packing::from(&layout), packing);
        }
        let text = serde_json::to_string(&packing).unwrap();
        assert!(!text.contains("ausal"), "{text}");
        assert_eq!(serde_json::from_str::<Packing>(&text).unwrap(), packing);
        let hole = text.replacen("\"end\":4", "\"end\":3", 1);
        assert!(
            serde_json::from_str::<Packing>(&hole).unwrap_err().to_string().contains("rows 3..4")
        );
    }

    proptest! {
        /// Row by row: a row of a layout with chunks is where it is in the packing, and keeps the keys of its own chunk.
        #[test]
        fn rows_with_chunks_lie_where_they_lay_and_keep_what_is_theirs(
            lengths in proptest::collection::vec(1_u32..40, 1..6),
            tokens in 1_u32..50,
            chunk in 1_u32..45,
            window in proptest::option::of(0_u32..9),
        ) {
            let mask = window.map_or(Mask::Causal, |left| Mask::Window { left });
            let kind = Kind { mask, chunk: NonZeroU32::new(chunk), ..CAUSAL };
            let documents: Vec<_> = lengths.iter().map(|&rows| Document { rows, mask }).collect();
            // A rank that has the end of the stream may hold less.
            let whole = Layout::end_to_end(documents, tokens).unwrap();
            let packing = Packing::from(&whole);
            let layout = packing.layout(kind).unwrap();
            prop_assert_eq!(layout.ranks().len(), whole.ranks().len());
            for rank in (0..whole.ranks().len() as u32).map(RankId) {
                prop_assert_eq!(layout.rank_rows(rank), whole.rank_rows(rank));
            }
            let mut next = 0;
            for (of, &rows) in (0..).map(DocumentId).zip(&lengths) {
                for row in 0..rows {
                    let id = DocumentId(next + row / chunk);
                    let inner = row % chunk;
                    prop_assert_eq!(packing.origin(kind, id), Some((of, row - inner)));
                    let at = |layout: &Layout, id, row| {
                        let all: Vec<_> = layout.locate(id, row..row + 1).collect();
                        (all.len(), all[0].rank, all[0].local.clone())
                    };
                    prop_assert_eq!(at(&layout, id, inner), at(&whole, of, row));
                    let kept = layout.documents()[id.0 as usize];
                    let keys = kept.mask.keys(kept.rows, inner..inner + 1);
                    let first = (row - inner).max(row.saturating_sub(window.unwrap_or(u32::MAX)));
                    prop_assert_eq!((keys.start + row - inner, keys.end), (first, inner + 1));
                }
                next += rows.div_ceil(chunk);
            }
            prop_assert_eq!(layout.documents().len(), next as usize);
            prop_assert_eq!(packing.origin(kind, DocumentId(next)), None);
        }
    }
}
