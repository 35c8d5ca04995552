//! A plan that is less even where tile rows are coarse and evenness is dear.
//!
//! In: empty bins, and what they hold when the last finishes in time. Out: what they hold when it may finish later, if far
//! fewer bytes travel then.
//!
//! Where one tile row is more than [`COARSE`] of what a slot does, nothing but small ends of documents makes slots even, and
//! each of these brings keys for hardly any work: 62 documents of 129 rows at two ranks move five times the bytes to finish
//! six thousandths earlier.

use std::collections::BTreeSet;
use std::ops::Range;

use super::bin::Bin;
use super::bins::Bins;
use super::prices::Prices;
use super::{even, fill, keeps_tolerance, rank};
use crate::{Document, Mask, Problem, TILE_ROWS, Tolerance};

/// A tile row is coarse if it costs more than one part in this many of the level.
const COARSE: u64 = 50;
/// With coarse tile rows the last slot may finish after the level by one part in this many of it.
const LATE: u64 = 100;
/// A plan that finishes so late has to save one part in this many of the bytes.
const SAVED: i128 = 5;

/// A plan that tolerates the later finish and keeps more rows at home; none if it is not much cheaper than `fine`, or if that keeps
/// a tolerance that is not the usual one.
pub(super) fn cheaper<'a>(start: Bins<'a>, fine: &Bins<'a>) -> Option<Bins<'a>> {
    let problem = start.problem;
    let is_asked_for = problem.tolerance != Tolerance::USUAL || is_windowed(problem);
    if is_asked_for && keeps_tolerance(fine, rank(fine).0) {
        return None;
    }
    let heads = if problem.heads_may_part() { 0..1 } else { problem.all_heads() };
    if dearest_tile(&start, heads) <= start.level / COARSE {
        return None;
    }
    let mut bins = start;
    bins.tolerated = bins.level / LATE;
    let others = fill::place_at_home(&mut bins, &BTreeSet::new());
    fill::fill(&mut bins, others).ok()?;
    even::even(&mut bins);
    let prices = Prices::of(&bins);
    let is_late = |it: &Bin<'_>| !it.is_empty() && it.finish() > bins.level + bins.tolerated;
    let known = prices.of_all(fine);
    let is_cheap = prices.of_all(&bins) <= known - known / SAVED;
    (is_cheap && !bins.all.iter().any(is_late)).then_some(bins)
}

/// Cost of the dearest tile row under some heads.
pub(super) fn dearest_tile(bins: &Bins<'_>, heads: Range<u16>) -> u64 {
    let problem = bins.problem;
    let longest = problem.layout.longest().into_iter();
    let cost = longest.flat_map(|document| {
        let rows = problem.document(document).rows;
        let last = (rows - 1) / TILE_ROWS * TILE_ROWS;
        let tiles = [last.saturating_sub(TILE_ROWS)..last, last..rows];
        tiles.map(|tile| problem.cost(document, &heads, &tile))
    });
    cost.max().unwrap_or(0)
}

/// Whether a window leaves out keys of a document.
pub(super) fn is_windowed(problem: &Problem) -> bool {
    problem.layout.documents().iter().any(is_cut_by_window)
}

/// Whether a window leaves out keys of this document.
pub(super) fn is_cut_by_window(document: &Document) -> bool {
    matches!(document.mask, Mask::Window { left } if document.rows > left.saturating_add(1))
}
