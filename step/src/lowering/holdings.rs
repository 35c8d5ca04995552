//! Whose rows a bundle needs, and how many.
//!
//! In: a plan and where the rows of its documents are. Out: for each bundle its [`Holding`]s. Where the rows lie at a rank is not
//! asked here.
//!
//! Invariant: each rank that has query rows or keys of a bundle has one holding of it, and these are sorted by rank.

use std::ops::Range;

use cadre_planner::{Bundle, BundleId, DocumentId, Layout, Plan, Problem, RankId};
use cadre_protocol::Groups;

/// Rows of a bundle that one rank holds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Holding {
    pub(super) rank: RankId,
    /// Query rows of its tasks.
    pub(super) queries: u32,
    /// Rows of its keys.
    pub(super) keys: u32,
}

/// What each rank holds of each bundle.
pub(super) fn holdings(problem: &Problem, plan: &Plan) -> Groups<Holding> {
    let layout = &problem.layout;
    let (mut all, mut of_bundle) = (Groups::with_capacity(plan.bundles().len()), Vec::new());
    for (index, Bundle { document, keys, .. }) in (0..).map(BundleId).zip(plan.bundles()) {
        let tasks = plan.tasks_of(index);
        if let Some(rank) = layout.holder(*document) {
            let queries = tasks.iter().map(|it| it.rows.end - it.rows.start).sum();
            all.push([Holding { rank, queries, keys: keys.end - keys.start }]);
            continue;
        }
        of_bundle.clear();
        for task in tasks {
            of_bundle.extend(layout.locate(*document, task.rows.clone()).map(|it| {
                let queries = it.rows.end - it.rows.start;
                Holding { rank: it.rank, queries, keys: 0 }
            }));
        }
        of_bundle.extend(layout.locate(*document, keys.clone()).map(|it| {
            let keys = it.rows.end - it.rows.start;
            Holding { rank: it.rank, queries: 0, keys }
        }));
        of_bundle.sort_unstable_by_key(|it| it.rank);
        of_bundle.dedup_by(|more, it| {
            let same = more.rank == it.rank;
            if same {
                it.queries += more.queries;
                it.keys += more.keys;
            }
            same
        });
        all.push(of_bundle.iter().copied());
    }
    all.shrink();
    all
}

/// How many of some rows each rank holds, by rank.
pub(super) fn by_rank(
    layout: &Layout,
    document: DocumentId,
    rows: &Range<u32>,
) -> Vec<(RankId, u32)> {
    let located = layout.locate(document, rows.clone());
    let mut held: Vec<_> = located.map(|it| (it.rank, it.rows.end - it.rows.start)).collect();
    held.sort_unstable_by_key(|it| it.0);
    held.dedup_by(|more, it| {
        let same = more.0 == it.0;
        if same {
            it.1 += more.1;
        }
        same
    });
    held
}
