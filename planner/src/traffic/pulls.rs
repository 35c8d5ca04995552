//! Transfer lists: what every slot pulls from whom.
//!
//! In: a problem and its plan. Out: [`Pulls`]. Rows are merged where they are adjacent, and no byte is in two
//! pulls of a slot, since head groups of a document in a slot do not overlap. Results go the same way back, so
//! they need no list of their own.
//!
//! It knows rows and heads, not bytes or addresses: who lowers a pull to bytes knows how rows are stored.

use std::ops::Range;

use super::is_whole_at;
use crate::{BundleId, DocumentId, Plan, Problem, RankId, SlotId};

/// Rows that a slot pulls from one place.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Pull {
    /// The rank that holds the rows.
    pub rank: RankId,
    /// Where they are in the rank's stream, in rows.
    pub local: Range<u32>,
    /// The document.
    pub document: DocumentId,
    /// Which rows of the document they are.
    pub rows: Range<u32>,
    /// KV heads, for the query side with the query heads that read them.
    pub kv_heads: Range<u16>,
}

/// Everything that slots pull in a phase.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Pulls {
    queries: Vec<Pull>,
    keys: Vec<Pull>,
    /// Where a slot's pulls begin in both; one more entry than slots.
    first: Vec<(u32, u32)>,
}

impl Pulls {
    /// The transfer lists of a plan.
    pub fn of(problem: &Problem, plan: &Plan) -> Self {
        let mut pulls = Self::default();
        let mut bundles = (0..).map(BundleId).zip(plan.bundles()).peekable();
        for (slot, it) in (0..).map(SlotId).zip(&problem.slots) {
            pulls.first.push(pulls.ends());
            while let Some((id, bundle)) = bundles.next_if(|it| it.1.slot == slot) {
                if it
                    .home
                    .is_some_and(|rank| is_whole_at(problem, rank.0 as usize, bundle.document))
                {
                    continue;
                }
                let group = (bundle.document, &bundle.kv_heads);
                add(problem, it.home, group, bundle.keys.clone(), &mut pulls.keys);
                for run in plan.runs_of(id) {
                    add(problem, it.home, group, run.rows, &mut pulls.queries);
                }
            }
        }
        pulls.first.push(pulls.ends());
        pulls
    }

    /// Rows of the query side (Q; backward also dO, LSE, Δ) that a slot pulls, by document, head and row.
    pub fn queries_of(&self, slot: SlotId) -> &[Pull] {
        let (first, end) = self.range(slot);
        &self.queries[first.0 as usize..end.0 as usize]
    }

    /// Rows of K and V that a slot pulls, in the same order.
    pub fn keys_of(&self, slot: SlotId) -> &[Pull] {
        let (first, end) = self.range(slot);
        &self.keys[first.1 as usize..end.1 as usize]
    }

    fn ends(&self) -> (u32, u32) {
        (self.queries.len() as u32, self.keys.len() as u32)
    }

    fn range(&self, slot: SlotId) -> ((u32, u32), (u32, u32)) {
        let at = |slot: usize| self.first.get(slot).copied().unwrap_or(self.ends());
        (at(slot.0 as usize), at(slot.0 as usize + 1))
    }
}

/// Adds the rows that are not at home.
fn add(
    problem: &Problem,
    home: Option<RankId>,
    (document, kv_heads): (DocumentId, &Range<u16>),
    rows: Range<u32>,
    to: &mut Vec<Pull>,
) {
    let pieces = problem.layout.locate(document, rows).filter(|it| Some(it.rank) != home);
    to.extend(pieces.map(|it| Pull {
        rank: it.rank,
        local: it.local,
        document,
        rows: it.rows,
        kv_heads: kv_heads.clone(),
    }));
}
