//! Cuts the documents and spreads them over the slots so that all finish together.
//!
//! In: a [`Problem`]. Out: a checked [`Plan`]. Four steps, a file or more each of the last three:
//!
//! 1. Pour all work over the slots like water: every slot gets a **capacity** in cost, smaller for
//!    slow slots and for those with a head start.
//! 2. [`fill`]: rows at a rank with a slot in place go to that slot; all others, the dearest
//!    documents first, to the slot with most capacity left, cut where the capacity ends.
//! 3. [`matching`]: who holds too much sends few large pieces to who has room; [`give`] and [`together`] cut them so that all
//!    pieces of a document together are cheap.
//! 4. [`even`]: from the slot that finishes last to those that finish first move pieces with the
//!    least bytes per cost, until the last finishes within 1/508 of the level.
//!
//! If the plan does not fit the slots' memory, the steps are repeated under limits for the bytes of
//! a slot and of a bundle, and of the plans that fit the one that finishes first is taken.

mod bins;
mod edges;
mod even;
mod exact;
mod fill;
mod give;
mod groups;
mod matching;
mod pieces;
mod prices;
mod shapes;
mod tails;
mod together;

use crate::balance::bins::{Bin, Bins, Limits};
use crate::balance::matching::Given;
use crate::balance::prices::Prices;
use crate::memory::bytes;
use crate::plan::least_work;
use crate::{DocumentId, Error, Links, Plan, Problem, TILE_ROWS};

/// Plans all work of a problem onto its slots.
///
/// # Guarantees
///
/// The plan passes [`Plan::check`]; the same problem gives the same plan on every machine. Where
/// memory does not bind, no slot finishes later than the earliest one by more than the dearest tile
/// row takes at both together, in practice far less ([`crate::Bounds::gap_ppm`]).
///
/// # Errors
///
/// What [`Problem::check`] refuses, a problem of standby slots only, or slots without the memory
/// for a document, by name.
pub fn plan(problem: &Problem) -> Result<Plan, Error> {
    problem.check()?;
    if problem.slots.iter().all(crate::Slot::is_standby) {
        return Err(Error::NoWeight { slots: problem.slots.len() as u32 });
    }
    refuse_large_documents(problem)?;
    let digest = problem.digest();
    match attempt(problem, digest, Limits::none()) {
        Err(Error::SlotFull { .. }) => plan_within_memory(problem, digest),
        plan => plan,
    }
}

/// The plan that finishes first of those made under several limits.
fn plan_within_memory(problem: &Problem, digest: u64) -> Result<Plan, Error> {
    let active = || problem.slots.iter().filter(|it| !it.is_standby()).map(|it| it.memory);
    let (least, most) = (active().min().unwrap_or(0), active().max().unwrap_or(0));
    // A third is what the largest bundle may have: two phases of it and the reserve.
    let mut reserves: Vec<u64> =
        [3, 4, 6, 10].iter().flat_map(|part| [most / part, least / part]).collect();
    reserves.dedup();
    let mut best: Result<Plan, Error> = Err(Error::NoSlot);
    for reserve in reserves {
        let plan = attempt(problem, digest, Limits::with_reserve(reserve));
        best = match (best, plan) {
            (Ok(best), Ok(plan)) if plan.bounds().finish < best.bounds().finish => Ok(plan),
            (Err(_), plan) => plan,
            (best, _) => best,
        };
    }
    best
}

fn attempt(problem: &Problem, digest: u64, limits: Limits) -> Result<Plan, Error> {
    let bins = search(problem, limits)?;
    if rank(&bins).0 == 0 || problem.links.are_equal() {
        return bins.into_plan(digest);
    }
    // Moves to where bytes are cheap may end where no move helps; finishing together counts more than the links.
    let alike = Problem { links: Links::equal(), ..problem.clone() };
    let mut other = search(&alike, limits)?;
    other.problem = problem;
    if rank(&other) < rank(&bins) { other } else { bins }.into_plan(digest)
}

fn search(problem: &Problem, limits: Limits) -> Result<Bins<'_>, Error> {
    let mut start = Bins::new(problem, limits, least_work(problem));
    fill::fill(&mut start)?;
    let most = if give::fits(&start) { ways_within_time(&start) } else { 1 };
    let matchings = matching::matchings(&start, most);
    // Edges along which pieces go one by one do not see that a slot holds keys of a document already; where documents
    // span ranks and heads stay together that may be worth more than few pieces.
    let spans = (0..problem.layout.documents().len() as u32)
        .any(|it| problem.layout.pieces_of_document(DocumentId(it)).len() > 1);
    let mut ways: Vec<Option<Vec<Given>>> = matchings.into_iter().map(Some).collect();
    if spans && !give::fits(&start) && !problem.heads_may_part() {
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
    let mut bins = match best {
        Some((other, best)) if other <= rank(&bins) => best,
        _ => bins,
    };
    if limits.are_none() {
        exact::improve(&mut bins);
    }
    Ok(bins)
}

/// Spreads along edges, if any, and evens out what is left.
fn go(mut bins: Bins<'_>, edges: Option<Vec<Given>>) -> Bins<'_> {
    if let Some(edges) = edges {
        matching::spread(&mut bins, edges);
    }
    even::even(&mut bins);
    bins
}

/// How many matchings are tried to the end: what one costs is known better once its pieces are cut. With few slots that takes no
/// time, and with many documents little of the time that all else takes.
fn ways_within_time(bins: &Bins<'_>) -> usize {
    let (slots, documents) = (bins.all.len(), bins.problem.layout.documents().len());
    let few = if slots <= 32 { (160 / slots).min(8) } else { 1 };
    few.max((documents / (10 * slots)).min(4))
}

/// Part of the level by which the last may finish late without being worse.
const ENOUGH: u64 = 504;

/// How good bins are, the less the better: how far beyond the tolerated finish, then bytes.
fn rank(bins: &Bins<'_>) -> (u64, i128) {
    let finish = bins.all.iter().filter(|it| !it.is_empty()).map(Bin::finish).max().unwrap_or(0);
    (finish.saturating_sub(bins.level + bins.level / ENOUGH), Prices::of(bins).of_all(bins))
}

/// A document of which even one tile with its keys fits no slot three times over.
fn refuse_large_documents(problem: &Problem) -> Result<(), Error> {
    let active = problem.slots.iter().filter(|it| !it.is_standby());
    let largest = active.map(|it| it.memory).max().unwrap_or(0);
    let heads = problem.all_heads();
    for document in problem.layout.longest() {
        let it = problem.document(document);
        let last = (it.rows - 1) / TILE_ROWS * TILE_ROWS;
        let tiles = [last.saturating_sub(TILE_ROWS)..last, last..it.rows];
        let needed = tiles.into_iter().map(|tile| {
            let keys = it.mask.keys(it.rows, tile.clone());
            bytes(problem, &heads, tile.len() as u64, keys.len() as u64).most().saturating_mul(3)
        });
        let needed = needed.max().unwrap_or(0);
        if needed > largest {
            return Err(Error::DocumentTooLarge { document, needed, largest });
        }
    }
    Ok(())
}
