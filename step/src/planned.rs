//! A step's header turned into plans, transfer lists and protocol shapes.
//!
//! In: a [`Header`]. Out: a [`PlannedStep`], the same at every worker, and after a round the
//! assignments of bundles to the slots that are alive.
//!
//! Pure but for the time it takes. Invariant: [`PlannedStep::digest`] is equal at two workers exactly
//! if they made the same plans from the same header.

use std::sync::Arc;

use cadre_crds::Wire;
use cadre_planner::{Assignment, BundleId, Links, Plan, Problem, plan, plan_at_home, reassign};
use cadre_protocol::{
    Bundle, Filler, Fillers, Phase, Round, RoundTable, ServerId, Shape, ShapeError, Slot, Step,
    StepError, TrainerId,
};
use xxhash_rust::xxh3::xxh3_64;

use crate::header::{Header, Member, Placement};
use crate::lowering::Lists;
use crate::phases::{Direction, PhaseOrder};

/// A nano-batch of a step.
#[derive(Clone, Debug)]
pub struct NanoPlan {
    /// What was planned.
    pub problem: Problem,
    /// Who computes what.
    pub plan: Plan,
    /// Which bytes travel for it.
    pub lists: Lists,
    forward: Arc<Shape>,
    backward: Arc<Shape>,
}

/// A step, ready to run.
#[derive(Clone, Debug)]
pub struct PlannedStep {
    /// What it was planned from.
    pub header: Arc<Header>,
    /// Numbers its phases.
    pub order: PhaseOrder,
    /// By nano-batch.
    pub nanos: Vec<NanoPlan>,
    /// Of header and plans.
    pub digest: u64,
}

/// Why a header cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no plan.
    #[error("step {step} cannot be planned: {source}")]
    Plan {
        /// The step.
        step: u64,
        /// The planner's reason.
        source: cadre_planner::Error,
    },
    /// The transfer lists contradict themselves: a bug of the lowering.
    #[error(transparent)]
    Lists(#[from] ShapeError),
}

impl Error {
    /// The reason, and where memory is set if that is what a plan lacks.
    pub fn with_remedy(&self) -> String {
        use cadre_planner::Error as Reason;
        let Self::Plan { source, .. } = self else { return self.to_string() };
        let lacks_memory = matches!(
            source,
            Reason::DocumentTooLarge { .. }
                | Reason::NoRoom { .. }
                | Reason::SlotFull { .. }
                | Reason::BundleFitsNowhere { .. }
        );
        if !lacks_memory {
            return self.to_string();
        }
        format!(
            "{self} (memory of a trainer: --memory-mib, or spec.attention.inPlaceMemoryMebibytes; of a server: --memory-mib of `cadre serve`)"
        )
    }
}

impl PlannedStep {
    /// Plans every nano-batch of a step.
    ///
    /// # Errors
    ///
    /// The planner's: a document that fits no server, a layout with a hole, no slot.
    pub fn new(header: Arc<Header>) -> Result<Self, Error> {
        let mut nanos = Vec::new();
        for layout in &header.nanos {
            let problem = Problem {
                layout: layout.clone(),
                heads: header.heads,
                element_bytes: wire_bytes(header.wire),
                // A trainer is one processor, so heads could part; but a piece of the exchange is one
                // range of bytes, and a group of heads would be a piece a row.
                lanes: header.heads.kv,
                slots: header.slots.clone(),
                costs: header.costs,
                links: Links::equal(),
            };
            let plan = match header.placement {
                Placement::Pool => plan(&problem),
                Placement::Local => plan_at_home(&problem),
            }
            .map_err(|source| Error::Plan { step: header.step, source })?;
            let lists = Lists::new(&problem, &plan);
            let forward = Arc::new(lists.shape(&problem, &plan, Direction::Forward)?);
            let backward = Arc::new(lists.shape(&problem, &plan, Direction::Backward)?);
            nanos.push(NanoPlan { problem, plan, lists, forward, backward });
        }
        let order = PhaseOrder { layers: header.layers.into(), nanos: nanos.len() };
        let mut digest = header.digest().to_le_bytes().to_vec();
        for nano in &nanos {
            digest.extend(nano.plan.digest().to_le_bytes());
        }
        Ok(Self { header, order, nanos, digest: xxh3_64(&digest) })
    }

