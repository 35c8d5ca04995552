//! One step as every process knows it: its phases, who fills the slots, and who executes what.
//!
//! Constructors check what the machines assume; a table of another step or other slots is refused.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{At, Bundle, Peer, Phase, Round, ServerId, Shape, Slot, TrainerId};

/// Rounds that one step may have.
pub(crate) const MAX_ROUNDS: usize = 64;

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

/// A step that has begun at a worker, with the newest round that it has heard of.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) step: Arc<Step>,
    pub(crate) table: Arc<RoundTable>,
}

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
            if let Some(it) = shape.parcels().iter().find(|it| it.from.0 >= trainers) {
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
            || !sizes.eq(self.shapes.iter().map(|it| it.bundles().len()))
            || table.assignments.iter().flatten().flatten().any(|it| usize::from(it.0) >= slots)
            || self
                .shapes
                .iter()
                .any(|it| it.bundles().iter().any(|bundle| usize::from(bundle.slot.0) >= slots));
        if wrong { Err(StepError::Table { step: self.number, round: table.round }) } else { Ok(()) }
    }

    /// Whether a message may name these fillers for rounds `1..=round`: one table a round, each of all
    /// slots, and not more rounds than a step may have.
    pub fn takes(&self, round: Round, tables: &[Fillers]) -> bool {
        let slots = self.table.fillers.len();
        tables.len() == round.0 as usize
            && tables.len() <= MAX_ROUNDS
            && tables.iter().all(|it| it.len() == slots)
    }

    /// Whether the step has this phase.
    pub fn has(&self, phase: Phase) -> bool {
        phase.0 < self.phases()
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
