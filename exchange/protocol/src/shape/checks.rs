//! Whether works name what they may, and why a shape is refused.
//!
//! In: works, one after the other. Out: the first that names a parcel of another bundle, a trainer that sends nothing, or one of
//! these twice.
//!
//! Invariant: a check takes as long as what the work names, whatever else the shape has.

use super::{ParcelShape, WorkOf, trainers};
use crate::{Bundle, Parcel, TrainerId, Work};

/// Checks one work after the other; each takes as long as what it names.
pub(super) struct Checks {
    /// By parcel: the last work that needs it.
    needed: Vec<Option<Work>>,
    /// By trainer: the last work that needs rows of it, and the last that has results for it.
    sends: Vec<Option<Work>>,
    reads: Vec<Option<Work>>,
}

impl Checks {
    pub(super) fn new(parcels: &[ParcelShape]) -> Self {
        let trainers = trainers(parcels);
        Self {
            needed: vec![None; parcels.len()],
            sends: vec![None; trainers],
            reads: vec![None; trainers],
        }
    }

    pub(super) fn work(
        &mut self,
        work: Work,
        shape: WorkOf<'_>,
        parcels: &[ParcelShape],
    ) -> Result<(), ShapeError> {
        for &parcel in shape.needs {
            let own = parcels.get(parcel.0 as usize).filter(|it| it.bundle == shape.bundle);
            let Some(own) = own else { return Err(ShapeError::Needs { work, parcel }) };
            if self.needed[parcel.0 as usize].replace(work) == Some(work) {
                return Err(ShapeError::Needs { work, parcel });
            }
            self.sends[usize::from(own.from.0)] = Some(work);
        }
        for &(trainer, _) in shape.results {
            let index = usize::from(trainer.0);
            let sends = self.sends.get(index).is_some_and(|it| *it == Some(work));
            if !sends || self.reads[index].replace(work) == Some(work) {
                return Err(ShapeError::Reader { work, trainer });
            }
        }
        Ok(())
    }

    pub(super) fn is_needed(&self, parcel: Parcel) -> bool {
        self.needed[parcel.0 as usize].is_some()
    }
}

/// Why a shape is refused.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ShapeError {
    /// A parcel of no bundle.
    #[error("parcel {} names bundle {}, which the shape does not have", parcel.0, bundle.0)]
    ParcelBundle {
        /// The parcel.
        parcel: Parcel,
        /// What it names.
        bundle: Bundle,
    },
    /// Work of no bundle.
    #[error("work {} names bundle {}, which the shape does not have", work.0, bundle.0)]
    WorkBundle {
        /// The work.
        work: Work,
        /// What it names.
        bundle: Bundle,
    },
    /// Work that needs a parcel of another bundle, or one twice.
    #[error("work {} needs parcel {}, which is not its bundle's or is named twice", work.0, parcel.0)]
    Needs {
        /// The work.
        work: Work,
        /// The parcel.
        parcel: Parcel,
    },
    /// Results for a trainer that sends nothing to the work, or twice.
    #[error("work {} has results for trainer {}, which sends it no rows or is named twice", work.0, trainer.0)]
    Reader {
        /// The work.
        work: Work,
        /// The trainer.
        trainer: TrainerId,
    },
    /// A bundle without work.
    #[error("bundle {} has no work; leave it out", bundle.0)]
    Idle {
        /// The bundle.
        bundle: Bundle,
    },
    /// A parcel that no work reads.
    #[error("parcel {} is needed by no work; leave it out", parcel.0)]
    Unused {
        /// The parcel.
        parcel: Parcel,
    },
}
