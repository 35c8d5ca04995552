//! What a bundle reads: the landing of its rows, and who gives which of them.
//!
//! In: a bundle of a plan and a direction. Out: its [`Inputs`]. Nothing about results, see
//! [`super::Lists`]; nothing is allocated or moved.
//!
//! Invariant: areas follow each other in the order of [`read`], begin at multiples of 4 bytes and do not
//! overlap; the pieces of all sources together fill each area once.

use std::ops::Range;

use cadre_planner::{BundleId, Plan, Problem, RankId};
use cadre_protocol::Piece;

use super::Tensor;
use super::pieces::{gather, row};
use crate::phases::Direction;

/// Everything that a bundle reads in one direction.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// Parts of the landing.
    pub areas: Areas,
    /// Size of the landing.
    pub bytes: usize,
    /// Whom it comes from, by rank.
    pub sources: Vec<Source>,
}

/// Most tensors that a direction reads.
const TENSORS: usize = 6;

/// What one trainer gives to one bundle. A step may have hundreds of thousands of these.
#[derive(Clone, Debug)]
pub struct Source {
    /// The trainer.
    pub rank: RankId,
    /// All of its pieces together.
    pub bytes: u64,
    /// The tensors that the direction reads; where the pieces of each end.
    tensors: &'static [Tensor],
    ends: [u32; TENSORS],
    pieces: Vec<Piece>,
}

impl Source {
    fn new(rank: RankId, tensors: &'static [Tensor]) -> Self {
        Self { rank, bytes: 0, tensors, ends: [0; TENSORS], pieces: Vec::new() }
    }

    /// Pieces by tensor, of those of which there are any; `remote` is in the trainer's rows of the phase, `local` in the landing.
    pub fn tensors(&self) -> impl Iterator<Item = (Tensor, &[Piece])> {
        let begins = std::iter::once(0).chain(self.ends);
        let of = self.tensors.iter().zip(begins.zip(self.ends));
        let of = of.map(|(it, (begin, end))| (*it, &self.pieces[begin as usize..end as usize]));
        of.filter(|it| !it.1.is_empty())
    }

    /// Those of all tensors.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }
}

/// Where the parts of a bundle's landing begin, in bytes.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Areas {
    /// Queries of all tasks, in row order.
    pub q: Range<usize>,
    /// Keys.
    pub k: Range<usize>,
    /// Values.
    pub v: Range<usize>,
    /// Gradients of O; empty forward.
    pub dout: Range<usize>,
    /// Log-sum-exp; empty forward.
    pub lse: Range<usize>,
    /// Row sums of dO ∘ O; empty forward.
    pub delta: Range<usize>,
}

/// Lays out the landing of bundle `index`, whose tasks have `query_rows` rows together.
pub(super) fn inputs(
    problem: &Problem,
    plan: &Plan,
    index: BundleId,
    query_rows: u32,
    direction: Direction,
) -> Inputs {
    let bundle = &plan.bundles()[index.0 as usize];
    let key_rows = bundle.keys.end - bundle.keys.start;
    let mut areas = Areas::default();
    let mut bytes = 0_usize;
    let mut sources: Vec<Source> = Vec::new();
    for &tensor in read(direction) {
        let row = row(problem, &bundle.kv_heads, tensor);
        let of_keys = matches!(tensor, Tensor::K | Tensor::V);
        let rows = if of_keys { key_rows } else { query_rows };
        let area = bytes..bytes + rows as usize * row.part as usize;
        bytes = area.end.next_multiple_of(4);
        let mut add = |rank: RankId, local: &Range<u32>, first: u32| {
            let pieces = pieces_of(&mut sources, rank, read(direction));
            gather(pieces, row, local, first, area.start as u64);
        };
        if of_keys {
            for at in problem.layout.locate(bundle.document, bundle.keys.clone()) {
                add(at.rank, &at.local, at.rows.start - bundle.keys.start);
            }
        } else {
            let mut base = 0;
            for task in plan.tasks_of(index) {
                for at in problem.layout.locate(task.document, task.rows.clone()) {
                    add(at.rank, &at.local, base + at.rows.start - task.rows.start);
                }
                base += task.rows.end - task.rows.start;
            }
        }
        *areas.of(tensor) = area;
        for source in &mut sources {
            // Of the tensors behind this one, until they are there.
            let behind = source.tensors.iter().position(|it| *it == tensor).unwrap_or(0);
            source.ends[behind..].fill(source.pieces.len() as u32);
        }
    }
    sources.sort_by_key(|it| it.rank);
    for source in &mut sources {
        source.bytes = source.pieces.iter().map(|it| it.bytes).sum();
        source.pieces.shrink_to_fit();
    }
    sources.shrink_to_fit();
    Inputs { areas, bytes, sources }
}

/// Query-side tensors and key-side tensors that a direction reads.
pub(super) fn read(direction: Direction) -> &'static [Tensor] {
    match direction {
        Direction::Forward => &[Tensor::Q, Tensor::K, Tensor::V],
        Direction::Backward => {
            &[Tensor::Q, Tensor::K, Tensor::V, Tensor::DOut, Tensor::Lse, Tensor::Delta]
        }
    }
}

impl Areas {
    /// The part that holds a tensor.
    pub(super) fn of(&mut self, tensor: Tensor) -> &mut Range<usize> {
        match tensor {
            Tensor::Q | Tensor::O | Tensor::DQ => &mut self.q,
            Tensor::K | Tensor::DK => &mut self.k,
            Tensor::V | Tensor::DV => &mut self.v,
            Tensor::DOut => &mut self.dout,
            Tensor::Lse | Tensor::OLse => &mut self.lse,
            Tensor::Delta => &mut self.delta,
        }
    }
}

fn pieces_of<'a>(
    sources: &'a mut Vec<Source>,
    rank: RankId,
    tensors: &'static [Tensor],
) -> &'a mut Vec<Piece> {
    let index = sources.iter().position(|it| it.rank == rank).unwrap_or_else(|| {
        sources.push(Source::new(rank, tensors));
        sources.len() - 1
    });
    &mut sources[index].pieces
}
