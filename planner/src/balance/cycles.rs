//! Parts what two slots share without need: rows of the same two documents.
//!
//! In: bins that hold all rows. Out: the same rows, where fewer bytes travel and the last finishes no later beyond what is
//! tolerated; or the bins as they were.
//!
//! Draw a line from each document to every bin that holds rows of it: a line costs the keys that the bin pulls. Along a
//! circle of lines work can be pushed round without any bin getting more, until one line carries nothing, and its keys stay
//! where they are. Here circles of two bins and two documents are broken: one bin gives all it has of one document for as
//! much work of the other.

use std::collections::BTreeMap;
use std::ops::Range;

use super::bins::Bins;
use super::even::even;
use super::groups::Span;
use super::pieces::{Offer, best_piece};
use super::prices::Prices;
use super::rank;
use crate::DocumentId;

/// Maximum documents of a slot, the dearest that it shares with other slots, that are tried.
const DOCUMENTS: usize = 6;
/// Maximum slots that are tried for a pair of documents of which each of them holds rows.
const BINS: usize = 6;
/// Maximum pieces that a slot gets back for what it gives.
const PIECES: usize = 3;
/// Maximum (span, number of heads) pairs, the cheapest estimates, whose bytes are counted exactly;
/// see [`best_piece`].
const TRIES: usize = 4;
/// With more slots than this no circles are sought: it would take too long.
const MANY: usize = 512;
/// Maximum circles of a round, so that the time is bounded however documents lie.
const CIRCLES: usize = 4_000;
/// Maximum rounds; each one searches for all circles again.
const ROUNDS: usize = 4;
/// What comes back may cost less than what was given, by one part in this many of the level; the last step evens that out.
const CLOSE: u64 = 128;

/// A document under some KV heads.
type Column = (DocumentId, Range<u16>);
/// A span that went from one bin to another.
type Moved = (usize, usize, Span);

/// Breaks circles as long as that saves bytes.
pub(super) fn broken(bins: Bins<'_>) -> Bins<'_> {
    if bins.all.len() > MANY {
        return bins;
    }
    let mut found = circles(&bins);
    if found.is_empty() {
        return bins;
    }
    let mut other = bins.clone();
    let prices = Prices::of(&other);
    let mut is_changed = false;
    for _ in 0..ROUNDS {
        let mut is_again = false;
        for (both, columns) in &found {
            is_again |= part(&mut other, &prices, *both, columns);
        }
        if !is_again {
            break;
        }
        is_changed = true;
        found = circles(&other);
    }
    if !is_changed {
        return bins;
    }
    even(&mut other);
    if rank(&other) < rank(&bins) { other } else { bins }
}

/// Two bins and two columns of which both hold rows.
fn circles(bins: &Bins<'_>) -> Vec<([usize; 2], [Column; 2])> {
    let mut shared: BTreeMap<(DocumentId, u16, u16), usize> = BTreeMap::new();
    for bin in &bins.all {
        for (document, groups) in bin.touched() {
            for it in groups {
                *shared.entry((document, it.heads.start, it.heads.end)).or_default() += 1;
            }
        }
    }
    let mut holders: BTreeMap<[(DocumentId, u16, u16); 2], Vec<usize>> = BTreeMap::new();
    for (at, bin) in bins.all.iter().enumerate() {
        let mut columns = Vec::new();
        for (document, groups) in bin.touched() {
            for it in groups {
                let key = (document, it.heads.start, it.heads.end);
                if shared.get(&key).is_some_and(|it| *it > 1) {
                    let cost = bins.all_cost(document, std::slice::from_ref(it));
                    columns.push((std::cmp::Reverse(cost), key));
                }
            }
        }
        columns.sort_unstable();
        columns.truncate(DOCUMENTS);
        let mut keys: Vec<_> = columns.into_iter().map(|it| it.1).collect();
        keys.sort_unstable();
        for (index, first) in keys.iter().enumerate() {
            for second in &keys[index + 1..] {
                holders.entry([*first, *second]).or_default().push(at);
            }
        }
    }
    let column = |it: (DocumentId, u16, u16)| (it.0, it.1..it.2);
    let mut found = Vec::new();
    for (columns, all) in holders {
        let all = &all[..all.len().min(BINS)];
        for (index, first) in all.iter().enumerate() {
            for second in &all[index + 1..] {
                found.push(([*first, *second], columns.map(column)));
            }
        }
    }
    found.truncate(CIRCLES);
    found
}

/// Breaks a circle at the line where most bytes are saved; `false` if none are.
fn part(bins: &mut Bins<'_>, prices: &Prices, both: [usize; 2], columns: &[Column; 2]) -> bool {
    let mut best: Option<(i128, Vec<Moved>)> = None;
    for (giver, taker) in [(both[0], both[1]), (both[1], both[0])] {
        for (gives, gets) in [(&columns[0], &columns[1]), (&columns[1], &columns[0])] {
            let mut moved = Vec::new();
            let saved = exchange(bins, prices, (giver, taker), (gives, gets), &mut moved);
            for (from, to, span) in moved.iter().rev() {
                bins.take(*to, span);
                bins.put(*from, span);
            }
            if let Some(bytes) = saved.filter(|it| *it < 0)
                && best.as_ref().is_none_or(|it| bytes < it.0)
            {
                best = Some((bytes, moved));
            }
        }
    }
    let Some((_, moved)) = best else {
        return false;
    };
    for (from, to, span) in moved {
        bins.take(from, &span);
        bins.put(to, &span);
    }
    true
}

/// Moves all of one column from a bin to another, and work of equal cost in the other column back.
/// Returns the bytes that are pulled more afterwards, or `None` if there is not enough work to move
/// back.
fn exchange(
    bins: &mut Bins<'_>,
    prices: &Prices,
    (giver, taker): (usize, usize),
    (gives, gets): (&Column, &Column),
    moved: &mut Vec<Moved>,
) -> Option<i128> {
    let all = spans_of(bins, giver, gives);
    let given: u64 = all.iter().map(|it| bins.cost(it)).sum();
    let there: u64 = spans_of(bins, taker, gets).iter().map(|it| bins.cost(it)).sum();
    if given == 0 || there < given {
        return None;
    }
    let mut bytes = 0;
    let mut go = |bins: &mut Bins<'_>, from: usize, to: usize, span: Span| {
        let more = prices.of_move(bins, &bins.all[from], &bins.all[to], &span);
        bins.take(from, &span);
        bins.put(to, &span);
        moved.push((from, to, span));
        more
    };
    for span in all {
        if !bins.reaches(taker, &span) {
            return None;
        }
        bytes += go(bins, giver, taker, span);
    }
    let close = bins.level / CLOSE;
    let mut left = given;
    for _ in 0..PIECES {
        let spans = spans_of(bins, taker, gets);
        let offer = [Offer { donor: taker, spans: &spans, wanted: left }];
        let Some((_, piece)) = best_piece(bins, prices, &offer, giver, TRIES) else {
            break;
        };
        left -= bins.cost(&piece.span).min(left);
        bytes += go(bins, taker, giver, piece.span);
        if left <= close {
            break;
        }
    }
    (left <= close).then_some(bytes)
}

