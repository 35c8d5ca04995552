//! Who gives how much to whom: surpluses of bins matched to rooms of others along few edges.
//!
//! In: what each bin has too much or can take. Out: [`Edge`]s that use up one side. The fewest edges suffice
//! where sums of surpluses meet sums of rooms, so the largest of all takes the one or two of the other side
//! that leave least of it, at the least price of their ways.

use std::collections::{BTreeMap, BTreeSet, btree_set};
use std::iter::Peekable;

use super::bins::Bins;
use crate::DocumentId;

/// Part of a slot's capacity that it may have above it.
const OVER: u64 = 1_150;
const OVER_ROOM: u64 = 600;
/// Candidates for the first of two that fit together.
const FIRST: usize = 32;

/// A group of donors gives a receiver work of this cost.
#[derive(Clone, Copy, Debug)]
pub(super) struct Edge {
    /// The first of the group, see [`Sides::group`].
    pub(super) donor: usize,
    pub(super) receiver: usize,
    pub(super) cost: u64,
}

/// Bins with what they have too much or can take, by amount.
type Side = BTreeSet<(u64, usize)>;

/// One or two of them.
type OneOrTwo = [Option<(u64, usize)>; 2];

/// Surpluses and rooms.
pub(super) struct Sides<'a> {
    bins: &'a Bins<'a>,
    surplus: Side,
    room: Side,
    /// Bins with surplus whose furthest document is the same, by the first of them: what a receiver gets of one
    /// and of another shares its keys.
    groups: BTreeMap<usize, Vec<usize>>,
    /// What is too little for an edge.
    worth: u64,
    /// Bins of one node each; empty where links are equal.
    nodes: Vec<Vec<usize>>,
}

impl<'a> Sides<'a> {
    pub(super) fn of(bins: &'a Bins<'_>, worth: u64) -> Self {
        let mut room = Side::new();
        let mut of_document: BTreeMap<DocumentId, Vec<(u64, usize)>> = BTreeMap::new();
        let mut donors = Vec::new();
        for (bin, it) in bins.all.iter().enumerate() {
            let left = it.left();
            let left = left + (it.capacity() / if left < 0 { OVER } else { OVER_ROOM }) as i64;
            let amount = (left.unsigned_abs(), bin);
            if amount.0 <= worth {
                continue;
            }
            if left >= 0 {
                room.insert(amount);
                continue;
            }
            match bins.furthest(bin).filter(|it| bins.problem.layout.spans_ranks(*it)) {
                Some(document) => of_document.entry(document).or_default().push(amount),
                None => donors.push(vec![amount]),
            }
        }
        donors.extend(of_document.into_values());
        let amount = |group: &Vec<(u64, usize)>| (group.iter().map(|it| it.0).sum(), group[0].1);
        let surplus = donors.iter().map(amount).collect();
        let members =
            |group: Vec<(u64, usize)>| (group[0].1, group.iter().map(|it| it.1).collect());
        let groups = donors.into_iter().map(members).collect();
        let mut nodes: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (bin, it) in bins.all.iter().enumerate() {
            if let Some(link) = bins.problem.links.places.get(it.place()) {
                nodes.entry(link.node).or_default().push(bin);
            }
        }
        Self { bins, surplus, room, groups, worth, nodes: nodes.into_values().collect() }
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
        cost.isqrt() * self.percent(donor, receiver)
    }

    fn percent(&self, donor: usize, receiver: usize) -> u64 {
        let (from, to) = (self.bins.all[donor].place(), self.bins.all[receiver].place());
        self.bins.problem.links.price(from, to).into()
    }
}

/// Edges that use up the surpluses or the rooms. The donors `first` choose before all others, each the rooms that
/// cost it least.
pub(super) fn edges(sides: &Sides<'_>, first: &[usize]) -> Vec<Edge> {
    let (mut surplus, mut room) = (sides.surplus.clone(), sides.room.clone());
    let mut edges = Vec::new();
    for &donor in first {
        let Some(&(amount, _)) = surplus.iter().find(|it| it.1 == donor) else {
            continue;
        };
        surplus.remove(&(amount, donor));
        let mut left = amount;
        while left > sides.worth
            && let Some((size, receiver)) = cheapest_room(sides, &room, donor, left)
        {
            let cost = size.min(left);
            room.remove(&(size, receiver));
            if size - cost > sides.worth {
                room.insert((size - cost, receiver));
            }
            left -= cost;
            edges.push(Edge { donor, receiver, cost });
        }
    }
    while let (Some(&most), Some(&widest)) = (surplus.last(), room.last()) {
        let gives = most >= widest;
        let (amount, bin) = most.max(widest);
        let (own, other) =
            if gives { (&mut surplus, &mut room) } else { (&mut room, &mut surplus) };
        own.remove(&(amount, bin));
        let mut left = amount;
        for it in best_fit(sides, other, bin, amount, gives).into_iter().flatten() {
            other.remove(&it);
            left -= it.0;
            let (donor, receiver) = if gives { (bin, it.1) } else { (it.1, bin) };
            edges.push(Edge { donor, receiver, cost: it.0 });
        }
        if left > sides.worth {
            own.insert((left, bin));
        }
    }
    edges
}

