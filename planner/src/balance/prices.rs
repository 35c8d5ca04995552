//! What moving rows costs on the wire: bytes of a phase forward and a phase backward together.
//!
//! In: bins and a span. Out: bytes, times the percent price of their way, that are pulled more when it moves, and where a
//! piece that starts anew is cheapest.

use std::ops::Range;

use super::bin::Bin;
use super::bins::Bins;
use super::groups::{Group, Span};
use super::shapes::Rates;
use crate::memory::bytes;
use crate::{DocumentId, Mask, Stretch, TILE_ROWS};

/// Tails leave more pieces than heads. One is tried only if the whole document costs more than this
/// many times as much as the tail.
const MUCH_CHEAPER: f64 = 1.25;

/// Bytes of a row under one KV head, with the query heads that read it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prices {
    query: i128,
    key: i128,
    /// The cheapest piece of F pairs ends at √(2 F) times this.
    stretch: f64,
}

impl Prices {
    pub(super) fn of(bins: &Bins<'_>) -> Self {
        let price = |rows, keys| {
            let it = bytes(bins.problem, &(0..1), rows, keys);
            i128::from(it.forward) + i128::from(it.backward)
        };
        let (query, key) = (price(1, 0), price(0, 1));
        let ratio = 1.0 + key as f64 / query as f64;
        Self { query, key, stretch: ratio / (ratio * ratio - 1.0).sqrt() }
    }

    /// Bytes of a query row and of a key row under one KV head.
    pub(super) fn of_row(&self) -> (f64, f64) {
        (self.query as f64, self.key as f64)
    }

    /// The ratio of both.
    pub(super) fn rates(&self) -> Rates {
        Rates::of(self.query, self.key)
    }

    /// How many more bytes are pulled after a span has moved.
    pub(super) fn of_move(
        &self,
        bins: &Bins<'_>,
        from: &Bin<'_>,
        to: &Bin<'_>,
        span: &Span,
    ) -> i128 {
        let gives = self.taken(bins, from, span);
        let gets = self.added(bins, to, span);
        gives + gets + self.of_task(&span.heads)
    }

    /// Price that every piece has since it is one more task: that of one tile.
    fn of_task(&self, heads: &Range<u16>) -> i128 {
        100 * i128::from(TILE_ROWS) * (self.query + self.key) * heads.len() as i128
    }

    /// The end row of the piece that costs `most` for the least bytes, where a bin has to pull all keys up to there.
    pub(super) fn cheapest_end(&self, bins: &Bins<'_>, heads: &Range<u16>, most: u64) -> u32 {
        let query_heads = bins.problem.heads.query_count(heads).max(1);
        self.cheapest(most as f64 / query_heads as f64) as u32
    }

    /// The same end, from a number of pairs: a piece `[a, b)` has `(b² − a²) / 2`, and `b/a = 1 + key/query` is best.
    fn cheapest(&self, pairs: f64) -> f64 {
        (2.0 * pairs).sqrt() * self.stretch
    }

    /// Where the cheapest tail of a causal document begins, as a share of its rows.
    pub(super) fn cheapest_tail(&self) -> f64 {
        let ratio = self.key as f64 / self.query as f64;
        1.0 + ratio - (ratio * ratio + 2.0 * ratio).sqrt()
    }

    /// Ratio of the bytes a cost of a whole causal document to those of its cheapest tail.
    fn whole_over_tail(&self) -> f64 {
        let (ratio, start) = (self.key as f64 / self.query as f64, self.cheapest_tail());
        (1.0 + ratio) * (1.0 - start * start) / (1.0 - start + ratio)
    }

    /// Where the cheapest tail of rows begins that all may go, if it is much cheaper than all of them.
    pub(super) fn tail_of(&self, mask: Mask, rows: &Range<u32>) -> Option<u32> {
        let start = (f64::from(rows.end) * self.cheapest_tail()) as u32;
        let is_cheaper = mask == Mask::Causal && self.whole_over_tail() > MUCH_CHEAPER;
        (is_cheaper && start > rows.start).then_some(start)
    }

    /// What the best piece of some rows, worth `all` pairs, costs under one head, about, if it has at most `most` pairs.
    /// All rows lie at the donor, which keeps those before `below`; the receiver holds keys up to `held`.
    pub(super) fn guess(
        &self,
        mask: Mask,
        (rows, all): (&Range<u32>, f64),
        (below, held): (u32, u32),
        most: f64,
    ) -> f64 {
        let (start, end) = (f64::from(rows.start), f64::from(rows.end));
        let held = f64::from(held);
        let (low, high, saved) = if all <= most {
            // The donor needs no keys between what it keeps and this.
            (start, end, start - f64::from(below))
        } else if mask == Mask::Causal {
            let least = (start * start + 2.0 * most).sqrt();
            let high = if held >= least { held } else { self.cheapest(most) };
            let high = high.max(least).min(end);
            ((high * high - 2.0 * most).max(0.0).sqrt(), high, 0.0)
        } else {
            (end - (end - start) * most / all, end, 0.0)
        };
        let keys = (high - held).max(0.0) - saved;
        // A task is as dear as one tile.
        let tile = f64::from(TILE_ROWS);
        (high - low + tile) * self.query as f64 + (keys + tile) * self.key as f64
    }

