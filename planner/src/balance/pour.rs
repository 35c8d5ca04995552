//! Which documents leave home altogether.
//!
//! In: empty bins. Out: documents that need fewer bytes when their heads and rows go wherever they fit than when every
//! slot keeps the rows that lie at its rank. Rows at home save their queries, but ask for the keys of **all** heads before
//! them: where a document spans s ranks that is about s/2 times its keys. Dealt out by heads first, with H of them, each
//! head's keys go to s/H slots only. Which is cheaper is a matter of s, H and the queries that share a key; both are
//! estimated here in closed form, and where they are close both are tried.
//!
//! It estimates bytes and places nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::bins::Bins;
use super::groups::Span;
use super::prices::Prices;
use crate::{DocumentId, Mask, RankId};

/// Where heads may part: work, in levels, from which a document that lies whole at one rank may
/// leave it.
const LEVELS: u64 = 4;
/// A document is short if it costs at most one part in this many of the level.
const SHORT: u64 = 8;
/// With more slots than this, short documents are not dealt out by heads: slots come out even without it.
const MANY: usize = 512;
/// Thresholds that are tried, with few slots and with many. A document leaves its rank if its price
/// elsewhere is below the threshold times its price at home.
const TRIED: (&[f64], &[f64]) = (&[0.8, 1.0, 1.2, 1.6], &[1.0]);
/// Maximum slots that count as few.
const FEW: usize = 128;

/// Sets of documents whose estimated price away from their ranks is hardly above that at home. The
/// sets grow, and none is empty.
pub(super) fn poured(bins: &Bins<'_>) -> Vec<BTreeSet<DocumentId>> {
    let mut homes = BTreeMap::new();
    for (bin, it) in bins.all.iter().enumerate() {
        if let Some(rank) = it.home() {
            homes.entry(rank).or_insert(bin);
        }
    }
    // By document: its price at home, and its price elsewhere.
    let mut costs: Vec<(DocumentId, f64, f64)> = Vec::new();
    if !homes.is_empty() && bins.level > 0 {
        let prices = Prices::of(bins);
        for (document, whole) in (0..).map(DocumentId).zip(bins.problem.layout.documents()) {
            let pieces = bins.problem.layout.pieces_of_document(document);
            if matches!(whole.mask, Mask::Window { .. }) {
                continue;
            }
            if pieces.len() == 1 {
                // Heads that stay together have all keys at home.
                if !bins.problem.heads_may_part() {
                    continue;
                }
                let work = bins.problem.cost(document, &bins.problem.all_heads(), &(0..whole.rows));
                if work / LEVELS < bins.level {
                    continue;
                }
            }
            let Some(stays) = at_home(bins, &prices, &homes, document) else {
                continue;
            };
            let leaves = dealt_out(bins, &prices, document);
            costs.push((document, stays, leaves));
        }
    }
    let tried = if bins.all.len() <= FEW { TRIED.0 } else { TRIED.1 };
    let set = |part: &f64| {
        let cheap = costs.iter().filter(|(_, stays, leaves)| *leaves < stays * part);
        cheap.map(|it| it.0).collect::<BTreeSet<_>>()
    };
    let mut sets: Vec<BTreeSet<DocumentId>> =
        tried.iter().map(set).filter(|it| !it.is_empty()).collect();
    sets.dedup();
    sets
}

/// Where heads may part: the short documents that lie at several ranks. Their rows travel in any
/// case. Dealt out by heads they fill slots exactly; otherwise ends of other documents would have
/// to, and each end brings keys of its own.
pub(super) fn short(bins: &Bins<'_>) -> BTreeSet<DocumentId> {
    let problem = bins.problem;
    let is_short = |document: DocumentId| {
        let rows = problem.document(document).rows;
        problem.layout.spans_ranks(document)
            && problem.cost(document, &problem.all_heads(), &(0..rows)) <= bins.level / SHORT
    };
    let is_few = bins.all.len() <= MANY;
    let is_asked =
        is_few && problem.heads_may_part() && bins.all.iter().any(|it| it.home().is_some());
    let all = 0..if is_asked { problem.layout.documents().len() as u32 } else { 0 };
    all.map(DocumentId).filter(|it| is_short(*it)).collect()
}

