//! What one layer of one nano-batch asks of processors and links.
//!
//! In: which rows of which documents every place computes, from the planner or from a baseline. Out: a [`Phase`]: work
//! by place, of that what can start without a transfer, and bytes by pair of places.
//!
//! Masks are causal and a pair is the only cost. Places are the ranks, then the dedicated slots. A place that computes
//! pieces of a document pulls one prefix of its keys, and each query row once. Bytes are those of the published
//! protocol: Q, K, V forward and O, LSE back; Q, dO, LSE, Δ, K, V backward and dQ, f32 dK, dV back.

use std::collections::BTreeMap;
use std::ops::Range;

use cadre_planner::{Assignment, BundleId, DocumentId, Layout, Plan, Problem, RankId, SlotId};

use crate::machine::{Kernel, Model, Nanos};

/// Rows of one document and some KV heads that a place computes.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Share {
    /// The place.
    pub place: usize,
    /// The document.
    pub document: DocumentId,
    /// Number of KV heads.
    pub kv_heads: u64,
    /// Query rows, ascending and disjoint.
    pub rows: Vec<Range<u32>>,
}

/// Bytes between a rank and the place that computes for it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Bytes {
    /// Q, K, V to the place, forward.
    pub inputs: u64,
    /// O and LSE to the rank.
    pub results: u64,
    /// Q, dO, LSE, Δ, K, V to the place, backward.
    pub backward_inputs: u64,
    /// dQ, dK, dV to the rank.
    pub backward_results: u64,
    /// The part of `inputs` that is query rows.
    pub queries: u64,
    /// The part of `inputs` that is rows of K and V.
    pub keys: u64,
}

/// Work and bytes of one layer of one nano-batch.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Phase {
    /// Tokens of each place; zero for a dedicated one.
    pub tokens: Vec<u64>,
    /// Forward cost by place: pairs times query heads, all of it.
    pub cost: Vec<u64>,
    /// The part of `cost` that needs no row of another place.
    pub local: Vec<u64>,
    /// Bytes by (rank, place); a rank and its own place exchange none.
    pub wires: BTreeMap<(usize, usize), Bytes>,
    /// What the busiest link needs at least, forward and backward together, whatever plan finishes as early; 0 if not known.
    pub least_link: Nanos,
}

impl Phase {
    /// The phase of some shares.
    pub fn new(model: &Model, layout: &Layout, places: usize, shares: &[Share]) -> Self {
        let ranks = layout.ranks().len();
        let tokens = (0..places).map(|place| {
            if place < ranks { layout.rank_rows(RankId(place as u32)).into() } else { 0 }
        });
        let mut phase = Self {
            tokens: tokens.collect(),
            cost: vec![0; places],
            local: vec![0; places],
            wires: BTreeMap::new(),
            least_link: 0,
        };
        for share in shares {
            phase.add(model, layout, share);
        }
        phase
    }

    /// The phase of a plan.
    pub fn of_plan(model: &Model, problem: &Problem, plan: &Plan) -> Self {
        let phase = Self::of_assignment(model, problem, plan, &Assignment::planned(plan));
        Self { least_link: plan.least(problem).link, ..phase }
    }

    /// The same phase with the bytes that the published planner's own system moves backward: rows of Q, O, dO and LSE, of K and V,
    /// and bf16 dK and dV back.
    #[must_use]
    pub fn as_published(mut self) -> Self {
        for it in self.wires.values_mut() {
            let statistics = it.results - it.queries;
            it.backward_inputs = 3 * it.queries + statistics + it.keys;
            it.backward_results = it.queries + it.keys;
        }
        self
    }

    /// The phase of a plan whose bundles may run elsewhere. Bundles without executor are left out.
    pub fn of_assignment(
        model: &Model,
        problem: &Problem,
        plan: &Plan,
        assignment: &Assignment,
    ) -> Self {
        let mut phase = Self::new(model, &problem.layout, places(problem), &[]);
        for bundle in (0..plan.bundles().len() as u32).map(BundleId) {
            phase.add_bundle(model, problem, plan, bundle, assignment);
        }
        phase
    }

    /// Adds a bundle at its executor, if it has one.
    pub(crate) fn add_bundle(
        &mut self,
        model: &Model,
        problem: &Problem,
        plan: &Plan,
        bundle: BundleId,
        assignment: &Assignment,
    ) {
        let (Some(SlotId(slot)), Some(it)) = (assignment.executor(bundle), plan.bundle(bundle))
        else {
            return;
        };
        let mut rows: Vec<Range<u32>> = Vec::new();
        for task in plan.tasks_of(bundle) {
            match rows.last_mut() {
                Some(last) if last.end == task.rows.start => last.end = task.rows.end,
                _ => rows.push(task.rows.clone()),
            }
        }
        let place = place_of(problem, slot as usize);
        let kv_heads = it.kv_heads.len() as u64;
        self.add(model, &problem.layout, &Share { place, document: it.document, kv_heads, rows });
    }

