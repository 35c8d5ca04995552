//! Tries every tile on every slot, for problems so small that this is done in a moment.
//!
//! In: bins that hold all rows. Out: the same rows, so spread that the last bin finishes as early as it can
//! and, within a thousandth of that, fewest bytes travel; or the bins as they were.
//!
//! Pieces of a few tiles are too coarse for moves that make a little better. The search walks the tiles of each document
//! from the last to the first, so that the first tile a bin gets brings most of its keys. It leaves a way that cannot
//! finish in time, costs with the least that tiles to come may cost no fewer bytes than the best, or comes to a state that was
//! reached as cheaply before. Of bins that are alike ([`Tile`]) and hold as much it tries one, and states that differ by their order
//! alone are one. Where the finish alone is asked for, bytes and so homes and links do not part bins. KV heads stay together.
//! It ends after a number of visits, so its time is bounded.

use std::collections::BTreeMap;

use super::bin::Bin;
use super::bins::Bins;
use super::prices::Prices;
use super::tiles::{Keys, Tile, tiles_of};
use crate::TILE_ROWS;

/// Problems with more tiles or more slots than this are not searched exactly.
const MOST_TILES: usize = 12;
pub(super) const MOST_BINS: usize = 6;
/// Maximum tiles that one search places before it ends.
pub(super) const VISITS: usize = 200_000;
/// Searches by which the earliest finish is narrowed down, each halving the interval.
const HALVINGS: usize = 10;

/// Spreads the rows of a small problem. Returns how many tiles the searches have placed.
pub(super) fn improve(bins: &mut Bins<'_>) -> usize {
    let layout = &bins.problem.layout;
    let tiles: u32 = layout.documents().iter().map(|it| it.rows.div_ceil(TILE_ROWS)).sum();
    let few = layout.documents().len() <= MOST_TILES && tiles as usize <= MOST_TILES;
    if !few || bins.all.len() < 2 || bins.all.len() > MOST_BINS {
        return 0;
    }
    let tiles = tiles_of(bins);
    let mut visits = 0;
    let finish = finish(bins);
    // The earliest finish, to a thousandth.
    let (mut never, mut possible) = (bins.level.saturating_sub(1).min(finish), finish);
    if bins.problem.tolerance.is_wide() {
        possible = finish.max(bins.level);
    }
    for _ in 0..HALVINGS {
        if possible - never <= finish / 1_000 {
            break;
        }
        let middle = never.midpoint(possible);
        let (found, put) = Search::new(bins, &tiles, middle, None).run();
        visits += put;
        if found.is_some() { possible = middle } else { never = middle }
    }
    // What the plan is now is one way, if it is early enough.
    let known = if finish <= possible { Prices::of(bins).of_all(bins) } else { i128::MAX };
    let (owners, put) = Search::new(bins, &tiles, possible, Some(known)).run();
    if let Some(owners) = owners {
        take_over(bins, &tiles, &owners);
    }
    visits + put
}

pub(super) fn finish(bins: &Bins<'_>) -> u64 {
    bins.all.iter().filter(|it| !it.is_empty()).map(Bin::finish).max().unwrap_or(0)
}

pub(super) struct Search<'a> {
    tiles: &'a [Tile],
    /// Cost of a tile and all later ones.
    rest: Vec<u64>,
    /// Most cost of each bin.
    most: Vec<u64>,
    /// Whether the search ends at the first assignment that fits.
    any: bool,
    /// Fewest bytes of an assignment so far; another one must have fewer.
    least: i128,
    best: Option<Vec<u8>>,
    pub(super) visits: usize,
    /// By tile: bytes with which a state was reached.
    reached: Vec<BTreeMap<State, i128>>,
}

/// By bin which it is like, its load and the keys that it holds of a tile's document; like ones in order of load.
type State = Vec<(usize, u64, u32, u32)>;

/// An assignment of the tiles up to here.
struct Way {
    loads: Vec<u64>,
    /// Keys of the current document, by bin.
    held: Vec<Keys>,
    owners: Vec<u8>,
    bytes: i128,
}

impl<'a> Search<'a> {
    /// `least`: the bytes that an assignment has to beat; `None` if any is enough.
    pub(super) fn new(bins: &Bins<'_>, tiles: &'a [Tile], by: u64, least: Option<i128>) -> Self {
        let mut rest: Vec<u64> = Vec::with_capacity(tiles.len());
        for tile in tiles.iter().rev() {
            rest.push(rest.last().copied().unwrap_or(0) + tile.cost);
        }
        rest.reverse();
        let most = bins.all.iter().map(|it| it.most_by(by)).collect();
        Self {
            tiles,
            rest,
            most,
            any: least.is_none(),
            least: least.unwrap_or(i128::MAX),
            best: None,
            visits: 0,
            reached: vec![BTreeMap::new(); tiles.len()],
        }
    }

