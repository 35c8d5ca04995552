//! Very many slots: who of whom gets work is decided for **regions** first, then inside each.
//!
//! In: what each rank holds, as sums ([`RankSum`]), and all slots. Out: [`Regions`], neighbouring ranks with the slots that
//! compute for them. A document belongs to the region of its first row, and is planned there alone. A region that has more
//! work than its slots can do by the level gets dedicated slots, or is **lent** the rooms of slots of other regions. So
//! regions can be planned one by one, each as a [`Problem`] of its own, and a process needs the documents of few of them.
//!
//! It places no rows. What others rely on: a slot is in as many regions as it computes for, later in each of them by what the
//! others get of it, and the slots of every region can do its work by the level, but for less than 1/4096 of it.

mod local;
mod part;
mod whole;

use std::cmp::Reverse;
use std::ops::Range;

use serde::{Deserialize, Serialize};

pub use part::{Part, Sent};
pub(crate) use whole::plan_all;

use crate::plan::level;
use crate::{DocumentId, Problem, RankId, Slot, SlotId};

/// Slots of a region: with fewer, more work crosses between regions; with more, planning a region takes longer.
pub const SLOTS_OF_A_REGION: u32 = 512;
/// A region may lack, or have too much, one part in this many of what its slots do by the level.
const CLOSE: u64 = 8_192;
/// The border of two regions moves by at most one part in this many of a region, to where no document spans it.
const MOVES: u32 = 8;

/// What all must know of a rank to decide who helps whom. Costs are forward, see [`crate::Costs`].
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct RankSum {
    /// Cost of the documents whose first row lies there, with all their rows, wherever they lie.
    pub begins: u64,
    /// Cost of the rows that lie there.
    pub lies: u64,
    /// Whether a document has rows there or before, and behind.
    pub goes_on: bool,
}

impl RankSum {
    /// Bytes of one: two costs and a flag.
    pub const BYTES: usize = 17;

    /// The sums of all ranks.
    pub fn of(problem: &Problem) -> Vec<Self> {
        let (layout, heads) = (&problem.layout, problem.all_heads());
        let mut sums = vec![Self::default(); layout.ranks().len()];
        // By rank, how many more documents go on behind it than behind the rank before.
        let mut open = vec![0_i64; sums.len() + 1];
        for (document, it) in (0..).map(DocumentId).zip(layout.documents()) {
            let cost = problem.cost(document, &heads, &(0..it.rows));
            let pieces = layout.pieces_of_document(document);
            if let [one] = pieces {
                let sum = &mut sums[one.rank.0 as usize];
                sum.begins += cost;
                sum.lies += cost;
                continue;
            }
            sums[pieces[0].rank.0 as usize].begins += cost;
            for it in pieces {
                let cost = problem.cost(document, &heads, &it.rows);
                sums[it.rank.0 as usize].lies += cost;
            }
            let ranks = pieces.iter().map(|it| it.rank.0 as usize);
            open[ranks.clone().min().unwrap_or(0)] += 1;
            open[ranks.max().unwrap_or(0)] -= 1;
        }
        let mut now = 0;
        for (sum, more) in sums.iter_mut().zip(open) {
            now += more;
            sum.goes_on = now > 0;
        }
        sums
    }
}

/// A slot of a region, and when it begins with the region's work.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Share {
    slot: SlotId,
    head_start: u64,
}

/// Ranks and slots by region.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Regions {
    /// The first rank of each region, and one more entry.
    borders: Vec<u32>,
    /// By region, in the order of slots.
    shares: Vec<Vec<Share>>,
}

impl Regions {
    /// Regions of about so many slots; at least one, and no more than ranks.
    pub fn of(slots: &[Slot], sums: &[RankSum], slots_of_region: u32) -> Self {
        let work = sums.iter().map(|it| it.begins).sum();
        let level = level(slots, work);
        let active = slots.iter().filter(|it| !it.is_standby()).count() as u32;
        let count = active.div_ceil(slots_of_region.max(1)).clamp(1, sums.len().max(1) as u32);
        let borders = borders(sums, count);
        let close = level / CLOSE * u64::from(slots_of_region.min(active));
        let mut dealing = Dealing::new(slots, sums, &borders, level, close);
        dealing.dedicated();
        dealing.lend();
        dealing.rest();
        dealing.none_without();
        let shares = dealing.shares();
        Self { borders, shares }
    }

    /// How many regions there are.
    pub fn count(&self) -> usize {
        self.shares.len()
    }

