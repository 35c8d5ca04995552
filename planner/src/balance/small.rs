//! Moves single tiles about, for problems that are small but too large to be searched exactly.
//!
//! In: bins that hold all rows. Out: the same rows, so spread that the last bin finishes earlier or, where none is late, that fewer
//! bytes travel; or the bins as they were.
//!
//! With a few dozen tiles a slot has so few that each move of the other steps is too coarse or too dear. Here every tile (of every
//! KV head, where heads may part) is an item. A move gives an item, or a run of them, to another bin, or exchanges two. First
//! moves make bins finish by the level; then, with that finish as a limit, they save bytes. A move that makes things worse stays
//! if it does so by less than a threshold, which falls to nothing. The number of moves is given and random numbers have a fixed
//! seed, so the time is bounded and the result is the same everywhere.

use super::below::{Below, Random};
use super::bin::Bin;
use super::bins::Bins;
use super::exact::{MOST_BINS as MOST_BINS_SEARCHED, Search, VISITS, finish};
use super::items::Items;
use super::prices::Prices;
use super::rank;
use super::tiles::tiles_of;
use crate::TILE_ROWS;

/// Problems with more tiles, more items or more slots than this are not tried: they come out even without it.
const MOST_TILES: u32 = 24;
const MOST_ITEMS: usize = 192;
const MOST_BINS: usize = 8;
/// Moves of each of the two parts.
const MOVES: i64 = 15_000;
/// Times that the second part is done, each from the best so far.
const TURNS: usize = 3;
/// Tiles that the search for fewer bytes places: for problems of up to [`FEW_TILES`], and of more, where it seldom ends.
const SEARCHED: usize = 200_000;
const SEARCHED_OF_MORE: usize = 20_000;
const FEW_TILES: usize = 20;
/// At first a bin may be later by one part in this many of the level.
const LATE: u64 = 8;
/// At first a move may bring one part in this many of all bytes.
const DEAR: i64 = 12;
/// A part of the level that a bin is late is as dear as this many times that part of all bytes.
const WORSE: i64 = 64;
/// That price is this many times lower at first, so that ways are found that lead through uneven states.
const EASY: i64 = 32;

/// Spreads the rows of a small problem anew.
pub(super) fn improve(bins: &mut Bins<'_>) {
    let problem = bins.problem;
    let documents = problem.layout.documents();
    let count = bins.all.len();
    if documents.len() > MOST_TILES as usize || !(2..=MOST_BINS).contains(&count) {
        return;
    }
    let tiles: u32 = documents.iter().map(|it| it.rows.div_ceil(TILE_ROWS)).sum();
    let columns = if problem.heads_may_part() { usize::from(problem.heads.kv) } else { 1 };
    if tiles > MOST_TILES || tiles as usize * columns > MOST_ITEMS {
        return;
    }
    let Some(items) = Items::of(bins) else {
        return;
    };
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    let level = i64::try_from(bins.level + bins.enough).unwrap_or(i64::MAX);
    let first = State::of(&items, bins);
    let mut floors = items.floors(bins);
    if first.bytes <= floors.bytes && first.last > level.max(floors.finish) {
        floors.prove(bins, first.last);
    }
    let on_time = level.max(floors.finish);
    if first.is_within(on_time, floors.bytes) {
        // Nothing finishes earlier and is late, and nothing moves fewer bytes.
        return;
    }
    let dear = (first.bytes / DEAR).max(1);
    let late = (level / LATE as i64).max(1);
    let enough = (on_time, floors.bytes);
    let aim = Aim { by: level, late: 1, bytes: 0, warm: late, enough };
    let early = first.walk(&items, bins, &mut random, &aim);
    let by = early.last.max(level);
    let worse = (early.bytes.max(1) / level.max(1) + 1) * WORSE;
    let aim = Aim { by, late: worse, bytes: 1, warm: dear, enough: (by, floors.bytes) };
    let mut best = if first.last <= by && first.bytes < early.bytes { first } else { early };
    for _ in 0..TURNS {
        if best.is_within(by, floors.bytes) {
            break;
        }
        best = best.walk(&items, bins, &mut random, &aim);
    }
    let other = best.bins(&items, bins);
    if rank(&other) < rank(bins) {
        *bins = other;
    }
    if count <= MOST_BINS_SEARCHED && !problem.heads_may_part() {
        save(bins);
    }
}

/// Searches for fewer bytes, while no bin finishes later than the last does, or than counts as even.
fn save(bins: &mut Bins<'_>) {
    let tiles = tiles_of(bins);
    let possible = finish(bins).max(bins.level + bins.enough);
    let known = Prices::of(bins).of_all(bins);
    let mut search = Search::new(bins, &tiles, possible, Some(known));
    search.visits = VISITS - if tiles.len() <= FEW_TILES { SEARCHED } else { SEARCHED_OF_MORE };
    let (owners, _) = search.run();
    let Some(owners) = owners else {
        return;
    };
    let mut other = emptied(bins);
    for (tile, owner) in tiles.iter().zip(owners) {
        other.put(owner.into(), &tile.span);
    }
    if rank(&other) < rank(bins) {
        *bins = other;
    }
}

