//! Merges what came from servers into a trainer's tensors, and refuses what is not finite.
//!
//! In: landed results and those of the own process. Out: O, or dQ, dK, dV as the model wants them.
//! Invariant: dK and dV are added in the order of bundles, whatever landed first.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use cadre_exchange::{Buffer, Piece};
use cadre_planner::{BundleId, RankId};
use cadre_protocol::{At, Peer, Work};

use crate::launch::Results;
use crate::lowering::{BackwardResult, Lists};
use crate::planned::{NanoPlan, PlannedStep};
use crate::trainer::{AttentionError, Gradients};

/// Copies a task's own rows of O and LSE to where they belong.
pub fn own_forward(
    nano: &NanoPlan,
    task: usize,
    rank: RankId,
    (o, lse): (&Buffer, &Buffer),
    (to_o, to_lse): (&mut Buffer, &mut Buffer),
) {
    let (o_pieces, lse_pieces) = Lists::forward_result(&nano.problem, &nano.plan, task, rank);
    copy(&o_pieces, o, to_o);
    copy(&lse_pieces, lse, to_lse);
}

/// Copies a bundle's own rows of dQ to where they belong.
pub fn own_backward(nano: &NanoPlan, bundle: BundleId, rank: RankId, dq: &Buffer, to: &mut Buffer) {
    let result = nano.lists.backward_result(&nano.problem, &nano.plan, bundle, rank);
    copy(&result.dq, dq, to);
}

/// dK and dV of this trainer's rows: the sum of all parts, bundle by bundle.
pub fn parts(
    nano: &NanoPlan,
    rank: RankId,
    own: &BTreeMap<BundleId, Arc<Results>>,
    landed: &BTreeMap<BundleId, (Buffer, BackwardResult)>,
) -> (Vec<f32>, Vec<f32>) {
    let heads = nano.problem.heads;
    let width = usize::from(heads.kv) * usize::from(heads.dim);
    let rows = nano.problem.layout.rank_rows(rank) as usize;
    let (mut dk, mut dv) = (vec![0.0; rows * width], vec![0.0; rows * width]);
    for (index, bundle) in (0..).map(BundleId).zip(nano.plan.bundles()) {
        let columns = |it: &Range<u16>| {
            usize::from(it.start) * usize::from(heads.dim)
                ..usize::from(it.end) * usize::from(heads.dim)
        };
        let columns = columns(&bundle.kv_heads);
        if let Some((buffer, result)) = landed.get(&index) {
            let values = buffer.f32s();
            let (part_k, part_v) = values.split_at(values.len() / 2);
            add(&mut dk, width, &result.rows, &columns, part_k);
            add(&mut dv, width, &result.rows, &columns, part_v);
        } else if let Some(results) = own.get(&index)
            && let Results::Backward([_, part_k, part_v]) = results.as_ref()
        {
            let result = nano.lists.backward_result(&nano.problem, &nano.plan, index, rank);
            for (rows, piece) in result.rows.iter().zip(&result.part) {
                let range = piece.remote as usize / 4..(piece.remote + piece.bytes) as usize / 4;
                let rows = std::slice::from_ref(rows);
                add(&mut dk, width, rows, &columns, &part_k.f32s()[range.clone()]);
                add(&mut dv, width, rows, &columns, &part_v.f32s()[range]);
            }
        }
    }
    (dk, dv)
}

/// Adds rows that lie one after the other in `part` to `columns` of the rows of `to`.
fn add(to: &mut [f32], width: usize, rows: &[Range<u32>], columns: &Range<usize>, part: &[f32]) {
    let mut part = part.chunks_exact(columns.len());
    for row in rows.iter().cloned().flatten() {
        let to = &mut to[row as usize * width..][columns.clone()];
        let Some(part) = part.next() else { return };
        for (to, part) in to.iter_mut().zip(part) {
            *to += part;
        }
    }
}

