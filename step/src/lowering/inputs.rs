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

use super::pieces::{Strip, carry, row_bytes};
use super::{HeadRows, Stretches, Tensor};
use crate::phases::Direction;

/// Everything that a bundle reads in one direction.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// Parts of the landing.
    pub areas: Areas,
    /// Size of the landing.
    pub bytes: usize,
    /// What each trainer sends, by rank.
    pub sources: Vec<Source>,
}

/// Most tensors that a direction reads.
const MAX_TENSORS: usize = 6;

/// What one trainer sends for one bundle. A step may have hundreds of thousands of these.
#[derive(Clone, Debug)]
pub struct Source {
    /// The trainer.
    pub rank: RankId,
    /// All of its pieces together.
    pub bytes: u64,
    /// The tensors that the direction reads; where the pieces of each end.
    tensors: &'static [Tensor],
    ends: [u32; MAX_TENSORS],
    pieces: Vec<Piece>,
}

impl Source {
    fn new(rank: RankId, tensors: &'static [Tensor]) -> Self {
        Self { rank, bytes: 0, tensors, ends: [0; MAX_TENSORS], pieces: Vec::new() }
    }

    /// Pieces of each tensor that has any. `remote` is in the trainer's rows of the phase, `local`
    /// in the landing.
    pub fn tensors(&self) -> impl Iterator<Item = (Tensor, &[Piece])> {
        let begins = std::iter::once(0).chain(self.ends);
        let of = self.tensors.iter().zip(begins.zip(self.ends));
        let of = of.map(|(it, (begin, end))| (*it, &self.pieces[begin as usize..end as usize]));
        of.filter(|it| !it.1.is_empty())
    }

    /// Pieces of all tensors.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }
}

/// Where the parts of a bundle's landing begin, in bytes.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Areas {
    /// Queries, task by task, each head by head.
    pub q: Range<usize>,
    /// Keys, head by head.
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
    (problem, stretches): (&Problem, &Stretches),
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
    let kv_heads = &bundle.kv_heads;
    for (index_of, &tensor) in read(direction).iter().enumerate() {
        let row = row_bytes(problem, tensor);
        let of_keys = matches!(tensor, Tensor::K | Tensor::V);
        let rows = if of_keys { key_rows } else { query_rows };
        let area = bytes..bytes + rows as usize * kv_heads.len() * row as usize;
        bytes = area.end.next_multiple_of(4);
        let mut add = |at: &cadre_planner::Piece, to: HeadRows| {
            let pieces = pieces_of(&mut sources, at.rank, (read(direction), index_of));
            let rows = at.rows.end - at.rows.start;
            let strip = Strip { bytes: row, rows, kv_heads: kv_heads.len() };
            carry(pieces, strip, stretches.home(at, kv_heads), (to, area.start as u64));
        };
        let locate = |rows| problem.layout.locate(bundle.document, rows);
        if of_keys {
            for at in locate(bundle.keys.clone()) {
                add(&at, HeadRows::in_keys(key_rows, at.rows.start - bundle.keys.start));
            }
        } else {
            let mut base = 0;
            for task in plan.tasks_of(index) {
                let rows = task.rows.end - task.rows.start;
                for at in locate(task.rows.clone()) {
                    let offset = at.rows.start - task.rows.start;
                    add(&at, HeadRows::in_task(base, rows, kv_heads.len(), offset));
                }
                base += rows;
            }
        }
        *areas.of(tensor) = area;
        for source in &mut sources {
            // Later tensors have no pieces yet: their ends are the end of this one.
            source.ends[index_of..].fill(source.pieces.len() as u32);
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
    (tensors, index_of): (&'static [Tensor], usize),
) -> (&'a mut Vec<Piece>, usize) {
    let index = sources.iter().position(|it| it.rank == rank).unwrap_or_else(|| {
        sources.push(Source::new(rank, tensors));
        sources.len() - 1
    });
    let source = &mut sources[index];
    (&mut source.pieces, source.ends[index_of] as usize)
}
