//! What one phase asks for: bundles, work and parcels.
//!
//! The worker lowers its plan to this; the protocol knows nothing else about it. The constructor checks
//! what the machines assume: indices in range, every bundle with work, results going only to trainers
//! whose rows the work needs (so that a result never comes before its reader's landing space).

use crate::{Bundle, Parcel, Slot, TrainerId, Work};

/// Tasks of one document and KV-head group; they move as a whole from slot to slot.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BundleShape {
    /// Its slot in the plan, in whose memory it has a planned place.
    pub slot: Slot,
}

/// What a server launches: forward a task, backward a whole bundle.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct WorkShape {
    /// The bundle that it belongs to.
    pub bundle: Bundle,
    /// Parcels of the same bundle that it reads, each once.
    pub needs: Vec<Parcel>,
    /// Bytes of results for each trainer that wants some, each trainer once.
    pub results: Vec<(TrainerId, u64)>,
}

/// Rows that one trainer holds and one bundle needs, pulled in one go.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ParcelShape {
    /// The bundle that needs it.
    pub bundle: Bundle,
    /// The trainer that holds it.
    pub from: TrainerId,
    /// Its size.
    pub bytes: u64,
}

/// What one phase asks for, the same in every layer of a nano-batch and direction.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Shape {
    bundles: Vec<BundleShape>,
    works: Vec<WorkShape>,
    parcels: Vec<ParcelShape>,
    parts: Vec<Parts>,
    /// By parcel: the work that needs it, ascending.
    users: Vec<Vec<Work>>,
    of_trainers: Vec<OfTrainer>,
}

/// What a trainer has to do with a shape, found once: ascending.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
struct OfTrainer {
    /// Bundles that need its rows.
    feeds: Vec<Bundle>,
    /// Its rows, as they are pulled.
    sends: Vec<Parcel>,
    /// Work of which it wants results.
    wants: Vec<Work>,
}

/// A bundle's share of a shape, found once.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Parts {
    pub(crate) works: Vec<Work>,
    pub(crate) parcels: Vec<Parcel>,
    /// Trainers whose rows it needs, ascending.
    pub(crate) sources: Vec<TrainerId>,
    /// Inputs and results together.
    pub(crate) bytes: u64,
}

impl Shape {
    /// Checks and indexes the parts.
    ///
    /// # Errors
    ///
    /// The first part that breaks what the types' docs say.
    pub fn new(
        bundles: Vec<BundleShape>,
        works: Vec<WorkShape>,
        parcels: Vec<ParcelShape>,
    ) -> Result<Self, ShapeError> {
        let mut parts = vec![Parts::default(); bundles.len()];
        let mut checks = Checks::new(&parcels);
        for (parcel, shape) in (0..).map(Parcel).zip(&parcels) {
            let part = parts
                .get_mut(shape.bundle.0 as usize)
                .ok_or(ShapeError::ParcelBundle { parcel, bundle: shape.bundle })?;
            part.parcels.push(parcel);
            part.sources.push(shape.from);
            part.bytes += shape.bytes;
        }
        for (work, shape) in (0..).map(Work).zip(&works) {
            let part = parts
                .get_mut(shape.bundle.0 as usize)
                .ok_or(ShapeError::WorkBundle { work, bundle: shape.bundle })?;
            part.works.push(work);
            part.bytes += shape.results.iter().map(|it| it.1).sum::<u64>();
            checks.work(work, shape, &parcels)?;
        }
        let mut of_trainers = Vec::new();
        for (parcel, shape) in (0..).map(Parcel).zip(&parcels) {
            of(&mut of_trainers, shape.from).sends.push(parcel);
        }
        for (bundle, part) in (0..).map(Bundle).zip(&mut parts) {
            part.sources.sort_unstable();
            part.sources.dedup();
            if part.works.is_empty() {
                return Err(ShapeError::Idle { bundle });
            }
            if let Some(&parcel) = part.parcels.iter().find(|it| !checks.is_needed(**it)) {
                return Err(ShapeError::Unused { parcel });
            }
            for &source in &part.sources {
                of(&mut of_trainers, source).feeds.push(bundle);
            }
        }
        let mut users = vec![Vec::new(); parcels.len()];
        for (work, shape) in (0..).map(Work).zip(&works) {
            for &(reader, _) in &shape.results {
                of(&mut of_trainers, reader).wants.push(work);
            }
            for parcel in &shape.needs {
                users[parcel.0 as usize].push(work);
            }
        }
        Ok(Self { bundles, works, parcels, parts, users, of_trainers })
    }

