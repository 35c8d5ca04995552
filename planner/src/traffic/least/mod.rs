//! Lower bounds for what slots must pull.
//!
//! In: a problem and a finishing time. Out: [`Least`]: bytes of Q, K and V, and time of the busiest link, below which no plan
//! finishes by then.
//!
//! **Why they hold.** First, what [`cover`] says of each document that no rank with a slot holds whole: such bytes add up,
//! and add to those of donors that hold whole documents only. Second, pieces: what a slot gets of one document under g KV heads is at best one piece, rows `[a, b)`: it brings its
//! query rows and the keys up to b. The price of a piece (bytes per cost) falls with its cost F until `b` reaches the
//! longest document's end, and then until the best share of it. So F cannot come cheaper than F times the least price
//! of pieces up to F, in however many pieces. Two sides give a bound each:
//!
//! * **Donors.** A rank whose own rows cost more than its slots can do by the finish sends the surplus away. Surpluses of
//!   different ranks are pieces of different documents, so their bytes add.
//! * **Receivers.** A slot that its own rank does not fill receives what lacks, up to what all slots together may leave
//!   undone: their capacity less all work. Leaving the smallest rooms empty saves most, and a room that is left in part
//!   saves at most its average price.
//!
//! A slot that holds rows of a document that spans ranks may hold keys of it already: on these two sides it counts with
//! query rows alone. The largest of all holds.
//!
//! **Overheads.** A row costs at least its share of a tile's overhead, so rows `[a, b)` cost at least
//! `((b + s)² − (a + s)²) / 2` under one query head, with `s = ½ + tile / 128`: rows are counted s further on. Overheads of
//! tasks are let go. Masks other than causal have no sides; their rows that lie at no slot's place still travel.

mod cover;
mod memory;

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};

use super::{Row, rows};
use crate::{Document, DocumentId, Mask, Problem, RankId, TILE_ROWS};
use cover::Cover;
pub use memory::least_memory;
pub(crate) use memory::{Held, smallest_bundle};

/// What no plan that finishes in time can avoid.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Least {
    /// Bytes of Q, K and V that slots pull, forward.
    pub pulled: u64,
    /// Nanoseconds of the busiest link, forward and backward together.
    pub link: u64,
}

/// Relative error by which rounded floats may be too large.
const ROUNDING: f64 = 1e-9;

/// Lower bounds for all plans that finish by `finish`; `None` for a finish at which no slot has begun.
pub fn least(problem: &Problem, finish: u64) -> Option<Least> {
    let all = All::of(problem, finish)?;
    let [forward, backward] = rows(problem);
    let prices = |query: u64, key: u64| Prices::new(problem, query as f64, key as f64, all.shift);
    let pulled = all.bytes(problem, &prices(forward.query, forward.key));
    let both = |of: fn(Row) -> (u64, u64)| {
        let (a, b) = (of(forward), of(backward));
        prices(a.0 + b.0, a.1 + b.1)
    };
    let out = both(|it| (it.query, it.key));
    let back = both(|it| (it.result, it.key_result));
    // A plan's time is rounded down, forward and backward.
    let link = all.link(problem, &out, &back) * (1.0 - ROUNDING) - 2.0;
    Some(Least { pulled: (pulled * (1.0 - ROUNDING)) as u64, link: link as u64 })
}

/// What bounds the bytes that must travel.
struct All {
    /// Zero sides where masks are not causal.
    sides: Option<Sides>,
    /// By document.
    covers: Vec<Cover>,
    /// Slots that are not standby, by rank.
    slots_at: Vec<u32>,
    /// What rows are counted further on.
    shift: f64,
}

