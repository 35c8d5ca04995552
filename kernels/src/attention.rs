//! The nouns of a launch: heads, masks, rows, forward tasks and backward bundles.
//!
//! In and out: types only, and the number of query-key pairs that they cost. Slices belong to the caller. All of them are
//! row-major `[rows, heads, dim]`, LSE and Δ `[rows, query heads]`.
//!
//! Nothing here checks or computes: `check` refuses what does not fit, `cpu` computes.

use std::ops::Range;

use half::bf16;

/// Rows of a tile, of queries and of keys, counted from the document's start.
pub const TILE: u32 = 128;

/// Heads of the rows handed in: those of one KV-head group.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Heads {
    /// Query heads, a multiple of `kv`. Query heads `[h·query/kv, (h+1)·query/kv)` share KV head `h`.
    pub query: usize,
    /// KV heads, at least 1.
    pub kv: usize,
    /// Numbers of a head's row: a multiple of 8, at most 256.
    pub dim: usize,
}

/// Which keys a query row attends to, by position in the document.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Mask {
    /// Keys at or before the row.
    Causal,
    /// All keys of the document.
    Full,
    /// Keys at or before the row, at most `left` before it.
    Window {
        /// Distance of the oldest key; 0 keeps the row itself alone.
        left: u32,
    },
}

impl Mask {
    /// Keys that row `row` of a document of `document_rows` rows attends to.
    pub fn keys(self, row: u32, document_rows: u32) -> Range<u32> {
        match self {
            Self::Causal => 0..row + 1,
            Self::Full => 0..document_rows,
            Self::Window { left } => row.saturating_sub(left)..row + 1,
        }
    }

    /// Keys that any row of `rows` attends to; empty without rows.
    pub fn keys_of(self, rows: &Range<u32>, document_rows: u32) -> Range<u32> {
        if rows.is_empty() {
            return 0..0;
        }
        let (first, last) =
            (self.keys(rows.start, document_rows), self.keys(rows.end - 1, document_rows));
        first.start..last.end
    }
}

/// Rows that a launch reads.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// f32 storage.
    F32(&'a [f32]),
    /// bf16 storage; the arithmetic is f32 all the same.
    Bf16(&'a [bf16]),
}

impl Rows<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(rows) => rows.len(),
            Self::Bf16(rows) => rows.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Rows that a launch writes.
#[derive(Debug)]
pub enum RowsMut<'a> {
    /// f32 storage.
    F32(&'a mut [f32]),
    /// bf16 storage, rounded to nearest even.
    Bf16(&'a mut [bf16]),
}

impl RowsMut<'_> {
    /// The same rows, to be read.
    pub fn as_rows(&self) -> Rows<'_> {
        match self {
            Self::F32(rows) => Rows::F32(rows),
            Self::Bf16(rows) => Rows::Bf16(rows),
        }
    }

    /// How many numbers there are.
    pub fn len(&self) -> usize {
        self.as_rows().len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A task: query rows of one document and KV-head group, and the keys that their mask keeps.
#[derive(Debug)]
pub struct Forward<'a> {
    /// Heads of all rows below.
    pub heads: Heads,
    /// Which keys a row attends to.
    pub mask: Mask,
    /// Factor of the scores, mostly `dim^-½`.
    pub scale: f32,
    /// Bound of the scores, above 0: a scaled score becomes softcap · tanh(score / softcap), before the mask.
    pub softcap: Option<f32>,
    /// Rows of the whole document.
    pub document_rows: u32,
    /// Positions of the query rows in the document.
    pub rows: Range<u32>,
    /// Positions of the keys held: all that the mask keeps for `rows`, or none for rows without keys.
    pub keys: Range<u32>,
    /// `[rows, query, dim]`.
    pub q: Rows<'a>,
    /// `[keys, kv, dim]`.
    pub k: Rows<'a>,
    /// `[keys, kv, dim]`.
    pub v: Rows<'a>,
    /// O, `[rows, query, dim]`.
    pub out: RowsMut<'a>,
    /// Natural log of the sum of exponentials of the scaled scores, `[rows, query]`.
    pub lse: &'a mut [f32],
}

/// A bundle: all query rows of one document and KV-head group in one slot.
#[derive(Debug)]
pub struct Backward<'a> {
    /// Heads of all rows below.
    pub heads: Heads,
    /// Which keys a row attends to.
    pub mask: Mask,
    /// Factor of the scores, as in the forward pass.
    pub scale: f32,
    /// Bound of the scores, as in the forward pass.
    pub softcap: Option<f32>,
    /// Rows of the whole document.
    pub document_rows: u32,
    /// Positions of the keys held: all that the mask keeps for the parts, or none.
    pub keys: Range<u32>,
    /// `[keys, kv, dim]`.
    pub k: Rows<'a>,
    /// `[keys, kv, dim]`.
    pub v: Rows<'a>,
    /// The bundle's query rows, ascending, not overlapping.
    pub parts: Vec<BackwardRows<'a>>,
    /// `[keys, kv, dim]`; the rows of `key_tiles` are overwritten, the others left alone.
    pub dk: &'a mut [f32],
    /// `[keys, kv, dim]`; the rows of `key_tiles` are overwritten, the others left alone.
    pub dv: &'a mut [f32],
    /// The [`key_tiles`] of `keys` that this launch computes; `0..key_tiles(&keys)` is all of them.
    pub key_tiles: Range<u32>,
}

