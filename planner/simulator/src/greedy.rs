//! The published planner (`DistCA`), built again from its description, as the baseline to compare with.
//!
//! In: a layout, a model, the tolerance. Out: [`Share`]s. Servers below the mean are filled in order of their deficit.
//! Of all pieces on servers above the mean the one with the best ratio of work to bytes moves, whole or as an inner
//! pair of head and tail, until the receiver is within the tolerance of the mean. Bytes of a candidate are counted as
//! the original counts them: half of the moved Q and all of the document's K and V.
//!
//! It has the original's weaknesses on purpose: nothing looks at what the receiver holds, at the way back, or at what
//! one sender sends.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use cadre_planner::{DocumentId, Layout, RankId};

use crate::machine::Model;
use crate::phase::{Share, triangle};

/// Rows of a document at one place: a piece of the head and the piece of the tail that mirrors it; either may be
/// empty.
#[derive(Clone, Debug)]
struct Piece {
    document: DocumentId,
    head: Range<u32>,
    tail: Range<u32>,
}

impl Piece {
    fn pairs(&self) -> u64 {
        [&self.head, &self.tail].into_iter().map(|it| triangle(it.end) - triangle(it.start)).sum()
    }

    fn rows(&self) -> u64 {
        (self.head.len() + self.tail.len()) as u64
    }

    /// Splits off the innermost rows of head and tail with about `pairs` pairs; `None` if not one row of each is.
    fn split(&mut self, pairs: u64) -> Option<Self> {
        let most = self.head.len().min(self.tail.len()) as u64;
        // A row of the head and its mirror in the tail have the same number of pairs together.
        let each = u64::from(self.head.end) + u64::from(self.tail.start) + 1;
        let count = (pairs / each).min(most) as u32;
        (count > 0).then(|| {
            let head = self.head.end - count..self.head.end;
            let tail = self.tail.start..self.tail.start + count;
            self.head.end = head.start;
            self.tail.start = tail.end;
            Self { document: self.document, head, tail }
        })
    }
}

/// Work and bytes of a candidate.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    donor: usize,
    index: usize,
    pairs: u64,
    bytes: u64,
}

impl Candidate {
    fn better(&self, other: &Self) -> bool {
        u128::from(self.pairs) * u128::from(other.bytes)
            > u128::from(other.pairs) * u128::from(self.bytes)
    }
}

/// Spreads the work of a layout over its ranks and the places after them; `tolerance` is in thousandths.
pub fn greedy(model: &Model, layout: &Layout, places: usize, tolerance: u64) -> Vec<Share> {
    let ranks = layout.ranks().len();
    let mut pieces: Vec<Vec<Piece>> =
        (0..ranks).map(|rank| pieces_of(layout, RankId(rank as u32))).collect();
    pieces.resize(places.max(ranks), Vec::new());
    let mut loads: Vec<u64> = pieces.iter().map(|it| it.iter().map(Piece::pairs).sum()).collect();
    let mean = loads.iter().sum::<u64>() / loads.len().max(1) as u64;
    let allowed = mean * tolerance / 1000;
    let mut receivers: Vec<usize> = (0..loads.len()).filter(|it| loads[*it] < mean).collect();
    receivers.sort_by_key(|it| (Reverse(mean - loads[*it]), *it));
    for receiver in receivers {
        while loads[receiver] + allowed < mean {
            let deficit = mean - loads[receiver];
            let Some(best) = best(model, layout, &pieces, &loads, mean, deficit) else { break };
            let Candidate { donor, index, pairs, .. } = best;
            let moved = if pieces[donor][index].pairs() <= pairs {
                Some(pieces[donor].remove(index))
            } else {
                pieces[donor][index].split(pairs)
            };
            let Some(moved) = moved else { break };
            loads[donor] -= moved.pairs();
            loads[receiver] += moved.pairs();
            pieces[receiver].push(moved);
        }
    }
    shares(model, pieces)
}

fn best(
    model: &Model,
    layout: &Layout,
    pieces: &[Vec<Piece>],
    loads: &[u64],
    mean: u64,
    deficit: u64,
) -> Option<Candidate> {
    let query = 2 * u64::from(model.heads.query) * u64::from(model.heads.dim);
    let key = 4 * u64::from(model.heads.kv) * u64::from(model.heads.dim);
    let mut best: Option<Candidate> = None;
    for donor in (0..pieces.len()).filter(|it| loads[*it] > mean) {
        let limit = deficit.min(loads[donor] - mean);
        for (index, piece) in pieces[donor].iter().enumerate() {
            let all = piece.pairs();
            let pairs = all.min(limit);
            if all > limit {
                let each = u64::from(piece.head.end) + u64::from(piece.tail.start) + 1;
                if limit < each || piece.head.is_empty() || piece.tail.is_empty() {
                    continue;
                }
            }
            let rows =
                (u128::from(piece.rows()) * u128::from(pairs) / u128::from(all.max(1))) as u64;
            let document = layout.document(piece.document).map_or(0, |it| u64::from(it.rows));
            let candidate =
                Candidate { donor, index, pairs, bytes: rows * query / 2 + document * key };
            if best.as_ref().is_none_or(|it| candidate.better(it)) {
                best = Some(candidate);
            }
        }
    }
    best
}

/// What a rank holds: of a document a head and the tail that mirrors it, or one run of rows cut in its middle.
fn pieces_of(layout: &Layout, rank: RankId) -> Vec<Piece> {
    let mut runs: BTreeMap<DocumentId, Vec<Range<u32>>> = BTreeMap::new();
    for (document, piece) in layout.pieces_of(rank) {
        runs.entry(document).or_default().push(piece.rows);
    }
    let mut pieces = Vec::new();
    for (document, mut runs) in runs {
        runs.sort_by_key(|it| it.start);
        if let [head, tail] = &runs[..] {
            pieces.push(Piece { document, head: head.clone(), tail: tail.clone() });
            continue;
        }
        for run in runs {
            let middle = run.start + (run.end - run.start) / 2;
            pieces.push(Piece { document, head: run.start..middle, tail: middle..run.end });
        }
    }
    pieces
}

fn shares(model: &Model, pieces: Vec<Vec<Piece>>) -> Vec<Share> {
    let mut shares = Vec::new();
    for (place, pieces) in pieces.into_iter().enumerate() {
        let mut documents: BTreeMap<DocumentId, Vec<Range<u32>>> = BTreeMap::new();
        for Piece { document, head, tail } in pieces {
            let rows = documents.entry(document).or_default();
            rows.extend([head, tail].into_iter().filter(|it| !it.is_empty()));
        }
        for (document, mut rows) in documents {
            rows.sort_by_key(|it| it.start);
            let rows = merged(rows);
            shares.push(Share { place, document, kv_heads: model.heads.kv.into(), rows });
        }
    }
    shares
}

fn merged(rows: Vec<Range<u32>>) -> Vec<Range<u32>> {
    let mut all: Vec<Range<u32>> = Vec::new();
    for it in rows {
        match all.last_mut() {
            Some(last) if last.end == it.start => last.end = it.end,
            _ => all.push(it),
        }
    }
    all
}