/// The bins without what they hold.
fn emptied<'a>(bins: &Bins<'a>) -> Bins<'a> {
    let mut other = bins.clone();
    for bin in 0..other.all.len() {
        for span in other.spans(bin, usize::MAX) {
            other.take(bin, &span);
        }
    }
    other
}

/// What moves go for.
struct Aim {
    /// Finishing later than this has a price.
    by: i64,
    /// Price of lateness, and of a byte.
    late: i64,
    bytes: i64,
    /// By how much a move may make things worse at first.
    warm: i64,
    /// Nothing is better than to finish by then with so many bytes.
    enough: (i64, i64),
}

/// `amount · parts / MOVES`, in 64 bits where these suffice: walks do nothing as often as this.
fn part(amount: i64, parts: i64) -> i128 {
    match amount.checked_mul(parts) {
        Some(all) => (all / MOVES).into(),
        None => i128::from(amount) * i128::from(parts) / i128::from(MOVES),
    }
}

/// Which bin has which item.
#[derive(Clone)]
struct State {
    owners: Vec<usize>,
    /// By column, then by bin: its tiles, as bits.
    held: Vec<u32>,
    loads: Vec<u64>,
    bytes: i64,
    /// When the last bin finishes.
    last: i64,
}

impl State {
    /// What bins hold.
    fn of(items: &Items, bins: &Bins<'_>) -> Self {
        let count = bins.all.len();
        let columns = items.column.last().map_or(0, |it| it + 1);
        let mut state = Self {
            owners: vec![0; items.all.len()],
            held: vec![0; columns * count],
            loads: vec![0; count],
            bytes: 0,
            last: 0,
        };
        for (at, item) in items.all.iter().enumerate() {
            let holds = |bin: &Bin<'_>| {
                let mut is_here = false;
                bins.each_group(bin, item.span.document, |heads, rows| {
                    is_here |= heads.contains(&item.span.heads.start)
                        && rows.iter().any(|it| it.contains(&item.span.rows.start));
                });
                is_here
            };
            let owner = bins.all.iter().position(holds).unwrap_or(0);
            state.owners[at] = owner;
            state.loads[owner] += item.cost;
            state.bytes += item.queries[owner];
            state.held[items.column[at] * count + owner] |= 1 << (at - items.first[at]);
        }
        for (at, first) in items.first.iter().enumerate().filter(|it| it.0 == *it.1) {
            for bin in 0..count {
                let tiles = state.held[items.column[at] * count + bin];
                state.bytes += items.keys(*first, tiles, bin);
            }
        }
        state.last = state.finish(bins);
        state
    }

    fn is_within(&self, last: i64, bytes: i64) -> bool {
        self.last <= last && self.bytes <= bytes
    }

    fn finish(&self, bins: &Bins<'_>) -> i64 {
        let with_work = self.loads.iter().zip(&bins.all).filter(|it| *it.0 > 0);
        let finish = with_work.map(|(load, bin)| bin.slot.finish(*load)).max().unwrap_or(0);
        i64::try_from(finish).unwrap_or(i64::MAX)
    }

    /// How much later than asked a bin finishes; an empty one is never late.
    fn late(&self, bins: &Bins<'_>, bin: usize, by: i64) -> i64 {
        let load = self.loads[bin];
        if load == 0 {
            return 0;
        }
        let finish = i64::try_from(bins.all[bin].slot.finish(load)).unwrap_or(i64::MAX);
        finish.saturating_sub(by).max(0)
    }

    /// Gives an item to a bin.
    fn give(&mut self, items: &Items, at: usize, to: usize) {
        let count = self.loads.len();
        let from = std::mem::replace(&mut self.owners[at], to);
        let (item, first) = (&items.all[at], items.first[at]);
        let (bit, column) = (1 << (at - first), items.column[at] * count);
        for bin in [from, to] {
            let tiles = &mut self.held[column + bin];
            let before = *tiles;
            *tiles ^= bit;
            self.bytes += items.keys(first, before ^ bit, bin) - items.keys(first, before, bin);
        }
        self.bytes += item.queries[to] - item.queries[from];
        self.loads[from] -= item.cost;
        self.loads[to] += item.cost;
    }

    /// The best state on a walk: late by the least, then of the fewest bytes.
    fn walk(&self, items: &Items, bins: &Bins<'_>, random: &mut Random, aim: &Aim) -> Self {
        let mut now = self.clone();
        let mut best = self.clone();
        let mut lateness: Vec<i64> =
            (0..bins.all.len()).map(|it| now.late(bins, it, aim.by)).collect();
        // Of up to eight bins, each late by less than 2^60.
        let sum = |lateness: &[i64]| lateness.iter().sum::<i64>();
        let mut now_late = sum(&lateness);
        let mut moved: Vec<(usize, usize)> = Vec::new();
        for turn in 0..MOVES {
            moved.clear();
            now.choose(items, random, &mut moved);
            // All that moves does so between two bins.
            let Some(&(first, to)) = moved.first() else {
                continue;
            };
            let both = [now.owners[first], to];
            let (bytes, before) = (now.bytes, both.map(|it| lateness[it]));
            for it in &mut moved {
                let back = now.owners[it.0];
                now.give(items, it.0, it.1);
                it.1 = back;
            }
            for bin in both {
                lateness[bin] = now.late(bins, bin, aim.by);
            }
            let late = sum(&lateness);
            let warm = part(aim.warm, MOVES - turn);
            let dear = i128::from(aim.late) * i128::from(turn + MOVES / EASY);
            let later = i64::try_from(dear).map_or_else(
                |_| i128::from(late - now_late) * dear / i128::from(MOVES),
                |dear| part(late - now_late, dear),
            );
            let more = i128::from(now.bytes - bytes) * i128::from(aim.bytes);
            if later + more > warm {
                for (at, back) in moved.iter().rev() {
                    now.give(items, *at, *back);
                }
                for (bin, late) in both.into_iter().zip(before) {
                    lateness[bin] = late;
                }
                continue;
            }
            now_late = late;
            let order = |it: &Self, last: i64| ((last - aim.by).max(0), it.bytes);
            // Only who is late by as little can be better.
            if late <= (best.last - aim.by).max(0) * bins.all.len() as i64 {
                let last = now.finish(bins);
                if order(&now, last) < order(&best, best.last) {
                    best.clone_from(&now);
                    best.last = last;
                    if best.is_within(aim.enough.0, aim.enough.1) {
                        break;
                    }
                }
            }
        }
        best
    }

    /// Items that are to move, each with its next bin.
    fn choose(&self, items: &Items, random: &mut Random, moved: &mut Vec<(usize, usize)>) {
        let (count, bins) = (items.all.len(), self.loads.len());
        let at = random.below(&items.any);
        let from = self.owners[at];
        let other = |random: &mut Random| {
            let to = from + 1 + random.below(&items.other);
            if to < bins { to } else { to - bins }
        };
        match random.below(&Below::new(3)) {
            // An item goes.
            0 => moved.push((at, other(random))),
            // Two are exchanged.
            1 => {
                let other = random.below(&items.any);
                if self.owners[other] != from {
                    moved.extend([(at, self.owners[other]), (other, from)]);
                }
            }
            // A run of a bin's tiles of a column goes.
            _ => {
                let to = other(random);
                let same =
                    |it: &usize| items.column[*it] == items.column[at] && self.owners[*it] == from;
                if random.below(&Below::new(2)) == 0 {
                    moved.extend((at..count).take_while(same).map(|it| (it, to)));
                } else {
                    moved.extend((0..=at).rev().take_while(same).map(|it| (it, to)));
                }
            }
        }
    }

    /// Bins that hold what the state says.
    fn bins<'a>(&self, items: &Items, bins: &Bins<'a>) -> Bins<'a> {
        let mut other = emptied(bins);
        for (item, owner) in items.all.iter().zip(&self.owners) {
            other.put(*owner, &item.span);
        }
        other
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::super::fill::{fill, place_at_home};
    use super::super::limits::Limits;
    use super::*;
    use crate::plan::least_work;
    use crate::{Costs, Document, Heads, Layout, Links, Mask, Problem, RankId, Slot};

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        #[test]
        fn tiles_that_move_bring_what_bins_that_hold_them_pull(
            lengths in prop::collection::vec((1_u32..700, 0_u32..500, 0..3), 1..5),
            rank_rows in 100_u32..700,
            moves in prop::collection::vec(any::<[u16; 2]>(), 1..40),
        ) {
            let mask = |left, kind| match kind {
                0 => Mask::Causal,
                1 => Mask::Full,
                _ => Mask::Window { left },
            };
            let documents = lengths.iter().map(|it| Document { rows: it.0, mask: mask(it.1, it.2) });
            let layout = Layout::end_to_end(documents.collect(), rank_rows).unwrap();
            let slot = |home| Slot { weight: 100, head_start: 0, home, memory: 1 << 50 };
            let problem = Problem {
                layout,
                heads: Heads { query: 4, kv: 2, dim: 64 },
                element_bytes: 2,
                lanes: 1,
                slots: vec![slot(None), slot(Some(RankId(0))), slot(None)],
                costs: Costs::pairs_only(),
                links: Links::equal(),
                tolerance: crate::Tolerance::USUAL,
            };
            let mut bins = Bins::new(&problem, Limits::none(), least_work(&problem));
            let spans = place_at_home(&mut bins, &BTreeSet::new());
            fill(&mut bins, spans).unwrap();
            let items = Items::of(&bins).unwrap();
            let mut state = State::of(&items, &bins);
            for [at, to] in moves {
                let (at, to) = (usize::from(at) % items.all.len(), usize::from(to) % 3);
                if state.owners[at] != to {
                    state.give(&items, at, to);
                }
            }
            let moved = state.bins(&items, &bins);
            prop_assert_eq!(i128::from(state.bytes), Prices::of(&moved).of_all(&moved));
        }
    }
}
