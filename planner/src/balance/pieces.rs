//! Which piece of what a slot holds moves best to another.
//!
//! In: rows that donors hold and the cost that should move of each, a receiver. Out: the piece with the least new bytes per
//! cost of those that cost no more, as far as a guess of the rows and heads it is of tells.
//!
//! For a causal document the best piece is seldom its tail: it may end where queries and keys cost the
//! same ([`Prices::cheapest_end`]), or inside the prefix of keys that the receiver holds already.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::ops::Range;

use super::bin::Bin;
use super::bins::Bins;
use super::groups::{Group, Span};
use super::prices::Prices;
use crate::{DocumentId, TILE_ROWS};

/// A piece with what it would cost to move.
pub(super) struct Scored {
    pub(super) span: Span,
    pub(super) moved: i128,
    bytes: i128,
    /// Whether it is less than half of what should move.
    is_small: bool,
}

/// What a donor could give: parts of `spans` that cost at most `wanted`.
pub(super) struct Offer<'a> {
    pub(super) donor: usize,
    /// Parts on offer, in the order of document, heads and row.
    pub(super) spans: &'a [Span],
    pub(super) wanted: u64,
}

/// The cheapest piece among the offers, with its donor; `None` if even single tiles cost too much.
///
/// The price of taking some KV heads of a span is estimated in closed form. For the `tries`
/// cheapest estimates, and for more as long as no piece is found, the bytes of all pieces are
/// counted exactly.
pub(super) fn best_piece(
    bins: &Bins<'_>,
    prices: &Prices,
    offers: &[Offer<'_>],
    receiver: usize,
    tries: usize,
) -> Option<(usize, Scored)> {
    let to = &bins.all[receiver];
    let mut guesses = guesses(bins, prices, offers, to);
    let mut best: Option<(usize, Scored)> = None;
    for at in 0..guesses.len() {
        if at >= tries && best.is_some() {
            break;
        }
        let next = (at..guesses.len()).min_by(|a, b| guesses[*a].order(&guesses[*b]));
        guesses.swap(at, next.unwrap_or(at));
        let Guess { offer: &Offer { donor, wanted, .. }, span, heads, .. } = guesses[at];
        let span = Span { heads: span.heads.end - heads..span.heads.end, ..span.clone() };
        for piece in candidates(bins, prices, to, &span, wanted) {
            if piece.rows.is_empty() || !bins.has_room(receiver, &piece) {
                continue;
            }
            let moved = bins.cost(&piece);
            let is_small = moved < wanted / 2;
            if is_small && best.as_ref().is_some_and(|(_, best)| !best.is_small) {
                continue;
            }
            let bytes = prices.of_move(bins, &bins.all[donor], to, &piece);
            let it = Scored { span: piece, moved: moved.max(1).into(), bytes, is_small };
            if best.as_ref().is_none_or(|(_, best)| it.is_better_than(best)) {
                best = Some((donor, it));
            }
        }
    }
    best
}

/// The last `heads` KV heads of a span, with the estimated price of a piece of them.
#[derive(Clone, Copy)]
struct Guess<'a> {
    offer: &'a Offer<'a>,
    span: &'a Span,
    heads: u16,
    /// Bytes per cost.
    price: f64,
    is_small: bool,
}

impl Guess<'_> {
    fn order(&self, other: &Self) -> Ordering {
        self.is_small.cmp(&other.is_small).then(self.price.total_cmp(&other.price))
    }
}

fn guesses<'a>(
    bins: &Bins<'_>,
    prices: &Prices,
    offers: &'a [Offer<'a>],
    to: &Bin<'_>,
) -> Vec<Guess<'a>> {
    let problem = bins.problem;
    // Query heads of a KV head.
    let group = problem.heads.query_count(&(0..1)) as f64;
    let mut guesses = Vec::with_capacity(64);
    for offer in offers {
        let way = problem.links.price(bins.all[offer.donor].place(), to.place()) as f64;
        let mut last: Option<&Span> = None;
        let mut there = Cow::Borrowed(&[][..]);
        for span in offer.spans {
            if last.is_none_or(|it| it.document != span.document) {
                there = bins.groups_of(to, span.document);
            }
            let is_same = |it: &&Span| (it.document, &it.heads) == (span.document, &span.heads);
            let below = last.replace(span).filter(is_same).map_or(0, |it| it.rows.end);
            let whole = problem.document(span.document);
            let pairs = whole.mask.pairs(whole.rows, span.rows.clone()) as f64;
            for heads in counts(bins, span) {
                let kv = span.heads.end - heads..span.heads.end;
                let held = held_of(bins, &there, span.document, &kv);
                let most = offer.wanted as f64 / (group * f64::from(heads));
                let bytes = prices.guess(whole.mask, (&span.rows, pairs), (below, held), most);
                let price = way * bytes / pairs.min(most);
                let is_small = pairs < most / 2.0;
                guesses.push(Guess { offer, span, heads, price, is_small });
                // With fewer heads it is smaller still.
                if is_small {
                    break;
                }
            }
        }
    }
    guesses
}

