//! Moves the surplus of slots that hold too much to those with room, in few large pieces.
//!
//! In: bins that hold all rows. Out: the same rows; what is left to even out is small.
//!
//! A piece that costs F needs about √F bytes, whichever long document it is cut from: its keys go up to its
//! last row. So few large pieces are cheaper than many small ones, on the wire and at their sender. Flow:
//!
//! 1. [`edges`] says who gives how much to whom, in several ways.
//! 2. Of these those are best whose busiest link has nearly the least to do, and of them the one with fewest bytes.
//! 3. Along each edge, the largest first, pieces move: of the donor's longest documents the piece, and with
//!    one lane the number of KV heads, with the least new bytes.

use std::cmp::Reverse;

use super::bins::Bins;
use super::edges::{Edge, Sides, edges};
use super::give::{Wanted, fits, give};
use super::groups::Span;
use super::pieces::{Offer, Scored, best_piece};
use super::prices::Prices;
use super::shapes::Rates;
use super::together::give_together;

/// Surpluses below one part in this many of the level are left alone.
const WORTH: u64 = 1_500;
/// Accept matchings whose busiest link has up to a fifth more than the least that one has.
const NEARLY: u128 = 5;
/// Maximum documents of a donor that are tried.
const DOCUMENTS: usize = 3;
/// Maximum pieces along one edge.
const PIECES: usize = 6;
/// Maximum (span, number of heads) pairs, the cheapest estimates, whose bytes are counted exactly;
/// see [`best_piece`].
const TRIES: usize = 1;

/// An edge with the bins of its group.
pub(super) type Given = (Edge, Vec<usize>);

/// Moves surpluses from donors to receivers, along the edges of one matching.
pub(super) fn spread(bins: &mut Bins<'_>, mut edges: Vec<Given>) {
    let prices = Prices::of(bins);
    if fits(bins) {
        send_shaped(bins, prices.rates(), edges);
        return;
    }
    edges.sort_by_key(|(it, _)| (Reverse(it.cost), it.donor, it.receiver));
    let mut stocks: Vec<Option<Vec<Span>>> = vec![None; bins.all.len()];
    for (edge, donors) in edges {
        send(bins, &prices, &donors, edge, &mut stocks);
    }
}

/// Cuts everything that a group of donors gives, together.
fn send_shaped(bins: &mut Bins<'_>, rates: Rates, mut edges: Vec<Given>) {
    edges.sort_by_key(|(it, _)| (it.donor, it.receiver));
    for of_group in edges.chunk_by(|a, b| a.0.donor == b.0.donor) {
        let wanted = of_group.iter().map(|(it, _)| Wanted { receiver: it.receiver, cost: it.cost });
        let mut wanted: Vec<Wanted> = wanted.collect();
        match of_group[0].1.as_slice() {
            &[donor] => give(bins, rates, donor, &mut wanted),
            donors => give_together(bins, rates, donors, &mut wanted),
        }
    }
}

/// Up to `most` matchings, in the order of the bytes that they seem to move. Those that load their
/// busiest link much more than the best one does are left out. In every other try the donors that
/// had the busiest link before choose their receivers first.
pub(super) fn matchings(bins: &Bins<'_>, most: usize) -> Vec<Vec<Given>> {
    let sides = Sides::of(bins, bins.level / WORTH);
    let tries = tries_within_time(bins);
    let mut all: Vec<(u128, u128, Vec<Edge>)> = Vec::with_capacity(tries);
    let (mut first, mut least, mut busiest) = (Vec::new(), u128::MAX, None);
    for number in 0..tries {
        let is_led = number % 2 == 1;
        first.extend(busiest.take_if(|_| is_led));
        let edges = edges(&sides, number as u64, if is_led { &first } else { &[] });
        let (link, bytes, donor) = estimate(&sides, &edges);
        if link < least {
            least = link;
            busiest = donor.filter(|it| !first.contains(it));
        }
        all.push((link, bytes, edges));
    }
    all.retain(|it| it.0 <= least + least / NEARLY);
    all.sort_by_key(|it| (it.1, it.0));
    all.dedup_by_key(|it| (it.1, it.0));
    all.truncate(most);
    let given = |it: Edge| (it, sides.group(it.donor).to_vec());
    all.into_iter().map(|(_, _, edges)| edges.into_iter().map(given).collect()).collect()
}

/// How many matchings are tried: many with few slots, where a try takes no time, and few with very many slots or documents.
fn tries_within_time(bins: &Bins<'_>) -> usize {
    let documents = bins.problem.layout.documents().len();
    match bins.all.len() {
        ..=32 => 24,
        slots @ ..=128 if documents < 16 * slots => 4,
        _ => 12,
    }
}

/// What the busiest donor sends, what all donors send, and which one is the busiest; amounts are prices of √cost.
fn estimate(sides: &Sides<'_>, edges: &[Edge]) -> (u128, u128, Option<usize>) {
    let mut sent = vec![0_u128; sides.count()];
    for it in edges {
        sent[it.donor] += u128::from(sides.price(it.donor, it.receiver, it.cost));
    }
    let all = sent.iter().sum();
    for (donor, sent) in sent.iter_mut().enumerate() {
        *sent /= sides.group(donor).len().max(1) as u128;
    }
    let busiest = (0..sent.len()).max_by_key(|donor| (sent[*donor], Reverse(*donor)));
    (busiest.map_or(0, |it| sent[it]), all, busiest)
}

/// Moves pieces along an edge from its donors together, none more than its surplus. What a bin could give is kept in `stocks`
/// until it changes.
fn send(
    bins: &mut Bins<'_>,
    prices: &Prices,
    donors: &[usize],
    Edge { receiver, cost, donor: _ }: Edge,
    stocks: &mut [Option<Vec<Span>>],
) {
    // Donors of a group have its document in common, and it goes furthest.
    let most = if donors.len() > 1 { 1 } else { DOCUMENTS };
    let mut left = cost;
    for _ in 0..PIECES + donors.len() - 1 {
        for &donor in donors {
            stocks[donor].get_or_insert_with(|| bins.spans(donor, most));
        }
        let mut offers = Vec::with_capacity(donors.len());
        for &donor in donors {
            let surplus = bins.all[donor].left().min(0).unsigned_abs();
            let wanted = if donors.len() == 1 { left } else { left.min(surplus) };
            if let Some(spans) = &stocks[donor]
                && wanted > bins.level / WORTH
            {
                offers.push(Offer { donor, spans, wanted });
            }
        }
        let piece = best_piece(bins, prices, &offers, receiver, TRIES);
        let Some((donor, Scored { span, moved, .. })) = piece else {
            return;
        };
        bins.take(donor, &span);
        bins.put(receiver, &span);
        (stocks[donor], stocks[receiver]) = (None, None);
        left = left.saturating_sub(u64::try_from(moved).unwrap_or(u64::MAX));
    }
}
