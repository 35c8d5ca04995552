//! What a plan moves: bytes by direction, sender and receiver.
//!
//! In: a problem and its plan. Out: [`Traffic`] of one layer and nano-batch, all lanes together. Rows that
//! lie where they are needed do not count.
//!
//! It is an account, not a schedule: which bytes travel and how long their links need, not when.

mod least;
mod pulls;

use std::ops::Range;

use serde::Serialize;

pub(crate) use least::{Held, smallest_bundle};
pub use least::{Least, least, least_memory};
pub use pulls::{Pull, Pulls};

use crate::plan::Runs;
use crate::{Assignment, BundleId, DocumentId, Plan, Problem, RankId, SlotId};

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
    /// Nanoseconds that its link needs for all that leaves.
    pub sending: u64,
    /// Nanoseconds that its link needs for all that arrives.
    pub receiving: u64,
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
    /// Nanoseconds that the busiest link needs, in its busier direction.
    pub fn busiest(&self) -> u64 {
        self.places.iter().map(|it| it.sending.max(it.receiving)).max().unwrap_or(0)
    }
}

/// Bytes that one row of one KV head adds on each side.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    pub(crate) query: u64,
    pub(crate) key: u64,
    pub(crate) result: u64,
    pub(crate) key_result: u64,
}

/// Rows of a phase forward and of one backward.
pub(crate) fn rows(problem: &Problem) -> [Row; 2] {
    let (dim, element) = (u64::from(problem.heads.dim), u64::from(problem.element_bytes));
    let group = u64::from(problem.heads.query / problem.heads.kv.max(1));
    let (query, key, statistic) = (group * dim * element, 2 * dim * element, group * 4);
    let forward = Row { query, key, result: query + statistic, key_result: 0 };
    let backward = Row { query: 2 * (query + statistic), key, result: query, key_result: 8 * dim };
    [forward, backward]
}

/// Bytes times the percent of their way.
type Priced = u128;

/// A flow with what its links have to carry.
struct Account {
    row: Row,
    flow: Flow,
    /// Leaving and arriving, by place.
    priced: Vec<(Priced, Priced)>,
}

impl Traffic {
    /// What a plan moves. Places are the ranks, each with the slots at home there, then the dedicated
    /// slots by number.
    pub fn of(problem: &Problem, plan: &Plan) -> Self {
        Self::of_runs(problem, plan, &Runs::of(plan))
    }

    /// As [`Self::of`], where bundles may be executed elsewhere. Bundles without an executor move
    /// nothing.
    pub fn of_assignment(problem: &Problem, plan: &Plan, assignment: &Assignment) -> Self {
        Self::of_executors(problem, plan, &Runs::of(plan), |bundle| assignment.executor(bundle))
    }

    /// As [`Self::of`], with the runs of the plan, which the caller has computed.
    pub(crate) fn of_runs(problem: &Problem, plan: &Plan, runs: &Runs) -> Self {
        Self::of_executors(problem, plan, runs, |bundle| plan.bundle(bundle).map(|it| it.slot))
    }

    fn of_executors(
        problem: &Problem,
        plan: &Plan,
        runs: &Runs,
        executor: impl Fn(BundleId) -> Option<SlotId>,
    ) -> Self {
        let (place_of, places) = problem.places();
        let mut accounts = rows(problem).map(|row| Account {
            row,
            flow: Flow { places: vec![Place::default(); places], ..Flow::default() },
            priced: vec![(0, 0); places],
        });
        // Rows of queries and of keys that bundles of one place, which are side by side, have from each rank.
        let mut from = Rows { rows: vec![(0, 0); places], ranks: Vec::new() };
        let mut last = 0;
        for (id, bundle) in (0..).map(BundleId).zip(plan.bundles()) {
            let Some(SlotId(slot)) = executor(id) else {
                continue;
            };
            let there = place_of[slot as usize];
            if there != last {
                from.carry(problem, last, &mut accounts);
                last = there;
            }
            let heads = bundle.kv_heads.len() as u64;
            let runs = runs.of_bundle(id).iter();
            if let Some(RankId(rank)) = problem.layout.holder(bundle.document) {
                // Most documents lie at one rank whole; then no list of pieces is looked up.
                let rank = rank as usize;
                if rank != there {
                    let queries: u64 = runs.map(|it| it.rows.len() as u64).sum();
                    from.add(rank, queries * heads, bundle.keys.len() as u64 * heads);
                }
            } else {
                let remote = |rows: Range<u32>| remote(problem, there, bundle.document, rows);
                for (rank, rows) in remote(bundle.keys.clone()) {
                    from.add(rank, 0, rows * heads);
                }
                for (rank, rows) in runs.flat_map(|it| remote(it.rows.clone())) {
                    from.add(rank, rows * heads, 0);
                }
            }
        }
        from.carry(problem, last, &mut accounts);
        let [forward, backward] = accounts.map(|it| it.timed(problem));
        Self { forward, backward }
    }