/// Numbers of a span's KV heads that may move: all up to 8, then some; of a document that spans ranks, whose pieces are many,
/// halves.
fn counts(bins: &Bins<'_>, span: &Span) -> impl Iterator<Item = u16> {
    let all = span.heads.len() as u16;
    let fewest = if bins.problem.heads_may_part() { 1 } else { all };
    let halves = bins.problem.layout.spans_ranks(span.document);
    let fewer = move |it: &u16| Some(if halves { it / 2 } else { it - it.div_ceil(8) });
    std::iter::successors(Some(all), fewer).take_while(move |it| *it >= fewest)
}

/// Pieces of a span that cost at most `most`, some of them empty.
fn candidates(bins: &Bins<'_>, prices: &Prices, to: &Bin<'_>, span: &Span, most: u64) -> Vec<Span> {
    if bins.cost(span) <= most {
        let mask = bins.problem.document(span.document).mask;
        let tail = prices.tail_of(mask, &span.rows);
        let tail =
            tail.map(|start| bins.tail(span, bins.cost(&span.with_rows(start..span.rows.end))));
        return std::iter::once(span.clone()).chain(tail).collect();
    }
    let Range { start, end } = span.rows;
    let ends_at = |row: u32| {
        let row = row.next_multiple_of(TILE_ROWS).clamp(start + 1, end);
        let row = row.next_multiple_of(TILE_ROWS).min(end);
        bins.tail(&span.with_rows(start..row), most)
    };
    let cheapest = prices.cheapest_end(bins, &span.heads, most).min(end);
    let held = held(bins, to, span).min(end);
    let mut pieces = Vec::with_capacity(5);
    pieces.push(ends_at(end));
    if start > 0 || cheapest >= end {
        pieces.push(bins.head(span, most));
    }
    if cheapest < end {
        pieces.push(ends_at(cheapest));
    }
    if held > start {
        pieces.push(ends_at(held));
        let tile = dearest_tile(bins, &span.with_rows(start..held), most);
        if bins.cost(&tile) <= most {
            pieces.push(tile);
        }
    }
    pieces
}

/// Where the keys end that a bin holds for all heads of a span.
pub(super) fn held(bins: &Bins<'_>, bin: &Bin<'_>, span: &Span) -> u32 {
    held_of(bins, &bins.groups_of(bin, span.document), span.document, &span.heads)
}

/// As [`held`], from a bin's groups of the document.
fn held_of(bins: &Bins<'_>, groups: &[Group], document: DocumentId, kv: &Range<u16>) -> u32 {
    let shared = groups.iter().filter(|it| it.heads.start < kv.end && kv.start < it.heads.end);
    let mut heads = 0;
    let ends = shared.map(|it| {
        heads += it.heads.end.min(kv.end) - it.heads.start.max(kv.start);
        bins.keys(document, &it.rows).last().map_or(0, |keys| keys.end)
    });
    let end = ends.min().unwrap_or(0);
    if usize::from(heads) == kv.len() { end } else { 0 }
}

/// The last tile of a span that costs at most `most`, if cost grows along the span; its first tile
/// if none does.
pub(super) fn dearest_tile(bins: &Bins<'_>, span: &Span, most: u64) -> Span {
    let first = span.rows.start / TILE_ROWS;
    let tiles = span.rows.end.div_ceil(TILE_ROWS) - first;
    let (mut known, mut beyond) = (0, tiles);
    while beyond - known > 1 {
        let middle = known + (beyond - known) / 2;
        if bins.cost(&tile_of(span, first + middle)) <= most {
            known = middle;
        } else {
            beyond = middle;
        }
    }
    tile_of(span, first + known)
}

/// A tile of a span, cut by the span's ends.
pub(super) fn tile_of(span: &Span, tile: u32) -> Span {
    let Range { start, end } = span.rows;
    span.with_rows((tile * TILE_ROWS).max(start)..((tile + 1) * TILE_ROWS).min(end))
}

impl Scored {
    /// The better first.
    pub(super) fn order(&self, other: &Self) -> Ordering {
        let bytes = (self.bytes * other.moved).cmp(&(other.bytes * self.moved));
        self.is_small.cmp(&other.is_small).then(bytes)
    }

    /// Fewer bytes per cost; the first found wins a tie.
    fn is_better_than(&self, other: &Self) -> bool {
        self.order(other) == Ordering::Less
    }
}
