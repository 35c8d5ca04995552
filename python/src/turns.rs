//! A step as Python announces it: the order of its phases, and what this rank holds.
//!
//! In: turns of micro-batches, forward (`F`) and backward (`B`); documents of each. Out: the session's turns and lengths. Whether a
//! step can go so, the session says.

use std::num::NonZeroU16;

use cadre_planner::{DocumentId, Stretch};
use cadre_worker::session::{Direction, NanoLengths, Turn, Turns, Which};
use pyo3::prelude::*;

use crate::refusal::refused;

/// Micro-batches of a turn.
#[derive(FromPyObject)]
pub(crate) enum MicroBatches {
    One(u16),
    Several(Vec<u16>),
}

/// The order of a step's phases; none where it is the usual one.
pub(crate) fn in_words(
    turns: Vec<(char, MicroBatches)>,
    frozen: u16,
    layers: u16,
) -> PyResult<Option<Turns>> {
    let turns = turns.into_iter().map(|(way, of)| {
        let nanos = match of {
            MicroBatches::One(nano) => vec![nano],
            MicroBatches::Several(nanos) => nanos,
        };
        let (direction, layers) = match (way, frozen) {
            ('F', _) => (Direction::Forward, Which::All),
            ('B', 0) => (Direction::Backward, Which::All),
            ('B', _) => (Direction::Backward, Which::Only((frozen..layers).collect())),
            (other, _) => {
                return Err(refused(format!("turn {other}{nanos:?}; say F or B")));
            }
        };
        Ok(Turn { direction, nanos, layers })
    });
    let turns = turns.collect::<PyResult<Vec<_>>>()?;
    let turns = Turns::new(turns).map_err(refused)?;
    Ok(if turns == Turns::together(NonZeroU16::MIN) { None } else { Some(turns) })
}

/// What a rank holds of a micro-batch: `(document, its rows)`, and `(document, start, end)` in the order of the rank's rows.
pub(crate) type MicroBatch = (Vec<(u32, u32)>, Vec<(u32, u32, u32)>);

/// The same, as a session takes it.
pub(crate) fn lengths_of((documents, stretches): MicroBatch) -> NanoLengths {
    let stretch = |(document, start, end)| Stretch { document: DocumentId(document), start, end };
    NanoLengths { documents, stretches: stretches.into_iter().map(stretch).collect() }
}
