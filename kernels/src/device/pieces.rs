//! Copies of many pieces from a peer's arena to a landing: by the copy engine where pieces are few or large, else in one launch.
//!
//! In: pieces. Out: copies in the order of one stream. Neighbours that follow each other at the same distances, as the rows of
//! some heads do in a tensor of all, are one [`RowCopy`]. What is large takes no processor from kernels; what is small and
//! comes by the thousand takes no call of the driver each. Pieces that no word of 4 bytes divides are the driver's, too.
//!
//! It orders nothing between streams. Invariant: either all pieces are put, in whatever order among themselves, or there is an
//! error; nothing outside of both memories is touched.

use super::arena::{ArenaMemory, CopyPiece, Imported, holds};
use super::error::Error;
use super::memory::Stream;
use super::rows::{RowCopier, RowCopy};

/// Minimum number of small pieces that are copied by one launch instead of a driver call each. A
/// driver call takes a few microseconds of the thread that pulls. A launch takes two calls, but its
/// blocks wait until other kernels leave a processor. Not measured.
const MANY: usize = 64;
/// Bytes from which a piece is left to the copy engine, however many pieces there are: copying it
/// takes longer than the driver call. Not measured.
const LARGE: u64 = 1 << 20;
/// Longest distance between rows, in bytes, at which pieces count as rows of one copy.
const FAR: u64 = 1 << 31;

/// Puts copies of pieces on one stream.
#[derive(Debug)]
pub struct PieceCopier {
    rows: RowCopier,
    launches: u64,
}

impl PieceCopier {
    /// On `stream`.
    ///
    /// # Errors
    ///
    /// Memory for a list, or the driver's.
    pub fn new(stream: Stream) -> Result<Self, Error> {
        Ok(Self { rows: RowCopier::new(stream)?, launches: 0 })
    }

    /// The stream on which it copies.
    pub fn stream(&self) -> &Stream {
        self.rows.stream()
    }

    /// Number of lists that were copied by one launch.
    pub fn launches(&self) -> u64 {
        self.launches
    }

    /// Copies pieces of `from` to `to`, in the order of the stream.
    ///
    /// # Errors
    ///
    /// A piece outside of either, before anything is copied; pieces that share bytes of the target, where that can be seen; or
    /// the driver's.
    pub fn copy(
        &mut self,
        from: &Imported,
        pieces: &[CopyPiece],
        to: &ArenaMemory,
    ) -> Result<(), Error> {
        holds(from.place(), pieces, to)?;
        let (launched, driven) = divided(pieces);
        from.copy(self.rows.stream(), &driven, to)?;
        if launched.is_empty() {
            return Ok(());
        }
        self.launches += 1;
        self.rows.put((from.slice(), to.landing()), &launched)
    }
}

/// Splits pieces into rows for one launch, and pieces for the driver's copies.
fn divided(pieces: &[CopyPiece]) -> (Vec<RowCopy>, Vec<CopyPiece>) {
    let joined = joined(pieces);
    let of_launch =
        |it: &CopyPiece| it.bytes < LARGE && (it.from | it.to | it.bytes).is_multiple_of(4);
    let (small, mut driven): (Vec<_>, Vec<_>) = joined.into_iter().partition(of_launch);
    if small.len() >= MANY {
        return (runs(&small), driven);
    }
    driven.extend(small);
    (Vec::new(), driven)
}

/// Joins pieces that follow one another at both ends, and drops empty ones.
fn joined(pieces: &[CopyPiece]) -> Vec<CopyPiece> {
    let mut all: Vec<CopyPiece> = Vec::new();
    for &piece in pieces.iter().filter(|it| it.bytes > 0) {
        match all.last_mut() {
            Some(it) if it.from + it.bytes == piece.from && it.to + it.bytes == piece.to => {
                it.bytes += piece.bytes;
            }
            _ => all.push(piece),
        }
    }
    all
}