    /// Bytes that a bin pulls for the query rows of a span and for keys of its document and heads.
    pub(super) fn of_rows(
        &self,
        bins: &Bins<'_>,
        bin: &Bin<'_>,
        span: &Span,
        keys: &Range<u32>,
    ) -> i128 {
        let queries = away(bins, bin, span.document, &span.rows) * self.query;
        let keys = away(bins, bin, span.document, keys) * self.key;
        span.heads.len() as i128 * (queries + keys)
    }

    /// Bytes that all bins pull.
    pub(super) fn of_all(&self, bins: &Bins<'_>) -> i128 {
        let of_bin = |bin: &Bin<'_>| -> i128 {
            let parts: i128 =
                bin.touched().map(|(id, groups)| self.pulled(bins, bin, id, groups)).sum();
            let whole = bins.strangers(bin).map(|document| {
                let rows = 0..bins.problem.document(document).rows;
                let span = Span { document, heads: bins.problem.all_heads(), rows };
                self.of_rows(bins, bin, &span, &span.rows)
            });
            parts + whole.sum::<i128>()
        };
        bins.all.iter().map(of_bin).sum()
    }

    /// Change of the bytes that a slot pulls if a span leaves it; mostly negative.
    fn taken(&self, bins: &Bins<'_>, bin: &Bin<'_>, span: &Span) -> i128 {
        let mut keys = 0;
        bins.each_group(bin, span.document, |heads, rows| {
            let shared = shared(heads, &span.heads);
            if shared > 0 {
                let less = bins.keys_of_less(span.document, rows, &span.rows);
                keys -= shared * away(bins, bin, span.document, &less);
            }
        });
        let queries = span.heads.len() as i128 * away(bins, bin, span.document, &span.rows);
        keys * self.key - queries * self.query
    }

    /// How many more bytes a slot pulls if it gets a span that it does not hold.
    pub(super) fn added(&self, bins: &Bins<'_>, bin: &Bin<'_>, span: &Span) -> i128 {
        let (mut keys, mut fresh) = (0, span.heads.len() as i128);
        bins.each_group(bin, span.document, |heads, rows| {
            let shared = shared(heads, &span.heads);
            if shared > 0 {
                let more = bins.keys_of_more(span.document, rows, &span.rows);
                keys += shared * away(bins, bin, span.document, &more);
                fresh -= shared;
            }
        });
        if fresh > 0 {
            let all = bins.keys_of_more(span.document, &[], &span.rows);
            keys += fresh * away(bins, bin, span.document, &all);
        }
        let queries = span.heads.len() as i128 * away(bins, bin, span.document, &span.rows);
        keys * self.key + queries * self.query
    }

    /// Bytes that a bin pulls for its rows of a document, at the price of their way.
    fn pulled(
        &self,
        bins: &Bins<'_>,
        bin: &Bin<'_>,
        document: DocumentId,
        groups: &[Group],
    ) -> i128 {
        let of_group = |Group { heads, rows }: &Group| {
            let span = Span { document, heads: heads.clone(), rows: 0..0 };
            self.of_runs(bins, bin, &span, rows)
        };
        groups.iter().map(of_group).sum()
    }

    /// Bytes that a bin pulls for runs of rows of a span's document and heads; some may be empty.
    fn of_runs(&self, bins: &Bins<'_>, bin: &Bin<'_>, of: &Span, runs: &[Range<u32>]) -> i128 {
        let rows: i128 = runs.iter().map(|it| away(bins, bin, of.document, it)).sum();
        let keys = bins.keys(of.document, runs);
        let keys: i128 = keys.map(|it| away(bins, bin, of.document, &it)).sum();
        of.heads.len() as i128 * (rows * self.query + keys * self.key)
    }
}

/// Heads that two ranges share.
fn shared(a: &Range<u16>, b: &Range<u16>) -> i128 {
    i128::from(a.end.min(b.end).saturating_sub(a.start.max(b.start)))
}

