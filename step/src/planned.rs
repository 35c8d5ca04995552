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
use crate::layers::Kind;
use crate::lowering::Lists;
use crate::packing::Packing;
use crate::phases::{Direction, PhaseAt, PhaseOrder};

/// A nano-batch in all layers of one kind.
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
    /// By nano-batch, then by kind of layers: each is made once, and serves all layers of its kind.
    pub plans: Vec<NanoPlan>,
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
    /// Plans every nano-batch of a step, once for each kind of layers.
    ///
    /// # Errors
    ///
    /// The planner's: a document that fits no server, no slot.
    pub fn new(header: Arc<Header>) -> Result<Self, Error> {
        let mut plans = Vec::new();
        for nano in &header.nanos {
            for kind in header.layers.kinds() {
                plans.push(NanoPlan::new(&header, nano, *kind)?);
            }
        }
        let order = PhaseOrder { layers: header.layers.count().into(), nanos: header.nanos.len() };
        let mut digest = header.digest().to_le_bytes().to_vec();
        for nano in &plans {
            digest.extend(nano.plan.digest().to_le_bytes());
        }
        Ok(Self { header, order, plans, digest: xxh3_64(&digest) })
    }

    /// Which of [`Self::plans`] a phase runs: that of its nano-batch and of its layer's kind.
    pub fn plan_index(&self, at: PhaseAt) -> usize {
        let layers = &self.header.layers;
        at.nano * layers.kinds().len() + layers.number_of(at.layer)
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
        let phases = (0..self.order.count() as u32).map(|phase| {
            let at = self.order.at(Phase(phase));
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

    /// The slot that a bundle was planned for.
    pub fn slot_of(&self, phase: Phase, bundle: Bundle) -> Slot {
        Slot(self.nano_of(phase).0.plan.bundles()[bundle.0 as usize].slot.0)
    }
}

impl NanoPlan {
    fn new(header: &Header, nano: &Packing, kind: Kind) -> Result<Self, Error> {
        let Kind { mask } = kind;
        let problem = Problem {
            layout: nano.layout(mask),
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
        Ok(Self { problem, plan, lists, forward, backward })
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
mod tests {
    use cadre_planner::{DocumentId, Mask, Slot as Place, Stretch};

    use super::*;
    use crate::layers::Layers;

    /// Two nano-batches of one document each, over two trainers and three servers.
    fn header(masks: &[Mask]) -> Header {
        let any: Header = serde_json::from_str(include_str!("../../testing/header.json")).unwrap();
        let nano = |rows: u32| {
            let stretch = |start, end| vec![Stretch { document: DocumentId(0), start, end }];
            Packing::new(&[rows], vec![stretch(0, rows / 2), stretch(rows / 2, rows)]).unwrap()
        };
        let server = |index| Member::Server { index, incarnation: 0, address: String::new() };
        let slot = Place { weight: 100, head_start: 0, home: None, memory: 1 << 30 };
        Header {
            layers: Layers::new(masks.iter().map(|&mask| Kind { mask })).unwrap(),
            nanos: vec![nano(3_000), nano(5_000)],
            slots: vec![slot; 3],
            fillers: (0..3).map(|it| Some(server(it))).collect(),
            ..any
        }
    }

    fn planned(masks: &[Mask]) -> PlannedStep {
        PlannedStep::new(Arc::new(header(masks))).unwrap()
    }

    #[test]
    fn every_phase_has_the_plan_of_its_nano_batch_and_of_its_layers_kind() {
        let near = Mask::Window { left: 99 };
        let masks = [near, Mask::Causal, near, Mask::Full, near];
        let planned = planned(&masks);
        assert_eq!(planned.plans.len(), 2 * 3, "a plan is made once for all layers of a kind");
        let step = planned.protocol_step(&planned.assign(None, &[true; 3]).unwrap()).unwrap();
        for phase in (0..planned.order.count() as u32).map(Phase) {
            let at = planned.order.at(phase);
            let (nano, direction) = planned.nano_of(phase);
            let document = nano.problem.layout.documents()[0];
            assert_eq!((document.mask, direction), (masks[at.layer], at.direction));
            assert_eq!(document.rows, [3_000, 5_000][at.nano]);
            // The machines wait for what this phase's own plan says.
            let shape = nano.lists.shape(&nano.problem, &nano.plan, direction).unwrap();
            assert_eq!(**step.shape(phase), shape, "{at:?}");
            assert_eq!(planned.works(phase), shape.works().len());
        }
    }

    #[test]
    fn the_plans_of_a_kind_are_those_of_a_model_that_has_no_other() {
        let near = Mask::Window { left: 99 };
        let mixed = planned(&[near, Mask::Causal, near]);
        for (kind, mask) in [near, Mask::Causal].into_iter().enumerate() {
            let alone = planned(&[mask; 3]);
            for nano in 0..2 {
                assert_eq!(mixed.plans[2 * nano + kind].plan, alone.plans[nano].plan, "{mask}");
            }
        }
        assert_ne!(mixed.digest, planned(&[Mask::Causal, near, near]).digest);
    }

    #[test]
    fn bundles_of_all_kinds_go_to_survivors() {
        let planned = planned(&[Mask::Window { left: 99 }, Mask::Causal]);
        let alive = [true, false, true];
        let first = planned.assign(None, &[true; 3]).unwrap();
        let moved = planned.assign(Some(&first), &alive).unwrap();
        let table = planned.table(Round(1), vec![None; 3], &moved);
        assert_eq!(table.assignments.len(), 2 * planned.plans.len());
        let lost = Some(Slot(1));
        let before = planned.table(Round(0), vec![None; 3], &first);
        for (index, plan) in planned.plans.iter().enumerate() {
            let shapes = 2 * index..2 * index + 2;
            assert!(before.assignments[shapes.clone()].iter().all(|it| it.contains(&lost)));
            for slots in &table.assignments[shapes] {
                assert_eq!(slots.len(), plan.plan.bundles().len());
                assert!(slots.iter().all(|it| it.is_some() && *it != lost));
            }
        }
    }
}