/// Groups neighbouring pieces of one length and equal distances into row copies.
fn runs(pieces: &[CopyPiece]) -> Vec<RowCopy> {
    let mut all: Vec<RowCopy> = Vec::new();
    for &CopyPiece { from, to, bytes } in pieces {
        if let Some(it) = all.last_mut()
            && it.bytes == bytes
            && let Some((from_stride, to_stride)) = follows(it, from, to)
        {
            *it = RowCopy { rows: it.rows + 1, from_stride, to_stride, ..*it };
            continue;
        }
        all.push(RowCopy { from, to, rows: 1, bytes, from_stride: 0, to_stride: 0 });
    }
    all
}

/// The distances at which a row at these positions continues a copy. None where it does not.
fn follows(copy: &RowCopy, from: u64, to: u64) -> Option<(u64, u64)> {
    let last = u64::from(copy.rows - 1);
    let from_stride = from.checked_sub(copy.from + last * copy.from_stride)?;
    let to_stride = to.checked_sub(copy.to + last * copy.to_stride)?;
    let first = copy.rows == 1 && from_stride < FAR && (copy.bytes..FAR).contains(&to_stride);
    let same = copy.rows > 1 && (from_stride, to_stride) == (copy.from_stride, copy.to_stride);
    (first || same).then_some((from_stride, to_stride))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn piece((from, to, bytes): (u64, u64, u64)) -> CopyPiece {
        CopyPiece { from, to, bytes }
    }

    /// A copy of bytes: its source, its target, its length.
    fn bytes(runs: &[RowCopy], pieces: &[CopyPiece]) -> Vec<(u64, u64)> {
        let row = |it: &RowCopy, row: u64| {
            (it.from + row * it.from_stride, it.to + row * it.to_stride, it.bytes)
        };
        let rows = runs.iter().flat_map(|it| (0..it.rows.into()).map(move |at| row(it, at)));
        let pieces = pieces.iter().map(|it| (it.from, it.to, it.bytes));
        let of = |(from, to, bytes)| (0..bytes).map(move |at| (from + at, to + at));
        let mut all: Vec<_> = rows.chain(pieces).flat_map(of).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn rows_of_some_heads_are_one_run_and_large_pieces_are_the_drivers() {
        let heads = (0..200).map(|row| piece((64 + row * 512, row * 128, 128)));
        let large = piece((1 << 30, 1 << 20, LARGE));
        let odd = piece((3, 1 << 19, 8));
        let (launched, driven) = divided(&heads.chain([large, odd]).collect::<Vec<_>>());
        let run =
            RowCopy { from: 64, to: 0, rows: 200, bytes: 128, from_stride: 512, to_stride: 128 };
        assert_eq!((launched, driven), (vec![run], vec![large, odd]));
        // Whole rows side by side are one piece, and few are the driver's.
        let whole: Vec<_> = (0..200).map(|row| piece((row * 128, row * 128, 128))).collect();
        assert_eq!(divided(&whole), (vec![], vec![piece((0, 0, 200 * 128))]));
        let few: Vec<_> = (0..MANY as u64 - 1).map(|row| piece((row * 256, row * 8, 8))).collect();
        assert_eq!(divided(&few), (vec![], few));
    }

    proptest! {
        #[test]
        fn every_byte_is_copied_once_whatever_is_joined(
            lines in prop::collection::vec((0..5_u64, 0..3_u64, 0..4_u64, 1..60_u64), 1..20),
            unit in prop::sample::select(vec![1_u64, 4, 16]),
        ) {
            let (mut from, mut to, mut pieces) = (0, 0, Vec::new());
            for (skip, gap, words, rows) in lines {
                for _ in 0..rows {
                    let bytes = words * unit;
                    pieces.push(piece((from, to, bytes)));
                    (from, to) = (from + bytes + skip * unit, to + bytes + gap * unit);
                }
                // Not in order.
                from = (from * 7 + 1000 * unit) % (100_000 * unit);
            }
            let (launched, driven) = divided(&pieces);
            prop_assert_eq!(bytes(&launched, &driven), bytes(&[], &pieces));
            prop_assert!(launched.iter().all(|it| it.is_multiple_of(4)));
            prop_assert!(launched.len() <= pieces.len());
        }
    }
}