/// Rows that the slot has to pull, each times the price of its distance.
pub(super) fn away(
    bins: &Bins<'_>,
    bin: &Bin<'_>,
    document: DocumentId,
    rows: &Range<u32>,
) -> i128 {
    if rows.is_empty() {
        return 0;
    }
    let there = bin.place();
    let layout = &bins.problem.layout;
    if let [whole] = layout.pieces_of_document(document) {
        let price = bins.problem.links.price(whole.rank.0 as usize, there);
        return rows.len() as i128 * i128::from(price);
    }
    let pieces = layout.pieces_of_document(document);
    if bins.problem.links.are_equal() {
        // All but its own: a place has few stretches of its own, a document may lie at thousands of places.
        let own: &[Stretch] = layout.ranks().get(there).map_or(&[], Vec::as_slice);
        if own.len() < pieces.len() {
            let own = own.iter().filter(|it| it.document == document);
            let here = own.map(|it| it.end.min(rows.end).saturating_sub(it.start.max(rows.start)));
            return 100 * i128::from(rows.len() as u32 - here.sum::<u32>());
        }
    }
    let first = pieces.partition_point(|it| it.rows.end <= rows.start);
    let here = pieces[first..].iter().take_while(|it| it.rows.start < rows.end);
    let priced = here.map(|it| {
        let kept = it.rows.end.min(rows.end) - it.rows.start.max(rows.start);
        u64::from(kept) * bins.problem.links.price(it.rank.0 as usize, there)
    });
    i128::from(priced.sum::<u64>())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::super::fill::{fill, place_at_home};
    use super::super::limits::Limits;
    use super::*;
    use crate::plan::least_work;
    use crate::{Costs, Document, Heads, Layout, Link, Links, NOMINAL_RATE, Problem, RankId, Slot};

    const NEAR: crate::Prices = crate::Prices { node: 10, rail: 70, leaf: 100, far: 150 };

    /// Documents laid head and tail over ranks with a slot each, and some dedicated slots; links equal, or by distance.
    fn problems() -> impl Strategy<Value = Problem> {
        let masks = prop_oneof![
            4 => Just(Mask::Causal),
            1 => Just(Mask::Full),
            1 => (0_u32..1_500).prop_map(|left| Mask::Window { left }),
        ];
        let document = (1_u32..3_000, masks).prop_map(|(rows, mask)| Document { rows, mask });
        let documents = prop::collection::vec(document, 1..6);
        (documents, 300_u32..3_000, 0_usize..3, any::<bool>(), any::<bool>()).prop_map(
            |(documents, rank_rows, dedicated, one_lane, equal)| {
                let layout = Layout::head_tail(documents, rank_rows).unwrap();
                let ranks = layout.ranks().len();
                let homes = (0..ranks as u32).map(|rank| Some(RankId(rank)));
                let slot = |home| Slot { weight: 100, head_start: 0, home, memory: 1 << 50 };
                let slots: Vec<Slot> =
                    homes.chain(std::iter::repeat_n(None, dedicated)).map(slot).collect();
                let link = |place: u32| Link {
                    node: place / 2,
                    rail: place % 2,
                    leaf: place / 4,
                    out: NOMINAL_RATE,
                    into: NOMINAL_RATE,
                };
                let places = (0..slots.len() as u32).map(link).collect();
                let by_distance = Links { places, prices: NEAR, ..Links::equal() };
                Problem {
                    layout,
                    heads: Heads { query: 16, kv: 8, dim: 64 },
                    element_bytes: 2,
                    lanes: if one_lane { 1 } else { 8 },
                    slots,
                    costs: Costs::pairs_only(),
                    links: if equal { Links::equal() } else { by_distance },
                    tolerance: crate::Tolerance::USUAL,
                }
            },
        )
    }

    /// Part of a span, cut at tiles; all its heads if they may not part.
    fn part(problem: &Problem, span: &Span, at: [Index; 4]) -> Span {
        let tiles = span.rows.end.div_ceil(TILE_ROWS) - span.rows.start / TILE_ROWS;
        let first = at[0].index(tiles as usize) as u32;
        let last = first + at[1].index((tiles - first) as usize) as u32;
        let row = |tile: u32| (span.rows.start / TILE_ROWS + tile) * TILE_ROWS;
        let rows = row(first).max(span.rows.start)..row(last + 1).min(span.rows.end);
        let mut heads = span.heads.clone();
        if problem.heads_may_part() {
            heads.start += at[2].index(heads.len()) as u16;
            heads.end = heads.start + 1 + at[3].index(heads.len()) as u16;
        }
        Span { document: span.document, heads, rows }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn a_move_is_priced_as_what_all_pull_more_after_it(
            problem in problems(),
            moves in prop::collection::vec(any::<([Index; 3], [Index; 4])>(), 1..30),
        ) {
            let mut bins = Bins::new(&problem, Limits::none(), least_work(&problem));
            let spans = place_at_home(&mut bins, &BTreeSet::new());
            fill(&mut bins, spans).unwrap();
            let prices = Prices::of(&bins);
            for ([donor, receiver, span], at) in moves {
                let (donor, receiver) = (donor.index(bins.all.len()), receiver.index(bins.all.len()));
                let spans = bins.spans(donor, usize::MAX);
                if donor == receiver || spans.is_empty() {
                    continue;
                }
                let span = part(&problem, span.get(&spans), at);
                let priced = prices.of_move(&bins, &bins.all[donor], &bins.all[receiver], &span);
                let before = prices.of_all(&bins);
                bins.take(donor, &span);
                bins.put(receiver, &span);
                let more = prices.of_all(&bins) - before;
                prop_assert_eq!(priced - prices.of_task(&span.heads), more, "{:?}", span);
            }
        }
    }
}