    /// Nanoseconds of the busiest link forward and of the busiest backward.
    pub fn busiest(&self) -> u64 {
        self.forward.busiest().saturating_add(self.backward.busiest())
    }
}

/// Rows of queries and of keys from each rank, and the ranks that there are any of.
struct Rows {
    rows: Vec<(u64, u64)>,
    ranks: Vec<usize>,
}

impl Rows {
    fn add(&mut self, rank: usize, queries: u64, keys: u64) {
        let rows = &mut self.rows[rank];
        if *rows == (0, 0) {
            self.ranks.push(rank);
        }
        *rows = (rows.0 + queries, rows.1 + keys);
    }

    /// All of them go to a place.
    fn carry(&mut self, problem: &Problem, there: usize, accounts: &mut [Account; 2]) {
        for rank in self.ranks.drain(..) {
            let rows = std::mem::take(&mut self.rows[rank]);
            let ways = [(rank, there), (there, rank)];
            let percents = ways.map(|(a, b)| problem.links.percent(a, b).into());
            for account in &mut *accounts {
                account.carry(ways[0], rows, percents);
            }
        }
    }
}

impl Account {
    /// Rows that go from a rank to a slot's place, and their results back.
    fn carry(
        &mut self,
        (rank, slot): (usize, usize),
        (queries, keys): (u64, u64),
        [there, back]: [Priced; 2],
    ) {
        let Row { query, key, result, key_result } = self.row;
        let inputs = queries * query + keys * key;
        let results = queries * result + keys * key_result;
        let Flow { queries: all_queries, keys: all_keys, results: all_results, places } =
            &mut self.flow;
        *all_queries += queries * query;
        *all_keys += keys * key;
        *all_results += results;
        places[rank].inputs_sent += inputs;
        places[rank].results_received += results;
        places[slot].inputs_received += inputs;
        places[slot].results_sent += results;
        let (inputs, results) = (Priced::from(inputs) * there, Priced::from(results) * back);
        self.priced[rank].0 += inputs;
        self.priced[slot].1 += inputs;
        self.priced[slot].0 += results;
        self.priced[rank].1 += results;
    }

    fn timed(mut self, problem: &Problem) -> Flow {
        for (place, (sent, received)) in self.priced.into_iter().enumerate() {
            let (out, into) = problem.links.rates(place);
            let it = &mut self.flow.places[place];
            it.sending = nanoseconds(problem, sent, out);
            it.receiving = nanoseconds(problem, received, into);
        }
        self.flow
    }
}

/// Time of bytes times percent, shared by all lanes, at bytes a microsecond.
fn nanoseconds(problem: &Problem, priced: Priced, rate: u32) -> u64 {
    let time = priced * 10 / (u128::from(rate) * u128::from(problem.lanes));
    u64::try_from(time).unwrap_or(u64::MAX)
}

/// Whether a document lies whole at a place.
pub(crate) fn is_whole_at(problem: &Problem, place: usize, document: DocumentId) -> bool {
    problem.layout.holder(document).is_some_and(|it| it.0 as usize == place)
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
        .map(|piece| (piece.rank.0 as usize, piece.rows.len() as u64))
        .filter(move |(rank, _)| *rank != here)
}