impl All {
    fn of(problem: &Problem, finish: u64) -> Option<Self> {
        let documents = problem.layout.documents();
        let most = problem.slots.iter().map(|it| capacity(it, finish)).max()?;
        if most <= 0 {
            return None;
        }
        let shift = 0.5 + f64::from(problem.costs.tile) / f64::from(TILE_ROWS);
        let ids = (0..documents.len() as u32).map(DocumentId);
        let covers = ids.map(|it| Cover::of(problem, it, most as f64, shift)).collect();
        let mut slots_at = vec![0; problem.layout.ranks().len()];
        for slot in problem.slots.iter().filter(|it| !it.is_standby()) {
            if let Some(RankId(rank)) = slot.home {
                slots_at[rank as usize] += 1;
            }
        }
        let causal = documents.iter().all(|it| it.mask == Mask::Causal);
        let sides = causal.then(|| Sides::of(problem, finish)).flatten();
        Some(Self { sides, covers, slots_at, shift })
    }

    /// Bytes that cross at least.
    fn bytes(&self, problem: &Problem, prices: &Prices) -> f64 {
        let heads = f64::from(problem.heads.kv);
        let price = (prices.query, prices.key);
        let mut covered = 0.0;
        for (document, cover) in (0..).map(DocumentId).zip(&self.covers) {
            match problem.layout.pieces_of_document(document) {
                [one] if self.slots_at[one.rank.0 as usize] > 0 => {}
                _ => covered += cover::bytes(problem, &self.slots_at, document, cover, price),
            }
        }
        let whole = self.sides.as_ref().map_or(0.0, |it| it.of_whole_documents(prices));
        let sides = self.sides.as_ref().map_or(0.0, |it| it.bytes(prices));
        sides.max(covered * heads + whole)
    }

    /// Nanoseconds of the busiest link.
    fn link(&self, problem: &Problem, out: &Prices, back: &Prices) -> f64 {
        let time = f64::from(problem.links.least_percent()) * 10.0 / f64::from(problem.lanes);
        // All that arrives at slots, over all their links.
        let (places, _) = problem.places();
        let mut used: Vec<usize> = problem
            .slots
            .iter()
            .zip(&places)
            .filter(|it| !it.0.is_standby())
            .map(|it| *it.1)
            .collect();
        used.sort_unstable();
        used.dedup();
        let rate = |of: fn((u32, u32)) -> u32| -> f64 {
            used.iter().map(|it| f64::from(of(problem.links.rates(*it)))).sum()
        };
        let all = (self.bytes(problem, out) * time / rate(|it| it.1))
            .max(self.bytes(problem, back) * time / rate(|it| it.0));
        let mut most = self.sides.as_ref().map_or(0.0, |it| it.link(problem, out, back)).max(all);
        for (rank, stretches) in problem.layout.ranks().iter().enumerate() {
            let (sends, receives) = problem.links.rates(rank);
            let bytes = |prices: &Prices| self.of_rank(problem, rank, stretches, prices) * time;
            let sent = bytes(out) / f64::from(sends);
            most = most.max(sent.max(bytes(back) / f64::from(receives)));
        }
        most
    }

    /// Bytes that leave a rank at least: keys for all slots but its own, and the queries if it has none.
    fn of_rank(
        &self,
        problem: &Problem,
        rank: usize,
        stretches: &[crate::Stretch],
        prices: &Prices,
    ) -> f64 {
        let own = self.slots_at[rank];
        let of = |it: &crate::Stretch| {
            let rows = f64::from(it.start)..f64::from(it.end);
            let queries = if own > 0 { 0.0 } else { (rows.end - rows.start) * prices.query };
            queries + self.covers[it.document.0 as usize].sum(&rows, own) * prices.key
        };
        stretches.iter().map(of).sum::<f64>() * f64::from(problem.heads.kv)
    }
}

/// Most work with which a slot finishes by then.
fn capacity(slot: &crate::Slot, finish: u64) -> i128 {
    let time = i128::from(finish) - i128::from(slot.head_start);
    if time < 0 {
        return 0;
    }
    // A finish is rounded down: most that still ends then.
    ((time + 1) * i128::from(slot.weight) - 1).max(0) / 100
}

/// What leaves and what arrives at least.
struct Sides {
    /// Most work that one slot can do by the finish.
    most: f64,
    donors: Vec<Side>,
    /// The largest first.
    receivers: Vec<Side>,
    /// What receivers may leave undone together.
    slack: i128,
}

