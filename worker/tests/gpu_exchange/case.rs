//! A nano-batch of two documents on one trainer, with rows drawn by seed, in the memory that a test wants them in.
//!
//! In: a seed. Out: works on rows at home or in landings, and the plan that they are of. The first document's bundle has two tasks
//! with another server's rows between them; of the second one another server has the first head.
//!
//! Invariant: one seed gives the same rows, wherever they lie.

use std::num::NonZeroU16;
use std::sync::Arc;

use cadre_crds::Wire;
use cadre_exchange::Buffer;
use cadre_kernels::device::Stream;
use cadre_kernels::wire::to_bf16;
use cadre_planner::{
    BundleId, Costs, DocumentId, Heads, Links, Mask, Plan, Slot, Stretch, Tolerance,
};
use cadre_step::header::{Header, KvHeads, Member, Placement, ViewNumber};
use cadre_step::layers::{Kind, Layers};
use cadre_step::lowering::{Lists, Source};
use cadre_step::packing::Packing;
use cadre_step::phases::{Direction, PhaseAt};
use cadre_step::planned::PlannedStep;
use cadre_step::turns::Turns;
use cadre_worker::io::rows::tensors;
use cadre_worker::launch::{BundleRows, PhaseRows, Promise, Work};
use cadre_worker::memory::{GpuRows, Memory, OnGpu, Place};
use serde_json::json;

const HEADS: Heads = Heads { query: 4, kv: 2, dim: 64 };
/// Rows of the two documents.
const ROWS: [u32; 2] = [200, 40];
/// Of the layers.
const MASKS: [Mask; 3] = [Mask::Causal, Mask::Window { left: 29 }, Mask::Causal];

/// Layers with a window bound their scores, too.
fn kind(mask: Mask) -> Kind {
    let bound = match mask {
        Mask::Causal | Mask::Full => "",
        Mask::Window { .. } => "2",
    };
    Kind { mask, softcap: bound.parse().ok(), ..Kind::causal(HEADS) }
}

/// See the module.
pub(super) struct Case {
    pub(super) planned: Arc<PlannedStep>,
}

impl Case {
    pub(super) fn new() -> Self {
        let stretch = |document: u32| Stretch {
            document: DocumentId(document),
            start: 0,
            end: ROWS[document as usize],
        };
        let packing = Packing::new(&ROWS, vec![vec![stretch(0), stretch(1)]]).expect("one rank");
        let header = Header {
            step: 3,
            layers: Layers::new(MASKS.map(kind)).expect("three layers"),
            kv_heads: KvHeads::Together,
            wire: Wire::Bf16,
            seed: 0,
            numerics: String::new(),
            placement: Placement::Pool,
            slots: vec![Slot { weight: 100, head_start: 0, home: None, memory: 1 << 30 }],
            costs: vec![Costs::default(); 2],
            tolerance: Tolerance::USUAL,
            links: Links::equal(),
            turns: Turns::together(NonZeroU16::MIN),
            nanos: vec![packing],
            view: ViewNumber::default(),
            fillers: vec![Some(Member::Server {
                index: 0,
                incarnation: 0,
                address: String::new(),
            })],
        };
        let mut planned = PlannedStep::new(Arc::new(header)).expect("one slot");
        for nano in &mut planned.plans {
            let mask = nano.problem.layout.documents()[0].mask;
            // The rows between belong to a slot that is not looked at here, and so does the second document's first head.
            let heads = |document: usize| if document == 0 { 0..2 } else { 1..2 };
            let task = |document: usize, rows: std::ops::Range<u32>| json!({"document": document, "keys": mask.keys(ROWS[document], rows.clone()), "rows": rows, "kv_heads": heads(document), "bundle": document});
            let bundle = |document: usize, tasks: std::ops::Range<u32>| json!({"document": document, "kv_heads": heads(document), "slot": 0, "tasks": tasks, "keys": 0..ROWS[document]});
            let mut plan = serde_json::to_value(&*nano.plan).expect("plain data");
            plan["tasks"] = json!([task(0, 0..70), task(0, 130..200), task(1, 0..40)]);
            plan["bundles"] = json!([bundle(0, 0..2), bundle(1, 2..3)]);
            let plan: Plan = serde_json::from_value(plan).expect("a plan");
            nano.plan = Arc::new(plan);
            nano.lists = Lists::new(&nano.problem, &nano.plan);
        }
        Self { planned: Arc::new(planned) }
    }

