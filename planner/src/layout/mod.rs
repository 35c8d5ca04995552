//! Where the rows of documents are: a packed stream at each rank.
//!
//! In: documents, and the stretches of them that each rank holds in the order of its stream. Out:
//! a [`Layout`] that finds the rows of a document ([`Layout::locate`]).
//!
//! Any loader fits: end to end, head and tail ([`packed`]), or other. What others rely on: every row of every
//! document is at exactly one place, no document or stretch is empty, and there is a document. A rank may hold nothing.

mod packed;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{Error, Mask};

/// Longest document, in rows.
pub(crate) const MOST_ROWS: u32 = 1 << 24;
/// Most ranks.
const MOST_RANKS: usize = 1 << 20;

/// Index of a document in [`Layout::documents`].
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct DocumentId(pub u32);

/// A trainer's number in the job.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct RankId(pub u32);

/// One document of a nano-batch.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Document {
    /// Length; at least 1, at most 2^24.
    pub rows: u32,
    /// Which keys its rows keep.
    pub mask: Mask,
}

/// Rows `start..end` of a document, as a rank holds them.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Stretch {
    /// The document.
    pub document: DocumentId,
    /// First row, counted from the document's start.
    pub start: u32,
    /// Row after the last.
    pub end: u32,
}

/// Rows of one document that lie side by side at one rank.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Piece {
    /// The rank that holds the rows.
    pub rank: RankId,
    /// Where they are in the rank's stream, in rows.
    pub local: Range<u32>,
    /// Which rows of the document they are.
    pub rows: Range<u32>,
}

/// Documents of a nano-batch and where their rows are. A copy shares them.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(try_from = "Parts", into = "Parts")]
pub struct Layout {
    documents: Arc<[Document]>,
    rows: Arc<Rows>,
}

/// Where rows are, whatever masks their documents have.
#[derive(Debug, Eq, PartialEq)]
struct Rows {
    ranks: Vec<Vec<Stretch>>,
    /// All pieces, by document, then by row.
    pieces: Vec<Piece>,
    /// Where a document's pieces begin in `pieces`; one more entry than documents.
    first_piece: Vec<u32>,
    /// The rank of each document of one piece, [`CUT`] of all others. Small, so that a walk over bundles, which meets
    /// documents in no order, finds it in a near cache.
    holders: Vec<u32>,
}

/// In place of a rank: the document has several pieces.
const CUT: u32 = u32::MAX;

/// What a [`Layout`] is made from; its serialized form.
#[derive(Deserialize, Serialize)]
struct Parts {
    documents: Vec<Document>,
    ranks: Vec<Vec<Stretch>>,
}

impl Layout {
    /// Takes the stretches of each rank, in the order of its stream.
    ///
    /// # Errors
    ///
    /// Names the first document or stretch that is empty, or a document, rank or stretch that is too long, missing or held twice.
    pub fn new(documents: Vec<Document>, ranks: Vec<Vec<Stretch>>) -> Result<Self, Error> {
        check_counts(&documents, &ranks)?;
        let mut pieces: Vec<(DocumentId, Piece)> = Vec::new();
        for (rank, stretches) in (0..).map(RankId).zip(&ranks) {
            let mut local = 0_u64;
            for &Stretch { document, start, end } in stretches {
                let rows = documents.get(document.0 as usize).map_or(0, |it| it.rows);
                if start >= end || end > rows {
                    return Err(Error::BadStretch { rank, document, start, end });
                }
                let first = local;
                local += u64::from(end - start);
                if local > u64::from(u32::MAX) {
                    return Err(Error::LongRank { rank, rows: local });
                }
                let local = first as u32..local as u32;
                pieces.push((document, Piece { rank, local, rows: start..end }));
            }
        }
        pieces.sort_by_key(|(document, piece)| (*document, piece.rows.start, piece.rank));
        let first_piece = check_cover(&documents, &pieces)?;
        let pieces: Vec<_> = pieces.into_iter().map(|(_, piece)| piece).collect();
        let holders =
            first_piece.windows(2).map(|it| match pieces[it[0] as usize..it[1] as usize] {
                [ref whole] => whole.rank.0,
                _ => CUT,
            });
        let holders = holders.collect();
        let rows = Arc::new(Rows { ranks, pieces, first_piece, holders });
        Ok(Self { documents: documents.into(), rows })
    }