    /// Ranks of a region, by number.
    pub(crate) fn ranks(&self, region: usize) -> Range<u32> {
        self.borders[region]..self.borders[region + 1]
    }

    /// The region of a rank.
    pub(crate) fn of_rank(&self, RankId(rank): RankId) -> usize {
        self.borders.partition_point(|it| *it <= rank).saturating_sub(1)
    }

    /// Slots that compute for more than one region.
    pub fn shared(&self) -> usize {
        let mut all: Vec<SlotId> = self.shares.iter().flatten().map(|it| it.slot).collect();
        all.sort_unstable();
        all.chunk_by(|a, b| a == b).filter(|it| it.len() > 1).count()
    }
}

/// Equal numbers of ranks, cut where no document spans the border if there is such a place nearby.
fn borders(sums: &[RankSum], count: u32) -> Vec<u32> {
    let ranks = sums.len() as u32;
    let near = ranks / count / MOVES;
    let border = |region: u32| {
        let at = (u64::from(ranks) * u64::from(region) / u64::from(count)) as u32;
        let is_free = |at: &u32| *at == 0 || !sums[*at as usize - 1].goes_on;
        let moved = (0..=near).flat_map(|by| [at + by, at.saturating_sub(by)]);
        moved.filter(|it| *it < ranks).find(is_free).unwrap_or(at)
    };
    (0..count).map(border).chain([ranks]).collect()
}

/// Regions while slots are dealt to them.
struct Dealing<'a> {
    slots: &'a [Slot],
    level: u64,
    /// Amounts up to this are let go.
    close: u64,
    /// Work of each region.
    works: Vec<u64>,
    /// The same less what its slots can do: below 0 it has room for others.
    needs: Vec<i128>,
    /// The region of each slot in place.
    homes: Vec<Option<usize>>,
    /// What a slot's own rank has for it.
    lies: Vec<u64>,
    /// By slot what it has given to other regions.
    given: Vec<u64>,
    shares: Vec<Vec<Share>>,
}

impl<'a> Dealing<'a> {
    fn new(slots: &'a [Slot], sums: &[RankSum], borders: &[u32], level: u64, close: u64) -> Self {
        let count = borders.len() - 1;
        let of_region =
            |region: usize| &sums[borders[region] as usize..borders[region + 1] as usize];
        let work = |region| of_region(region).iter().map(|it| it.begins).sum();
        let works: Vec<u64> = (0..count).map(work).collect();
        let mut it = Self {
            slots,
            level,
            close,
            needs: works.iter().copied().map(i128::from).collect(),
            works,
            homes: vec![None; slots.len()],
            lies: vec![0; slots.len()],
            given: vec![0; slots.len()],
            shares: vec![Vec::new(); count],
        };
        let mut is_taken = vec![false; sums.len()];
        for (at, slot) in slots.iter().enumerate() {
            let Some(rank) = slot.home.filter(|_| !slot.is_standby()) else {
                continue;
            };
            let rank = rank.0 as usize;
            let region = borders.partition_point(|it| *it as usize <= rank) - 1;
            it.homes[at] = Some(region);
            it.needs[region] -= i128::from(it.capacity(at));
            // Rows stay at the first slot of their rank.
            if !std::mem::replace(&mut is_taken[rank], true) {
                it.lies[at] = sums[rank].lies;
            }
        }
        it
    }

    /// What a slot does by the level.
    fn capacity(&self, slot: usize) -> u64 {
        let Slot { weight, head_start, .. } = self.slots[slot];
        let time = u128::from(self.level.saturating_sub(head_start));
        u64::try_from(time * u128::from(weight) / 100).unwrap_or(u64::MAX)
    }

    /// Gives a region a part of what a slot does by the level: the region sees a slot that begins so late that it does no
    /// more by then.
    fn give(&mut self, region: usize, slot: usize, cost: u64) {
        let Slot { weight, head_start, .. } = self.slots[slot];
        let is_whole = cost == self.capacity(slot);
        let time = (u128::from(cost) * 100).div_ceil(u128::from(weight.max(1)));
        let late = self.level.saturating_sub(u64::try_from(time).unwrap_or(u64::MAX));
        let head_start = if is_whole { head_start } else { late.max(head_start) };
        self.shares[region].push(Share { slot: SlotId(slot as u32), head_start });
        self.given[slot] += cost;
        self.needs[region] -= i128::from(cost);
    }

