//! The order of a step's phases, as Python says it.
//!
//! In: turns of micro-batches, forward (`F`) and backward (`B`). Out: the session's turns. Whether a step can go so, the session says.

use std::num::NonZeroU16;

use cadre_worker::session::{Direction, Turn, Turns, Which};
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
