//! Lowers a plan to transfer lists: which bytes travel from whom to where.
//!
//! In: a problem and its plan. Out: for a bundle the rows that its server pulls
//! ([`Inputs`]), for a trainer the places of results ([`Lists::forward_result`],
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
mod holdings;
mod inputs;
mod pieces;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use cadre_planner::{BundleId, Plan, Problem, RankId, Task};
use cadre_protocol::Piece;
use cadre_protocol::{
    Bundle, BundleShape, Groups, Parcel, ParcelShape, Shape, ShapeError, Slot, TrainerId, Works,
};

use self::holdings::{Holding, by_rank, holdings};
use self::inputs::{inputs, read};
use self::pieces::{Strip, carry, row_bytes};
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

/// Transfer lists of one plan. What a bundle reads is found when it is asked for and kept then: a process carries out few of the
/// bundles of a large step, or none.
#[derive(Clone, Debug)]
pub struct Lists {
    problem: Arc<Problem>,
    plan: Arc<Plan>,
    stretches: Stretches,
    /// Row of the bundle's query rows at which a task begins, by task.
    task_base: Vec<u32>,
    /// By bundle: what each rank sends. The index of an entry in all is the number of its parcel,
    /// in both directions.
    holdings: Groups<Holding>,
    /// By bundle: its inputs, made when they are first asked for.
    inputs: OnceLock<Box<[Found]>>,
}

/// What a bundle reads forward and backward, once it was asked for.
type Found = [OnceLock<Box<Inputs>>; 2];

impl Lists {
    /// Lowers `plan`.
    pub fn new(problem: &Arc<Problem>, plan: &Arc<Plan>) -> Self {
        let mut task_base = Vec::with_capacity(plan.tasks().len());
        for index in (0..plan.bundles().len() as u32).map(BundleId) {
            let mut rows = 0;
            for task in plan.tasks_of(index) {
                task_base.push(rows);
                rows += task.rows.end - task.rows.start;
            }
        }
        Self {
            problem: Arc::clone(problem),
            plan: Arc::clone(plan),
            stretches: Stretches::new(&problem.layout, problem.heads.kv),
            task_base,
            holdings: holdings(problem, plan),
            inputs: OnceLock::new(),
        }
    }

    /// How the rows of each rank lie.
    pub fn stretches(&self) -> &Stretches {
        &self.stretches
    }

    /// What a bundle reads.
    pub fn inputs(&self, bundle: BundleId, direction: Direction) -> &Inputs {
        let all = self.inputs.get_or_init(|| {
            (0..self.holdings.len()).map(|_| [OnceLock::new(), OnceLock::new()]).collect()
        });
        let [forward, backward] = &all[bundle.0 as usize];
        let found = match direction {
            Direction::Forward => forward,
            Direction::Backward => backward,
        };
        found.get_or_init(|| {
            let of = (&*self.problem, &self.stretches);
            Box::new(inputs(of, &self.plan, bundle, self.query_rows(bundle), direction))
        })
    }

    /// Query rows of a bundle, all tasks together.
    pub fn query_rows(&self, bundle: BundleId) -> u32 {
        let tasks = self.plan.bundles()[bundle.0 as usize].tasks.clone();
        tasks.last().map_or(0, |it| {
            let rows = &self.plan.tasks()[it as usize].rows;
            self.task_base[it as usize] + (rows.end - rows.start)
        })
    }

    /// Where a task's rows begin among its bundle's query rows.
    pub fn task_base(&self, task: usize) -> u32 {
        self.task_base[task]
    }

    /// The source that a parcel stands for, and its bundle.
    pub fn parcel(&self, parcel: Parcel, direction: Direction) -> (BundleId, &Source) {
        let bundle = self.holdings.group_of(parcel.0 as usize);
        let source = parcel.0 as usize - self.holdings.begin(bundle);
        let bundle = BundleId(bundle as u32);
        (bundle, &self.inputs(bundle, direction).sources[source])
    }

