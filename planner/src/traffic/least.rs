//! A lower bound for the bytes that slots must pull, forward.
//!
//! In: a problem and a finishing time. Out: Q, K and V bytes below which no plan finishes by then.
//!
//! **Why it holds.** A rank whose own rows cost more than its slot can do by the finish must send the surplus
//! S away, in pieces: rows `[a, b)` of one of its documents under g KV heads in one slot. Such a piece brings
//! its query rows and the keys up to b. The price of a piece (bytes per cost) falls with its cost F until
//! `b` reaches the longest document's end and then until the best share of it, so no split of S is cheaper than
//! `S · least price of F ≤ min(S, most that one slot can do)`. Surpluses of different ranks are pieces of
//! different documents, so their bytes add. A rank with a document that spans ranks counts with its query
//! rows alone, since a slot may hold keys of it already.

use crate::{Document, Mask, Problem, RankId};

/// Least bytes of Q, K and V that slots pull from other places if all finish by `finish`; `None` where
/// the bound does not hold: masks other than causal, overheads in the costs, a finish at which no slot
/// has begun.
pub fn least_pulled(problem: &Problem, finish: u64) -> Option<u64> {
    let layout = &problem.layout;
    let causal = layout.documents().iter().all(|it| it.mask == Mask::Causal);
    if !causal || problem.costs.tile > 0 || problem.costs.task > 0 {
        return None;
    }
    let capacity = |slot: &crate::Slot| {
        let time = u128::from(finish.saturating_sub(slot.head_start));
        (time * u128::from(slot.weight) / 100) as f64
    };
    let most = problem.slots.iter().map(capacity).fold(0.0, f64::max);
    if most <= 0.0 {
        return None;
    }
    let mut own = vec![0.0; layout.ranks().len()];
    for slot in &problem.slots {
        if let Some(RankId(rank)) = slot.home {
            own[usize::from(rank)] += capacity(slot);
        }
    }
    let prices = Prices::of(problem);
    let mut least = 0.0;
    for (rank, stretches) in layout.ranks().iter().enumerate() {
        let (mut load, mut longest, mut spans) = (0.0, 0, false);
        for it in stretches {
            let Document { rows, mask } = layout.documents()[it.document.0 as usize];
            load += mask.pairs(rows, it.start..it.end) as f64 * f64::from(problem.heads.query);
            longest = longest.max(it.end);
            spans |= it.end - it.start < rows;
        }
        // A tile belongs to the rank that holds its first row: what that may add is let go.
        let edge = f64::from(longest) * 128.0 * f64::from(problem.heads.query);
        let surplus = load - own[rank] - if spans { 2.0 * edge } else { 0.0 };
        if surplus > 0.0 {
            least += surplus * prices.least(surplus.min(most), longest, spans);
        }
    }
    Some(least as u64)
}

/// Bytes of a row under one KV head, and what its query heads cost a key.
struct Prices {
    query: f64,
    key: f64,
    query_heads: f64,
    /// KV heads of a piece, fewest and most.
    heads: (u16, u16),
}

impl Prices {
    fn of(problem: &Problem) -> Self {
        let heads = problem.heads;
        let (dim, element) = (f64::from(heads.dim), f64::from(problem.element_bytes));
        let query_heads = f64::from(heads.query / heads.kv);
        let fewest = if problem.heads_may_part() { 1 } else { heads.kv };
        let (query, key) = (query_heads * dim * element, 2.0 * dim * element);
        Self { query, key, query_heads, heads: (fewest, heads.kv) }
    }

    /// Least bytes per cost of a piece that costs at most `most`, of a document of `rows` rows.
    fn least(&self, most: f64, rows: u32, spans: bool) -> f64 {
        let n = f64::from(rows);
        if spans {
            return self.query / (self.query_heads * n);
        }
        let of_heads = |heads: u16| {
            // Pairs of one query head.
            let pairs = most / (self.query_heads * f64::from(heads));
            // With all rows up to n at hand, the best share of them is [a, n) where its price is least:
            // query · (n − a) + key · n over (n² − a²) / 2, least at a/n = 1 + k − √(k² + 2k), k = key/query.
            let k = self.key / self.query;
            let a = n * (1.0 + k - (k * k + 2.0 * k).sqrt()).max(0.0);
            let best = (n * n - a * a) / 2.0;
            let pairs = pairs.min(best);
            // Otherwise the piece [a, b) with b/a = 1 + key/query, or the tail if that ends beyond n.
            let ratio = 1.0 + k;
            let end = (2.0 * pairs / (1.0 - 1.0 / (ratio * ratio))).sqrt().min(n);
            let start = (end * end - 2.0 * pairs).max(0.0).sqrt();
            (self.query * (end - start) + self.key * end) / (self.query_heads * pairs)
        };
        (self.heads.0..=self.heads.1).map(of_heads).fold(f64::INFINITY, f64::min)
    }
}
