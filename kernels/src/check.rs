//! Refuses tasks and bundles that do not fit, before anything is computed.
//!
//! In: a task or bundle and its index in the launch. Out: nothing, or the first thing that is wrong.
//!
//! What passes here is assumed by the engine without a further look. Values are not looked at.

use std::ops::Range;

use crate::{Backward, Forward, Heads, Mask, Rows, key_tiles};

/// Why a launch is refused; `task` is the index in the launch, of a task or of a bundle.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Error {
    /// The head dimension is not one of the engine's.
    #[error("task {task}: head dim {dim} is not a multiple of 8 from 8 to 256; choose another one")]
    Dim {
        /// Index in the launch.
        task: usize,
        /// The dimension.
        dim: usize,
    },
    /// Query heads do not divide over KV heads.
    #[error(
        "task {task}: {query} query heads do not divide over {kv} KV heads; \
         hand in whole KV-head groups"
    )]
    Ratio {
        /// Index in the launch.
        task: usize,
        /// Query heads.
        query: usize,
        /// KV heads.
        kv: usize,
    },
    /// A range runs backwards or past its end.
    #[error(
        "task {task}: {field} {start}..{end} is not a range within 0..{limit}; \
         positions are counted from the document's start, key tiles from the first one held"
    )]
    Positions {
        /// Index in the launch.
        task: usize,
        /// The field.
        field: &'static str,
        /// First position of the range.
        start: u32,
        /// End of the range.
        end: u32,
        /// Largest end that is allowed.
        limit: u32,
    },
    /// Keys that the mask keeps are not held.
    #[error(
        "task {task}: the mask keeps keys {needed:?} for rows {rows:?}, held are {held:?}; \
         hand in every key that the mask keeps"
    )]
    KeysMissing {
        /// Index in the launch.
        task: usize,
        /// The query rows.
        rows: Range<u32>,
        /// Keys that the mask keeps.
        needed: Range<u32>,
        /// Keys held.
        held: Range<u32>,
    },
    /// A slice has another length than heads and ranges say.
    #[error(
        "task {task}: {field} has {actual} numbers, heads and ranges say {expected}; slice it to that"
    )]
    Length {
        /// Index in the launch.
        task: usize,
        /// The field.
        field: &'static str,
        /// Length that heads and ranges say.
        expected: usize,
        /// Length handed in.
        actual: usize,
    },
    /// Parts of a bundle overlap or are not ascending.
    #[error(
        "task {task}: part {part} starts at row {start}, before row {previous_end} where the part \
         before it ends; hand in a bundle's rows ascending"
    )]
    Parts {
        /// Index in the launch.
        task: usize,
        /// Index of the part.
        part: usize,
        /// First row of the part.
        start: u32,
        /// End of the part before it.
        previous_end: u32,
    },
    /// The scale is not a number to multiply with.
    #[error("task {task}: scale {scale} is not finite; it mostly is dim^-0.5")]
    Scale {
        /// Index in the launch.
        task: usize,
        /// The scale, printed.
        scale: String,
    },
    /// The softcap bounds nothing.
    #[error(
        "task {task}: softcap {softcap} is not a finite number above 0 that scales can be divided by; \
         leave it out for none"
    )]
    Softcap {
        /// Index in the launch.
        task: usize,
        /// The softcap, printed.
        softcap: String,
    },
}

/// Checks a forward task.
pub(crate) fn forward(task: usize, it: &Forward<'_>) -> Result<(), Error> {
    let Forward { heads, mask, scale, softcap, document_rows, rows, keys, q, k, v, out, lse } = it;
    common(task, *heads, *scale, *softcap)?;
    positions(task, "rows", rows, *document_rows)?;
    positions(task, "keys", keys, *document_rows)?;
    keys_held(task, *mask, rows, keys, *document_rows)?;
    let (queries, held) = (rows.len() * heads.query, keys.len() * heads.kv);
    length(task, "q", q.len(), queries * heads.dim)?;
    length(task, "k", k.len(), held * heads.dim)?;
    length(task, "v", v.len(), held * heads.dim)?;
    length(task, "out", out.len(), queries * heads.dim)?;
    length(task, "lse", lse.len(), queries)
}