/// The room that takes of an amount for the least price a cost; of equal ones the smallest.
fn cheapest_room(
    sides: &Sides<'_>,
    room: &Side,
    donor: usize,
    amount: u64,
) -> Option<(u64, usize)> {
    let enough = room.range((amount, 0)..).next();
    if sides.nodes.is_empty() {
        return enough.or_else(|| room.last()).copied();
    }
    let widest = room.iter().rev().take(FIRST);
    let near = near(sides, room, donor);
    let price = |it: &(u64, usize)| {
        let cost = it.0.min(amount);
        // √cost · percent / cost, the larger the worse.
        (sides.percent(donor, it.1) << 32) / cost.isqrt().max(1)
    };
    let all = enough.into_iter().chain(widest).chain(near.iter());
    all.min_by_key(|it| (price(it), **it)).copied()
}

/// One or two of a side that leave least of an amount, at the least price; all of the side are at most the amount.
fn best_fit(sides: &Sides<'_>, side: &Side, bin: usize, amount: u64, gives: bool) -> OneOrTwo {
    let way = |it: (u64, usize)| {
        let (donor, receiver) = if gives { (bin, it.1) } else { (it.1, bin) };
        sides.percent(donor, receiver)
    };
    let near = near(sides, side, bin);
    let mut best: Option<(u64, OneOrTwo)> = None;
    let mut seconds = Seconds::of(side);
    for &first in side.iter().rev().take(FIRST).chain(near.iter()) {
        let left = amount - first.0;
        let second = seconds.most(first, left);
        let close = near.iter().filter(|it| it.0 <= left && **it != first).max().copied();
        // Among equal ways only what is left counts, and the closest is as good as any.
        for second in [Some(second), (!near.is_empty()).then_some(close)].into_iter().flatten() {
            let left = left - second.map_or(0, |it| it.0);
            let far = way(first).max(second.map_or(0, way));
            let score = (left + sides.bins.level / 64) * far;
            if best.as_ref().is_none_or(|(least, _)| score < *least) {
                best = Some((score, [Some(first), second]));
            }
        }
    }
    best.map_or([None; 2], |(_, chosen)| chosen)
}

/// What fits best beside a first one. The firsts come largest first, so what is left for a second grows, and each entry
/// is passed once.
struct Seconds<'a> {
    side: &'a Side,
    rest: Peekable<btree_set::Range<'a, (u64, usize)>>,
    /// The last two that were passed, the larger first.
    passed: OneOrTwo,
    left: Option<u64>,
}

impl<'a> Seconds<'a> {
    fn of(side: &'a Side) -> Self {
        Self { side, rest: side.range((0, 0)..).peekable(), passed: [None; 2], left: None }
    }

    /// The largest entry but `first` that is at most `left`.
    fn most(&mut self, first: (u64, usize), left: u64) -> Option<(u64, usize)> {
        if self.left.is_none_or(|last| left < last) {
            let mut before = self.side.range(..=(left, usize::MAX)).rev().copied();
            self.passed = [before.next(), before.next()];
            self.rest = self.side.range((left, usize::MAX)..).peekable();
        }
        self.left = Some(left);
        while let Some(&next) = self.rest.next_if(|it| it.0 <= left) {
            self.passed = [Some(next), self.passed[0]];
        }
        self.passed.into_iter().flatten().find(|it| *it != first)
    }
}

/// Entries of a side on a bin's node.
fn near(sides: &Sides<'_>, side: &Side, bin: usize) -> Vec<(u64, usize)> {
    let Some(node) = sides.nodes.iter().find(|it| it.contains(&bin)) else {
        return Vec::new();
    };
    side.iter().filter(|it| node.contains(&it.1)).copied().collect()
}
