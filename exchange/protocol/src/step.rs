//! What one step asks for: bundles, work, parcels, and who fills the slots.
//!
//! The worker lowers its plan to this; the protocol knows nothing else about it. Constructors check
//! what the machines assume: indices in range, every bundle with work, results going only to trainers
//! whose rows the work needs (so that a result never comes before its reader's landing space).

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{At, Bundle, Parcel, Peer, Phase, Round, ServerId, Slot, TrainerId, Work};

/// Work that moves as a whole from slot to slot.
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
            check_work(work, shape, &parcels)?;
        }
        for (bundle, part) in (0..).map(Bundle).zip(&mut parts) {
            part.sources.sort_unstable();
            part.sources.dedup();
            if part.works.is_empty() {
                return Err(ShapeError::Idle { bundle });
            }
            let used = |parcel: &&Parcel| {
                !part.works.iter().any(|it| works[it.0 as usize].needs.contains(parcel))
            };
            if let Some(&parcel) = part.parcels.iter().find(used) {
                return Err(ShapeError::Unused { parcel });
            }
        }
        Ok(Self { bundles, works, parcels, parts })
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

fn check_work(work: Work, shape: &WorkShape, parcels: &[ParcelShape]) -> Result<(), ShapeError> {
    for (index, &parcel) in shape.needs.iter().enumerate() {
        let foreign = parcels.get(parcel.0 as usize).is_none_or(|it| it.bundle != shape.bundle);
        if foreign || shape.needs[..index].contains(&parcel) {
            return Err(ShapeError::Needs { work, parcel });
        }
    }
    for (index, &(trainer, _)) in shape.results.iter().enumerate() {
        let sends = shape.needs.iter().any(|it| parcels[it.0 as usize].from == trainer);
        if !sends || shape.results[..index].iter().any(|it| it.0 == trainer) {
            return Err(ShapeError::Reader { work, trainer });
        }
    }
    Ok(())
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

/// Who fills a slot.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
pub enum Filler {
    /// A dedicated server.
    Server(ServerId),
    /// The server in a trainer's process.
    InPlace(TrainerId),
    /// A trainer that takes work only when the pool is lost; a round then says `InPlace`.
    Standby(TrainerId),
}

impl Filler {
    /// The process that executes the slot's bundles; none while standing by.
    pub const fn executor(self) -> Option<Peer> {
        match self {
            Self::Server(id) => Some(Peer::Server(id)),
            Self::InPlace(id) => Some(Peer::Trainer(id)),
            Self::Standby(_) => None,
        }
    }
}

/// Who fills each slot; `None`: vacant.
pub type Fillers = Vec<Option<Filler>>;

/// Which slots may execute bundles: filled, and not by a standby.
pub fn alive(fillers: &[Option<Filler>]) -> Vec<bool> {
    fillers.iter().map(|it| it.and_then(Filler::executor).is_some()).collect()
}

/// For every bundle of a shape the slot that executes it; `None` while no slot can.
pub type Assignment = Vec<Option<Slot>>;

/// Who fills the slots in a round, and which slot executes which bundle.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RoundTable {
    /// The step.
    pub step: u64,
    /// The round; 0 is what the header says.
    pub round: Round,
    /// By slot.
    pub fillers: Fillers,
    /// By shape of the step.
    pub assignments: Vec<Assignment>,
}

impl RoundTable {
    /// The process that executes a bundle of a shape.
    pub fn executor(&self, shape: usize, bundle: Bundle) -> Option<Peer> {
        let slot = self.assignments[shape][bundle.0 as usize]?;
        self.fillers[slot.0 as usize].and_then(Filler::executor)
    }
}

/// A step as every process knows it from its header.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Step {
    number: u64,
    trainers: u16,
    digest: u64,
    shapes: Vec<Arc<Shape>>,
    phases: Vec<u16>,
    table: Arc<RoundTable>,
}

impl Step {
    /// `phases` names the shape of every phase, in step order; `table` is round 0.
    ///
    /// # Errors
    ///
    /// When a phase names no shape, a table does not match the shapes, or a trainer is out of range.
    pub fn new(
        trainers: u16,
        digest: u64,
        shapes: Vec<Arc<Shape>>,
        phases: Vec<u16>,
        table: RoundTable,
    ) -> Result<Self, StepError> {
        let number = table.step;
        if phases.is_empty() {
            return Err(StepError::Empty { step: number });
        }
        if let Some(&shape) = phases.iter().find(|&&it| usize::from(it) >= shapes.len()) {
            return Err(StepError::NoShape { step: number, shape });
        }
        for shape in &shapes {
            if let Some(it) = shape.parcels.iter().find(|it| it.from.0 >= trainers) {
                return Err(StepError::NoTrainer { step: number, trainer: it.from });
            }
        }
        let step = Self { number, trainers, digest, shapes, phases, table: Arc::new(table) };
        step.check(&step.table)?;
        Ok(step)
    }

    /// Checks that a table is one of this step.
    ///
    /// # Errors
    ///
    /// When its size or a slot in it is wrong.
    pub fn check(&self, table: &RoundTable) -> Result<(), StepError> {
        let slots = self.table.fillers.len();
        let sizes = table.assignments.iter().map(Vec::len);
        let wrong = table.step != self.number
            || table.fillers.len() != slots
            || !sizes.eq(self.shapes.iter().map(|it| it.bundles.len()))
            || table.assignments.iter().flatten().flatten().any(|it| usize::from(it.0) >= slots)
            || self
                .shapes
                .iter()
                .any(|it| it.bundles.iter().any(|bundle| usize::from(bundle.slot.0) >= slots));
        if wrong { Err(StepError::Table { step: self.number, round: table.round }) } else { Ok(()) }
    }

    /// Which step.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// How many trainers.
    pub fn trainers(&self) -> u16 {
        self.trainers
    }

    /// Digest of the plan that it was lowered from.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Round 0.
    pub fn table(&self) -> &Arc<RoundTable> {
        &self.table
    }

    /// How many phases.
    pub fn phases(&self) -> u32 {
        self.phases.len() as u32
    }

    /// The last phase.
    pub fn last(&self) -> At {
        At::new(self.number, self.phases() - 1)
    }

    /// Index of a phase's shape.
    pub fn shape_index(&self, phase: Phase) -> usize {
        usize::from(self.phases[phase.0 as usize])
    }

    /// A phase's shape.
    pub fn shape(&self, phase: Phase) -> &Arc<Shape> {
        &self.shapes[self.shape_index(phase)]
    }

    /// All shapes.
    pub fn shapes(&self) -> &[Arc<Shape>] {
        &self.shapes
    }
}

/// Why a step is refused.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum StepError {
    /// No phase.
    #[error("step {step} has no phase")]
    Empty {
        /// The step.
        step: u64,
    },
    /// A phase names a shape that is not there.
    #[error("step {step} names shape {shape}, which it does not have")]
    NoShape {
        /// The step.
        step: u64,
        /// The shape.
        shape: u16,
    },
    /// A parcel comes from a trainer that is not there.
    #[error("step {step} pulls from trainer {}, which the job does not have", trainer.0)]
    NoTrainer {
        /// The step.
        step: u64,
        /// The trainer.
        trainer: TrainerId,
    },
    /// A table of other slots, shapes or another step.
    #[error("the table of round {} does not match step {step}", round.0)]
    Table {
        /// The step.
        step: u64,
        /// The round.
        round: Round,
    },
}