/// Checks a backward bundle.
pub(crate) fn backward(task: usize, it: &Backward<'_>) -> Result<(), Error> {
    let Backward {
        heads,
        mask,
        scale,
        softcap,
        document_rows,
        keys,
        k,
        v,
        parts,
        dk,
        dv,
        key_tiles: tiles,
    } = it;
    common(task, *heads, *scale, *softcap)?;
    positions(task, "keys", keys, *document_rows)?;
    positions(task, "key_tiles", tiles, key_tiles(keys))?;
    let held = keys.len() * heads.kv * heads.dim;
    for (field, rows) in [("k", k), ("v", v), ("dk", &Rows::F32(dk)), ("dv", &Rows::F32(dv))] {
        length(task, field, rows.len(), held)?;
    }
    let mut previous_end = 0;
    for (index, part) in parts.iter().enumerate() {
        positions(task, "rows", &part.rows, *document_rows)?;
        if part.rows.start < previous_end {
            let start = part.rows.start;
            return Err(Error::Parts { task, part: index, start, previous_end });
        }
        previous_end = part.rows.end;
        keys_held(task, *mask, &part.rows, keys, *document_rows)?;
        let queries = part.rows.len() * heads.query;
        length(task, "q", part.q.len(), queries * heads.dim)?;
        length(task, "dout", part.dout.len(), queries * heads.dim)?;
        length(task, "lse", part.lse.len(), queries)?;
        length(task, "delta", part.delta.len(), queries)?;
        length(task, "dq", part.dq.len(), queries * heads.dim)?;
    }
    Ok(())
}

/// Whether an engine computes heads of this dim.
pub fn is_head_dim(dim: usize) -> bool {
    dim.is_multiple_of(8) && (8..=256).contains(&dim)
}

/// Whether the GPU kernels compute heads of this dim.
pub fn is_gpu_head_dim(dim: usize) -> bool {
    matches!(dim, 64 | 128 | 256)
}

fn common(task: usize, heads: Heads, scale: f32, softcap: Option<f32>) -> Result<(), Error> {
    let Heads { query, kv, dim } = heads;
    if !is_head_dim(dim) {
        return Err(Error::Dim { task, dim });
    }
    if kv == 0 || query == 0 || !query.is_multiple_of(kv) {
        return Err(Error::Ratio { task, query, kv });
    }
    if !scale.is_finite() {
        return Err(Error::Scale { task, scale: scale.to_string() });
    }
    if let Some(softcap) = softcap.filter(|it| !is_softcap(*it, scale)) {
        return Err(Error::Softcap { task, softcap: softcap.to_string() });
    }
    Ok(())
}

/// Whether `softcap` can bound scores of factor `scale`: neither the softcap in units of log 2 overflows, nor the factor inside
/// tanh.
pub(crate) fn is_softcap(softcap: f32, scale: f32) -> bool {
    softcap > 0.0
        && (softcap * std::f32::consts::LOG2_E).is_finite()
        && (scale / softcap).is_finite()
}

pub(crate) fn positions(
    task: usize,
    field: &'static str,
    it: &Range<u32>,
    limit: u32,
) -> Result<(), Error> {
    if it.start > it.end || it.end > limit {
        return Err(Error::Positions { task, field, start: it.start, end: it.end, limit });
    }
    Ok(())
}

pub(crate) fn keys_held(
    task: usize,
    mask: Mask,
    rows: &Range<u32>,
    held: &Range<u32>,
    document_rows: u32,
) -> Result<(), Error> {
    let needed = mask.keys_of(rows, document_rows);
    if held.is_empty() || needed.is_empty() {
        return Ok(());
    }
    if needed.start < held.start || needed.end > held.end {
        return Err(Error::KeysMissing { task, rows: rows.clone(), needed, held: held.clone() });
    }
    Ok(())
}