/// An amount of work: the surplus of a rank, or the room of a slot.
#[derive(Clone, Copy)]
struct Side {
    place: usize,
    cost: i128,
    /// The longest document that it may be a piece of, and whether keys may be there.
    longest: u32,
    spans: bool,
    /// Whether a slot stands at the place.
    has_slot: bool,
}

impl Sides {
    fn of(problem: &Problem, finish: u64) -> Option<Self> {
        let layout = &problem.layout;
        let capacity = |slot: &crate::Slot| capacity(slot, finish);
        let most = problem.slots.iter().map(capacity).max().filter(|it| *it > 0)?;
        let mut own = vec![0; layout.ranks().len()];
        for slot in &problem.slots {
            if let Some(RankId(rank)) = slot.home {
                own[rank as usize] += capacity(slot);
            }
        }
        let query_heads = i128::from(problem.heads.query);
        let mut ranks = Vec::with_capacity(layout.ranks().len());
        let mut all = 0;
        for stretches in layout.ranks() {
            let (mut load, mut longest, mut spans) = (0, 0, false);
            for it in stretches {
                let Document { rows, mask } = layout.documents()[it.document.0 as usize];
                // Counted in integers: a rounded float may say that a row moves where none does.
                let tiles = i128::from(it.end - it.start) * i128::from(problem.costs.tile);
                load += i128::from(mask.pairs(rows, it.start..it.end)) * query_heads;
                load += tiles / i128::from(TILE_ROWS) * query_heads;
                longest = longest.max(it.end);
                spans |= it.end - it.start < rows;
            }
            all += load;
            // A tile is computed by the rank that holds its first row. The work that this may shift
            // between ranks is subtracted.
            let tile = i128::from(longest) * i128::from(TILE_ROWS) + i128::from(problem.costs.tile);
            let edge = 2 * tile * query_heads;
            ranks.push((load, longest, spans, if spans { edge } else { 0 }));
        }
        let side = |place, cost: i128, longest, spans, has_slot| {
            (cost > 0).then_some(Side { place, cost, longest, spans, has_slot })
        };
        let donors = ranks.iter().zip(&own).enumerate().filter_map(|(place, (rank, own))| {
            let &(load, longest, spans, edge) = rank;
            side(place, load - own - edge, longest, spans, *own > 0)
        });
        let longest = layout.documents().iter().map(|it| it.rows).max().unwrap_or(0);
        let (places, _) = problem.places();
        let receivers = problem.slots.iter().zip(&places).filter_map(|(slot, place)| {
            let rank = slot.home.and_then(|RankId(rank)| ranks.get(rank as usize));
            let (load, _, spans, edge) = rank.copied().unwrap_or((0, 0, false, 0));
            side(*place, capacity(slot) - load - edge, longest, spans, true)
        });
        let mut receivers: Vec<Side> = receivers.collect();
        receivers.sort_by_key(|it| Reverse(it.cost));
        let slack = (problem.slots.iter().map(capacity).sum::<i128>() - all).max(0);
        Some(Self { most: most as f64, donors: donors.collect(), receivers, slack })
    }

    /// Bytes that leave ranks whose documents are all whole there.
    fn of_whole_documents(&self, prices: &Prices) -> f64 {
        let donors = self.donors.iter().filter(|it| !it.spans && it.has_slot);
        donors.map(|it| self.bytes_of(prices, it, it.cost)).sum()
    }

    /// Bytes that cross at least.
    fn bytes(&self, prices: &Prices) -> f64 {
        let price = |it: &Side| self.bytes_of(prices, it, it.cost);
        let donors: f64 = self.donors.iter().map(price).sum();
        let mut saved: Vec<(f64, i128)> =
            self.receivers.iter().map(|it| (price(it) / it.cost as f64, it.cost)).collect();
        saved.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut slack = self.slack;
        let mut receivers = 0.0;
        for (price, cost) in saved {
            let left = slack.min(cost);
            slack -= left;
            receivers += price * (cost - left) as f64;
        }
        donors.max(receivers)
    }

