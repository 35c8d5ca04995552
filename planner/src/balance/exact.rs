//! Tries every tile on every slot, for problems so small that this is done in a moment.
//!
//! In: bins that hold all rows. Out: the same rows, so spread that the last bin finishes as early as it can
//! and, within a thousandth of that, fewest bytes travel; or the bins as they were.
//!
//! Pieces of a few tiles are too coarse for moves that make a little better. The search walks the tiles of each document
//! from the last to the first, so that the first tile a bin gets brings most of its keys. It leaves a way that cannot
//! finish in time, costs more bytes than the best, or comes to a state that was reached as cheaply before. Of bins that are
//! [`alike`] and hold as much it tries one, and states that differ by their order alone are one. KV heads stay
//! together. It ends after a number of visits, so its time is bounded.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use super::bins::{Bin, Bins};
use super::groups::Span;
use super::prices::Prices;
use crate::{DocumentId, TILE_ROWS};

/// Most tiles and most bins.
const MOST_TILES: usize = 12;
const MOST_BINS: usize = 6;
/// Tiles that are put, in one search.
const VISITS: usize = 200_000;
/// Searches for the earliest finish.
const HALVINGS: usize = 10;

/// Spreads the rows of a small problem.
pub(super) fn improve(bins: &mut Bins<'_>) {
    let layout = &bins.problem.layout;
    let tiles: u32 = layout.documents().iter().map(|it| it.rows.div_ceil(TILE_ROWS)).sum();
    let few = layout.documents().len() <= MOST_TILES && tiles as usize <= MOST_TILES;
    if !few || bins.all.len() < 2 || bins.all.len() > MOST_BINS {
        return;
    }
    let tiles = tiles_of(bins);
    let finish = finish(bins);
    // The earliest finish, to a thousandth.
    let (mut never, mut possible) = (bins.level.saturating_sub(1).min(finish), finish);
    for _ in 0..HALVINGS {
        if possible - never <= finish / 1_000 {
            break;
        }
        let middle = never.midpoint(possible);
        match Search::new(bins, &tiles, middle, None).run() {
            Some(_) => possible = middle,
            None => never = middle,
        }
    }
    // What the plan is now is one way, if it is early enough.
    let known = if finish <= possible { Prices::of(bins).of_all(bins) } else { i128::MAX };
    if let Some(owners) = Search::new(bins, &tiles, possible, Some(known)).run() {
        take_over(bins, &tiles, &owners);
    }
}

fn finish(bins: &Bins<'_>) -> u64 {
    bins.all.iter().filter(|it| !it.is_empty()).map(Bin::finish).max().unwrap_or(0)
}

/// One tile of all heads, and what it means for each bin.
struct Tile {
    span: Span,
    cost: u64,
    /// Bytes of its query rows, by bin.
    queries: Vec<i128>,
    /// Its keys.
    keys: Range<u32>,
    /// Whether it is the first of its document on the way.
    starts: bool,
    /// By bin the first one that is like it for this tile and all behind it.
    alike: Rc<[usize]>,
}

/// The dearest documents first, each from its last tile.
fn tiles_of(bins: &Bins<'_>) -> Vec<Tile> {
    let problem = bins.problem;
    let prices = Prices::of(bins);
    let heads = problem.all_heads();
    let mut documents: Vec<(Reverse<u64>, DocumentId)> = (0..)
        .map(DocumentId)
        .zip(problem.layout.documents())
        .map(|(id, it)| (Reverse(problem.cost(id, &heads, &(0..it.rows))), id))
        .collect();
    documents.sort_unstable();
    let mut behind: Vec<DocumentId> = documents.iter().rev().map(|it| it.1).collect();
    let mut tiles = Vec::new();
    for (_, document) in documents {
        let alike = alike(bins, &behind);
        behind.pop();
        let whole = problem.document(document);
        for tile in (0..whole.rows.div_ceil(TILE_ROWS)).rev() {
            let rows = tile * TILE_ROWS..whole.rows.min((tile + 1) * TILE_ROWS);
            let span = Span { document, heads: heads.clone(), rows: rows.clone() };
            let queries = bins.all.iter().map(|bin| prices.of_rows(bins, bin, &span, &(0..0)));
            tiles.push(Tile {
                cost: bins.cost(&span),
                queries: queries.collect(),
                keys: whole.mask.keys(whole.rows, rows.clone()),
                starts: rows.end == whole.rows,
                alike: Rc::clone(&alike),
                span,
            });
        }
    }
    tiles
}

/// By bin the first one of the same speed and head start whose bytes of `documents` come as dearly.
fn alike(bins: &Bins<'_>, documents: &[DocumentId]) -> Rc<[usize]> {
    let problem = bins.problem;
    let ways = |bin: &Bin<'_>| -> Vec<u32> {
        let pieces = documents.iter().flat_map(|it| problem.layout.pieces_of_document(*it));
        pieces.map(|it| problem.links.price(it.rank.0.into(), bin.place())).collect()
    };
    let traits: Vec<_> =
        bins.all.iter().map(|it| (it.slot.weight, it.slot.head_start, ways(it))).collect();
    let first = |of| traits.iter().position(|it| it == of).unwrap_or(0);
    traits.iter().map(first).collect()
}