/// The rows that a slot holds of a column: of a document under some KV heads.
fn spans_of(bins: &Bins<'_>, bin: usize, (document, heads): &Column) -> Vec<Span> {
    let groups = bins.groups_of(&bins.all[bin], *document);
    let here = groups.iter().filter(|it| it.heads == *heads);
    let rows = here.flat_map(|it| it.rows.iter().cloned());
    rows.map(|rows| Span { document: *document, heads: heads.clone(), rows }).collect()
}

#[cfg(test)]
mod tests {
    use super::super::limits::Limits;
    use super::*;
    use crate::plan::least_work;
    use crate::{Costs, Document, Heads, Layout, Links, Mask, Problem, Slot};

    /// Documents of which each slot has one, but for two slots that have a half each of the first two.
    fn crossed(slots: usize) -> Problem {
        let documents = vec![Document { rows: 1_024, mask: Mask::Full }; slots];
        Problem {
            layout: Layout::end_to_end(documents, 1_024).unwrap(),
            heads: Heads { query: 4, kv: 2, dim: 64 },
            element_bytes: 2,
            lanes: 2,
            slots: vec![Slot { weight: 100, head_start: 0, home: None, memory: 1 << 50 }; slots],
            costs: Costs::pairs_only(),
            links: Links::equal(),
            tolerance: crate::Tolerance::USUAL,
        }
    }

    #[test]
    fn circles_are_broken_among_as_many_slots_as_the_page_says() {
        for (slots, is_broken) in [(2, true), (MANY, true), (MANY + 1, false)] {
            let problem = crossed(slots);
            let mut bins = Bins::new(&problem, Limits::none(), least_work(&problem));
            for document in 0..slots {
                let whole = Span {
                    document: DocumentId(document as u32),
                    heads: problem.all_heads(),
                    rows: 0..1_024,
                };
                if document < 2 {
                    bins.put(0, &whole.with_rows(0..512));
                    bins.put(1, &whole.with_rows(512..1_024));
                } else {
                    bins.put(document, &whole);
                }
            }
            let bytes = |bins: &Bins<'_>| Prices::of(bins).of_all(bins);
            let before = bytes(&bins);
            assert_eq!(bytes(&broken(bins)) < before, is_broken, "{slots} slots");
        }
    }
}