/// Consecutive query rows of a bundle.
#[derive(Debug)]
pub struct BackwardRows<'a> {
    /// Positions in the document.
    pub rows: Range<u32>,
    /// `[rows, query, dim]`.
    pub q: Rows<'a>,
    /// dO, `[rows, query, dim]`.
    pub dout: Rows<'a>,
    /// LSE of the forward pass, `[rows, query]`; −∞ gives a row no gradient.
    pub lse: &'a [f32],
    /// Δ = rowsum(dO∘O), `[rows, query]`.
    pub delta: &'a [f32],
    /// dQ, `[rows, query, dim]`; zeroed by the launch that has key tile 0, added to by the others.
    pub dq: &'a mut [f32],
}

/// How many tiles of [`TILE`] rows, counted from the document's start, the keys touch.
pub fn key_tiles(keys: &Range<u32>) -> u32 {
    if keys.is_empty() { 0 } else { keys.end.div_ceil(TILE) - keys.start / TILE }
}

/// Cost of a task: pairs of query and key that its mask keeps, times query heads, times `dim`.
pub fn forward_cost(task: &Forward<'_>) -> u64 {
    pairs(task.mask, &task.rows, &task.keys, task.document_rows)
        * (task.heads.query * task.heads.dim) as u64
}

/// Cost of a bundle in one launch, in the unit of [`forward_cost`]. Backward costs 2.5 times as much per pair.
pub fn backward_cost(bundle: &Backward<'_>) -> u64 {
    let keys = tile_keys(&bundle.keys, &bundle.key_tiles);
    let pairs: u64 = bundle
        .parts
        .iter()
        .map(|part| pairs(bundle.mask, &part.rows, &keys, bundle.document_rows))
        .sum();
    pairs * (bundle.heads.query * bundle.heads.dim) as u64 * 5 / 2
}

/// Keys of `keys` that lie in its tiles `tiles`.
pub(crate) fn tile_keys(keys: &Range<u32>, tiles: &Range<u32>) -> Range<u32> {
    let first = keys.start / TILE;
    let start = ((first + tiles.start) * TILE).max(keys.start);
    let end = ((first + tiles.end).saturating_mul(TILE)).min(keys.end);
    start..end.max(start)
}

/// Pairs of a row of `rows` and a key of `keys` that the mask keeps.
fn pairs(mask: Mask, rows: &Range<u32>, keys: &Range<u32>, document_rows: u32) -> u64 {
    rows.clone()
        .map(|row| {
            let kept = mask.keys(row, document_rows);
            u64::from(kept.end.min(keys.end).saturating_sub(kept.start.max(keys.start)))
        })
        .sum()
}
