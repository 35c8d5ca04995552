//! What one process has to know of a plan in regions: its own part.
//!
//! In: a problem, its [`Regions`], and a slot. Out: [`Part`]. Only those regions are planned for which the slot computes or of
//! whose documents rows lie at its rank, so the time does not grow with the number of regions. Documents that lie whole at
//! the slot's rank and are computed there are not listed. Where places cannot reach each other it plans all.
//!
//! What others rely on: the parts of all slots together are what the whole plan says, and its transfer lists.

use std::ops::Range;

use super::Regions;
use super::local::Local;
use crate::balance::{attempt, of_region};
use crate::{BundleId, DocumentId, Error, Piece, Plan, Problem, Pull, RankId, SlotId};

/// What a slot computes of documents that do not lie whole at its rank, what it pulls, and what others pull from its rank.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Part {
    /// Document, KV heads and query rows that the slot computes, by document, head and row.
    pub computed: Vec<(DocumentId, Range<u16>, Range<u32>)>,
    /// Rows of the query side that the slot pulls, in the same order.
    pub queries: Vec<Pull>,
    /// Rows of K and V that the slot pulls, in the same order.
    pub keys: Vec<Pull>,
    /// What other slots pull from the rank at which the slot is at home, by slot.
    pub sent: Vec<Sent>,
    /// Documents of the regions that were planned for it.
    pub documents: usize,
}

/// Rows that another slot pulls.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Sent {
    /// Who pulls.
    pub slot: SlotId,
    /// Whether they are keys and values, or rows of the query side.
    pub is_keys: bool,
    /// What is pulled.
    pub rows: Pull,
}

impl Regions {
    /// The part of one slot.
    ///
    /// # Errors
    ///
    /// What the problem of a region is refused for.
    pub fn part(&self, problem: &Problem, slot: SlotId) -> Result<Part, Error> {
        let home = problem.slots.get(slot.0 as usize).and_then(|it| it.home);
        let (places, _) = problem.places();
        let mut part = Part::default();
        let mut add = |local: &Local, plan: &Plan| {
            part.documents += local.documents.len();
            for bundle in (0..plan.bundles().len() as u32).map(BundleId) {
                part.add(problem, local, plan, bundle, (slot, home));
            }
        };
        if problem.links.reach_all() {
            for region in self.needed(problem, slot, home) {
                if let Some(local) = Local::of(problem, &places, self, region)? {
                    add(&local, &of_region(&local.problem)?);
                }
            }
        } else {
            // There one plan is made for all slots.
            add(&Local::all(problem), &attempt(problem, 0)?);
        }
        part.computed.sort_unstable_by_key(|it| (it.0, it.1.start, it.2.start));
        let order = |it: &Pull| (it.document, it.kv_heads.start, it.rows.start);
        part.queries.sort_by_key(order);
        part.keys.sort_by_key(order);
        part.sent.sort_by_key(|it| (it.slot, !it.is_keys, order(&it.rows)));
        Ok(part)
    }

    /// Regions for which a slot computes, and those whose documents have rows at its home.
    fn needed(&self, problem: &Problem, slot: SlotId, home: Option<RankId>) -> Vec<usize> {
        let is_of =
            |region: &usize| self.shares[*region].binary_search_by_key(&slot, |it| it.slot).is_ok();
        let mut needed: Vec<usize> = (0..self.count()).filter(is_of).collect();
        if let Some(home) = home {
            for (document, _) in problem.layout.pieces_of(home) {
                let first = problem.layout.pieces_of_document(document)[0].rank;
                needed.push(self.of_rank(first));
            }
        }
        needed.sort_unstable();
        needed.dedup();
        needed
    }
}

impl Part {
    /// Adds what a bundle asks of a slot or of its home.
    fn add(
        &mut self,
        problem: &Problem,
        local: &Local,
        plan: &Plan,
        bundle: BundleId,
        (slot, home): (SlotId, Option<RankId>),
    ) {
        let (at, document) = local.slot_and_document(plan, bundle.0 as usize);
        let its_home = problem.slots[at.0 as usize].home;
        let holder = problem.layout.holder(document);
        if holder.is_some() && holder == its_home || at != slot && home.is_none() {
            return;
        }
        let it = &plan.bundles()[bundle.0 as usize];
        let runs = plan.runs_of(bundle).map(|run| (false, run.rows));
        for (is_keys, rows) in std::iter::once((true, it.keys.clone())).chain(runs) {
            if !is_keys && at == slot {
                self.computed.push((document, it.kv_heads.clone(), rows.clone()));
            }
            let pieces = problem.layout.locate(document, rows);
            for Piece { rank, local, rows } in pieces.filter(|it| Some(it.rank) != its_home) {
                let rows = Pull { rank, local, document, rows, kv_heads: it.kv_heads.clone() };
                if at == slot {
                    if is_keys { &mut self.keys } else { &mut self.queries }.push(rows);
                } else if Some(rank) == home {
                    self.sent.push(Sent { slot: at, is_keys, rows });
                }
            }
        }
    }
}