/// Price of a document whose rows stay at ranks with a slot, except for the surplus there; `None` if no such rank has any
/// of it.
fn at_home(
    bins: &Bins<'_>,
    prices: &Prices,
    homes: &BTreeMap<RankId, usize>,
    document: DocumentId,
) -> Option<f64> {
    let problem = bins.problem;
    let mut held: BTreeMap<usize, (Vec<Range<u32>>, u64)> = BTreeMap::new();
    let (mut moves, mut rows) = (0, 0);
    for piece in problem.layout.pieces_of_document(document) {
        let work = problem.cost(document, &problem.all_heads(), &piece.rows);
        if let Some(bin) = homes.get(&piece.rank) {
            let at = held.entry(*bin).or_default();
            at.0.push(piece.rows.clone());
            at.1 += work;
        } else {
            moves += work;
            rows += u64::from(piece.rows.end - piece.rows.start);
        }
    }
    if held.is_empty() {
        return None;
    }
    let mut bytes = 0.0;
    for (bin, (runs, work)) in held {
        let none = Span { document, heads: problem.all_heads(), rows: 0..0 };
        let (mut pulled, mut keys) = (0, 0);
        for range in bins.keys(document, &runs) {
            pulled += prices.of_rows(bins, &bins.all[bin], &none, &range);
            keys += range.end - range.start;
        }
        bytes += pulled as f64;
        let over = work.saturating_sub(bins.all[bin].capacity());
        moves += over;
        if work > 0 {
            let kept = f64::from(keys) * (over as f64 / work as f64);
            rows += (kept / 2.0) as u64;
        }
    }
    Some(bytes + spread(bins, prices, document, moves, rows as f64))
}

/// Price of a document of which all rows may go to any slot.
fn dealt_out(bins: &Bins<'_>, prices: &Prices, document: DocumentId) -> f64 {
    let problem = bins.problem;
    let rows = problem.document(document).rows;
    let work = problem.cost(document, &problem.all_heads(), &(0..rows));
    let columns = f64::from(if problem.heads_may_part() { problem.heads.kv } else { 1 });
    spread(bins, prices, document, work, f64::from(rows) * (1.0 - 0.5 / columns))
}

/// Price of moving `work` of a document, with `rows` query rows, to empty slots.
fn spread(bins: &Bins<'_>, prices: &Prices, document: DocumentId, work: u64, rows: f64) -> f64 {
    if work == 0 {
        return 0.0;
    }
    let problem = bins.problem;
    let whole = problem.document(document);
    let heads = f64::from(problem.heads.kv);
    let columns = if problem.heads_may_part() { heads } else { 1.0 };
    let runs = work as f64 / bins.level as f64 / columns;
    // The sum of √(i / runs) for i up to runs: where the keys of equal runs of a causal document end.
    let ends = if whole.mask == Mask::Causal {
        2.0 / 3.0 * runs + 0.5 - 0.2079 / runs.max(1.0).sqrt()
    } else {
        runs
    };
    let share = runs.min(1.0);
    let keys = ends.max(share) * f64::from(whole.rows);
    let (query, key) = prices.of_row();
    100.0 * heads * (rows * query + keys * key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::balance::limits::Limits;
    use crate::plan::least_work;
    use crate::{Costs, Document, Heads, Layout, Links, Problem, Slot, Tolerance};

    /// A document over ranks with a slot each.
    fn over(ranks: u32, kv: u16, lanes: u16) -> Problem {
        let rows = ranks * 16_384;
        let slot =
            |rank| Slot { weight: 100, head_start: 0, home: Some(RankId(rank)), memory: 1 << 50 };
        Problem {
            layout: Layout::head_tail(vec![Document { rows, mask: Mask::Causal }], 16_384).unwrap(),
            heads: Heads { query: 32, kv, dim: 128 },
            element_bytes: 2,
            lanes,
            slots: (0..ranks).map(slot).collect(),
            costs: Costs::pairs_only(),
            links: Links::equal(),
            tolerance: Tolerance::USUAL,
        }
    }

    fn leaves(problem: &Problem) -> bool {
        !poured(&Bins::new(problem, Limits::none(), least_work(problem))).is_empty()
    }

    #[test]
    fn a_document_leaves_home_where_it_spans_many_ranks_and_its_heads_may_part() {
        assert!(leaves(&over(64, 8, 1)));
        assert!(!leaves(&over(2, 8, 1)));
        // One KV head under 32 query heads: its queries are what is dear.
        assert!(!leaves(&over(4, 1, 1)));
    }
}
