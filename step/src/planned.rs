//! A step's header turned into plans, transfer lists and protocol shapes.
//!
//! In: a [`Header`]. Out: a [`PlannedStep`], the same at every worker, and after a round the
//! assignments of bundles to the slots that are alive.
//!
//! Pure but for the time it takes. Invariant: [`PlannedStep::digest`] is equal at two workers exactly
//! if they made the same plans from the same header.

pub(crate) mod plans;

use std::sync::Arc;

use cadre_crds::Wire;
use cadre_planner::{Assignment, BundleId, Plan, Problem, RankId, reassign};
use cadre_protocol::{
    Bundle, Filler, Fillers, Phase, Round, RoundTable, ServerId, Shape, ShapeError, Slot, Step,
    StepError, TrainerId,
};
use xxhash_rust::xxh3::xxh3_64;

use crate::header::{Header, Member};
use crate::layers::Kind;
use crate::lowering::Lists;
use crate::phases::{Direction, PhaseAt, PhaseOrder};
use crate::turns;

pub use self::plans::{TooManyPlans, check_plans, needed, plans};

/// A nano-batch in all layers of one kind.
#[derive(Clone, Debug)]
pub struct NanoPlan {
    /// The problem that was planned.
    pub problem: Arc<Problem>,
    /// The plan: tasks to slots.
    pub plan: Arc<Plan>,
    /// Bytes that travel for the plan.
    pub lists: Lists,
    forward: Arc<Shape>,
    backward: Arc<Shape>,
    /// Of the plan. To make it takes as long as the plan has tasks.
    digest: u64,
    /// By slot: number of works, forward and backward.
    works: Vec<[usize; 2]>,
}

/// A step, ready to run.
#[derive(Clone, Debug)]
pub struct PlannedStep {
    /// The header that the step was planned from.
    pub header: Arc<Header>,
    /// Numbers its phases.
    pub order: PhaseOrder,
    /// Plans, by nano-batch and then by kind of layers. Each is made once, and serves all layers of its kind. Plans that no phase
    /// runs are left out.
    pub plans: Vec<NanoPlan>,
    /// Digest of header and plans.
    pub digest: u64,
    /// Indices in `plans`, by nano-batch and then by kind of layers.
    numbers: Vec<Option<usize>>,
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
    /// Turns that do not fit its layers and nano-batches.
    #[error("step {step}: {source}")]
    Turns {
        /// The step.
        step: u64,
        /// What is wrong.
        source: turns::Error,
    },
    /// The header has costs for more or fewer kinds of layers than it lists.
    #[error(
        "step {step}: its header has {costs} costs for {kinds} kinds of layers, one for each; take it from the conductor of this build, or a log as it was written"
    )]
    Costs {
        /// The step.
        step: u64,
        /// Costs in the header.
        costs: usize,
        /// Kinds of layers in the header.
        kinds: usize,
    },
    /// The transfer lists contradict themselves: a bug of the lowering.
    #[error(transparent)]
    Lists(#[from] ShapeError),
}

impl Error {
    /// The reason, and where memory is set or links are told if that is what a plan lacks.
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
        if matches!(source, Reason::OutOfReach { .. } | Reason::CannotReach { .. }) {
            return format!(
                "{self} (who reaches whom: unreachable in the file of --profile or spec.attention.profile)"
            );
        }
        if !lacks_memory {
            return self.to_string();
        }
        format!(
            "{self} (memory of a trainer: --memory-mib, or spec.attention.inPlaceMemoryMebibytes; of a server: --memory-mib of `cadre serve`)"
        )
    }
}

impl PlannedStep {
    /// Plans every nano-batch of a step, once for each kind of layers.
    ///
    /// # Errors
    ///
    /// Turns of other layers or nano-batches, costs of other kinds. The planner's: a document that fits no server, no slot.
    pub fn new(header: Arc<Header>) -> Result<Self, Error> {
        let (layers, nanos) = (header.layers.count(), header.nanos.len());
        let order = PhaseOrder::new(&header.turns, layers, nanos)
            .map_err(|source| Error::Turns { step: header.step, source })?;
        let (costs, kinds) = (header.costs.len(), header.layers.kinds().len());
        if costs != kinds {
            return Err(Error::Costs { step: header.step, costs, kinds });
        }
        let made = plans(&header).map_err(|source| Error::Plan { step: header.step, source })?;
        let made = made.into_iter().map(|(problem, plan)| NanoPlan::new(problem, plan));
        let plans = made.collect::<Result<Vec<_>, Error>>()?;
        let mut digest = header.digest().to_le_bytes().to_vec();
        for nano in &plans {
            digest.extend(nano.digest.to_le_bytes());
        }
        let mut next = 0..plans.len();
        let numbers =
            plans::has_phases(&header).into_iter().map(|it| if it { next.next() } else { None });
        let numbers = numbers.collect();
        Ok(Self { header, order, plans, digest: xxh3_64(&digest), numbers })
    }

    /// Digest of the plans alone, and of what each was made from: equal for two steps that plan the same work alike.
    pub fn plans_digest(&self) -> u64 {
        digest_of(self.plans.iter().map(|it| it.digest))
    }

