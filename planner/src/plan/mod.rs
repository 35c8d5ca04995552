//! The plan: tasks in bundles, bundles on slots.
//!
//! In: what the balance decided, as pieces of documents per slot. Out: a [`Plan`] in canonical
//! order, its digest, loads and certificate.
//!
//! What others rely on is what `check` states: every row of every KV head once, cuts on
//! tiles, every key once per head and slot, memory within every slot's.
//! Who executes a bundle at the moment is not part of a plan, see [`crate::Assignment`].

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::{Document, DocumentId, Error, Problem, SlotId};

mod bounds;
mod check;
mod runs;

pub use bounds::Bounds;
pub(crate) use bounds::{least_work, level};
pub(crate) use runs::Runs;

/// Index of a bundle in [`Plan::bundles`].
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct BundleId(pub u32);

/// Query rows of a document and KV-head group, with the keys that its mask keeps: the forward
/// unit of work.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Task {
    /// The document.
    pub document: DocumentId,
    /// Query rows, counted from the document's start.
    pub rows: Range<u32>,
    /// Keys that any of the rows keeps.
    pub keys: Range<u32>,
    /// KV heads, with the query heads that read them.
    pub kv_heads: Range<u16>,
    /// The bundle it is in.
    pub bundle: BundleId,
}

/// Tasks of one document and KV-head group in one slot whose keys touch: the backward unit of work,
/// and what moves when a slot is lost. Under a window a slot may have several of one document and
/// group; no two of them have a key in common.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Bundle {
    /// The document.
    pub document: DocumentId,
    /// KV heads, with the query heads that read them.
    pub kv_heads: Range<u16>,
    /// The slot it is planned for.
    pub slot: SlotId,
    /// Its tasks, as indices into [`Plan::tasks`]; never empty.
    pub tasks: Range<u32>,
    /// Keys of its tasks, without a gap.
    pub keys: Range<u32>,
}

/// Where documents may be cut.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Cuts {
    /// At multiples of the tile, counted from the document's start.
    Tiles,
    /// There, and at the edges of ranks.
    RankEdges,
}

/// Which slot runs which rows.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Plan {
    problem: u64,
    cuts: Cuts,
    tasks: Vec<Task>,
    bundles: Vec<Bundle>,
    bounds: Bounds,
}

/// A plan being written in the order (slot, document, first KV head, first row).
pub(crate) struct Draft<'a> {
    problem: &'a Problem,
    tasks: Vec<Task>,
    bundles: Vec<Bundle>,
}

impl<'a> Draft<'a> {
    pub(crate) fn new(problem: &'a Problem) -> Self {
        let expected = problem.layout.documents().len() + 8 * problem.slots.len();
        let (tasks, bundles) = (Vec::with_capacity(2 * expected), Vec::with_capacity(expected));
        Self { problem, tasks, bundles }
    }

    /// Adds rows of a slot that are ascending, disjoint and not touching: a bundle of those whose keys touch, and further ones behind
    /// each gap between keys.
    pub(crate) fn rows(
        &mut self,
        slot: SlotId,
        document: DocumentId,
        kv_heads: &Range<u16>,
        rows: impl IntoIterator<Item = Range<u32>>,
    ) {
        let Document { rows: whole, mask } = self.problem.document(document);
        let mut open: Option<Bundle> = None;
        for rows in rows.into_iter().flat_map(|rows| self.problem.costs.tasks(rows)) {
            let keys = mask.keys(whole, rows.clone());
            // Both ends of the keys move only upwards with the rows.
            if let Some(done) = open.take_if(|it| it.keys.end < keys.start) {
                self.bundles.push(done);
            }
            let bundle = BundleId(self.bundles.len() as u32);
            let at = self.tasks.len() as u32;
            let it = open.get_or_insert_with(|| Bundle {
                document,
                kv_heads: kv_heads.clone(),
                slot,
                tasks: at..at,
                keys: keys.clone(),
            });
            (it.tasks.end, it.keys.end) = (at + 1, it.keys.end.max(keys.end));
            self.tasks.push(Task { document, rows, keys, kv_heads: kv_heads.clone(), bundle });
        }
        self.bundles.extend(open);
    }

    /// The plan, checked.
    pub(crate) fn finish(self, digest: u64, cuts: Cuts) -> Result<Plan, Error> {
        let problem = self.problem;
        let mut plan = self.finish_unchecked(digest, cuts);
        plan.bounds = plan.verify(problem)?;
        Ok(plan)
    }

