//! The plan of all regions.
//!
//! In: a problem. Out: its plan, checked as a whole, of which each document's tasks are those of its region's plan.
//!
//! What others rely on: memory is not bent over regions. Where it binds, or places cannot reach each other, whoever calls
//! plans without regions.

use super::local::Local;
use super::{RankSum, Regions};
use crate::balance::of_region;
use crate::plan::Draft;
use crate::{BundleId, Cuts, DocumentId, Error, Plan, Problem, SlotId};

/// Plans region by region, with about so many slots in each.
///
/// # Errors
///
/// What the problem of a region is refused for, or memory that does not suffice.
pub(crate) fn plan_all(problem: &Problem, digest: u64, slots: u32) -> Result<Plan, Error> {
    let regions = Regions::of(&problem.slots, &RankSum::of(problem), slots);
    let (places, _) = problem.places();
    let mut made: Vec<(Local, Plan)> = Vec::with_capacity(regions.count());
    for region in 0..regions.count() {
        if let Some(local) = Local::of(problem, &places, &regions, region)? {
            let plan = of_region(&local.problem)?;
            made.push((local, plan));
        }
    }
    let mut order: Vec<(SlotId, DocumentId, u16, u32, u32)> = Vec::new();
    for (at, (local, plan)) in (0..).zip(&made) {
        for (bundle, it) in (0_u32..).zip(plan.bundles()) {
            let (slot, document) = local.slot_and_document(plan, bundle as usize);
            order.push((slot, document, it.kv_heads.start, at, bundle));
        }
    }
    order.sort_unstable();
    let mut draft = Draft::new(problem);
    for (slot, document, _, at, bundle) in order {
        let plan = &made[at as usize].1;
        let bundle = BundleId(bundle);
        let heads = &plan.bundles()[bundle.0 as usize].kv_heads;
        draft.rows(slot, document, heads, plan.runs_of(bundle).map(|it| it.rows));
    }
    draft.finish(digest, Cuts::Tiles)
}
