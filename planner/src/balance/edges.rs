//! Who gives how much to whom: surpluses of bins matched to rooms of others along few edges.
//!
//! In: what each bin has too much or can take. Out: [`Edge`]s that use up one side. An edge of cost F needs about √F bytes, so
//! few edges are cheap, and the fewest suffice where sums of surpluses meet sums of rooms. The largest of all takes the one or two of
//! the other side for which they and what is left of it have the least price; a room may leave a little unused, as long as all
//! surpluses find room. Which ones are best is a matter of luck later on, so prices are blurred a little, differently in each try.

use std::collections::BTreeMap;

use super::bin::Bin;
use super::bins::Bins;
use super::shapes::root;
use crate::DocumentId;

/// A giving slot may keep, and a receiving slot may get, one part in this many of its capacity above that capacity.
const OVER: (u64, u64) = (800, 520);
/// Candidates for the larger partner, where an amount is met by two partners together.
const FIRST: usize = 8;
/// Candidates for the larger partner among slots of the same node.
const NEAR: usize = 64;
/// An amount that exceeds the largest partner this many times takes that partner at once, without a
/// search for two that fit together.
const MANY: u64 = 2;
/// A receiver may leave one part in this many of the level unused.
const UNUSED: u64 = 50;

/// One transfer: a group of donors gives a receiver work of this cost.
#[derive(Clone, Copy, Debug)]
pub(super) struct Edge {
    /// The first of the group, see [`Sides::group`].
    pub(super) donor: usize,
    pub(super) receiver: usize,
    pub(super) cost: u64,
}

/// Bins with what they have too much or can take, by amount.
type Side = Vec<(u64, usize)>;

/// Surpluses and rooms.
pub(super) struct Sides<'a> {
    bins: &'a Bins<'a>,
    surplus: Side,
    room: Side,
    /// Bins with surplus whose furthest document is the same, by the first of them: what a receiver gets of one
    /// and of another shares its keys.
    groups: BTreeMap<usize, Vec<usize>>,
    /// Amounts up to this are too little to be worth an edge.
    worth: u64,
    /// The node of each bin; empty where links are equal.
    nodes: Vec<u32>,
    /// What bins get that hold keys of a group's document already.
    holders: Vec<Edge>,
    /// Bits that amounts are shifted by before their root is taken.
    shift: u32,
}

impl<'a> Sides<'a> {
    pub(super) fn of(bins: &'a Bins<'_>, worth: u64) -> Self {
        let mut room = Side::new();
        let mut of_document: BTreeMap<DocumentId, Side> = BTreeMap::new();
        let mut donors = Vec::new();
        for (bin, it) in bins.all.iter().enumerate() {
            let over = if it.left() < 0 { OVER.0 } else { OVER.1 };
            let left = it.left() + (it.capacity() / over) as i64;
            let amount = (left.unsigned_abs(), bin);
            if amount.0 <= worth {
                continue;
            }
            if left >= 0 {
                room.push(amount);
                continue;
            }
            match bins.furthest(bin).filter(|it| bins.problem.layout.spans_ranks(*it)) {
                Some(document) => of_document.entry(document).or_default().push(amount),
                None => donors.push(vec![amount]),
            }
        }
        let amount = |group: &Side| (group.iter().map(|it| it.0).sum::<u64>(), group[0].1);
        let mut surplus: Side = donors.iter().map(amount).collect();
        let mut holders = Vec::new();
        for (document, group) in of_document {
            let (mut left, donor) = amount(&group);
            for it in room.iter_mut().filter(|it| bins.holds(it.1, document)) {
                let cost = it.0.min(left);
                if cost > worth {
                    holders.push(Edge { donor, receiver: it.1, cost });
                    (it.0, left) = (it.0 - cost, left - cost);
                }
            }
            surplus.push((left, donor));
            donors.push(group);
        }
        for side in [&mut surplus, &mut room] {
            side.retain(|it| it.0 > worth);
        }
        let members = |group: Side| (group[0].1, group.iter().map(|it| it.1).collect());
        let groups = donors.into_iter().map(members).collect();
        let links = &bins.problem.links.places;
        let node = |bin: &Bin<'_>| links.get(bin.place()).map(|it| it.node);
        let nodes = bins.all.iter().filter_map(node).collect();
        surplus.sort_unstable();
        room.sort_unstable();
        let most = surplus.last().max(room.last()).map_or(0, |it| it.0);
        let shift = (u64::BITS - most.leading_zeros()).saturating_sub(u32::BITS);
        Self { bins, surplus, room, groups, worth, nodes, holders, shift }
    }

