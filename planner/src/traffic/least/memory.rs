//! Lower bounds for the memory of slots.
//!
//! In: a problem and a finishing time. Out: bytes that every slot needs if all have the same.
//!
//! **Why it holds.** All slots that are not standby hold all rows and the keys that [`super::cover`] counts, in each of two
//! phases, and a reserve for the largest bundle of the plan. No plan is without the smallest bundle that has the last row
//! of a document. If no bundle has more than R bytes, long documents are in more bundles, each with its own keys
//! ([`super::cover::Limit`]). Whatever R a plan has, it needs R and what slots hold under it in the mean; and the slot that
//! has the largest bundle holds that in two phases as well. So no plan needs less than the least of these over all R. Between
//! two values that are tried, R counts as the smaller and what slots hold as under the larger.

use std::cmp::Reverse;

use super::cover::{Limit, more_keys};
use super::{All, ROUNDING};
use crate::memory::bytes;
use crate::{Cuts, Document, DocumentId, Problem, TILE_ROWS};

/// From one try to the next the largest bundle grows by one part in this many.
const STEP: u64 = 32;
/// Maximum documents, the longest ones, whose further bundles are counted.
const LONGEST: usize = 1_024;

/// Lower bound of the memory of a slot, where all slots have the same: with less, no plan finishes
/// by `finish`. Zero if no slot has begun by `finish`.
pub fn least_memory(problem: &Problem, cuts: Cuts, finish: u64) -> u64 {
    let Some(held) = Held::of(problem, finish) else {
        return 0;
    };
    let mut bundle = smallest_bundle(problem, cuts);
    let mut least = u64::MAX;
    loop {
        let next = bundle.saturating_add(bundle / STEP + 1);
        let phases = held.phases(Some(next));
        least = least.min(bundle.saturating_add(phases).max(bundle.saturating_mul(3)));
        // Larger bundles alone do not save anything any more.
        if bundle.saturating_mul(3) >= least || phases <= held.phases(None) {
            return least;
        }
        bundle = next;
    }
}

/// Bytes of the smallest bundle that no plan is without: the last tile row of a document (in plans at home the last row) with
/// its keys, under as few heads as may be.
pub(crate) fn smallest_bundle(problem: &Problem, cuts: Cuts) -> u64 {
    let heads = if problem.heads_may_part() { 0..1 } else { problem.all_heads() };
    let of_document = |it: &Document| {
        let last = match cuts {
            Cuts::Tiles => (it.rows - 1) / TILE_ROWS * TILE_ROWS,
            Cuts::RankEdges => it.rows - 1,
        };
        let last = last..it.rows;
        let keys = it.mask.keys(it.rows, last.clone()).len() as u64;
        bytes(problem, &heads, last.len() as u64, keys).most()
    };
    problem.layout.documents().iter().map(of_document).max().unwrap_or(0)
}

/// What slots hold at least.
pub(crate) struct Held {
    all: All,
    /// Forward and backward bytes of one column (a KV head, or all where heads stay together) with bundles of any size.
    free: (f64, f64),
    /// Bytes of a query row and of a key row, forward and backward.
    row: (f64, f64),
    key: (f64, f64),
    /// Columns a slot.
    share: f64,
    /// The longest first.
    longest: Vec<(Document, DocumentId)>,
}

impl Held {
    pub(crate) fn of(problem: &Problem, finish: u64) -> Option<Self> {
        let all = All::of(problem, finish)?;
        let heads = if problem.heads_may_part() { 0..1 } else { problem.all_heads() };
        let of = |rows, keys| {
            let it = bytes(problem, &heads, rows, keys);
            (it.forward as f64, it.backward as f64)
        };
        let (row, key) = (of(1, 0), of(0, 1));
        let mut free = (0.0, 0.0);
        let smallest = smallest_bundle(problem, Cuts::RankEdges) as f64;
        let mut longest = Vec::new();
        for (document, whole) in (0..).map(DocumentId).zip(problem.layout.documents()) {
            let rows = f64::from(whole.rows);
            let keys = all.covers[document.0 as usize].sum(&(0.0..rows), 0);
            free.0 += rows * row.0 + keys * key.0;
            free.1 += rows * row.1 + keys * key.1;
            if rows * (row.1 + key.1) > smallest {
                longest.push((*whole, document));
            }
        }
        longest.sort_unstable_by_key(|it| (Reverse(it.0.rows), it.1));
        longest.truncate(LONGEST);
        let columns = f64::from(problem.heads.kv) / heads.len() as f64;
        let slots = problem.slots.iter().filter(|it| !it.is_standby()).count().max(1);
        Some(Self { all, free, row, key, share: columns / slots as f64, longest })
    }

    /// Mean bytes of two phases in a slot, where a bundle has at most `bundle` bytes.
    pub(crate) fn phases(&self, bundle: Option<u64>) -> u64 {
        let mut more = 0.0;
        if let Some(bundle) = bundle {
            let limit = Limit { bundle: bundle as f64, row: self.row.1, key: self.key.1 };
            let binds = |it: &&(Document, DocumentId)| {
                f64::from(it.0.rows) * (limit.row + limit.key) > limit.bundle
            };
            for (whole, document) in self.longest.iter().take_while(binds) {
                more += more_keys(&self.all.covers[document.0 as usize], *whole, limit);
            }
        }
        let (forward, backward) =
            (self.free.0 + more * self.key.0, self.free.1 + more * self.key.1);
        (2.0 * forward.max(backward) * self.share * (1.0 - ROUNDING)) as u64
    }
}
