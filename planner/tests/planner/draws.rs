//! Problems from seeds, for tests: nothing is read, and another seed is a fresh problem.

use cadre_planner::{
    Costs, Document, Heads, Layout, Link, Links, Mask, NOMINAL_RATE, Prices, Problem, RankId, Slot,
    Tolerance,
};

/// Numbers from a seed.
pub(crate) struct Draw(u64);

impl Draw {
    pub(crate) fn new(seed: u64) -> Self {
        let mut it = Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        for _ in 0..8 {
            it.next();
        }
        it
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    pub(crate) fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.next() as usize % all.len()]
    }

    /// Above 0, at most 1.
    pub(crate) fn share(&mut self) -> f64 {
        ((self.next() >> 13) as f64 + 1.0) / (1_u64 << 40) as f64
    }
}

/// Where slots stand; mixed: every other rank has one, and there are as many dedicated ones.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Where {
    InPlace,
    Dedicated,
    Mixed,
}

/// A problem of one seed: lengths of one of five kinds, 8 to 64 slots.
pub(crate) fn draw(seed: u64, place: Where, one_lane: bool) -> Problem {
    let mut draw = Draw::new(seed);
    let ranks = draw.of(&[8_u32, 12, 16, 24, 32, 64]);
    let rank_rows = draw.of(&[16_384_u32, 65_536, 131_072]);
    let all = u64::from(ranks) * u64::from(rank_rows);
    let kind = draw.next() % 5;
    let (mut documents, mut rows) = (Vec::new(), 0_u64);
    while rows < all {
        let length = match kind {
            // A heavy tail; whole ranks; a few giants among short ones; all alike; anything.
            0 => (200.0 / draw.share().powf(0.8)) as u64,
            1 => (f64::from(rank_rows) * draw.share().powi(2)) as u64,
            2 if rows == 0 => all / draw.of(&[2, 4, 8]),
            2 => 4_096,
            3 => u64::from(rank_rows) / draw.of(&[1, 1, 2]),
            _ => (all as f64 * draw.share().powi(8)) as u64,
        };
        let length = length.clamp(64, 1 << 22).min(all - rows).max(1);
        rows += length;
        documents.push(Document { rows: length as u32, mask: Mask::Causal });
    }
    let layout = if draw.next().is_multiple_of(3) {
        Layout::head_tail(documents, rank_rows)
    } else {
        Layout::end_to_end(documents, rank_rows)
    };
    let layout = layout.expect("documents have rows");
    let ranks = layout.ranks().len() as u32;
    let slots = match place {
        Where::Dedicated => draw.of(&[ranks, ranks / 2, ranks * 2 + 1]).max(2),
        Where::InPlace | Where::Mixed => ranks,
    };
    let home = |slot: u32| match place {
        Where::InPlace => Some(RankId(slot)),
        Where::Mixed => slot.is_multiple_of(2).then_some(RankId(slot)),
        Where::Dedicated => None,
    };
    let slot = |it| Slot { weight: 100, head_start: 0, home: home(it), memory: 1 << 50 };
    let kv = if one_lane { draw.of(&[1, 2, 8, 8, 16]) } else { 8 };
    Problem {
        layout,
        heads: Heads { query: 32, kv, dim: 128 },
        element_bytes: 2,
        lanes: if one_lane { 1 } else { kv },
        slots: (0..slots).map(slot).collect(),
        costs: draw.of(&[Costs::pairs_only(), Costs::default()]),
        links: Links::equal(),
        tolerance: Tolerance::USUAL,
    }
}

/// Nodes of four or eight places, or all in one; some slow interfaces.
pub(crate) fn links(problem: &Problem, seed: u64) -> Links {
    let mut draw = Draw::new(seed ^ 0xABCD);
    let (_, places) = problem.places();
    let node = draw.of(&[4, 8, 8, places as u32]);
    let slow = draw.of(&[1, 8, 16, 1_000]);
    let link = |place: u32| {
        let of = if place % slow == slow - 1 { 4 } else { 1 };
        let rate = NOMINAL_RATE / of;
        Link {
            node: place / node,
            rail: place % node,
            leaf: place / (4 * node),
            out: rate,
            into: rate,
        }
    };
    Links {
        places: (0..places as u32).map(link).collect(),
        prices: Prices { node: 12, rail: 100, leaf: 120, far: 150 },
        ..Links::equal()
    }
}

/// Heavy-tailed documents over ranks with a slot each, all on one node, or with links that are equal.
pub(crate) fn on_one_node(ranks: u32, known: bool) -> Problem {
    let mut draw = Draw::new(u64::from(ranks));
    let (mut documents, mut rows) = (Vec::new(), 0);
    let all = ranks * 65_536;
    while rows < all {
        let length = ((200.0 / draw.share().powf(0.8)) as u32).clamp(64, 131_072).min(all - rows);
        rows += length;
        documents.push(Document { rows: length, mask: Mask::Causal });
    }
    let slot =
        |rank| Slot { weight: 100, head_start: 0, home: Some(RankId(rank)), memory: 1 << 50 };
    let link =
        |rank: u32| Link { node: 0, rail: rank, leaf: 0, out: NOMINAL_RATE, into: NOMINAL_RATE };
    let places = (0..ranks).map(link).collect();
    Problem {
        layout: Layout::end_to_end(documents, 65_536).expect("documents have rows"),
        heads: Heads { query: 32, kv: 8, dim: 128 },
        element_bytes: 2,
        lanes: 8,
        slots: (0..ranks).map(slot).collect(),
        costs: Costs::pairs_only(),
        links: if known { Links { places, ..Links::equal() } } else { Links::equal() },
        tolerance: Tolerance::USUAL,
    }
}