    /// Bins, those without surplus or room included.
    pub(super) fn count(&self) -> usize {
        self.bins.all.len()
    }

    /// The bins that give together, by the first of them.
    pub(super) fn group(&self, first: usize) -> &[usize] {
        self.groups.get(&first).map_or(&[], Vec::as_slice)
    }

    /// What work of a cost is on the wire: √cost times the percent price of the way.
    pub(super) fn price(&self, donor: usize, receiver: usize, cost: u64) -> u64 {
        self.root(cost) * self.percent(donor, receiver)
    }

    fn root(&self, cost: u64) -> u64 {
        root(u32::try_from(cost >> self.shift).unwrap_or(u32::MAX).into())
    }

    fn percent(&self, donor: usize, receiver: usize) -> u64 {
        if self.nodes.is_empty() {
            return 100;
        }
        let (from, to) = (self.bins.all[donor].place(), self.bins.all[receiver].place());
        self.bins.problem.links.price(from, to)
    }

    /// Entries of a side on a bin's node, by their index.
    fn near(&self, side: &Side, bin: usize) -> Vec<usize> {
        let Some(node) = self.nodes.get(bin) else {
            return Vec::new();
        };
        (0..side.len()).filter(|at| self.nodes[side[*at].1] == *node).collect()
    }
}

/// Edges that use up the surpluses or the rooms. The donors `first` choose before all others, each the rooms that
/// cost it least. Tries differ by their number.
pub(super) fn edges(sides: &Sides<'_>, number: u64, first: &[usize]) -> Vec<Edge> {
    let (mut surplus, mut room) = (sides.surplus.clone(), sides.room.clone());
    let mut edges = Vec::with_capacity(surplus.len() + room.len() + sides.holders.len());
    edges.extend(&sides.holders);
    for &donor in first {
        give_first(sides, donor, &mut surplus, &mut room, &mut edges);
    }
    let all = |side: &Side| side.iter().map(|it| u128::from(it.0)).sum::<u128>();
    let mut unused = all(&room).saturating_sub(all(&surplus));
    let mut blur = Blur::of(number);
    while let (Some(&most), Some(&widest)) = (surplus.last(), room.last()) {
        let gives = most >= widest;
        let (own, other) =
            if gives { (&mut surplus, &mut room) } else { (&mut room, &mut surplus) };
        let (amount, bin) = most.max(widest);
        own.pop();
        let mut left = amount;
        for at in best_fit(sides, &mut blur, other, (bin, amount), gives).into_iter().flatten() {
            let (cost, fit) = other.remove(at);
            left -= cost;
            let (donor, receiver) = if gives { (bin, fit) } else { (fit, bin) };
            edges.push(Edge { donor, receiver, cost });
        }
        if !gives && u128::from(left) <= unused.min((sides.bins.level / UNUSED).into()) {
            unused -= u128::from(left);
        } else if left > sides.worth {
            insert(own, (left, bin));
        }
    }
    edges
}

fn insert(side: &mut Side, it: (u64, usize)) {
    side.insert(side.partition_point(|other| *other < it), it);
}

/// Lets a donor choose.
fn give_first(
    sides: &Sides<'_>,
    donor: usize,
    surplus: &mut Side,
    room: &mut Side,
    edges: &mut Vec<Edge>,
) {
    let Some(at) = surplus.iter().position(|it| it.1 == donor) else {
        return;
    };
    let (mut left, _) = surplus.remove(at);
    while left > sides.worth
        && let Some(at) = cheapest_room(sides, room, donor, left)
    {
        let (size, receiver) = room.remove(at);
        let cost = size.min(left);
        if size - cost > sides.worth {
            insert(room, (size - cost, receiver));
        }
        left -= cost;
        edges.push(Edge { donor, receiver, cost });
    }
}