    /// The same layout, where all documents have `mask`.
    #[must_use]
    pub fn masked(&self, mask: Mask) -> Self {
        if self.documents.iter().all(|it| it.mask == mask) {
            return self.clone();
        }
        // A window at least as long as its document leaves out no key. As a causal document it gets the better plans of those.
        let of = |rows: u32| match mask {
            Mask::Window { left } if left >= rows.saturating_sub(1) => Mask::Causal,
            Mask::Window { .. } | Mask::Causal | Mask::Full => mask,
        };
        let documents = self.documents.iter().map(|it| Document { mask: of(it.rows), ..*it });
        Self { documents: documents.collect(), rows: Arc::clone(&self.rows) }
    }

    /// Documents, by [`DocumentId`].
    pub fn documents(&self) -> &[Document] {
        &self.documents
    }

    /// A document, `None` if there is no such.
    pub fn document(&self, document: DocumentId) -> Option<Document> {
        self.documents.get(document.0 as usize).copied()
    }

    /// Stretches of each rank, by [`RankId`], in the order of its stream.
    pub fn ranks(&self) -> &[Vec<Stretch>] {
        &self.rows.ranks
    }

    /// Rows that a rank holds; zero for a rank that does not exist.
    pub fn rank_rows(&self, rank: RankId) -> u32 {
        let stretches = self.rows.ranks.get(rank.0 as usize).map_or(&[][..], Vec::as_slice);
        stretches.iter().map(|it| it.end - it.start).sum()
    }

    /// Stretches of a rank with their place in its stream, in its order.
    pub fn pieces_of(&self, rank: RankId) -> impl Iterator<Item = (DocumentId, Piece)> + '_ {
        let stretches = self.rows.ranks.get(rank.0 as usize).map_or(&[][..], Vec::as_slice);
        stretches.iter().scan(0, move |first, it| {
            let local = *first..*first + (it.end - it.start);
            *first = local.end;
            Some((it.document, Piece { rank, local, rows: it.start..it.end }))
        })
    }

    /// Where `rows` of a document are, in row order. Rows that do not exist are left out.
    pub fn locate(
        &self,
        document: DocumentId,
        rows: Range<u32>,
    ) -> impl Iterator<Item = Piece> + '_ {
        let pieces = self.pieces_of_document(document);
        let first = pieces.partition_point(|it| it.rows.end <= rows.start);
        let Range { start, end } = rows;
        pieces[first..].iter().take_while(move |it| it.rows.start < end.max(start)).filter_map(
            move |it| {
                let kept = it.rows.start.max(start)..it.rows.end.min(end);
                let shift = |row: u32| it.local.start + (row - it.rows.start);
                (!kept.is_empty()).then(|| Piece {
                    rank: it.rank,
                    local: shift(kept.start)..shift(kept.end),
                    rows: kept,
                })
            },
        )
    }

    /// The rank that holds a whole document in one piece; none if the document is cut or does not
    /// exist.
    pub fn holder(&self, document: DocumentId) -> Option<RankId> {
        self.rows.holders.get(document.0 as usize).filter(|it| **it != CUT).map(|it| RankId(*it))
    }

    /// Whether a document lies at more than one place.
    pub(crate) fn spans_ranks(&self, document: DocumentId) -> bool {
        self.pieces_of_document(document).len() > 1
    }

    /// The longest document of each mask. Its dearest tile is the dearest of all of that mask.
    pub(crate) fn longest(&self) -> Vec<DocumentId> {
        let mut longest: BTreeMap<Mask, (u32, DocumentId)> = BTreeMap::new();
        let mut first = 0;
        // As a rule all documents have the same.
        for same in self.documents.chunk_by(|one, next| one.mask == next.mask) {
            let ids = (first..).map(DocumentId);
            first += same.len() as u32;
            let (mut most, mask) = ((0, DocumentId(0)), same[0].mask);
            for (id, it) in ids.zip(same) {
                if most.0 < it.rows {
                    most = (it.rows, id);
                }
            }
            let other = longest.entry(mask).or_insert(most);
            if other.0 < most.0 {
                *other = most;
            }
        }
        longest.into_values().map(|(_, id)| id).collect()
    }

    /// All pieces of a document, in row order; none of a document that does not exist.
    pub(crate) fn pieces_of_document(&self, document: DocumentId) -> &[Piece] {
        let (index, Rows { pieces, first_piece, .. }) = (document.0 as usize, &*self.rows);
        match (first_piece.get(index), first_piece.get(index + 1)) {
            (Some(&first), Some(&end)) => &pieces[first as usize..end as usize],
            _ => &[],
        }
    }
}

