//! One region as a problem of its own.
//!
//! In: the whole problem and its [`Regions`]. Out: [`Local`], a problem that has only the documents that begin at ranks of the
//! region, the ranks that hold rows of them, and the slots that compute for it; and which numbers these have in the whole.
//!
//! It looks at the ranks of the region and at the pieces of its documents, never at all documents.

use super::{Regions, Share};
use crate::{
    Document, DocumentId, Error, Layout, Links, Plan, Problem, RankId, Slot, SlotId, Stretch,
};

/// A region's problem. What it calls n is the n-th of each list in the whole.
pub(super) struct Local {
    pub(super) problem: Problem,
    pub(super) documents: Vec<DocumentId>,
    pub(super) slots: Vec<SlotId>,
}

impl Local {
    /// The problem of a region; `None` where no document begins.
    ///
    /// # Errors
    ///
    /// [`Error::NoSlot`] for a region with work that no slot computes for.
    pub(super) fn of(
        whole: &Problem,
        places: &[usize],
        regions: &Regions,
        region: usize,
    ) -> Result<Option<Self>, Error> {
        let layout = &whole.layout;
        let own = regions.ranks(region);
        let mut documents = Vec::new();
        for stretches in &layout.ranks()[own.start as usize..own.end as usize] {
            documents.extend(stretches.iter().filter(|it| it.start == 0).map(|it| it.document));
        }
        if documents.is_empty() {
            return Ok(None);
        }
        if regions.shares[region].is_empty() {
            return Err(Error::NoSlot);
        }
        documents.sort_unstable();
        let mut ranks: Vec<u32> = own.clone().collect();
        for document in &documents {
            let pieces = layout.pieces_of_document(*document).iter();
            ranks.extend(pieces.map(|it| it.rank.0).filter(|it| !own.contains(it)));
        }
        ranks.sort_unstable();
        ranks.dedup();
        let stretches = |rank: &u32| -> Vec<Stretch> {
            let all = layout.ranks()[*rank as usize].iter();
            let mine = all.filter_map(|it| {
                let document = documents.binary_search(&it.document).ok()?;
                Some(Stretch { document: DocumentId(document as u32), ..*it })
            });
            mine.collect()
        };
        let stretches = ranks.iter().map(stretches).collect();
        let lengths: Vec<Document> = documents.iter().map(|it| whole.document(*it)).collect();
        let shares = &regions.shares[region];
        let slots = shares.iter().map(|it| slot(whole, it, &ranks)).collect::<Vec<_>>();
        let links = links(whole, places, &ranks, shares, &slots);
        let layout = Layout::new(lengths, stretches)?;
        let problem = Problem { layout, slots, links, ..without_layout(whole) };
        let slots = shares.iter().map(|it| it.slot).collect();
        Ok(Some(Self { problem, documents, slots }))
    }

    /// The whole problem, as the only region.
    pub(super) fn all(whole: &Problem) -> Self {
        let documents = (0..whole.layout.documents().len() as u32).map(DocumentId).collect();
        let slots = (0..whole.slots.len() as u32).map(SlotId).collect();
        Self { problem: whole.clone(), documents, slots }
    }

    /// What a bundle of the region's plan is in the whole.
    pub(super) fn slot_and_document(&self, plan: &Plan, bundle: usize) -> (SlotId, DocumentId) {
        let it = &plan.bundles()[bundle];
        (self.slots[it.slot.0 as usize], self.documents[it.document.0 as usize])
    }
}

/// All of a problem that is the same in each of its regions.
fn without_layout(whole: &Problem) -> Problem {
    let Problem { layout, heads, element_bytes, lanes, slots: _, costs, links: _, tolerance } =
        whole;
    Problem {
        layout: layout.clone(),
        heads: *heads,
        element_bytes: *element_bytes,
        lanes: *lanes,
        slots: Vec::new(),
        costs: *costs,
        links: Links::equal(),
        tolerance: *tolerance,
    }
}

/// A slot that begins later. Its memory is all slots' to check, once their regions are one plan: a region bends nothing for it.
fn slot(whole: &Problem, share: &Share, ranks: &[u32]) -> Slot {
    let it = whole.slots[share.slot.0 as usize];
    let home = it.home.and_then(|home| ranks.binary_search(&home.0).ok());
    let home = home.map(|rank| RankId(rank as u32));
    Slot { head_start: share.head_start, home, memory: u64::MAX, ..it }
}

/// Links of the region's places: its ranks, then those slots that have none of these ranks for a home.
fn links(
    whole: &Problem,
    places: &[usize],
    ranks: &[u32],
    shares: &[Share],
    slots: &[Slot],
) -> Links {
    let all = &whole.links;
    if all.are_equal() {
        return Links { places: Vec::new(), prices: all.prices, unreachable: Vec::new() };
    }
    let of_ranks = ranks.iter().map(|it| all.places[*it as usize]);
    let others = shares.iter().zip(slots).filter(|it| it.1.home.is_none());
    let of_slots = others.map(|(it, _)| all.places[places[it.slot.0 as usize]]);
    Links {
        places: of_ranks.chain(of_slots).collect(),
        prices: all.prices,
        unreachable: Vec::new(),
    }
}
