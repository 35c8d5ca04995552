//! Lowers a plan to transfer lists: which bytes travel from whom to where.
//!
//! In: a problem and its plan. Out: for every bundle the rows that its server pulls
//! ([`Inputs`]), for every trainer the places of results ([`Lists::forward_result`],
//! [`Lists::backward_result`]), and the shapes that the protocol runs on.
//!
//! It moves nothing and knows no peers. Invariant: server and trainer compute the same lists from the
//! same plan, so an offset is never sent; every byte travels once for each bundle that needs it.
//!
//! Rows lie head by head, at trainers, in landings and in results ([`HeadRows`]). A bundle's landing, rows of its KV-head group
//! only:
//! ```text
//! forward   | Q of its tasks | K of its keys | V of its keys |
//! backward  | Q | K | V | dO | LSE (f32) | Δ (f32) |
//! ```

mod head_rows;
mod inputs;
mod pieces;

use std::collections::BTreeSet;
use std::ops::Range;

use cadre_planner::{BundleId, Plan, Problem, RankId, Task};
use cadre_protocol::Piece;
use cadre_protocol::{
    Bundle, BundleShape, Parcel, ParcelShape, Shape, ShapeError, Slot, TrainerId, WorkShape,
};

use self::inputs::inputs;
use self::pieces::{Strip, backward_bytes, carry, forward_bytes, row_bytes};
use crate::phases::Direction;

pub use self::head_rows::{HeadRows, Stretches};
pub use self::inputs::{Areas, Inputs, Source};

/// A tensor that travels. Its numbers, by row:
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
#[repr(u32)]
pub enum Tensor {
    /// Queries, wire type, `[query heads, dim]`.
    Q,
    /// Keys, wire type, `[KV heads, dim]`.
    K,
    /// Values, as keys.
    V,
    /// Gradient of O, as queries.
    DOut,
    /// Log-sum-exp, f32, `[query heads]`.
    Lse,
    /// Row sums of dO ∘ O, as LSE.
    Delta,
    /// Results of a task, as queries.
    O,
    /// Log-sum-exp of a task, f32.
    OLse,
    /// Gradient of Q of a bundle's query rows, wire type.
    DQ,
    /// One part of the gradient of K, f32, of a bundle's keys.
    DK,
    /// One part of the gradient of V, f32, of a bundle's keys.
    DV,
}

/// Transfer lists of one plan.
#[derive(Clone, Debug)]
pub struct Lists {
    stretches: Stretches,
    bundles: Vec<BundleLists>,
    /// Row of the bundle's query rows at which a task begins, by task.
    task_base: Vec<u32>,
    /// First parcel of each bundle, in both directions.
    parcel_base: Vec<u32>,
    /// The bundle of each parcel.
    bundle_of: Vec<BundleId>,
}

#[derive(Clone, Debug)]
struct BundleLists {
    query_rows: u32,
    forward: Inputs,
    backward: Inputs,
}

impl Lists {
    /// Lowers `plan`.
    pub fn new(problem: &Problem, plan: &Plan) -> Self {
        let (bundles, tasks) = (plan.bundles().len(), plan.tasks().len());
        let mut lists = Self {
            stretches: Stretches::new(&problem.layout, problem.heads.kv),
            bundles: Vec::with_capacity(bundles),
            task_base: Vec::with_capacity(tasks),
            parcel_base: Vec::with_capacity(bundles),
            bundle_of: Vec::with_capacity(bundles),
        };
        for index in (0..plan.bundles().len() as u32).map(BundleId) {
            let mut rows = 0;
            for task in plan.tasks_of(index) {
                lists.task_base.push(rows);
                rows += task.rows.end - task.rows.start;
            }
            let of = (problem, &lists.stretches);
            let forward = inputs(of, plan, index, rows, Direction::Forward);
            let backward = inputs(of, plan, index, rows, Direction::Backward);
            lists.parcel_base.push(lists.bundle_of.len() as u32);
            lists.bundle_of.extend(forward.sources.iter().map(|_| index));
            lists.bundles.push(BundleLists { query_rows: rows, forward, backward });
        }
        lists
    }

    /// How the rows of each rank lie.
    pub fn stretches(&self) -> &Stretches {
        &self.stretches
    }

