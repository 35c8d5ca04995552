//! Attention where the rows are: what a step would be without a pool.
//!
//! In: a problem with an in-place slot for each rank. Out: a plan in which no query row moves, cut
//! at the edges of ranks, and the imbalance of such a plan. Keys that a rank lacks are pulled from
//! their owners like those of any task.

use std::ops::Range;

use crate::plan::Draft;
use crate::{Cuts, DocumentId, Error, Plan, Problem, RankId, SlotId};

/// Plans every query row onto the slot in place at its rank, for `--attention local`.
///
/// Of several slots at one rank the first is taken, standby or not. Rows of one document that a
/// rank holds in several stretches become one bundle, unless there is a gap between their keys.
///
/// # Errors
///
/// [`Problem::check`]'s, a rank without a slot in place, or memory that does not suffice.
pub fn plan_at_home(problem: &Problem) -> Result<Plan, Error> {
    problem.check()?;
    let mut bundles = Vec::new();
    for rank in (0..problem.layout.ranks().len() as u32).map(RankId) {
        let slot = slot_at(problem, rank).ok_or(Error::NoSlotAtHome { rank })?;
        bundles.extend(rows_at(problem, rank).into_iter().map(|(id, rows)| (slot, id, rows)));
    }
    bundles.sort_by_key(|(slot, document, _)| (*slot, *document));
    let mut draft = Draft::new(problem);
    for of_one in bundles.chunk_by(|one, next| (one.0, one.1) == (next.0, next.1)) {
        let (slot, document, _) = of_one[0];
        let rows = of_one.iter().map(|it| it.2.clone());
        draft.rows(slot, document, &problem.all_heads(), rows);
    }
    draft.finish(problem.digest(), Cuts::RankEdges)
}

/// The latest and the mean time that the ranks would take for their own attention, if no row moved: each with the weight of its
/// slot, or with the usual one where it has none or a standby slot. Head starts are left out.
///
/// # Errors
///
/// [`Problem::check`]'s.
pub fn imbalance_at_home(problem: &Problem) -> Result<(u64, u64), Error> {
    problem.check()?;
    let heads = problem.all_heads();
    let (mut most, mut work, mut weights) = (0, 0, 0);
    for rank in (0..problem.layout.ranks().len() as u32).map(RankId) {
        let cost = |(document, it)| u128::from(problem.cost(document, &heads, &it));
        let load: u128 = rows_at(problem, rank).into_iter().map(cost).sum();
        let slot = slot_at(problem, rank).map(|it| &problem.slots[it.0 as usize]);
        let weight = slot.filter(|it| !it.is_standby()).map_or(100, |it| u128::from(it.weight));
        most = most.max(load * 100 / weight);
        (work, weights) = (work + load, weights + weight);
    }
    let fit = |it: u128| u64::try_from(it).unwrap_or(u64::MAX);
    Ok((fit(most), fit(work * 100 / weights.max(1))))
}

/// The first slot in place at a rank.
fn slot_at(problem: &Problem, rank: RankId) -> Option<SlotId> {
    let slot = problem.slots.iter().position(|it| it.home == Some(rank))?;
    Some(SlotId(slot as u32))
}

/// A rank's rows by document and then by row, those that touch merged.
fn rows_at(problem: &Problem, rank: RankId) -> Vec<(DocumentId, Range<u32>)> {
    let stretches = &problem.layout.ranks()[rank.0 as usize];
    let mut rows: Vec<_> = stretches.iter().map(|it| (it.document, it.start..it.end)).collect();
    rows.sort_by_key(|it| (it.0, it.1.start));
    rows.dedup_by(|next, last| {
        let touch = last.0 == next.0 && last.1.end == next.1.start;
        if touch {
            last.1.end = next.1.end;
        }
        touch
    });
    rows
}