    /// The slot of each tile, and how many tiles were placed on the way.
    pub(super) fn run(mut self) -> (Option<Vec<u8>>, usize) {
        let count = self.most.len();
        let mut way = Way {
            loads: vec![0; count],
            held: vec![Keys::default(); count],
            owners: Vec::with_capacity(self.tiles.len()),
            bytes: 0,
        };
        self.walk(&mut way);
        (self.best, self.visits)
    }

    fn walk(&mut self, way: &mut Way) {
        let at = way.owners.len();
        let is_done = self.any && self.best.is_some() || self.visits >= VISITS;
        let to_come = self.tiles.get(at).map_or(0, |it| it.least);
        if is_done || !self.any && way.bytes + to_come >= self.least {
            return;
        }
        let Some(tile) = self.tiles.get(at) else {
            self.least = way.bytes;
            self.best = Some(way.owners.clone());
            return;
        };
        let room: u64 = self.most.iter().zip(&way.loads).map(|(most, load)| most - load).sum();
        if room < self.rest[at] {
            return;
        }
        let none = tile.starts.then(|| vec![Keys::default(); way.held.len()]);
        let before = none.map(|none| std::mem::replace(&mut way.held, none));
        if self.is_new(at, way) {
            for (more, bin) in self.options(tile, way) {
                let held = way.held[bin].clone();
                let joined = held.hull(&tile.keys[bin]);
                let bytes = way.bytes;
                (way.held[bin], way.bytes) = (joined, if self.any { 0 } else { bytes + more });
                way.loads[bin] += tile.cost;
                way.owners.push(bin as u8);
                self.visits += 1;
                self.walk(way);
                way.owners.pop();
                way.loads[bin] -= tile.cost;
                (way.held[bin], way.bytes) = (held, bytes);
            }
        }
        if let Some(before) = before {
            way.held = before;
        }
    }

    /// Whether no earlier path reached this state as cheaply.
    fn is_new(&mut self, at: usize, way: &Way) -> bool {
        let tile = &self.tiles[at];
        let of_bin = |bin: usize| {
            let held = &way.held[bin].rows;
            if self.any {
                (tile.as_fast[bin], way.loads[bin], 0, 0)
            } else {
                (tile.alike[bin], way.loads[bin], held.start, held.end)
            }
        };
        let mut state: State = (0..way.loads.len()).map(of_bin).collect();
        state.sort_unstable();
        let bytes = if self.any { 0 } else { way.bytes };
        let before = self.reached[at].entry(state).or_insert(i128::MAX);
        let is_new = bytes < *before;
        *before = bytes.min(*before);
        is_new
    }

    /// Bins that can take a tile, with the bytes that it adds there: the cheapest first, or the
    /// fullest first while bytes do not count.
    fn options(&self, tile: &Tile, way: &Way) -> Vec<(i128, usize)> {
        let mut options = Vec::with_capacity(way.loads.len());
        for bin in 0..way.loads.len() {
            let is_same = |other: usize| {
                way.loads[other] == way.loads[bin]
                    && if self.any {
                        tile.as_fast[other] == tile.as_fast[bin]
                    } else {
                        tile.alike[other] == tile.alike[bin]
                            && way.held[other].rows == way.held[bin].rows
                    }
            };
            let room = self.most[bin] - way.loads[bin];
            if tile.cost > room || (0..bin).any(is_same) {
                continue;
            }
            let more = way.held[bin].more(&tile.keys[bin]);
            options.push((if self.any { room.into() } else { tile.queries[bin] + more }, bin));
        }
        options.sort_unstable();
        options
    }
}