    /// Bytes of `cost` work of a side.
    fn bytes_of(&self, prices: &Prices, side: &Side, cost: i128) -> f64 {
        let cost = cost as f64;
        cost * prices.least(cost.min(self.most), side.longest, side.spans)
    }

    /// Nanoseconds of the busiest link: a donor that sends and gets results, a receiver that pulls and returns.
    fn link(&self, problem: &Problem, out: &Prices, back: &Prices) -> f64 {
        let percent = f64::from(problem.links.least_percent());
        let time = |it: &Side, cost: i128| {
            let (sends, receives) = problem.links.rates(it.place);
            let bytes = |prices: &Prices| {
                self.bytes_of(prices, it, cost) * percent * 10.0 / f64::from(problem.lanes)
            };
            (bytes(out), bytes(back), f64::from(sends), f64::from(receives))
        };
        let donor = |it: &Side| {
            let (out, back, sends, receives) = time(it, it.cost);
            (out / sends).max(back / receives)
        };
        let receiver = |it: &Side| {
            // In the worst case this receiver alone uses all the slack.
            let cost = it.cost - self.slack;
            if cost <= 0 {
                return 0.0;
            }
            let (out, back, sends, receives) = time(it, cost);
            (out / receives).max(back / sends)
        };
        let donors = self.donors.iter().map(donor);
        donors.chain(self.receivers.iter().map(receiver)).fold(0.0, f64::max)
    }
}

/// Bytes of a row under one KV head, and what its query heads cost a key.
struct Prices {
    query: f64,
    key: f64,
    query_heads: f64,
    /// What rows are counted further on.
    shift: f64,
    /// KV heads of a piece, fewest and most.
    heads: (u16, u16),
}

impl Prices {
    fn new(problem: &Problem, query: f64, key: f64, shift: f64) -> Self {
        let heads = problem.heads;
        let query_heads = f64::from(heads.query / heads.kv);
        let fewest = if problem.heads_may_part() { 1 } else { heads.kv };
        Self { query, key, query_heads, shift, heads: (fewest, heads.kv) }
    }

    /// Least bytes per cost of a piece that costs at most `most`, of a document of `rows` rows.
    fn least(&self, most: f64, rows: u32, spans: bool) -> f64 {
        let n = f64::from(rows);
        let last = n + self.shift;
        if spans {
            return self.query / (self.query_heads * last);
        }
        let of_heads = |heads: u16| {
            // Work under one query head.
            let most = most / (self.query_heads * f64::from(heads));
            // With all rows up to the last at hand, the best share of them is [a, last) where its price is least:
            // query · (last − a) + key · n over (last² − a²) / 2, at a/last = 1 + k − √(k² + 2k), k = key · n / (query · last).
            let k = self.key * n / (self.query * last);
            let a = (last * (1.0 + k - (k * k + 2.0 * k).sqrt())).max(self.shift);
            let work = most.min((last * last - a * a) / 2.0);
            // Otherwise the piece [a, b) with b/a = 1 + key/query, or the tail if that ends beyond the last, or the head
            // if it begins before the first.
            let ratio = 1.0 + self.key / self.query;
            let mut end = (2.0 * work / (1.0 - 1.0 / (ratio * ratio))).sqrt().min(last);
            let mut start = (end * end - 2.0 * work).max(0.0).sqrt();
            if start < self.shift {
                start = self.shift;
                end = (start * start + 2.0 * work).sqrt().min(last);
            }
            let piece = (self.query * (end - start) + self.key * (end - self.shift)) / work;
            // No piece is less than a row and a key, nor more than all rows.
            let row =
                (self.query + self.key) / most.min((last * last - self.shift * self.shift) / 2.0);
            piece.max(row) / self.query_heads
        };
        (self.heads.0..=self.heads.1).map(of_heads).fold(f64::INFINITY, f64::min)
    }
}