    /// The nano-batch and direction of a phase.
    pub fn nano_of(&self, phase: Phase) -> (&NanoPlan, Direction) {
        let at = self.order.at(phase);
        (&self.nanos[at.nano], at.direction)
    }

    /// The bundle that a work unit of a phase belongs to.
    pub fn bundle_of(&self, phase: Phase, work: u32) -> BundleId {
        let (nano, direction) = self.nano_of(phase);
        match direction {
            Direction::Forward => nano.plan.tasks()[work as usize].bundle,
            Direction::Backward => BundleId(work),
        }
    }

    /// What the protocol machines begin with. Shapes come by nano-batch, forward then backward.
    ///
    /// # Errors
    ///
    /// The protocol refuses the lists: a bug of the lowering.
    pub fn protocol_step(&self, assignments: &[Assignment]) -> Result<Step, StepError> {
        let shapes = self.nanos.iter().flat_map(|it| [&it.forward, &it.backward]).map(Arc::clone);
        let phases = (0..self.order.count() as u32).map(|phase| {
            let at = self.order.at(Phase(phase));
            (2 * at.nano + usize::from(at.direction == Direction::Backward)) as u16
        });
        let fillers = self.header.fillers.iter().map(|it| it.as_ref().map(filler)).collect();
        let trainers = self.header.nanos.first().map_or(0, |it| it.ranks().len() as u16);
        let table = self.table(Round(0), fillers, assignments);
        Step::new(trainers, self.digest, shapes.collect(), phases.collect(), table)
    }

    /// The table of a round, as the protocol wants it.
    pub fn table(&self, round: Round, fillers: Fillers, assignments: &[Assignment]) -> RoundTable {
        let by_shape = assignments.iter().zip(&self.nanos).flat_map(|(assignment, nano)| {
            let bundles = 0..nano.plan.bundles().len() as u32;
            let slot = |it| assignment.executor(BundleId(it)).map(|slot| Slot(slot.0));
            let slots: Vec<_> = bundles.map(slot).collect();
            [slots.clone(), slots]
        });
        RoundTable { step: self.header.step, round, fillers, assignments: by_shape.collect() }
    }

    /// Moves the bundles whose executor is not alive; from `current`, or from the plan itself.
    ///
    /// # Errors
    ///
    /// A bundle that no survivor can hold.
    pub fn assign(
        &self,
        current: Option<&[Assignment]>,
        alive: &[bool],
    ) -> Result<Vec<Assignment>, cadre_planner::Error> {
        let planned = |nano: &NanoPlan| Assignment::planned(&nano.plan);
        self.nanos
            .iter()
            .enumerate()
            .map(|(index, nano)| {
                let current =
                    current.map_or_else(|| planned(nano), |assignments| assignments[index].clone());
                reassign(&nano.problem, &nano.plan, &current, alive)
            })
            .collect()
    }

    /// Works of a phase.
    pub fn works(&self, phase: Phase) -> usize {
        let (nano, direction) = self.nano_of(phase);
        match direction {
            Direction::Forward => nano.plan.tasks().len(),
            Direction::Backward => nano.plan.bundles().len(),
        }
    }

    /// The slot that a bundle was planned for.
    pub fn slot_of(&self, phase: Phase, bundle: Bundle) -> Slot {
        Slot(self.nano_of(phase).0.plan.bundles()[bundle.0 as usize].slot.0)
    }
}

/// Bytes of an element of wire type.
pub fn wire_bytes(wire: Wire) -> u8 {
    match wire {
        Wire::F32 => 4,
        Wire::Bf16 => 2,
    }
}

/// A header's member, as the protocol names it.
pub fn filler(member: &Member) -> Filler {
    match member {
        Member::Server { index, incarnation, .. } => {
            Filler::Server(ServerId { index: *index, incarnation: *incarnation })
        }
        Member::InPlace(rank) => Filler::InPlace(TrainerId(*rank)),
        Member::Standby(rank) => Filler::Standby(TrainerId(*rank)),
    }
}