/// Moves every tile to its owner, if the bins finish no later for it.
fn take_over(bins: &mut Bins<'_>, tiles: &[Tile], owners: &[u8]) {
    let mut other = bins.clone();
    for bin in 0..other.all.len() {
        for span in other.spans(bin, usize::MAX) {
            other.take(bin, &span);
        }
    }
    for (tile, owner) in tiles.iter().zip(owners) {
        other.put(usize::from(*owner), &tile.span);
    }
    if finish(&other) <= finish(bins) {
        *bins = other;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::balance::fill::{fill, place_at_home};
    use crate::balance::limits::Limits;
    use crate::plan::least_work;
    use crate::{
        Costs, Document, Heads, Layout, Link, Links, Mask, NOMINAL_RATE, Prices as Percents,
        Problem, RankId, Slot,
    };

    /// Documents of up to twelve tiles together at six ranks with a slot each.
    fn problem(seed: u32, links: Links) -> Problem {
        let lengths = (0..5).map(|at| 90 + (seed * 97 + at * 61 + seed * at * 13) % 260);
        let documents: Vec<Document> =
            lengths.map(|rows| Document { rows, mask: Mask::Causal }).collect();
        let rows: u32 = documents.iter().map(|it| it.rows).sum();
        let layout = Layout::end_to_end(documents, rows.div_ceil(6)).unwrap();
        let slot =
            |rank| Slot { weight: 100, head_start: 0, home: Some(RankId(rank)), memory: 1 << 50 };
        Problem {
            slots: (0..layout.ranks().len() as u32).map(slot).collect(),
            layout,
            heads: Heads { query: 4, kv: 2, dim: 64 },
            element_bytes: 2,
            lanes: 2,
            costs: Costs::pairs_only(),
            links,
            tolerance: crate::Tolerance::USUAL,
        }
    }

    fn visits(problem: &Problem) -> usize {
        let mut bins = Bins::new(problem, Limits::none(), least_work(problem));
        let others = place_at_home(&mut bins, &std::collections::BTreeSet::new());
        fill(&mut bins, others).unwrap();
        improve(&mut bins)
    }

    /// All bins differ where links do; the search may not take long for it.
    #[test]
    fn links_that_differ_hardly_cost_visits() {
        let link = |place: u32| Link {
            node: place / 2,
            rail: place % 2,
            leaf: 0,
            out: NOMINAL_RATE / (1 + place),
            into: NOMINAL_RATE / (1 + place % 3),
        };
        let prices = Percents { node: 12, rail: 70, leaf: 100, far: 150 };
        let (mut all, mut known) = (0, 0);
        for seed in 0..40 {
            all += visits(&problem(seed, Links::equal()));
            let equal = problem(seed, Links::equal());
            let places = (0..equal.layout.ranks().len() as u32).map(link).collect();
            known += visits(&problem(seed, Links { places, prices, ..Links::equal() }));
        }
        println!("{all} tiles put with equal links, {known} with links that differ");
        assert!(known <= 2 * all.max(40 * 1_000), "{known} tiles put, with equal links {all}");
    }

    #[test]
    fn problems_are_searched_up_to_the_tiles_and_slots_that_the_page_says() {
        let few = |tiles: usize, slots: usize| {
            let documents = vec![Document { rows: 128 * tiles as u32 - 7, mask: Mask::Causal }];
            let slot = Slot { weight: 100, head_start: 0, home: None, memory: 1 << 50 };
            Problem {
                layout: Layout::end_to_end(documents, 10_000).unwrap(),
                slots: vec![slot; slots],
                ..problem(1, Links::equal())
            }
        };
        assert!(visits(&few(MOST_TILES, MOST_BINS)) > 0);
        assert_eq!(visits(&few(MOST_TILES + 1, MOST_BINS)), 0);
        assert_eq!(visits(&few(MOST_TILES, MOST_BINS + 1)), 0);
    }

    /// Two slots of which one is at home, six tiles of documents under windows, causal and full masks.
    #[test]
    fn the_search_counts_what_bins_pull() {
        let slot = |home| Slot { weight: 100, head_start: 0, home, memory: 1 << 50 };
        for left in [0, 50, 127, 128, 200, 300] {
            for other in [Mask::Causal, Mask::Full, Mask::Window { left: 10 }] {
                let masks = [Mask::Window { left }, other];
                let documents = [500, 200].into_iter().zip(masks);
                let documents = documents.map(|(rows, mask)| Document { rows, mask }).collect();
                let problem = Problem {
                    layout: Layout::end_to_end(documents, 300).unwrap(),
                    slots: vec![slot(Some(RankId(1))), slot(None), slot(Some(RankId(0)))],
                    ..problem(1, Links::equal())
                };
                let mut bins = Bins::new(&problem, Limits::none(), least_work(&problem));
                let others = place_at_home(&mut bins, &std::collections::BTreeSet::new());
                fill(&mut bins, others).unwrap();
                let tiles = tiles_of(&bins);
                let search = |by: u64, least| Search::new(&bins, &tiles, by, Some(least)).run().0;
                for more in [0, bins.level / 8, bins.level] {
                    let by = finish(&bins) + more;
                    let owners = search(by, i128::MAX).unwrap();
                    let mut best = bins.clone();
                    for bin in 0..best.all.len() {
                        for span in best.spans(bin, usize::MAX) {
                            best.take(bin, &span);
                        }
                    }
                    for (tile, owner) in tiles.iter().zip(owners) {
                        best.put(owner.into(), &tile.span);
                    }
                    let bytes = Prices::of(&best).of_all(&best);
                    assert_eq!(search(by, bytes), None, "{masks:?}: fewer than {bytes} bytes");
                    assert!(search(by, bytes + 1).is_some(), "{masks:?}: more than {bytes} bytes");
                }
            }
        }
    }
}