impl From<Layout> for Parts {
    fn from(layout: Layout) -> Self {
        Self { documents: layout.documents.to_vec(), ranks: layout.rows.ranks.clone() }
    }
}

impl TryFrom<Parts> for Layout {
    type Error = Error;

    fn try_from(Parts { documents, ranks }: Parts) -> Result<Self, Error> {
        Self::new(documents, ranks)
    }
}

fn check_counts(documents: &[Document], ranks: &[Vec<Stretch>]) -> Result<(), Error> {
    let stretches: usize = ranks.iter().map(Vec::len).sum();
    let counts = [
        ("ranks", ranks.len(), MOST_RANKS),
        ("documents", documents.len(), u32::MAX as usize - 1),
        ("stretches", stretches, u32::MAX as usize - 1),
    ];
    for (things, count, most) in counts {
        if count > most {
            return Err(Error::TooMany { things, count: count as u64, most: most as u64 });
        }
    }
    if ranks.is_empty() {
        return Err(Error::NoRank);
    }
    for (document, &Document { rows, .. }) in (0..).map(DocumentId).zip(documents) {
        if rows == 0 {
            return Err(Error::EmptyDocument { document });
        }
        if rows > MOST_ROWS {
            return Err(Error::LongDocument { document, rows, most: MOST_ROWS });
        }
    }
    if documents.is_empty() { Err(Error::NoRows) } else { Ok(()) }
}