    /// Deals dedicated slots to the regions that need them, in the order of both. What no region needs stays idle.
    fn dedicated(&mut self) {
        let close = i128::from(self.close);
        // What the regions before have too much; below 0 they lack it.
        let (mut region, mut over) = (0, 0);
        for slot in 0..self.slots.len() {
            if self.slots[slot].home.is_some() || self.slots[slot].is_standby() {
                continue;
            }
            let mut left = self.capacity(slot);
            while left > 0 {
                // No region gets a splinter of a slot, and all regions together nearly what they need.
                while let Some(&need) = self.needs.get(region)
                    && (need <= 0 || need - over <= close && !self.shares[region].is_empty())
                {
                    over -= need.max(0);
                    region += 1;
                }
                let Some(&need) = self.needs.get(region) else {
                    return;
                };
                let more = i128::from(left) - need;
                let is_all = more <= 0 || over + more <= close;
                let cost = if is_all { left } else { u64::try_from(need).unwrap_or(0) };
                over += more.max(0) * i128::from(is_all);
                self.give(region, slot, cost);
                left -= cost;
            }
        }
    }

    /// Regions with room lend the widest rooms of their slots to regions that need more, in the order of both.
    fn lend(&mut self) {
        let close = i128::from(self.close);
        let mut borrower = 0;
        for lender in 0..self.needs.len() {
            if self.needs[lender] >= -close {
                continue;
            }
            let mut rooms = self.rooms(lender);
            while self.needs[lender] < -close {
                while borrower < self.needs.len() && self.needs[borrower] <= close {
                    borrower += 1;
                }
                let (Some(need), Some((room, slot))) = (self.needs.get(borrower), rooms.next())
                else {
                    break;
                };
                let amount = (*need).min(-self.needs[lender]).min(i128::from(room));
                let cost = u64::try_from(amount).unwrap_or(0);
                self.give(borrower, slot, cost);
                self.needs[lender] += i128::from(cost);
            }
        }
    }

    /// Rooms of a region's slots, the widest first. Where rows of other regions' documents lie at its ranks, these may be too
    /// little: then all that slots can do.
    fn rooms(&self, region: usize) -> impl Iterator<Item = (u64, usize)> + use<> {
        let slots = (0..self.slots.len()).filter(|slot| self.homes[*slot] == Some(region));
        let room = |slot: usize| self.capacity(slot).saturating_sub(self.lies[slot]);
        let mut rooms: Vec<(u64, usize)> = slots.map(|slot| (room(slot), slot)).collect();
        rooms.sort_unstable_by_key(|it| (Reverse(it.0), it.1));
        let all: i128 = rooms.iter().map(|it| i128::from(it.0)).sum();
        if all < -self.needs[region] {
            for it in &mut rooms {
                it.0 = self.capacity(it.1);
            }
        }
        rooms.into_iter().filter(|it| it.0 > 0)
    }

    /// Slots in place compute for the region of their rank with all that they have not given.
    fn rest(&mut self) {
        for slot in 0..self.slots.len() {
            let Some(region) = self.homes[slot] else {
                continue;
            };
            let left = self.capacity(slot).saturating_sub(self.given[slot]);
            if left > 0 {
                self.give(region, slot, left);
            }
        }
    }

    /// A region with work for which no slot computes yet, since its work is too little for a slot or its own slots begin after
    /// the level, gets a little of one, beyond what that can do by the level: of the slot that is then done first.
    fn none_without(&mut self) {
        let mut done: Vec<u128> =
            self.slots.iter().map(|it| it.head_start.max(self.level).into()).collect();
        for region in 0..self.works.len() {
            let work = self.works[region];
            if work == 0 || !self.shares[region].is_empty() {
                continue;
            }
            let then = |at: usize| {
                let Slot { weight, .. } = self.slots[at];
                done[at] + u128::from(work) * 100 / u128::from(weight.max(1))
            };
            let active = (0..self.slots.len()).filter(|at| !self.slots[*at].is_standby());
            let Some(first) = active.min_by_key(|at| (then(*at), *at)) else {
                continue;
            };
            let head_start = u64::try_from(done[first]).unwrap_or(u64::MAX);
            done[first] = then(first);
            self.shares[region].push(Share { slot: SlotId(first as u32), head_start });
        }
    }

    /// The shares of all regions, in the order of slots.
    fn shares(mut self) -> Vec<Vec<Share>> {
        for shares in &mut self.shares {
            shares.sort_unstable_by_key(|it| it.slot);
        }
        self.shares
    }
}