    /// Parcels of a bundle.
    pub fn parcels_of(&self, bundle: BundleId) -> Range<u32> {
        let first = self.holdings.begin(bundle.0 as usize);
        let of = self.holdings.of(bundle.0 as usize);
        first as u32..(first + of.len()) as u32
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

    /// What the protocol runs on, forward and backward.
    ///
    /// # Errors
    ///
    /// None, unless the lists contradict themselves.
    pub fn shapes(&self) -> Result<[Shape; 2], ShapeError> {
        let bundles = self.plan.bundles();
        // Bytes of a query row and of a key under one KV head.
        let row = |direction| {
            let of_keys = |tensor: Tensor| matches!(tensor, Tensor::K | Tensor::V);
            read(direction).iter().fold([0, 0], |[queries, keys], &it| {
                let bytes = row_bytes(&self.problem, it);
                if of_keys(it) { [queries, keys + bytes] } else { [queries + bytes, keys] }
            })
        };
        let [forward, backward] = [row(Direction::Forward), row(Direction::Backward)];
        let bytes = |[query, key]: [u64; 2], bundle: &cadre_planner::Bundle, it: &Holding| {
            let rows = u64::from(it.queries) * query + u64::from(it.keys) * key;
            rows * bundle.kv_heads.len() as u64
        };
        let (all, mut sizes) = (self.holdings.all().len(), Vec::new());
        let mut parcels = Vec::with_capacity(all);
        sizes.reserve_exact(all);
        for (index, whole) in (0..).map(Bundle).zip(bundles) {
            for it in self.holdings.of(index.0 as usize) {
                let (from, bytes_forward) = (trainer(it.rank), bytes(forward, whole, it));
                parcels.push(ParcelShape { bundle: index, from, bytes: bytes_forward });
                sizes.push(bytes(backward, whole, it));
            }
        }
        let bundles = bundles.iter().map(|it| BundleShape { slot: Slot(it.slot.0 as u16) });
        let forward = Shape::of_works(bundles.collect(), self.forward_works(), parcels)?;
        let backward = forward.other_way(self.backward_works(), sizes.into_iter())?;
        Ok([forward, backward])
    }

    fn forward_works(&self) -> Works {
        let mut works = Works::with_capacity(self.plan.tasks().len());
        let bytes = |tensor| row_bytes(&self.problem, tensor);
        for (index, whole) in (0..).map(Bundle).zip(self.plan.bundles()) {
            let row = (bytes(Tensor::O) + bytes(Tensor::OLse)) * whole.kv_heads.len() as u64;
            let results = |rank: RankId, rows: u32| (trainer(rank), u64::from(rows) * row);
            let tasks = self.plan.tasks_of(BundleId(index.0));
            if let &[Holding { rank, .. }] = self.holdings.of(index.0 as usize) {
                let parcel = Parcel(self.holdings.begin(index.0 as usize) as u32);
                for task in tasks {
                    let rows = task.rows.end - task.rows.start;
                    works.push(index, [parcel], [results(rank, rows)]);
                }
                continue;
            }
            let needs = self.needs_of_tasks(tasks, BundleId(index.0));
            for (task, needs) in tasks.iter().zip(needs) {
                let homes = by_rank(&self.problem.layout, task.document, &task.rows);
                works.push(index, needs, homes.into_iter().map(|it| results(it.0, it.1)));
            }
        }
        works
    }

    fn backward_works(&self) -> Works {
        let mut works = Works::with_capacity(self.plan.bundles().len());
        let bytes = |tensor| row_bytes(&self.problem, tensor);
        for (index, whole) in (0..).map(Bundle).zip(self.plan.bundles()) {
            let kv_heads = whole.kv_heads.len() as u64;
            let (dq, parts) = (bytes(Tensor::DQ) * kv_heads, 2 * bytes(Tensor::DK) * kv_heads);
            let results = self.holdings.of(index.0 as usize).iter().map(|it| {
                (trainer(it.rank), u64::from(it.queries) * dq + u64::from(it.keys) * parts)
            });
            works.push(index, self.parcels_of(BundleId(index.0)).map(Parcel), results);
        }
        works
    }

    /// For each task of a bundle the parcels that hold its rows or keys. A parcel may hold only keys between those of two tasks,
    /// which no task reads: it counts as one of the last task.
    fn needs_of_tasks(&self, tasks: &[Task], bundle: BundleId) -> Vec<Vec<Parcel>> {
        let holdings = self.holdings.of(bundle.0 as usize);
        let all: BTreeSet<Parcel> = self.parcels_of(bundle).map(Parcel).collect();
        let first = self.parcels_of(bundle).start;
        let parcel = |rank| {
            let holding = holdings.binary_search_by_key(&rank, |it| it.rank);
            Parcel(first + holding.expect("whoever has rows of a bundle holds some") as u32)
        };
        let needs = |task: &Task| {
            let of = |rows: &Range<u32>| self.problem.layout.locate(task.document, rows.clone());
            of(&task.rows).chain(of(&task.keys)).map(|it| parcel(it.rank)).collect()
        };
        let mut needs: Vec<BTreeSet<Parcel>> = tasks.iter().map(needs).collect();
        let read: BTreeSet<Parcel> = needs.iter().flatten().copied().collect();
        if let Some(last) = needs.last_mut() {
            last.extend(all.difference(&read));
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

/// A rank by its name in the protocol. Headers have no more than it can name.
fn trainer(RankId(rank): RankId) -> TrainerId {
    TrainerId(rank as u16)
}

/// Rows `rows` of `tensor` under `kv_heads`.
fn strip(problem: &Problem, tensor: Tensor, rows: &Range<u32>, kv_heads: &Range<u16>) -> Strip {
    let bytes = row_bytes(problem, tensor);
    Strip { bytes, rows: rows.end - rows.start, kv_heads: kv_heads.len() }
}

#[cfg(test)]
mod tests;