/// Checks that every row is there once; returns where the pieces of each document begin.
fn check_cover(documents: &[Document], pieces: &[(DocumentId, Piece)]) -> Result<Vec<u32>, Error> {
    let mut first_piece = Vec::with_capacity(documents.len() + 1);
    let mut next = 0;
    for (document, &Document { rows, .. }) in (0..).map(DocumentId).zip(documents) {
        first_piece.push(next as u32);
        let mut covered = 0;
        while let Some((_, piece)) = pieces.get(next).filter(|(id, _)| *id == document) {
            let Range { start, end } = piece.rows;
            if start > covered {
                return Err(Error::Hole { document, start: covered, end: start });
            }
            if start < covered {
                return Err(Error::Overlap { document, start, end: end.min(covered) });
            }
            covered = end;
            next += 1;
        }
        if covered < rows {
            return Err(Error::Hole { document, start: covered, end: rows });
        }
    }
    first_piece.push(next as u32);
    Ok(first_piece)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn causal(rows: u32) -> Document {
        Document { rows, mask: Mask::Causal }
    }

    pub(super) fn stretch(document: u32, start: u32, end: u32) -> Stretch {
        Stretch { document: DocumentId(document), start, end }
    }

    #[test]
    fn rows_are_found_in_row_order_whatever_the_order_of_ranks() {
        let layout = Layout::new(
            vec![causal(10), causal(4)],
            vec![vec![stretch(1, 0, 4), stretch(0, 5, 10)], vec![stretch(0, 0, 5)]],
        )
        .unwrap();
        let found: Vec<_> = layout.locate(DocumentId(0), 3..8).collect();
        let expected = [
            Piece { rank: RankId(1), local: 3..5, rows: 3..5 },
            Piece { rank: RankId(0), local: 4..7, rows: 5..8 },
        ];
        assert_eq!(found, expected);
        assert_eq!(layout.rank_rows(RankId(0)), 9);
        assert_eq!(layout.rank_rows(RankId(7)), 0);
        assert_eq!(layout.locate(DocumentId(0), 4..4).count(), 0);
        assert_eq!(layout.locate(DocumentId(0), 10..12).count(), 0);
        assert_eq!(layout.locate(DocumentId(9), 0..12).count(), 0);
        let pieces: Vec<_> = layout.pieces_of(RankId(0)).map(|(_, it)| it.local).collect();
        assert_eq!(pieces, [0..4, 4..9]);
        let layout = Layout::new(vec![causal(4)], vec![vec![], vec![stretch(0, 0, 4)]]).unwrap();
        assert_eq!([0, 1].map(|it| layout.rank_rows(RankId(it))), [0, 4]);
    }

    #[test]
    fn wrong_layouts_are_refused_by_name() {
        let check = |documents: &[u32], ranks: &[&[Stretch]], expected: Error| {
            let documents = documents.iter().map(|&rows| causal(rows)).collect();
            let ranks = ranks.iter().map(|it| it.to_vec()).collect();
            assert_eq!(Layout::new(documents, ranks), Err(expected));
        };
        let document = DocumentId(0);
        let rank = RankId(0);
        check(&[4], &[], Error::NoRank);
        check(&[0], &[&[]], Error::EmptyDocument { document });
        let rows = MOST_ROWS + 1;
        check(&[rows], &[&[]], Error::LongDocument { document, rows, most: MOST_ROWS });
        check(&[], &[&[], &[]], Error::NoRows);
        let bad = |document, start, end| Error::BadStretch { rank, document, start, end };
        check(&[4], &[&[stretch(0, 2, 2)]], bad(document, 2, 2));
        check(&[4], &[&[stretch(0, 2, 5)]], bad(document, 2, 5));
        check(&[4], &[&[stretch(1, 0, 1)]], bad(DocumentId(1), 0, 1));
        check(&[4], &[&[stretch(0, 1, 4)]], Error::Hole { document, start: 0, end: 1 });
        check(&[4], &[&[stretch(0, 0, 3)]], Error::Hole { document, start: 3, end: 4 });
        let twice = [stretch(0, 0, 3), stretch(0, 2, 4)];
        check(&[4], &[&twice], Error::Overlap { document, start: 2, end: 3 });
        let many: Vec<&[Stretch]> = vec![&[]; MOST_RANKS + 1];
        check(&[], &many, Error::TooMany { things: "ranks", count: 1_048_577, most: 1_048_576 });
    }

    #[test]
    fn a_window_that_leaves_out_no_key_is_causal() {
        let layout = Layout::end_to_end(vec![causal(5), causal(300), causal(1)], 128).unwrap();
        let window = |left| Mask::Window { left };
        assert_eq!(layout.masked(window(299)), layout);
        let masks = |it: &Layout| it.documents().iter().map(|it| it.mask).collect::<Vec<_>>();
        let mixed = layout.masked(window(298));
        assert_eq!(masks(&mixed), [Mask::Causal, window(298), Mask::Causal]);
        assert_eq!(masks(&mixed.masked(window(3))), [window(3), window(3), Mask::Causal]);
        assert_eq!(mixed.masked(Mask::Causal), layout);
    }

    #[test]
    fn more_rows_than_a_rank_can_number_are_refused() {
        let documents = vec![causal(MOST_ROWS); 256];
        let all = Layout::end_to_end(documents, u32::MAX).unwrap();
        assert_eq!(all.ranks().len(), 2);
        let stretches = (0..256).map(|it| stretch(it, 0, MOST_ROWS)).collect();
        let refused = Layout::new(all.documents().to_vec(), vec![stretches]);
        assert_eq!(refused, Err(Error::LongRank { rank: RankId(0), rows: 1 << 32 }));
    }
}