fn copy(pieces: &[Piece], from: &Buffer, to: &mut Buffer) {
    for piece in pieces {
        let from = &from.bytes()[piece.remote as usize..][..piece.bytes as usize];
        to.bytes_mut()[piece.local as usize..][..piece.bytes as usize].copy_from_slice(from);
    }
}

/// Refuses NaN and infinity in O, and in LSE but for −∞.
///
/// # Errors
///
/// [`AttentionError::NotFinite`] names layer, task and server.
pub fn check_forward(
    planned: &PlannedStep,
    at: At,
    rank: RankId,
    o: &[f32],
    lse: &[f32],
    makers: &BTreeMap<Work, Peer>,
) -> Result<(), AttentionError> {
    let heads = planned.header.heads;
    let width = usize::from(heads.query) * usize::from(heads.dim);
    let wrong = first_not_finite(o).map(|it| ("O", it / width)).or_else(|| {
        let bad = |it: &f32| it.is_nan() || *it == f32::INFINITY;
        lse.iter().position(bad).map(|it| ("LSE", it / usize::from(heads.query)))
    });
    match wrong {
        Some((tensor, row)) => Err(not_finite(planned, at, rank, (tensor, row), makers)),
        None => Ok(()),
    }
}

/// Refuses NaN and infinity in dQ, dK and dV.
///
/// # Errors
///
/// [`AttentionError::NotFinite`] names layer, task and server.
pub fn check_backward(
    planned: &PlannedStep,
    at: At,
    rank: RankId,
    gradients: &Gradients,
    makers: &BTreeMap<Work, Peer>,
) -> Result<(), AttentionError> {
    let heads = planned.header.heads;
    let dim = usize::from(heads.dim);
    let (query, kv) = (usize::from(heads.query) * dim, usize::from(heads.kv) * dim);
    let Gradients { dq, dk, dv } = gradients;
    let wrong = [("dQ", dq, query), ("dK", dk, kv), ("dV", dv, kv)]
        .into_iter()
        .find_map(|(name, values, width)| first_not_finite(values).map(|it| (name, it / width)));
    match wrong {
        Some(place) => Err(not_finite(planned, at, rank, place, makers)),
        None => Ok(()),
    }
}

fn first_not_finite(values: &[f32]) -> Option<usize> {
    const EXPONENT: u32 = 0x7f80_0000;
    let bad = |it: f32| u32::from(it.to_bits() & EXPONENT == EXPONENT);
    let any = |chunk: &[f32]| chunk.iter().fold(0, |sum, &it| sum | bad(it)) != 0;
    let chunk = values.chunks(4096).position(any)?;
    values[chunk * 4096..].iter().position(|it| !it.is_finite()).map(|it| chunk * 4096 + it)
}

/// Names the task that covers a row of this trainer's stream, and who computed it.
fn not_finite(
    planned: &PlannedStep,
    at: At,
    rank: RankId,
    (tensor, row): (&'static str, usize),
    makers: &BTreeMap<Work, Peer>,
) -> AttentionError {
    let (nano, direction) = planned.nano_of(at.phase);
    let of_keys = matches!(tensor, "dK" | "dV");
    let covers = |task: &cadre_planner::Task| {
        let rows = if of_keys { task.keys.clone() } else { task.rows.clone() };
        let mut pieces = nano.problem.layout.locate(task.document, rows);
        pieces.any(|it| it.rank == rank && it.local.contains(&(row as u32)))
    };
    let found = nano.plan.tasks().iter().position(covers);
    let (task, server) = found.map_or(("unknown".into(), None), |index| {
        let task = &nano.plan.tasks()[index];
        let work = match direction {
            crate::phases::Direction::Forward => Work(index as u32),
            crate::phases::Direction::Backward => Work(task.bundle.0),
        };
        let rows = &task.rows;
        let name = format!("rows {}..{} of document {}", rows.start, rows.end, task.document.0);
        (name, makers.get(&work))
    });
    let layer = planned.order.at(at.phase).layer;
    let server = server.map_or_else(|| "an unknown server".into(), ToString::to_string);
    AttentionError::NotFinite { layer, tensor, task, server }
}
