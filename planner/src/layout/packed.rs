//! Two ways to pack documents onto ranks: end to end, and head and tail.
//!
//! In: documents and the rows of a rank. Out: a [`Layout`] of as many ranks as they fill. Loaders that pack otherwise use
//! [`Layout::new`].
//!
//! What others rely on: every rank but the last has all its rows.

use super::{Document, DocumentId, Layout, MOST_RANKS, Piece, Stretch};
use crate::Error;

impl Layout {
    /// Lays documents end to end over as many ranks as they fill, `rank_rows` rows each; the last
    /// rank holds what is left.
    ///
    /// # Errors
    ///
    /// As [`Layout::new`]; `rank_rows` zero leaves no rank.
    pub fn end_to_end(documents: Vec<Document>, rank_rows: u32) -> Result<Self, Error> {
        if rank_rows == 0 {
            return Err(Error::NoRank);
        }
        // Before there is memory for them.
        let rows = documents.iter().map(|it| u64::from(it.rows)).sum::<u64>();
        let count = rows.div_ceil(rank_rows.into());
        if count > MOST_RANKS as u64 {
            return Err(Error::TooMany { things: "ranks", count, most: MOST_RANKS as u64 });
        }
        let mut ranks: Vec<Vec<Stretch>> = Vec::new();
        let mut room = 0;
        for (document, &Document { rows, .. }) in (0..).map(DocumentId).zip(&documents) {
            let mut start = 0;
            while start < rows {
                if room == 0 {
                    ranks.push(Vec::new());
                    room = rank_rows;
                }
                let end = start + room.min(rows - start);
                let rank = ranks.last_mut().expect("a rank was pushed when room was zero");
                rank.push(Stretch { document, start, end });
                room -= end - start;
                start = end;
            }
        }
        Self::new(documents, ranks)
    }

    /// Lays documents end to end, but a document that spans ranks leaves each of them a piece of its
    /// head and one of its tail, so that their work is nearly the same. This is how context
    /// parallelism lays documents out.
    ///
    /// # Errors
    ///
    /// As [`Layout::end_to_end`].
    pub fn head_tail(documents: Vec<Document>, rank_rows: u32) -> Result<Self, Error> {
        let whole = Self::end_to_end(documents.clone(), rank_rows)?;
        let mut ranks = whole.ranks().to_vec();
        for (document, of) in (0..).map(DocumentId).zip(&documents) {
            let pieces = whole.pieces_of_document(document);
            let (mut head, mut tail) = (0, of.rows);
            for Piece { rank, rows, .. } in pieces.iter().filter(|_| pieces.len() > 1) {
                let count = rows.end - rows.start;
                let stretches = &mut ranks[rank.0 as usize];
                let at = stretches.iter().position(|it| it.document == document);
                let of_head = Stretch { document, start: head, end: head + count / 2 };
                let of_tail = Stretch { document, start: tail - (count - count / 2), end: tail };
                (head, tail) = (of_head.end, of_tail.start);
                let new = [of_head, of_tail].into_iter().filter(|it| it.start < it.end);
                let at = at.expect("the rank holds a piece");
                stretches.splice(at..=at, new);
            }
        }
        Self::new(documents, ranks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::tests::{causal, stretch};

    #[test]
    fn end_to_end_cuts_documents_at_the_edges_of_ranks() {
        let layout = Layout::end_to_end(vec![causal(5), causal(9)], 6).unwrap();
        let ranks = layout.ranks();
        assert_eq!(ranks[0], [stretch(0, 0, 5), stretch(1, 0, 1)]);
        assert_eq!(ranks[1], [stretch(1, 1, 7)]);
        assert_eq!(ranks[2], [stretch(1, 7, 9)]);
        assert_eq!(Layout::end_to_end(vec![causal(1)], 0), Err(Error::NoRank));
        // Refused before there is a list for each of them.
        let (count, most) = (4 * u64::from(u32::MAX), MOST_RANKS as u64);
        let refused = Error::TooMany { things: "ranks", count, most };
        assert_eq!(Layout::end_to_end(vec![causal(u32::MAX); 4], 1), Err(refused));
    }

    #[test]
    fn a_document_that_spans_ranks_leaves_each_a_head_and_a_tail() {
        let layout = Layout::head_tail(vec![causal(5), causal(12), causal(1)], 6).unwrap();
        let ranks = layout.ranks();
        assert_eq!(ranks[0], [stretch(0, 0, 5), stretch(1, 11, 12)]);
        assert_eq!(ranks[1], [stretch(1, 0, 3), stretch(1, 8, 11)]);
        assert_eq!(ranks[2], [stretch(1, 3, 5), stretch(1, 5, 8), stretch(2, 0, 1)]);
    }
}
