//! Small problems that are searched twice: as they are, and as if heads had to stay together.
//!
//! In: a problem. Out: its plan without limits, of the better search.

use super::bins::Bins;
use super::{rank, search};
use crate::{Error, Plan, Problem};

/// The plan without limits of a problem, made as if it were `asked`, which has the same work and slots.
pub(super) fn made(problem: &Problem, asked: &Problem, digest: u64) -> Result<Plan, Error> {
    // Heads that may part make so many ways that the best one with all heads together may be missed.
    let together = Problem { lanes: 2, ..asked.clone() };
    let mut bins = search(asked)?;
    if asked.heads_may_part()
        && takes_no_time(asked)
        && let Ok(other) = search(&together)
        && saves_bytes(&other, &bins)
    {
        bins = other;
    }
    bins.problem = problem;
    bins.into_plan(digest)
}

/// Whether bins move fewer bytes than others, and finish no later beyond the tolerated time.
fn saves_bytes(bins: &Bins<'_>, others: &Bins<'_>) -> bool {
    let ((late, bytes), (others_late, others_bytes)) = (rank(bins), rank(others));
    late <= others_late && bytes < others_bytes
}

/// Whether a problem is so small that it can be searched twice.
fn takes_no_time(problem: &Problem) -> bool {
    problem.slots.len() <= 32 && problem.layout.documents().len() <= 256
}
