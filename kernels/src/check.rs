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
        /// Its first position.
        start: u32,
        /// Its end.
        end: u32,
        /// Where it has to end at the latest.
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
        /// Its first row.
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
}

/// Checks a forward task.
pub(crate) fn forward(task: usize, it: &Forward<'_>) -> Result<(), Error> {
    let Forward { heads, mask, scale, document_rows, rows, keys, q, k, v, out, lse } = it;
    common(task, *heads, *scale)?;
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
    let Backward { heads, mask, scale, document_rows, keys, k, v, parts, dk, dv, key_tiles: tiles } =
        it;
    common(task, *heads, *scale)?;
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

fn common(task: usize, heads: Heads, scale: f32) -> Result<(), Error> {
    let Heads { query, kv, dim } = heads;
    if !dim.is_multiple_of(8) || dim == 0 || dim > 256 {
        return Err(Error::Dim { task, dim });
    }
    if kv == 0 || query == 0 || !query.is_multiple_of(kv) {
        return Err(Error::Ratio { task, query, kv });
    }
    if !scale.is_finite() {
        return Err(Error::Scale { task, scale: scale.to_string() });
    }
    Ok(())
}

fn positions(task: usize, field: &'static str, it: &Range<u32>, limit: u32) -> Result<(), Error> {
    if it.start > it.end || it.end > limit {
        return Err(Error::Positions { task, field, start: it.start, end: it.end, limit });
    }
    Ok(())
}

fn keys_held(
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