struct Search<'a> {
    bins: &'a Bins<'a>,
    prices: Prices,
    tiles: &'a [Tile],
    /// Cost of a tile and all behind it.
    rest: Vec<u64>,
    /// Most cost of each bin.
    most: Vec<u64>,
    /// Whether the first way that fits is enough.
    any: bool,
    /// Fewest bytes so far; a way must have fewer.
    least: i128,
    best: Option<Vec<u8>>,
    visits: usize,
    /// Bytes with which a state was reached.
    reached: BTreeMap<State, i128>,
}

/// Tile, and by bin which it is like, its load and the keys that it holds of the tile's document; like ones in order of load.
type State = (usize, Vec<(usize, u64, u32, u32)>);

/// A way through the tiles up to here.
struct Way {
    loads: Vec<u64>,
    /// Keys of the current document, by bin.
    held: Vec<Range<u32>>,
    owners: Vec<u8>,
    bytes: i128,
}

impl<'a> Search<'a> {
    /// `least` is `None` if any way is enough, else what must be beaten.
    fn new(bins: &'a Bins<'_>, tiles: &'a [Tile], finish: u64, least: Option<i128>) -> Self {
        let mut rest: Vec<u64> = Vec::with_capacity(tiles.len());
        for tile in tiles.iter().rev() {
            rest.push(rest.last().copied().unwrap_or(0) + tile.cost);
        }
        rest.reverse();
        let most = bins.all.iter().map(|it| it.most_by(finish)).collect();
        Self {
            bins,
            prices: Prices::of(bins),
            tiles,
            rest,
            most,
            any: least.is_none(),
            least: least.unwrap_or(i128::MAX),
            best: None,
            visits: 0,
            reached: BTreeMap::new(),
        }
    }

    /// The bin of each tile.
    fn run(mut self) -> Option<Vec<u8>> {
        let count = self.bins.all.len();
        let mut way = Way {
            loads: vec![0; count],
            held: vec![0..0; count],
            owners: Vec::with_capacity(self.tiles.len()),
            bytes: 0,
        };
        self.walk(&mut way);
        self.best
    }

    fn walk(&mut self, way: &mut Way) {
        let at = way.owners.len();
        let is_done = self.any && self.best.is_some() || self.visits >= VISITS;
        if is_done || way.bytes >= self.least {
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
        let before = way.held.clone();
        if tile.starts {
            way.held.fill(0..0);
        }
        if self.is_new(at, way) {
            for (more, bin) in self.options(tile, way) {
                let held = way.held[bin].clone();
                let joined = hull(&held, &tile.keys);
                (way.held[bin], way.bytes) = (joined, way.bytes + more);
                way.loads[bin] += tile.cost;
                way.owners.push(bin as u8);
                self.visits += 1;
                self.walk(way);
                way.owners.pop();
                way.loads[bin] -= tile.cost;
                (way.held[bin], way.bytes) = (held, way.bytes - more);
            }
        }
        way.held = before;
    }

    /// Whether a state was not reached as cheaply before.
    fn is_new(&mut self, at: usize, way: &Way) -> bool {
        let of_bin = |bin: usize| {
            let held = &way.held[bin];
            (self.tiles[at].alike[bin], way.loads[bin], held.start, held.end)
        };
        let mut state: Vec<_> = (0..way.loads.len()).map(of_bin).collect();
        state.sort_unstable();
        let bytes = if self.any { 0 } else { way.bytes };
        let before = self.reached.entry((at, state)).or_insert(i128::MAX);
        let is_new = bytes < *before;
        *before = bytes.min(*before);
        is_new
    }

    /// Bins that can take a tile, with the bytes it adds, the cheapest first.
    fn options(&self, tile: &Tile, way: &Way) -> Vec<(i128, usize)> {
        let mut options = Vec::with_capacity(way.loads.len());
        for (bin, it) in self.bins.all.iter().enumerate() {
            let is_same = |other: usize| {
                tile.alike[other] == tile.alike[bin]
                    && (way.loads[other], &way.held[other]) == (way.loads[bin], &way.held[bin])
            };
            if way.loads[bin] + tile.cost > self.most[bin] || (0..bin).any(is_same) {
                continue;
            }
            let keys = |keys: &Range<u32>| {
                let span = tile.span.with_rows(0..0);
                self.prices.of_rows(self.bins, it, &span, keys)
            };
            let held = &way.held[bin];
            options.push((tile.queries[bin] + keys(&hull(held, &tile.keys)) - keys(held), bin));
        }
        options.sort_unstable();
        options
    }
}

fn hull(a: &Range<u32>, b: &Range<u32>) -> Range<u32> {
    match (a.is_empty(), b.is_empty()) {
        (true, _) => b.clone(),
        (_, true) => a.clone(),
        _ => a.start.min(b.start)..a.end.max(b.end),
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