    fn add(&mut self, model: &Model, layout: &Layout, share: &Share) {
        let Share { place, document, kv_heads, rows } = share;
        let dim = u64::from(model.heads.dim);
        let group = u64::from(model.heads.query / model.heads.kv.max(1)) * kv_heads;
        let (query, statistic) = (2 * dim * group, 4 * group);
        let (key, key_result) = (4 * dim * kv_heads, 8 * dim * kv_heads);
        let end = rows.last().map_or(0, |it| it.end);
        let mut home_until = 0;
        for piece in layout.locate(*document, 0..end) {
            let rank = piece.rank.0 as usize;
            if rank == *place {
                if piece.rows.start == home_until {
                    home_until = piece.rows.end;
                }
                continue;
            }
            let count = piece.rows.len() as u64;
            let bytes = self.wires.entry((rank, *place)).or_default();
            bytes.inputs += count * key;
            bytes.keys += count * key;
            bytes.backward_inputs += count * key;
            bytes.backward_results += count * key_result;
        }
        for rows in rows {
            for piece in layout.locate(*document, rows.clone()) {
                let rank = piece.rank.0 as usize;
                let count = piece.rows.len() as u64;
                let pairs = triangle(piece.rows.end) - triangle(piece.rows.start);
                let cost =
                    pairs * group * Kernel::charged_rows(rows.len() as u64) / rows.len() as u64;
                self.cost[*place] += cost;
                if rank == *place && piece.rows.end <= home_until {
                    self.local[*place] += cost;
                }
                if rank != *place {
                    let bytes = self.wires.entry((rank, *place)).or_default();
                    bytes.inputs += count * query;
                    bytes.queries += count * query;
                    bytes.results += count * (query + statistic);
                    bytes.backward_inputs += 2 * count * (query + statistic);
                    bytes.backward_results += count * query;
                }
            }
        }
    }

    /// Most cost of a place over the mean, in millionths.
    pub fn imbalance_ppm(&self) -> u64 {
        let sum: u128 = self.cost.iter().map(|it| u128::from(*it)).sum();
        let most = self.cost.iter().copied().max().unwrap_or(0);
        let mean = (sum / self.cost.len().max(1) as u128).max(1);
        (u128::from(most) * 1_000_000 / mean) as u64
    }

    /// All bytes that travel.
    pub fn total(&self) -> Bytes {
        let mut sum = Bytes::default();
        for it in self.wires.values() {
            sum.inputs += it.inputs;
            sum.results += it.results;
            sum.backward_inputs += it.backward_inputs;
            sum.backward_results += it.backward_results;
            sum.queries += it.queries;
            sum.keys += it.keys;
        }
        sum
    }

    /// Most input bytes that one place sends, forward.
    pub fn busiest_sender(&self) -> u64 {
        let mut sent = vec![0; self.tokens.len()];
        for (&(rank, _), bytes) in &self.wires {
            sent[rank] += bytes.inputs;
        }
        sent.into_iter().max().unwrap_or(0)
    }
}

/// The number of places.
fn places(problem: &Problem) -> usize {
    problem.layout.ranks().len() + problem.slots.iter().filter(|it| it.home.is_none()).count()
}

/// The place of a slot: its rank, or after the ranks its turn among the dedicated ones.
fn place_of(problem: &Problem, slot: usize) -> usize {
    let dedicated = || problem.slots[..slot].iter().filter(|it| it.home.is_none()).count();
    problem.slots[slot]
        .home
        .map_or_else(|| problem.layout.ranks().len() + dedicated(), |RankId(rank)| rank as usize)
}

/// Causal pairs of the first rows of a document.
pub(crate) fn triangle(rows: u32) -> u64 {
    u64::from(rows) * (u64::from(rows) + 1) / 2
}

#[cfg(test)]
mod tests {
    use cadre_planner::{Traffic, plan};

    use super::*;
    use crate::cluster::{Cluster, Lay};

    #[test]
    fn bytes_of_a_plan_are_those_of_the_planner() {
        let lengths = [70_016, 3_072, 256, 8_960, 60_032, 40_960, 12_032, 1_024];
        for lay in [Lay::EndToEnd, Lay::HeadTail] {
            for lanes in [1, 8] {
                let cluster = Cluster { lanes, ..Cluster::in_place(Model::B8, 4) };
                let problem = cluster.problem(&lengths, lay).unwrap();
                let plan = plan(&problem).unwrap();
                let phase = Phase::of_plan(&Model::B8, &problem, &plan);
                let Traffic { forward, backward } = Traffic::of(&problem, &plan);
                let total = phase.total();
                assert_eq!((total.queries, total.keys), (forward.queries, forward.keys));
                assert_eq!(
                    (total.results, total.backward_results),
                    (forward.results, backward.results)
                );
                assert_eq!(total.backward_inputs, backward.queries + backward.keys);
                let sender = forward.places.iter().map(|it| it.inputs_sent).max();
                assert_eq!(Some(phase.busiest_sender()), sender);
                assert_eq!(
                    phase.cost,
                    (0..4).map(|it| plan.load(&problem, SlotId(it))).collect::<Vec<_>>()
                );
                assert!(phase.local.iter().zip(&phase.cost).all(|(local, all)| local <= all));
                assert!(phase.local.iter().sum::<u64>() > 0);
                // A row of Q, O, dO with its LSE, and a row of K and V each; dK and dV in bf16.
                let (queries, keys) = (forward.queries, forward.keys);
                let published = phase.as_published().total();
                let statistics = queries / (2 * u64::from(Model::B8.heads.dim)) * 4;
                assert_eq!(published.backward_inputs, 3 * queries + statistics + keys);
                assert_eq!(published.backward_results, queries + keys);
                assert_eq!(published.inputs, total.inputs);
            }
        }
    }
}