fn length(task: usize, field: &'static str, actual: usize, expected: usize) -> Result<(), Error> {
    if actual == expected { Ok(()) } else { Err(Error::Length { task, field, expected, actual }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BackwardRows, RowsMut, Threads};

    const HEADS: Heads = Heads { query: 2, kv: 1, dim: 8 };

    /// The refusal of a launch that is right but for `change`: one task, rows 2..4 of a document of 4.
    fn refusal_of_forward(change: impl FnOnce(&mut Forward<'_>)) -> Result<(), Error> {
        let numbers = [0.0; 64];
        let (mut out, mut lse) = ([0.0; 32], [0.0; 4]);
        let mut task = Forward {
            heads: HEADS,
            mask: Mask::Causal,
            scale: 1.0,
            softcap: None,
            document_rows: 4,
            rows: 2..4,
            keys: 0..4,
            q: Rows::F32(&numbers[..32]),
            k: Rows::F32(&numbers[..32]),
            v: Rows::F32(&numbers[..32]),
            out: RowsMut::F32(&mut out),
            lse: &mut lse,
        };
        change(&mut task);
        crate::forward(&mut [task], Threads::ONE)
    }

    /// The refusal of a launch that is right but for `change`: one bundle with two parts.
    fn refusal_of_backward(change: impl FnOnce(&mut Backward<'_>)) -> Result<(), Error> {
        let numbers = [0.0; 32];
        let (mut dk, mut dv, mut dq) = ([0.0; 32], [0.0; 32], [[0.0; 32]; 2]);
        let part = |(rows, dq)| BackwardRows {
            rows,
            q: Rows::F32(&numbers),
            dout: Rows::F32(&numbers),
            lse: &numbers[..4],
            delta: &numbers[..4],
            dq,
        };
        let mut bundle = Backward {
            heads: HEADS,
            mask: Mask::Causal,
            scale: 1.0,
            softcap: None,
            document_rows: 4,
            keys: 0..4,
            k: Rows::F32(&numbers),
            v: Rows::F32(&numbers),
            parts: [0..2, 2..4]
                .into_iter()
                .zip(dq.iter_mut().map(|it| &mut it[..]))
                .map(part)
                .collect(),
            dk: &mut dk,
            dv: &mut dv,
            key_tiles: 0..1,
        };
        change(&mut bundle);
        crate::backward(&mut [bundle], Threads::ONE)
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        assert_eq!(refusal_of_forward(|_| ()), Ok(()));
        assert_eq!(refusal_of_backward(|_| ()), Ok(()));
        assert_eq!(
            refusal_of_forward(|it| it.heads.dim = 12),
            Err(Error::Dim { task: 0, dim: 12 })
        );
        assert_eq!(
            refusal_of_forward(|it| it.heads.kv = 3),
            Err(Error::Ratio { task: 0, query: 2, kv: 3 })
        );
        let scale = "NaN".into();
        assert_eq!(
            refusal_of_forward(|it| it.scale = f32::NAN),
            Err(Error::Scale { task: 0, scale })
        );
        for softcap in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-39] {
            let refused = Error::Softcap { task: 0, softcap: softcap.to_string() };
            assert_eq!(refusal_of_forward(|it| it.softcap = Some(softcap)), Err(refused.clone()));
            assert_eq!(refusal_of_backward(|it| it.softcap = Some(softcap)), Err(refused));
        }
        assert_eq!(
            refusal_of_forward(|it| it.rows = 2..5),
            Err(Error::Positions { task: 0, field: "rows", start: 2, end: 5, limit: 4 })
        );
        assert_eq!(
            refusal_of_forward(|it| it.keys = 1..4),
            Err(Error::KeysMissing { task: 0, rows: 2..4, needed: 0..4, held: 1..4 })
        );
        assert_eq!(
            refusal_of_forward(|it| it.q = Rows::F32(&[0.0; 8])),
            Err(Error::Length { task: 0, field: "q", expected: 32, actual: 8 })
        );
        assert_eq!(
            refusal_of_backward(|it| it.key_tiles = 0..2),
            Err(Error::Positions { task: 0, field: "key_tiles", start: 0, end: 2, limit: 1 })
        );
        assert_eq!(
            refusal_of_backward(|it| it.parts[1].rows = 1..3),
            Err(Error::Parts { task: 0, part: 1, start: 1, previous_end: 2 })
        );
        assert_eq!(
            refusal_of_backward(|it| it.parts[0].delta = &[]),
            Err(Error::Length { task: 0, field: "delta", expected: 4, actual: 0 })
        );
    }
}