    /// What a bundle reads.
    pub fn inputs(&self, bundle: BundleId, direction: Direction) -> &Inputs {
        let lists = &self.bundles[bundle.0 as usize];
        match direction {
            Direction::Forward => &lists.forward,
            Direction::Backward => &lists.backward,
        }
    }

    /// Query rows of a bundle, all tasks together.
    pub fn query_rows(&self, bundle: BundleId) -> u32 {
        self.bundles[bundle.0 as usize].query_rows
    }

    /// Where a task's rows begin among its bundle's query rows.
    pub fn task_base(&self, task: usize) -> u32 {
        self.task_base[task]
    }

    /// The source that a parcel stands for, with its bundle.
    pub fn parcel(&self, parcel: Parcel, direction: Direction) -> (BundleId, &Source) {
        let bundle = self.bundle_of[parcel.0 as usize];
        let inputs = self.inputs(bundle, direction);
        let source = &inputs.sources[(parcel.0 - self.parcel_base[bundle.0 as usize]) as usize];
        (bundle, source)
    }

    /// Parcels of a bundle.
    pub fn parcels_of(&self, bundle: BundleId) -> Range<u32> {
        let first = self.parcel_base[bundle.0 as usize];
        first..first + self.bundles[bundle.0 as usize].forward.sources.len() as u32
    }

    /// Pieces of a task's O and LSE that belong to `rank`: from the server's result to the trainer's rows.
    pub fn forward_result(
        &self,
        problem: &Problem,
        plan: &Plan,
        task: usize,
        rank: RankId,
    ) -> (Vec<Piece>, Vec<Piece>) {
        let task = &plan.tasks()[task];
        let (rows, kv_heads) = (task.rows.end - task.rows.start, &task.kv_heads);
        let (mut o_pieces, mut lse_pieces) = (Vec::new(), Vec::new());
        for at in problem.layout.locate(task.document, task.rows.clone()) {
            if at.rank == rank {
                let offset = at.rows.start - task.rows.start;
                let result = HeadRows::in_task(0, rows, kv_heads.len(), offset);
                let home = self.stretches.home(&at, kv_heads);
                let scatter = |pieces, tensor| {
                    let strip = strip(problem, tensor, &at.rows, kv_heads);
                    carry((pieces, 0), strip, result, (home, 0));
                };
                scatter(&mut o_pieces, Tensor::O);
                scatter(&mut lse_pieces, Tensor::OLse);
            }
        }
        (o_pieces, lse_pieces)
    }

    /// Pieces of a bundle's results that belong to `rank`: dQ into the trainer's rows, and its key rows
    /// of dK and dV one after the other into a landing of their own ([`BackwardResult::part`]).
    pub fn backward_result(
        &self,
        problem: &Problem,
        plan: &Plan,
        bundle: BundleId,
        rank: RankId,
    ) -> BackwardResult {
        let whole = &plan.bundles()[bundle.0 as usize];
        let (layout, kv_heads) = (&problem.layout, &whole.kv_heads);
        let mut result = BackwardResult::default();
        for task in whole.tasks.clone() {
            let base = self.task_base[task as usize];
            let task = &plan.tasks()[task as usize];
            let rows = task.rows.end - task.rows.start;
            for at in layout.locate(task.document, task.rows.clone()) {
                if at.rank == rank {
                    let offset = at.rows.start - task.rows.start;
                    let made = HeadRows::in_task(base, rows, kv_heads.len(), offset);
                    let home = self.stretches.home(&at, kv_heads);
                    let strip = strip(problem, Tensor::DQ, &at.rows, kv_heads);
                    carry((&mut result.dq, 0), strip, made, (home, 0));
                }
            }
        }
        let keys = whole.keys.end - whole.keys.start;
        for at in layout.locate(whole.document, whole.keys.clone()) {
            if at.rank == rank {
                let strip = strip(problem, Tensor::DK, &at.rows, kv_heads);
                let first = at.rows.start - whole.keys.start;
                let (made, held) =
                    (HeadRows::in_keys(keys, first), HeadRows::in_keys(strip.rows, 0));
                carry((&mut result.part, 0), strip, made, (held, result.part_bytes));
                result.part_bytes += u64::from(strip.rows) * strip.kv_heads as u64 * strip.bytes;
                result.keys.push(KeyRows { local: at.local, first });
            }
        }
        result
    }