    /// Which of [`Self::plans`] a phase runs: that of its nano-batch and of its layer's kind.
    ///
    /// # Panics
    ///
    /// The step has no such phase.
    pub fn plan_index(&self, at: PhaseAt) -> usize {
        let layers = &self.header.layers;
        let number = self.numbers[at.nano * layers.kinds().len() + layers.number_of(at.layer)];
        number.expect("what a phase runs is planned")
    }

    /// How many phases run each of [`Self::plans`].
    pub fn phases_of_plans(&self) -> Vec<u32> {
        let mut phases = vec![0; self.plans.len()];
        for at in self.order.iter() {
            phases[self.plan_index(at)] += 1;
        }
        phases
    }

    /// Whether a rank has rows in a nano-batch. A rank without any makes no call for its phases.
    pub fn has_rows(&self, nano: usize, rank: u16) -> bool {
        self.header.nanos[nano].rank_rows(RankId(rank.into())) > 0
    }

    /// The kind of the layer of a phase.
    pub fn kind_of(&self, phase: Phase) -> Kind {
        self.header.layers.kind_of(self.order.at(phase).layer)
    }

    /// The plan and direction of a phase.
    pub fn nano_of(&self, phase: Phase) -> (&NanoPlan, Direction) {
        let at = self.order.at(phase);
        (&self.plans[self.plan_index(at)], at.direction)
    }

    /// The bundle that a work unit of a phase belongs to.
    pub fn bundle_of(&self, phase: Phase, work: u32) -> BundleId {
        let (nano, direction) = self.nano_of(phase);
        match direction {
            Direction::Forward => nano.plan.tasks()[work as usize].bundle,
            Direction::Backward => BundleId(work),
        }
    }

    /// What the protocol machines begin with. Shapes come by plan, forward then backward.
    ///
    /// # Errors
    ///
    /// The protocol refuses the lists: a bug of the lowering.
    pub fn protocol_step(&self, assignments: &[Assignment]) -> Result<Step, StepError> {
        let shapes = self.plans.iter().flat_map(|it| [&it.forward, &it.backward]).map(Arc::clone);
        let phases = self.order.iter().map(|at| {
            let shape = 2 * self.plan_index(at) + usize::from(at.direction == Direction::Backward);
            shape as u16
        });
        let fillers = self.header.fillers.iter().map(|it| it.as_ref().map(filler)).collect();
        let trainers = self.header.nanos.first().map_or(0, |it| it.ranks() as u16);
        let table = self.table(Round(0), fillers, assignments);
        Step::new(trainers, self.digest, shapes.collect(), phases.collect(), table)
    }

    /// The table of a round, as the protocol wants it.
    pub fn table(&self, round: Round, fillers: Fillers, assignments: &[Assignment]) -> RoundTable {
        let by_shape = assignments.iter().zip(&self.plans).flat_map(|(assignment, nano)| {
            let bundles = 0..nano.plan.bundles().len() as u32;
            let slot = |it| assignment.executor(BundleId(it)).map(|slot| Slot(slot.0 as u16));
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
        self.plans
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

    /// Works of a phase that are planned for the slots that this one fills by the header.
    pub fn works_of(&self, phase: Phase, executor: Filler) -> usize {
        let (nano, direction) = self.nano_of(phase);
        let backward = usize::from(direction == Direction::Backward);
        let fills = |it: &Option<Member>| it.as_ref().map(filler) == Some(executor);
        let slots = self.header.fillers.iter().zip(&nano.works);
        slots.filter(|it| fills(it.0)).map(|it| it.1[backward]).sum()
    }

    /// The slot that a bundle was planned for.
    pub fn slot_of(&self, phase: Phase, bundle: Bundle) -> Slot {
        Slot(self.nano_of(phase).0.plan.bundles()[bundle.0 as usize].slot.0 as u16)
    }
}

/// Digest of a step's plans, by nano-batch and then by kind of layers.
pub fn plans_digest<'a>(plans: impl IntoIterator<Item = &'a Plan>) -> u64 {
    digest_of(plans.into_iter().map(Plan::digest))
}

fn digest_of(plans: impl Iterator<Item = u64>) -> u64 {
    let bytes: Vec<u8> = plans.flat_map(u64::to_le_bytes).collect();
    xxh3_64(&bytes)
}

impl NanoPlan {
    fn new(problem: Problem, plan: Plan) -> Result<Self, Error> {
        let (problem, plan) = (Arc::new(problem), Arc::new(plan));
        let lists = Lists::new(&problem, &plan);
        let [forward, backward] = lists.shapes()?.map(Arc::new);
        let mut works = vec![[0; 2]; problem.slots.len()];
        for bundle in plan.bundles() {
            let [forward, backward] = &mut works[bundle.slot.0 as usize];
            *forward += bundle.tasks.len();
            *backward += 1;
        }
        let digest = plan.digest();
        Ok(Self { problem, plan, lists, forward, backward, digest, works })
    }

    /// Dimension of a head. Costs of a plan are in pairs of a query and a key of its own dimension: those of two plans are compared
    /// by this many times their pairs.
    pub fn dim(&self) -> u16 {
        self.problem.heads.dim
    }

    /// What the protocol runs on in a direction.
    pub fn shape(&self, direction: Direction) -> &Shape {
        match direction {
            Direction::Forward => &self.forward,
            Direction::Backward => &self.backward,
        }
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

#[cfg(test)]
mod tests;