    /// Bundles that need a trainer's rows, ascending.
    pub fn feeds(&self, trainer: TrainerId) -> &[Bundle] {
        self.of_trainers.get(usize::from(trainer.0)).map_or(&[], |it| &it.feeds)
    }

    /// Parcels of a trainer's rows, ascending.
    pub(crate) fn sends(&self, trainer: TrainerId) -> &[Parcel] {
        self.of_trainers.get(usize::from(trainer.0)).map_or(&[], |it| &it.sends)
    }

    /// Work that needs a parcel, ascending.
    pub(crate) fn users(&self, parcel: Parcel) -> &[Work] {
        &self.users[parcel.0 as usize]
    }

    /// Work of which a trainer wants results, ascending.
    pub fn wants(&self, trainer: TrainerId) -> &[Work] {
        self.of_trainers.get(usize::from(trainer.0)).map_or(&[], |it| &it.wants)
    }

    /// The bundles, by [`Bundle`].
    pub fn bundles(&self) -> &[BundleShape] {
        &self.bundles
    }

    /// The work, by [`Work`].
    pub fn works(&self) -> &[WorkShape] {
        &self.works
    }

    /// The parcels, by [`Parcel`].
    pub fn parcels(&self) -> &[ParcelShape] {
        &self.parcels
    }

    /// Bytes of a bundle's inputs and results together.
    pub fn bundle_bytes(&self, bundle: Bundle) -> u64 {
        self.parts(bundle).bytes
    }

    pub(crate) fn parts(&self, bundle: Bundle) -> &Parts {
        &self.parts[bundle.0 as usize]
    }

    pub(crate) fn work(&self, work: Work) -> &WorkShape {
        &self.works[work.0 as usize]
    }

    pub(crate) fn parcel(&self, parcel: Parcel) -> &ParcelShape {
        &self.parcels[parcel.0 as usize]
    }

    pub(crate) fn bundle_ids(&self) -> impl Iterator<Item = Bundle> + use<> {
        (0..self.bundles.len() as u32).map(Bundle)
    }
}

fn of(all: &mut Vec<OfTrainer>, trainer: TrainerId) -> &mut OfTrainer {
    let index = usize::from(trainer.0);
    if all.len() <= index {
        all.resize_with(index + 1, OfTrainer::default);
    }
    &mut all[index]
}

/// Checks one work after the other; each takes as long as what it names.
struct Checks {
    /// By parcel: the last work that needs it.
    needed: Vec<Option<Work>>,
    /// By trainer: the last work that needs rows of it, and the last that has results for it.
    sends: Vec<Option<Work>>,
    reads: Vec<Option<Work>>,
}

impl Checks {
    fn new(parcels: &[ParcelShape]) -> Self {
        let trainers = parcels.iter().map(|it| usize::from(it.from.0) + 1).max().unwrap_or(0);
        Self {
            needed: vec![None; parcels.len()],
            sends: vec![None; trainers],
            reads: vec![None; trainers],
        }
    }

    fn work(
        &mut self,
        work: Work,
        shape: &WorkShape,
        parcels: &[ParcelShape],
    ) -> Result<(), ShapeError> {
        for &parcel in &shape.needs {
            let own = parcels.get(parcel.0 as usize).filter(|it| it.bundle == shape.bundle);
            let Some(own) = own else { return Err(ShapeError::Needs { work, parcel }) };
            if self.needed[parcel.0 as usize].replace(work) == Some(work) {
                return Err(ShapeError::Needs { work, parcel });
            }
            self.sends[usize::from(own.from.0)] = Some(work);
        }
        for &(trainer, _) in &shape.results {
            let index = usize::from(trainer.0);
            let sends = self.sends.get(index).is_some_and(|it| *it == Some(work));
            if !sends || self.reads[index].replace(work) == Some(work) {
                return Err(ShapeError::Reader { work, trainer });
            }
        }
        Ok(())
    }

    fn is_needed(&self, parcel: Parcel) -> bool {
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
