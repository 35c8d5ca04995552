//! Tiles of a small problem, with what each costs and needs in each slot.
//!
//! In: bins. Out: the tiles in the order in which [`super::exact`] puts them, the dearest documents first, each from its last tile.
//!
//! What the search relies on: slots that count as alike may be swapped for a tile and all later ones, and the bytes of a tile
//! and all later ones are no fewer than its bound says.

use std::cmp::Reverse;
use std::ops::Range;
use std::rc::Rc;

use super::bin::Bin;
use super::bins::Bins;
use super::groups::Span;
use super::prices::Prices;
use crate::{DocumentId, TILE_ROWS};

/// A tile with all heads, and what it costs in each slot.
pub(super) struct Tile {
    pub(super) span: Span,
    pub(super) cost: u64,
    /// Bytes of its query rows, by bin.
    pub(super) queries: Vec<i128>,
    /// Keys that the tile needs, by bin.
    pub(super) keys: Vec<Keys>,
    /// Whether it is the first tile of its document in the order of the search.
    pub(super) starts: bool,
    /// By slot: the first slot that is interchangeable with this one, for this tile and all later
    /// ones.
    pub(super) alike: Rc<[usize]>,
    /// By slot: the first slot of the same speed and head start.
    pub(super) as_fast: Rc<[usize]>,
    /// Lower bound of the bytes of this tile and all later ones.
    pub(super) least: i128,
}

/// From the first to the last key that a bin holds of a document, with the bytes of all keys before them and up to their end.
#[derive(Clone, Debug, Default)]
pub(super) struct Keys {
    pub(super) rows: Range<u32>,
    pub(super) before: i128,
    pub(super) until: i128,
}

impl Keys {
    pub(super) fn bytes(&self) -> i128 {
        self.until - self.before
    }

    /// Bytes that a bin which holds these keys pulls more for those of a tile before all of its tiles.
    pub(super) fn more(&self, tile: &Self) -> i128 {
        // Bytes grow with the row, as keys do with the tile: none of the tile's is before those held and behind their start.
        let until = if self.rows.is_empty() { tile.until } else { tile.until.min(self.before) };
        (until - tile.before).max(0)
    }

    pub(super) fn hull(&self, other: &Self) -> Self {
        match (self.rows.is_empty(), other.rows.is_empty()) {
            (true, _) => return other.clone(),
            (_, true) => return self.clone(),
            _ => {}
        }
        let first = if other.rows.start < self.rows.start { other } else { self };
        let last = if other.rows.end > self.rows.end { other } else { self };
        Self { rows: first.rows.start..last.rows.end, before: first.before, until: last.until }
    }
}

/// The dearest documents first, each from its last tile.
pub(super) fn tiles_of(bins: &Bins<'_>) -> Vec<Tile> {
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
    let as_fast = alike(bins, &[]);
    let mut tiles: Vec<Tile> = Vec::new();
    for (_, document) in documents {
        let alike = alike(bins, &behind);
        behind.pop();
        let whole = problem.document(document);
        for tile in (0..whole.rows.div_ceil(TILE_ROWS)).rev() {
            let rows = tile * TILE_ROWS..whole.rows.min((tile + 1) * TILE_ROWS);
            let span = Span { document, heads: heads.clone(), rows: rows.clone() };
            let queries = bins.all.iter().map(|bin| prices.of_rows(bins, bin, &span, &(0..0)));
            let needed = whole.mask.keys(whole.rows, rows.clone());
            let none = span.with_rows(0..0);
            let keys = bins.all.iter().map(|bin| Keys {
                before: prices.of_rows(bins, bin, &none, &(0..needed.start)),
                until: prices.of_rows(bins, bin, &none, &(0..needed.end)),
                rows: needed.clone(),
            });
            tiles.push(Tile {
                cost: bins.cost(&span),
                queries: queries.collect(),
                keys: keys.collect(),
                starts: rows.end == whole.rows,
                alike: Rc::clone(&alike),
                as_fast: Rc::clone(&as_fast),
                least: 0,
                span,
            });
        }
    }
    // Lower bound: the query rows of every tile travel somewhere, and the slot that takes the first
    // tile of a document pulls all keys that the tile needs.
    let mut least = 0;
    for tile in tiles.iter_mut().rev() {
        least += tile.queries.iter().min().copied().unwrap_or(0);
        if tile.starts {
            least += tile.keys.iter().map(Keys::bytes).min().unwrap_or(0);
        }
        tile.least = least;
    }
    tiles
}

/// By bin: the first bin with the same speed, the same head start and the same prices for rows of
/// `documents`.
fn alike(bins: &Bins<'_>, documents: &[DocumentId]) -> Rc<[usize]> {
    let problem = bins.problem;
    let ways = |bin: &Bin<'_>| -> Vec<u64> {
        let pieces = documents.iter().flat_map(|it| problem.layout.pieces_of_document(*it));
        pieces.map(|it| problem.links.price(it.rank.0 as usize, bin.place())).collect()
    };
    let traits: Vec<_> =
        bins.all.iter().map(|it| (it.slot.weight, it.slot.head_start, ways(it))).collect();
    let first = |of| traits.iter().position(|it| it == of).unwrap_or(0);
    traits.iter().map(first).collect()
}