/// The room that takes of an amount for the least price a cost; of equal ones the smallest.
fn cheapest_room(sides: &Sides<'_>, room: &Side, donor: usize, amount: u64) -> Option<usize> {
    let enough = room.partition_point(|it| it.0 < amount);
    if sides.nodes.is_empty() {
        return Some(enough.min(room.len().checked_sub(1)?));
    }
    let price = |at: &usize| {
        let cost = room[*at].0.min(amount);
        // √cost · percent / cost, the larger the worse.
        (u128::from(sides.percent(donor, room[*at].1)) << 32) / u128::from(sides.root(cost).max(1))
    };
    (0..room.len()).min_by_key(|at| (price(at), room[*at]))
}

/// Indices of the one or two partners on the other side with the least price, the higher index
/// first. No partner exceeds the amount.
fn best_fit(
    sides: &Sides<'_>,
    blur: &mut Blur,
    side: &Side,
    (bin, amount): (usize, u64),
    gives: bool,
) -> [Option<usize>; 2] {
    if sides.nodes.is_empty() && side.last().is_some_and(|it| it.0 < amount / MANY) {
        return [side.len().checked_sub(1), None];
    }
    let way = |at: usize| {
        let fit = side[at].1;
        if gives { sides.percent(bin, fit) } else { sides.percent(fit, bin) }
    };
    let price = |at: usize| sides.root(side[at].0) * way(at);
    let near = sides.near(side, bin);
    let mut best = (u64::MAX, [None; 2]);
    let wide = if blur.number % 3 == 2 { 4 * FIRST } else { FIRST };
    for first in firsts(side.len(), wide, &near) {
        let left = amount - side[first].0;
        let fits = side.partition_point(|it| it.0 <= left);
        let second = (0..fits).rev().find(|it| *it != first);
        let close = near[..near.partition_point(|at| *at < fits)].iter().rev();
        let close = close.copied().find(|it| *it != first);
        let (one, far) = (price(first), way(first));
        let seconds = [second, close].into_iter().flatten().map(Some);
        for at in std::iter::once(None).chain(seconds) {
            // A root has 16 bits and a percent less than 40, so sums of a few prices fit.
            let all = one + at.map_or(0, price);
            let blurred = blur.next();
            if all >= best.0 {
                continue;
            }
            let left = left - at.map_or(0, |at| side[at].0);
            let rest = sides.root(left) * far.max(at.map_or(0, way));
            let all = all + blur.rest(rest, gives);
            let score = all + all / 1_024 * blurred;
            if score < best.0 {
                best = (score, [Some(first), at]);
            }
        }
    }
    let [a, b] = best.1;
    if a < b { [b, a] } else { [a, b] }
}

/// Candidates of a side with `all` partners: the `most` largest ones, then the largest of `near`.
/// The number of near ones is bounded, since one node may hold all places.
fn firsts(all: usize, most: usize, near: &[usize]) -> impl Iterator<Item = usize> {
    let largest = near[near.len().saturating_sub(NEAR)..].iter().copied();
    (0..all).rev().take(most).chain(largest)
}

/// Perturbs prices by the number of the try, so that tries find different matchings.
struct Blur {
    number: u64,
    state: u64,
    /// Weights of the work that a match leaves over, of a surplus and of a room, in quarters of the
    /// price of a piece of that size.
    left: (u64, u64),
}

impl Blur {
    /// The first try is not blurred.
    fn of(number: u64) -> Self {
        const LEFT: [(u64, u64); 6] = [(6, 6), (8, 4), (6, 8), (5, 6), (6, 4), (8, 6)];
        Self {
            number,
            state: number.wrapping_mul(0x9E37_79B9_7F4A_7C15),
            left: LEFT[number as usize % 6],
        }
    }

    fn rest(&self, price: u64, gives: bool) -> u64 {
        price / 4 * if gives { self.left.0 } else { self.left.1 }
    }

    /// By how many parts of 1,024 the next price is raised: 0 to 63, pseudo-random.
    fn next(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state >> 58
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_are_looked_at_on_a_node_of_all_places_as_on_a_large_one() {
        let all: Vec<usize> = (0..4_096).collect();
        let looked_at = |near: &[usize]| firsts(all.len(), FIRST, near).count();
        assert_eq!(looked_at(&all), looked_at(&all[..NEAR]));
        assert_eq!(looked_at(&[7, 9]), FIRST + 2);
    }
}