    /// What the protocol runs on.
    ///
    /// # Errors
    ///
    /// None, unless the lists contradict themselves.
    pub fn shape(
        &self,
        problem: &Problem,
        plan: &Plan,
        direction: Direction,
    ) -> Result<Shape, ShapeError> {
        let bundles =
            plan.bundles().iter().map(|it| BundleShape { slot: Slot(it.slot.0) }).collect();
        let mut parcels = Vec::new();
        for index in 0..self.bundles.len() as u32 {
            for source in &self.inputs(BundleId(index), direction).sources {
                let from = TrainerId(source.rank.0);
                parcels.push(ParcelShape { bundle: Bundle(index), from, bytes: source.bytes });
            }
        }
        let indices = (0..self.bundles.len() as u32).map(BundleId);
        let works = match direction {
            Direction::Forward => {
                let works = indices.flat_map(|index| {
                    let tasks = plan.bundles()[index.0 as usize].tasks.clone();
                    let needs = self.needs_of_tasks(problem, plan, index);
                    tasks.zip(needs).map(move |(task, needs)| {
                        let results = forward_bytes(problem, plan, task as usize);
                        WorkShape { bundle: Bundle(index.0), needs, results }
                    })
                });
                works.collect()
            }
            Direction::Backward => {
                let works = indices.map(|index| {
                    let needs = self.parcels_of(index).map(Parcel).collect();
                    let results = backward_bytes(problem, plan, index);
                    WorkShape { bundle: Bundle(index.0), needs, results }
                });
                works.collect()
            }
        };
        Shape::new(bundles, works, parcels)
    }

    /// For each task of a bundle the parcels that hold its rows or keys. A parcel may hold only keys between those of two tasks,
    /// which no task reads: it counts as one of the last task.
    fn needs_of_tasks(&self, problem: &Problem, plan: &Plan, bundle: BundleId) -> Vec<Vec<Parcel>> {
        let sources = &self.inputs(bundle, Direction::Forward).sources;
        let all: BTreeSet<Parcel> = self.parcels_of(bundle).map(Parcel).collect();
        let tasks = plan.tasks_of(bundle);
        if all.len() < 2 {
            return tasks.iter().map(|_| all.iter().copied().collect()).collect();
        }
        let first = self.parcel_base[bundle.0 as usize];
        let parcel = |rank| {
            let source = sources.binary_search_by_key(&rank, |it| it.rank);
            Parcel(first + source.expect("whoever has rows of a bundle is a source") as u32)
        };
        let needs = |task: &Task| {
            let of = |rows: &Range<u32>| problem.layout.locate(task.document, rows.clone());
            of(&task.rows).chain(of(&task.keys)).map(|it| parcel(it.rank)).collect()
        };
        let mut needs: Vec<BTreeSet<Parcel>> = tasks.iter().map(needs).collect();
        let idle: Vec<_> =
            all.into_iter().filter(|it| !needs.iter().any(|needs| needs.contains(it))).collect();
        if let Some(last) = needs.last_mut() {
            last.extend(idle);
        }
        needs.into_iter().map(|it| it.into_iter().collect()).collect()
    }
}

/// Where a bundle's gradients go at one trainer.
#[derive(Clone, Debug, Default)]
pub struct BackwardResult {
    /// From the bundle's dQ to the trainer's rows.
    pub dq: Vec<Piece>,
    /// From the bundle's dK (and, alike, dV) to a landing that holds this trainer's key rows.
    pub part: Vec<Piece>,
    /// Size of that landing, for dK and dV each.
    pub part_bytes: u64,
    /// The trainer's key rows that the landing holds, one stretch after the other, each head by head.
    pub keys: Vec<KeyRows>,
}

/// Key rows of a trainer among those of a bundle.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct KeyRows {
    /// Where they are in the trainer's stream, in rows.
    pub local: Range<u32>,
    /// The first one, counted from the bundle's first key.
    pub first: u32,
}

/// Rows `rows` of `tensor` under `kv_heads`.
fn strip(problem: &Problem, tensor: Tensor, rows: &Range<u32>, kv_heads: &Range<u16>) -> Strip {
    let bytes = row_bytes(problem, tensor);
    Strip { bytes, rows: rows.end - rows.start, kv_heads: kv_heads.len() }
}

#[cfg(test)]
mod tests;
