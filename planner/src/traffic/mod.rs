//! What a plan moves: bytes by direction, sender and receiver.
//!
//! In: a problem and its plan. Out: [`Traffic`] of one layer and nano-batch, all lanes together. Rows that
//! lie where they are needed do not count.
//!
//! It is an account, not a schedule: which bytes travel, not when.

mod least;
mod pulls;

use std::ops::Range;

use serde::Serialize;

pub use least::least_pulled;
pub use pulls::{Pull, Pulls};

use crate::{DocumentId, Plan, Problem, RankId, SlotId};

/// Bytes of a phase forward and of a phase backward.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Traffic {
    /// Q, K, V out; O and LSE back.
    pub forward: Flow,
    /// Q, K, V, dO, LSE and Δ out; dQ, dK and dV back.
    pub backward: Flow,
}

/// Bytes of one phase.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Flow {
    /// Rows of the query side that slots pull: Q, backward also dO, LSE and Δ.
    pub queries: u64,
    /// K and V that slots pull.
    pub keys: u64,
    /// Results that ranks pull.
    pub results: u64,
    /// By place, see [`Traffic::of`].
    pub places: Vec<Place>,
}

/// Bytes of one phase at one place.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Place {
    /// Inputs that others pull from here.
    pub inputs_sent: u64,
    /// Inputs that are pulled to here.
    pub inputs_received: u64,
    /// Results that others pull from here.
    pub results_sent: u64,
    /// Results that are pulled to here.
    pub results_received: u64,
}

impl Place {
    /// All that leaves.
    pub fn sent(self) -> u64 {
        self.inputs_sent + self.results_sent
    }

    /// All that arrives.
    pub fn received(self) -> u64 {
        self.inputs_received + self.results_received
    }
}

impl Flow {
    /// Most that leaves or arrives at one place: what the busiest link carries in one direction.
    pub fn busiest(&self) -> u64 {
        self.places.iter().map(|it| it.sent().max(it.received())).max().unwrap_or(0)
    }
}

/// Bytes that one row of one KV head adds on each side.
#[derive(Clone, Copy)]
struct Row {
    query: u64,
    key: u64,
    result: u64,
    key_result: u64,
}

impl Traffic {
    /// What a plan moves. Places are the ranks, each with the slots at home there, then the dedicated
    /// slots by number.
    pub fn of(problem: &Problem, plan: &Plan) -> Self {
        let (dim, element) = (u64::from(problem.heads.dim), u64::from(problem.element_bytes));
        let group = u64::from(problem.heads.query / problem.heads.kv.max(1));
        let (query, key, statistic) = (group * dim * element, 2 * dim * element, group * 4);
        let forward = Row { query, key, result: query + statistic, key_result: 0 };
        let backward =
            Row { query: 2 * (query + statistic), key, result: query, key_result: 8 * dim };
        Self { forward: flow(problem, plan, forward), backward: flow(problem, plan, backward) }
    }
}

fn flow(problem: &Problem, plan: &Plan, row: Row) -> Flow {
    let mut next = problem.layout.ranks().len();
    let place_of: Vec<usize> = problem
        .slots
        .iter()
        .map(|slot| {
            slot.home.map_or_else(
                || {
                    next += 1;
                    next - 1
                },
                |RankId(rank)| rank.into(),
            )
        })
        .collect();
    let mut flow = Flow { places: vec![Place::default(); next], ..Flow::default() };
    for bundle in plan.bundles() {
        let SlotId(slot) = bundle.slot;
        let there = place_of[usize::from(slot)];
        let heads = bundle.kv_heads.len() as u64;
        let remote = |rows: &Range<u32>| remote(problem, there, bundle.document, rows.clone());
        for (rank, rows) in remote(&bundle.keys) {
            flow.keys += rows * heads * row.key;
            flow.carry(rank, there, rows * heads * row.key, rows * heads * row.key_result);
        }
        for task in &plan.tasks()[bundle.tasks.start as usize..bundle.tasks.end as usize] {
            for (rank, rows) in remote(&task.rows) {
                flow.queries += rows * heads * row.query;
                flow.carry(rank, there, rows * heads * row.query, rows * heads * row.result);
            }
        }
    }
    flow
}

impl Flow {
    fn carry(&mut self, rank: usize, slot: usize, inputs: u64, results: u64) {
        self.results += results;
        self.places[rank].inputs_sent += inputs;
        self.places[rank].results_received += results;
        self.places[slot].inputs_received += inputs;
        self.places[slot].results_sent += results;
    }
}

/// How many of some rows lie at each other place.
fn remote(
    problem: &Problem,
    here: usize,
    document: DocumentId,
    rows: Range<u32>,
) -> impl Iterator<Item = (usize, u64)> + '_ {
    let pieces = problem.layout.locate(document, rows);
    pieces
        .map(|piece| (usize::from(piece.rank.0), piece.rows.len() as u64))
        .filter(move |(rank, _)| *rank != here)
}