    /// The plan, without bounds.
    pub(crate) fn finish_unchecked(self, digest: u64, cuts: Cuts) -> Plan {
        let Self { problem: _, mut tasks, mut bundles } = self;
        tasks.shrink_to_fit();
        bundles.shrink_to_fit();
        Plan { problem: digest, cuts, tasks, bundles, bounds: Bounds::default() }
    }
}

impl Plan {
    /// The same tasks as the plan of another problem with the same work and slots, checked.
    pub(crate) fn checked_for(mut self, problem: &Problem) -> Result<Self, Error> {
        self.bounds = self.verify(problem)?;
        Ok(self)
    }

    /// All tasks, by bundle, then first row.
    pub fn tasks(&self) -> &[Task] {
        &self.tasks
    }

    /// All bundles, by slot, document, first KV head, first key.
    pub fn bundles(&self) -> &[Bundle] {
        &self.bundles
    }

    /// A bundle, `None` if there is no such.
    pub fn bundle(&self, bundle: BundleId) -> Option<&Bundle> {
        self.bundles.get(bundle.0 as usize)
    }

    /// Tasks of a bundle in row order; none of a bundle that does not exist.
    pub fn tasks_of(&self, bundle: BundleId) -> &[Task] {
        let range = self.bundle(bundle).map_or(0..0, |it| it.tasks.clone());
        self.tasks.get(range.start as usize..range.end as usize).unwrap_or(&[])
    }

    /// Bundles planned for a slot, with their numbers.
    pub fn bundles_of(&self, slot: SlotId) -> impl Iterator<Item = (BundleId, &Bundle)> {
        let first = self.bundles.partition_point(|it| it.slot < slot);
        let numbered = (first as u32..).map(BundleId).zip(&self.bundles[first..]);
        numbered.take_while(move |(_, it)| it.slot == slot)
    }

    /// Digest of the problem that the plan was made for.
    pub fn problem_digest(&self) -> u64 {
        self.problem
    }

    /// Where documents were allowed to be cut.
    pub fn cuts(&self) -> Cuts {
        self.cuts
    }

    /// How good the plan is, against what any plan could reach.
    pub fn bounds(&self) -> Bounds {
        self.bounds
    }

    /// Forward cost of a task.
    pub fn task_cost(&self, problem: &Problem, task: &Task) -> u64 {
        problem.cost(task.document, &task.kv_heads, &task.rows)
    }

    /// Forward cost of a bundle; zero for one that does not exist.
    pub fn bundle_cost(&self, problem: &Problem, bundle: BundleId) -> u64 {
        let Some(it) = self.bundle(bundle) else { return 0 };
        let (document, heads) =
            (problem.document(it.document), problem.heads.query_count(&it.kv_heads));
        let runs = self.runs_of(bundle);
        runs.map(|it| problem.costs.run(document, heads, &it.rows, it.tasks.into())).sum()
    }

    /// Forward cost of all that is planned for a slot.
    pub fn load(&self, problem: &Problem, slot: SlotId) -> u64 {
        self.bundles_of(slot).map(|(bundle, _)| self.bundle_cost(problem, bundle)).sum()
    }

    /// When a slot finishes, head start included, in cost at weight 100.
    pub fn finish(&self, problem: &Problem, slot: SlotId) -> u64 {
        let load = self.load(problem, slot);
        problem.slots.get(slot.0 as usize).map_or(0, |it| it.finish(load))
    }

    /// Same on every machine for the same plan of the same problem, for ever.
    pub fn digest(&self) -> u64 {
        let Self { problem, cuts, tasks, bundles, bounds: _ } = self;
        let mut digest = Digest::new("plan");
        digest.u64(*problem);
        digest.u64(match cuts {
            Cuts::Tiles => 0,
            Cuts::RankEdges => 1,
        });
        digest.u64(tasks.len() as u64);
        for Task { document, rows, keys, kv_heads, bundle } in tasks {
            digest.u32s([document.0, rows.start, rows.end, keys.start, keys.end]);
            digest.u32s([kv_heads.start.into(), kv_heads.end.into(), bundle.0]);
        }
        digest.u64(bundles.len() as u64);
        for Bundle { document, kv_heads, slot, tasks, keys } in bundles {
            digest.u32s([document.0, kv_heads.start.into(), kv_heads.end.into()]);
            digest.u32s([slot.0, tasks.start, tasks.end, keys.start, keys.end]);
        }
        digest.value()
    }
}

/// Smallest range that holds all ranges; empty for none.
pub(crate) fn hull<'a>(ranges: impl Iterator<Item = &'a Range<u32>>) -> Range<u32> {
    ranges.cloned().reduce(|all, it| all.start.min(it.start)..all.end.max(it.end)).unwrap_or(0..0)
}
