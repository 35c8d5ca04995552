//! Cuts the documents and spreads them over the slots so that all finish together.
//!
//! In: a [`Problem`]. Out: a checked [`Plan`]. Four steps, a file or more each of the last three:
//!
//! 1. Pour all work over the slots like water: every slot gets a **capacity** in cost, smaller for
//!    slow slots and for those with a head start.
//! 2. [`fill`]: rows at a rank with a slot in place go to that slot, but those of documents for which [`pour`] finds it
//!    cheaper to leave home; all others, the dearest documents first, to the slot with most capacity left, by whole KV
//!    heads as far as they fit, cut where the capacity ends.
//! 3. [`matching`]: who holds too much sends few large pieces to who has room; [`give`] and [`together`] cut them so that all
//!    pieces of a document together are cheap.
//!    What a slot has far too much in [`short`] documents is taken from it and filled in elsewhere.
//! 4. [`even`]: from the slot that finishes last to those that finish first move pieces with the
//!    least bytes per cost, until the last finishes within 1/508 of the level.
//!
//! If a plan does not fit the slots' memory, it is bent ([`bend`]) under several limits for the bytes of a slot and of a
//! bundle; of the plans that fit the one that finishes first is taken ([`within`]).

mod below;
mod bend;
mod bin;
mod bins;
mod coarse;
mod cycles;
mod edges;
mod even;
mod exact;
mod fill;
mod floors;
mod give;
mod groups;
mod items;
mod limits;
mod line;
mod matching;
mod pieces;
mod pour;
mod prices;
mod room;
mod shapes;
mod short;
mod small;
mod tails;
mod tiles;
mod together;
mod twice;
mod waiting;
mod within;

use std::collections::BTreeSet;

use crate::balance::bin::Bin;
use crate::balance::bins::Bins;
use crate::balance::groups::Span;
use crate::balance::limits::Limits;
use crate::balance::matching::Given;
use crate::balance::prices::Prices;
use crate::memory::{bytes, check_beside, largest_bundle};
use crate::plan::least_work;
use crate::regions;
use crate::{Cuts, DocumentId, Error, Links, Plan, Problem, TILE_ROWS, Tolerance};

/// Plans all work of a problem onto its slots.
///
/// # Guarantees
///
/// The plan passes [`Plan::check`]; the same problem gives the same plan on every machine. Nothing is promised of
/// when it finishes; [`crate::Bounds::gap_ppm`] says how far from the best it is. Where memory does not bind, the last slot
/// is meant to finish within 1/500 of the level, but for one tile row and the overhead of tasks that cuts add.
///
/// # Errors
///
/// What [`Problem::check`] refuses, a problem of standby slots only, or slots without the memory
/// for a document, by name.
pub fn plan(problem: &Problem) -> Result<Plan, Error> {
    plan_beside(problem, 0)
}