    /// A trainer's rows of a phase.
    pub(super) fn rows<P: Place>(place: &P, seed: u32) -> PhaseRows<P::Memory> {
        let rows = ROWS.iter().sum::<u32>() as usize;
        let mut state = seed;
        let mut numbers = |count: usize, low: f32, high: f32| {
            let next = |_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                low + (high - low) * (state >> 8) as f32 / 16_777_216.0
            };
            (0..count).map(next).collect::<Vec<f32>>()
        };
        let [dim, query, kv] = [HEADS.dim, HEADS.query, HEADS.kv].map(usize::from);
        let wire = |values: &[f32]| {
            let mut buffer = Buffer::zeroed(values.len() * 2);
            to_bf16(buffer.bf16s_mut(), values);
            place.hold(buffer).expect("memory")
        };
        let [q, k, v, dout] =
            [query, kv, kv, query].map(|it| wire(&numbers(rows * it * dim, -1.0, 1.0)));
        let [lse, delta] = [(4.0, 5.0), (-1.0, 1.0)].map(|(low, high)| {
            place.hold(Buffer::from(numbers(rows * query, low, high))).expect("memory")
        });
        PhaseRows { q, k, v, gradients: Some([dout, lse, delta]) }
    }

    fn work<M>(
        &self,
        layer: usize,
        direction: Direction,
        work: u32,
        rows: BundleRows<M>,
    ) -> Work<M> {
        let at = PhaseAt { layer, nano: 0, direction };
        let phase = self.planned.order.index(at).expect("every phase comes");
        let planned = Arc::clone(&self.planned);
        Work { planned, phase, work, rows, promise: None }
    }

    /// All works of a phase with their bundles.
    fn works_of(&self, direction: Direction) -> Vec<(u32, BundleId)> {
        let plan = &self.planned.plans[0].plan;
        match direction {
            Direction::Forward => (0..).zip(plan.tasks()).map(|(it, of)| (it, of.bundle)).collect(),
            Direction::Backward => {
                (0..plan.bundles().len() as u32).map(|it| (it, BundleId(it))).collect()
            }
        }
    }

    /// Works on rows as the trainer has them.
    pub(super) fn home<M: Memory>(
        &self,
        layer: usize,
        direction: Direction,
        rows: &PhaseRows<M>,
    ) -> Vec<Work<M>> {
        let home = |(work, _)| self.work(layer, direction, work, BundleRows::Home(rows.clone()));
        self.works_of(direction).into_iter().map(home).collect()
    }

    /// Works on rows in landings that `copies`, a stream, fills; nobody waits for it here.
    pub(super) fn landed(
        &self,
        layer: usize,
        direction: Direction,
        rows: &PhaseRows<GpuRows>,
        (place, copies): (&OnGpu, &Stream),
    ) -> Vec<Work<GpuRows>> {
        let at = PhaseAt { layer, nano: 0, direction };
        let phase = self.planned.order.index(at).expect("every phase comes");
        let (nano, _) = self.planned.nano_of(phase);
        let rooms = place.rooms();
        let mut landings = Vec::new();
        for bundle in (0..nano.plan.bundles().len() as u32).map(BundleId) {
            let inputs = nano.lists.inputs(bundle, direction);
            let mut room = rooms.take(inputs.bytes as u64).expect("memory");
            for (tensor, pieces) in inputs.sources.iter().flat_map(Source::tensors) {
                let (_, memory) = tensors(rows).find(|it| it.0 == tensor).expect("a tensor");
                let piece = |it: &cadre_exchange::Piece| cadre_kernels::device::CopyPiece {
                    from: it.remote,
                    to: it.local,
                    bytes: it.bytes,
                };
                let pieces: Vec<_> = pieces.iter().map(piece).collect();
                room.copy(copies, memory, &pieces).expect("inside both");
            }
            // As if its pulls went on: the room stays the landing's.
            landings.push(room.early());
        }
        let landed = |(work, bundle): (u32, BundleId)| {
            let rows = BundleRows::Landed(landings[bundle.0 as usize].clone());
            self.work(layer, direction, work, rows)
        };
        self.works_of(direction).into_iter().map(landed).collect()
    }
}

/// The same work, behind a promise.
pub(super) fn promised<M: Memory>(work: &Work<M>) -> (Work<M>, Promise) {
    let promise = Promise::default();
    (Work { promise: Some(promise.clone()), ..work.clone() }, promise)
}
