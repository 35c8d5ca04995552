//! Problems for the tests: small ones by hand, arbitrary ones by proptest.

use cadre_planner::{
    Costs, Document, DocumentId, Heads, Layout, Links, Mask, Problem, RankId, Slot, Stretch,
    Tolerance,
};
use proptest::prelude::*;

/// More than any test's plan needs.
pub(crate) const PLENTY: u64 = 1 << 50;

pub(crate) const SMALL_HEADS: Heads = Heads { query: 4, kv: 2, dim: 64 };

pub(crate) fn dedicated(weight: u32) -> Slot {
    Slot { weight, head_start: 0, home: None, memory: PLENTY }
}

pub(crate) fn in_place(rank: u32) -> Slot {
    Slot { home: Some(RankId(rank)), ..dedicated(100) }
}

pub(crate) fn causal(rows: u32) -> Document {
    Document { rows, mask: Mask::Causal }
}

pub(crate) fn full(rows: u32) -> Document {
    Document { rows, mask: Mask::Full }
}

/// Documents end to end, pairs as the only cost.
pub(crate) fn problem(documents: Vec<Document>, rank_rows: u32, slots: Vec<Slot>) -> Problem {
    Problem {
        layout: Layout::end_to_end(documents, rank_rows).expect("the test's layout is right"),
        heads: SMALL_HEADS,
        element_bytes: 4,
        lanes: 1,
        slots,
        costs: Costs::pairs_only(),
        links: Links::equal(),
        tolerance: Tolerance::USUAL,
    }
}

fn masks() -> impl Strategy<Value = Mask> {
    prop_oneof![
        3 => Just(Mask::Causal),
        1 => Just(Mask::Full),
        1 => (0_u32..2_000).prop_map(|left| Mask::Window { left }),
    ]
}

/// Documents cut into stretches, dealt to ranks in any order.
fn layouts() -> impl Strategy<Value = Layout> {
    let lengths =
        prop_oneof![4 => 1_u32..1_000, 2 => 1_000_u32..6_000, 1 => Just(128), 1 => Just(4_096)];
    let documents = prop::collection::vec((lengths, masks()), 1..12);
    let cuts = prop::collection::vec((any::<prop::sample::Index>(), 0_u32..6_000), 0..12);
    (documents, cuts, 1_usize..6)
        .prop_flat_map(|(documents, cuts, ranks)| {
            let documents: Vec<Document> =
                documents.into_iter().map(|(rows, mask)| Document { rows, mask }).collect();
            let mut edges: Vec<Vec<u32>> = documents.iter().map(|it| vec![0, it.rows]).collect();
            for (document, row) in cuts {
                let document = document.index(documents.len());
                edges[document].push(row % documents[document].rows);
            }
            let mut stretches = Vec::new();
            for (document, mut edges) in edges.into_iter().enumerate() {
                edges.sort_unstable();
                edges.dedup();
                stretches.extend(edges.windows(2).map(|it| Stretch {
                    document: DocumentId(document as u32),
                    start: it[0],
                    end: it[1],
                }));
            }
            (Just(documents), Just(stretches).prop_shuffle(), Just(ranks))
        })
        .prop_map(|(documents, stretches, ranks)| {
            // Of few stretches some ranks get none.
            let mut dealt = vec![Vec::new(); ranks];
            let count = dealt.len();
            for (at, stretch) in stretches.into_iter().enumerate() {
                dealt[at % count].push(stretch);
            }
            Layout::new(documents, dealt).expect("every row is dealt once")
        })
}

fn slots(ranks: u32, memory: impl Strategy<Value = u64>) -> impl Strategy<Value = Vec<Slot>> {
    let weight = prop_oneof![1 => Just(0_u32), 6 => Just(100), 1 => 25_u32..400];
    let head_start = prop_oneof![3 => Just(0_u64), 1 => 0_u64..20_000_000];
    let home = prop::option::of((0..ranks).prop_map(RankId));
    let slot = (weight, head_start, home, memory)
        .prop_map(|(weight, head_start, home, memory)| Slot { weight, head_start, home, memory });
    prop::collection::vec(slot, 1..7).prop_map(|mut slots| {
        slots[0].weight = slots[0].weight.max(100);
        slots
    })
}

/// Any problem that can be planned if memory allows.
pub(crate) fn problems(
    memory: impl Strategy<Value = u64> + Clone,
) -> impl Strategy<Value = Problem> {
    let heads = prop_oneof![
        Just(SMALL_HEADS),
        Just(Heads { query: 1, kv: 1, dim: 8 }),
        Just(Heads { query: 32, kv: 8, dim: 128 }),
    ];
    let costs = (0_u32..10_000, 0_u32..20_000, 1_u32..20).prop_map(|(tile, task, tiles)| Costs {
        tile,
        task,
        task_rows: tiles * 128,
        ..Costs::default()
    });
    let costs = prop_oneof![Just(Costs::pairs_only()), Just(Costs::default()), costs];
    layouts().prop_flat_map(move |layout| {
        let slots = slots(layout.ranks().len() as u32, memory.clone());
        let element = prop_oneof![Just(2_u8), Just(4)];
        let lanes = any::<bool>();
        (Just(layout), heads.clone(), element, lanes, slots, costs.clone()).prop_map(
            |(layout, heads, element_bytes, one, slots, costs)| Problem {
                layout,
                heads,
                element_bytes,
                lanes: if one { 1 } else { heads.kv },
                slots,
                costs,
                links: Links::equal(),
                tolerance: Tolerance::USUAL,
            },
        )
    })
}

/// Hundreds of short documents packed onto ranks of which some have a slot in place, and slots of any speed.
pub(crate) fn pools() -> impl Strategy<Value = Problem> {
    let lengths = prop_oneof![Just(128_u32..512), Just(1_024..1_025), Just(64..3_000)];
    let documents = lengths.prop_flat_map(|rows| prop::collection::vec(rows, 300..1_200));
    let weights = prop_oneof![Just(100_u32..101), Just(25..401)];
    let slots = weights.prop_flat_map(|it| prop::collection::vec((it, any::<bool>()), 7..41));
    let costs = prop_oneof![Just(Costs::pairs_only()), Just(Costs::default())];
    (documents, slots, any::<bool>(), costs).prop_map(|(documents, slots, one_lane, costs)| {
        let rows: u32 = documents.iter().sum();
        // Ranks for those slots that stand in place; one more for what is left.
        let ranks = slots.iter().filter(|it| it.1).count() as u32;
        let documents = documents.into_iter().map(causal).collect();
        let layout = Layout::end_to_end(documents, rows.div_ceil(ranks.max(1))).unwrap();
        let mut homes = (0..layout.ranks().len() as u32).map(RankId);
        let slot = |(weight, at_home): (u32, bool)| Slot {
            home: if at_home { homes.next() } else { None },
            ..dedicated(weight)
        };
        Problem {
            layout,
            heads: Heads { query: 32, kv: 8, dim: 128 },
            element_bytes: 2,
            lanes: if one_lane { 1 } else { 8 },
            slots: slots.into_iter().map(slot).collect(),
            costs,
            links: Links::equal(),
            tolerance: Tolerance::USUAL,
        }
    })
}
