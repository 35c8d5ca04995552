//! Tasks of a bundle whose rows touch, as one range each.
//!
//! In: a plan whose bundles name tasks that exist. Out: [`Runs`]. There are far fewer of them than of tasks, so
//! whoever only counts rows, keys and cost looks at these.
//!
//! What others rely on: the runs of a bundle have its rows, in its order, and no two of them touch if its tasks are in row order.

use std::ops::Range;

use super::{BundleId, Plan};

/// Rows of a bundle that touch.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Run {
    pub(crate) rows: Range<u32>,
    pub(crate) tasks: u32,
}

/// The runs of every bundle of a plan.
pub(crate) struct Runs {
    all: Vec<Run>,
    /// Where the runs of each bundle end, after an entry for where the first bundle's begin.
    ends: Vec<u32>,
}

impl Runs {
    pub(crate) fn of(plan: &Plan) -> Self {
        let bundles = plan.bundles.len();
        let (mut all, mut ends) =
            (Vec::with_capacity(2 * bundles), Vec::with_capacity(bundles + 1));
        ends.push(0);
        for bundle in (0..bundles as u32).map(BundleId) {
            all.extend(plan.runs_of(bundle));
            ends.push(all.len() as u32);
        }
        Self { all, ends }
    }

    /// Runs of a bundle that the plan has.
    pub(crate) fn of_bundle(&self, BundleId(bundle): BundleId) -> &[Run] {
        let at = |index: usize| self.ends[index] as usize;
        &self.all[at(bundle as usize)..at(bundle as usize + 1)]
    }
}

impl Plan {
    /// Runs of one bundle; none of one that does not exist.
    pub(crate) fn runs_of(&self, bundle: BundleId) -> impl Iterator<Item = Run> + '_ {
        let mut tasks = self.tasks_of(bundle).iter().peekable();
        std::iter::from_fn(move || {
            let mut run = Run { rows: tasks.next()?.rows.clone(), tasks: 1 };
            while let Some(next) = tasks.next_if(|it| it.rows.start == run.rows.end) {
                run.rows.end = next.rows.end;
                run.tasks += 1;
            }
            Some(run)
        })
    }
}