/// As [`plan`], where slots have other plans in the same step. A bundle of `reserve` bytes has room
/// beside two phases of this plan, and no bundle of this plan is larger. A reserve of 0 says that
/// there is no other plan.
///
/// # Errors
///
/// As [`plan`].
pub fn plan_beside(problem: &Problem, reserve: u64) -> Result<Plan, Error> {
    problem.check()?;
    if problem.slots.iter().all(crate::Slot::is_standby) {
        return Err(Error::NoWeight { slots: problem.slots.len() as u32 });
    }
    refuse_large_documents(problem)?;
    let digest = problem.digest();
    let active = problem.slots.iter().filter(|it| !it.is_standby()).count();
    let fits = |plan: &Plan| fits(problem, plan, reserve);
    let in_regions = active > MANY && problem.links.reach_all();
    if in_regions {
        let made = regions::plan_all(problem, digest, regions::SLOTS_OF_A_REGION);
        match made {
            Ok(plan) if fits(&plan) => return Ok(plan),
            Ok(_) | Err(Error::SlotFull { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    best_of(problem, |asked| {
        if !in_regions {
            match twice::made(problem, asked, digest) {
                Ok(plan) if fits(&plan) => return Ok(plan),
                Ok(_) | Err(Error::SlotFull { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        within::plan_within_memory(asked, digest, reserve)?.checked_for(problem)
    })
}

/// Whether a checked plan leaves room for a bundle of `reserve` bytes, and has no larger one. That it fits where there is no other
/// plan was checked with the rest.
fn fits(problem: &Problem, plan: &Plan, reserve: u64) -> bool {
    reserve == 0
        || largest_bundle(problem, plan) <= reserve && check_beside(problem, plan, reserve).is_ok()
}

/// As [`plan`], in [regions](crate::Regions) of about so many slots, however few there are; with `u32::MAX` in one. Memory is not
/// bent. Where places cannot reach each other, one plan is made for all slots.
///
/// # Errors
///
/// As [`plan`].
pub fn plan_in_regions(problem: &Problem, slots: u32) -> Result<Plan, Error> {
    problem.check()?;
    if problem.slots.iter().all(crate::Slot::is_standby) {
        return Err(Error::NoWeight { slots: problem.slots.len() as u32 });
    }
    refuse_large_documents(problem)?;
    if !problem.links.reach_all() {
        return attempt(problem, problem.digest());
    }
    regions::plan_all(problem, problem.digest(), slots)
}

/// Whether the last slot finishes early enough.
fn is_even(problem: &Problem, plan: &Plan) -> bool {
    let it = plan.bounds();
    let level = problem.tolerance.raised(it.level);
    it.finish <= level.max(it.indivisible) + problem.tolerance.enough(level)
}

/// Whether `plan` is better: it is less late; or, as late, it loads its busiest link less, where links differ or more than the
/// usual is tolerated for that; or it moves fewer bytes.
fn is_better(problem: &Problem, plan: &Plan, other: &Plan) -> bool {
    let counts_links = !problem.links.are_equal() || problem.tolerance.is_wide();
    let order = |plan: &Plan| {
        let it = plan.bounds();
        (lateness(problem, plan), if counts_links { it.link } else { 0 }, it.pulled)
    };
    order(plan) < order(other)
}

/// How much later than tolerated the last slot finishes.
fn lateness(problem: &Problem, plan: &Plan) -> u64 {
    let (it, tolerance) = (plan.bounds(), problem.tolerance);
    let level = tolerance.raised(it.level);
    it.finish.saturating_sub(level + tolerance.enough(level))
}

/// The plan of a region: without limits, of a problem that is part of a checked one. Where there is only one to choose it is
/// not checked: whoever puts regions together checks the whole.
pub(crate) fn of_region(problem: &Problem) -> Result<Plan, Error> {
    if !problem.links.are_equal() || problem.tolerance.is_wide() {
        return attempt(problem, 0);
    }
    Ok(search(problem)?.into_draft().finish_unchecked(0, Cuts::Tiles))
}

/// The plan without limits: of all that keep the tolerance or a narrower one, the best.
pub(crate) fn attempt(problem: &Problem, digest: u64) -> Result<Plan, Error> {
    best_of(problem, |asked| twice::made(problem, asked, digest))
}

/// The best of the plans that are made as if something else were asked for: less tolerance, and links that are equal. So what a
/// wider tolerance allows is tried beside what a narrower one does, and to know links is never worse than to ignore them.
fn best_of(
    problem: &Problem,
    make: impl Fn(&Problem) -> Result<Plan, Error>,
) -> Result<Plan, Error> {
    let is_known = !problem.links.are_equal();
    // Where links are equal, what is best for one tolerance is where the next one begins: whatever comes later is at least as good.
    let takes_over = |asked: &Problem, new: &Plan, known: &Plan| {
        if is_known {
            return is_better(problem, new, known);
        }
        let moves_less = new.bounds().pulled <= known.bounds().pulled;
        is_better(asked, new, known) && (moves_less || lateness(asked, known) > 0)
    };
    let mut best: Option<Result<Plan, Error>> = None;
    // Plans that were too late for a narrow tolerance, and gave way to one that may load its links more.
    let mut late: Vec<Plan> = Vec::new();
    for tolerance in problem.tolerance.tried() {
        let asked = Problem { tolerance, ..problem.clone() };
        // Minimizing bytes may leave slots uneven or one link busy. So a plan without prices is made too.
        let unreachable = problem.links.unreachable.clone();
        let blind = || Problem { links: Links { unreachable, ..Links::equal() }, ..asked.clone() };
        let blind = is_known.then(blind);
        for asked in [Some(&asked), blind.as_ref()].into_iter().flatten() {
            match (&best, make(asked)) {
                (Some(Ok(known)), Ok(new)) if takes_over(asked, &new, known) => {
                    let is_late = lateness(asked, known) > 0;
                    late.extend(best.replace(Ok(new)).and_then(Result::ok).filter(|_| is_late));
                }
                (Some(Err(_)), Ok(new)) => best = Some(Ok(new)),
                (None, made) => best = Some(made),
                (Some(_), _) => {}
            }
        }
        // A wider tolerance allows it, and then it counts as if it had never been too late.
        if let Some(Ok(known)) = &mut best {
            for it in late.extract_if(.., |it| lateness(&asked, it) == 0) {
                if !is_known && is_better(&asked, &it, known) {
                    *known = it;
                }
            }
        }
    }
    best.unwrap_or(Err(Error::NoSlot))
}

fn search(problem: &Problem) -> Result<Bins<'_>, Error> {
    let start = Bins::new(problem, Limits::none(), least_work(problem));
    let sets = pour::poured(&start);
    // What leaving saves is estimated too roughly to do without trying what stays.
    let mut best = stay(start.clone());
    for documents in &sets {
        let other = leave(start.clone(), documents, fill::fill);
        // Sets grow: if this one needs many more bytes, the larger ones need even more.
        let mut is_last = false;
        best = match (best, other) {
            (Ok(best), Ok(other)) => {
                let (known, new) = (rank(&best), rank(&other));
                is_last = new.1 > known.1 + known.1 / MUCH;
                Ok(if new < known { other } else { best })
            }
            (Ok(best), Err(_)) => Ok(best),
            (Err(_), other) => other,
        };
        if is_last {
            break;
        }
    }
    let mut best = best?;
    let short = pour::short(&start);
    if !short.is_empty()
        && let Ok(other) = leave(start.clone(), &short, fill::fill_near)
        && rank(&other) < rank(&best)
    {
        best = other;
    }
    let fine = cycles::broken(best);
    let mut bins = coarse::cheaper(start.clone(), &fine).unwrap_or(fine);
    if let Some(line) = line::better(&start, &bins) {
        bins = line;
    }
    // The exact search keeps heads together.
    if problem.links.reach_all() && (exact::improve(&mut bins) == 0 || problem.heads_may_part()) {
        small::improve(&mut bins);
    }
    Ok(bins)
}

/// Keeps the rows of ranks with a slot there, except for surpluses.
fn stay(mut start: Bins<'_>) -> Result<Bins<'_>, Error> {
    let others = fill::place_at_home(&mut start, &BTreeSet::new());
    fill::fill(&mut start, others)?;
    let most = if give::fits(&start) { ways_within_time(&start) } else { 1 };
    let matchings = matching::matchings(&start, most);
    // Edges along which pieces go one by one do not see that a slot holds keys of a document already; where documents
    // span ranks and heads stay together that may be worth more than few pieces.
    let layout = &start.problem.layout;
    let spans = (0..layout.documents().len() as u32).any(|it| layout.spans_ranks(DocumentId(it)));
    let mut ways: Vec<Option<Vec<Given>>> = matchings.into_iter().map(Some).collect();
    if spans && !give::fits(&start) && !start.problem.heads_may_part() {
        ways.push(None);
    }
    let last = ways.pop().unwrap_or_default();
    let mut best: Option<((u64, i128), Bins<'_>)> = None;
    for way in ways {
        let bins = go(start.clone(), way);
        let rank = rank(&bins);
        if best.as_ref().is_none_or(|(other, _)| rank < *other) {
            best = Some((rank, bins));
        }
    }
    let bins = go(start, last);
    Ok(match best {
        Some((other, best)) if other <= rank(&bins) => best,
        _ => bins,
    })
}

/// Takes some documents from their ranks; they fill the capacity that is left once the others are even.
fn leave<'a>(
    mut bins: Bins<'a>,
    poured: &BTreeSet<DocumentId>,
    fill: impl Fn(&mut Bins<'a>, Vec<Span>) -> Result<(), Error>,
) -> Result<Bins<'a>, Error> {
    let others = fill::place_at_home(&mut bins, poured);
    if let Some(way) = matching::matchings(&bins, 1).pop() {
        matching::spread(&mut bins, way);
    }
    fill(&mut bins, others)?;
    deal(&mut bins);
    even::even(&mut bins);
    Ok(bins)
}

/// Moves surpluses along the edges of a matching if there are any, deals out short documents, and evens out the rest.
fn go(mut bins: Bins<'_>, edges: Option<Vec<Given>>) -> Bins<'_> {
    if let Some(edges) = edges {
        matching::spread(&mut bins, edges);
    }
    deal(&mut bins);
    even::even(&mut bins);
    bins
}

/// Deals short documents of slots that hold far too much in them to the others; where memory does not allow that they stay.
fn deal(bins: &mut Bins<'_>) {
    let overfull = short::overfull(bins);
    if overfull.is_empty() {
        return;
    }
    let mut dealt = bins.clone();
    let documents = short::take(&mut dealt, &overfull);
    if fill::fill(&mut dealt, documents).is_ok() {
        *bins = dealt;
    }
}

/// How many matchings are tried to the end: what one costs is known better once its pieces are cut. With few slots that takes no
/// time, and with many documents little of the time that all else takes.
fn ways_within_time(bins: &Bins<'_>) -> usize {
    let (slots, documents) = (bins.all.len(), bins.problem.layout.documents().len());
    let few = if slots <= 32 { (160 / slots).min(8) } else { 1 };
    few.max((documents / (10 * slots)).min(4))
}

/// The search for documents to move from home ends when a try needs more bytes than the best one by one part in this many.
const MUCH: i128 = 10;
/// More slots than this are planned in regions.
const MANY: usize = 2_048;

/// How good bins are, the less the better: how far beyond the tolerated finish, then bytes.
fn rank(bins: &Bins<'_>) -> (u64, i128) {
    let finish = bins.all.iter().filter(|it| !it.is_empty()).map(Bin::finish).max().unwrap_or(0);
    (finish.saturating_sub(bins.level + bins.enough), Prices::of(bins).of_all(bins))
}

/// Whether bins that finish so much beyond the tolerated time, as [`rank`] says, keep the tolerance, or at least the usual one.
fn keeps_tolerance(bins: &Bins<'_>, late: u64) -> bool {
    late == 0 || late + bins.enough <= Tolerance::USUAL.enough(bins.level)
}

/// A document of which even one tile with its keys fits no slot three times over.
fn refuse_large_documents(problem: &Problem) -> Result<(), Error> {
    let active = problem.slots.iter().filter(|it| !it.is_standby());
    let largest = active.map(|it| it.memory).max().unwrap_or(0);
    match largest_tile(problem) {
        (bytes, Some(document)) if bytes.saturating_mul(3) > largest => {
            Err(Error::DocumentTooLarge { document, needed: bytes.saturating_mul(3), largest })
        }
        _ => Ok(()),
    }
}

/// Bytes of the largest bundle that no plan is without: one tile of a document with its keys, under as few heads as may be.
fn largest_tile(problem: &Problem) -> (u64, Option<DocumentId>) {
    let heads = if problem.heads_may_part() { 0..1 } else { problem.all_heads() };
    let mut largest = (0, None);
    for document in problem.layout.longest() {
        let it = problem.document(document);
        let last = (it.rows - 1) / TILE_ROWS * TILE_ROWS;
        let tiles = [last.saturating_sub(TILE_ROWS)..last, last..it.rows];
        let needed = tiles.into_iter().map(|tile| {
            let keys = it.mask.keys(it.rows, tile.clone());
            bytes(problem, &heads, tile.len() as u64, keys.len() as u64).most()
        });
        let needed = needed.max().unwrap_or(0);
        if needed > largest.0 {
            largest = (needed, Some(document));
        }
    }
    largest
}
