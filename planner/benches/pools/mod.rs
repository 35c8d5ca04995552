//! Pools of any size for benches, with documents of a fixed heavy tail.

use cadre_planner::{
    Costs, Document, Heads, Layout, Links, Mask, Problem, RankId, Slot, Tolerance,
};

pub(crate) const HEADS: Heads = Heads { query: 32, kv: 8, dim: 128 };

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Place {
    InPlace,
    Dedicated,
}

/// A step of so many documents, dealt evenly to as many ranks as there are slots.
pub(crate) fn pool(slots: u32, documents: usize, lanes: u16, place: Place, seed: u64) -> Problem {
    let mut state = seed;
    let mut length = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let uniform = ((state >> 40) as f64 + 1.0) / 16_777_217.0;
        ((200.0 / uniform.powf(0.8)) as u32).clamp(64, 131_072)
    };
    let documents: Vec<Document> =
        (0..documents).map(|_| Document { rows: length(), mask: Mask::Causal }).collect();
    let rows: u64 = documents.iter().map(|it| u64::from(it.rows)).sum();
    let rank_rows = u32::try_from(rows.div_ceil(slots.into())).expect("few rows a rank");
    let layout = Layout::end_to_end(documents, rank_rows).expect("documents have rows");
    let ranks = layout.ranks().len() as u32;
    let home = |slot: u32| (place == Place::InPlace && slot < ranks).then_some(RankId(slot));
    let slot = |it| Slot { weight: 100, head_start: 0, home: home(it), memory: 1 << 50 };
    Problem {
        layout,
        heads: HEADS,
        element_bytes: 2,
        lanes,
        slots: (0..slots).map(slot).collect(),
        costs: Costs::pairs_only(),
        links: Links::equal(),
        tolerance: Tolerance::USUAL,
    }
}
