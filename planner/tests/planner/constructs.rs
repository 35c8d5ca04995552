//! Long documents against plain constructs: each KV head cut into a few runs of rows, heads first.
//!
//! A construct pours the work of all documents that no rank keeps along one line, document after document, head after
//! head, row after row, and lets every slot in turn take its share of the line. It looks at nothing else, so a plan that
//! moves more bytes has missed something plain.

use std::collections::BTreeMap;
use std::ops::Range;

use cadre_planner::{Document, Heads, Layout, Mask, Problem, RankId, Slot, SlotId, Traffic, plan};

use crate::problems::{causal, dedicated, problem};

const TILE: u32 = 128;
/// Bytes of a plan over those of its construct.
const MOST: f64 = 1.03;

/// Rows of a document and head that a slot computes.
struct Share {
    slot: usize,
    document: u32,
    head: u16,
    rows: Range<u32>,
}

/// What a construct moves forward, and how even it is.
struct Construct {
    bytes: u64,
    max_over_mean: f64,
}

/// Pairs of one head in rows of a document, times its query heads.
fn work(problem: &Problem, document: u32, rows: &Range<u32>) -> u64 {
    let it = problem.layout.documents()[document as usize];
    let group = u64::from(problem.heads.query / problem.heads.kv);
    it.mask.pairs(it.rows, rows.clone()) * group
}

/// Where rows of a document from `start` on have so many pairs of one head.
fn end_of(problem: &Problem, document: u32, start: u32, pairs: f64) -> f64 {
    let it = problem.layout.documents()[document as usize];
    match it.mask {
        Mask::Full => f64::from(start) + pairs / f64::from(it.rows),
        Mask::Causal | Mask::Window { .. } => {
            (f64::from(start) * f64::from(start) + 2.0 * pairs).sqrt()
        }
    }
}

/// The construct's shares: slots take from the line in the order `slots`.
fn shares(problem: &Problem, slots: &[usize]) -> Vec<Share> {
    let heads = problem.heads.kv;
    // Heads that move together.
    let column = if problem.lanes == 1 { 1 } else { heads };
    let documents = (0_u32..).zip(problem.layout.documents());
    let all: u64 =
        documents.map(|(id, it)| work(problem, id, &(0..it.rows)) * u64::from(heads)).sum();
    let level = all / slots.len() as u64;
    let mut shares = Vec::new();
    let mut left = vec![level as i64; slots.len()];
    let mut line = Vec::new();
    for (document, it) in (0_u32..).zip(problem.layout.documents()) {
        let pieces: Vec<_> =
            problem.layout.locate(cadre_planner::DocumentId(document), 0..it.rows).collect();
        let home = problem.slots.iter().position(|slot| slot.home == Some(pieces[0].rank));
        let whole = work(problem, document, &(0..it.rows)) * u64::from(heads);
        match home.filter(|_| pieces.len() == 1 && whole <= level / 8) {
            Some(slot) => {
                left[slot] -= whole as i64;
                let share = |head| Share { slot, document, head, rows: 0..it.rows };
                shares.extend((0..heads).map(share));
            }
            None => line.push((document, it.rows)),
        }
    }
    let mut turn = slots.iter().copied();
    let mut slot = turn.next().expect("there is a slot");
    for (document, rows) in line {
        for first in (0..heads).step_by(column.into()) {
            let mut start = 0;
            while start < rows {
                while left[slot] < level as i64 / 1_000
                    && let Some(next) = turn.next()
                {
                    slot = next;
                }
                // The tile edge next to where the slot is full; the last slot takes all.
                let group = f64::from(problem.heads.query / heads * column);
                let end = end_of(problem, document, start, left[slot].max(0) as f64 / group);
                let end = ((end / f64::from(TILE)).round() as u32 * TILE).max(start + TILE);
                let is_last = slot == *slots.last().expect("there is a slot");
                let end = if is_last { rows } else { end.min(rows) };
                left[slot] -= (work(problem, document, &(start..end)) * u64::from(column)) as i64;
                let share = |head| Share { slot, document, head, rows: start..end };
                shares.extend((first..first + column).map(share));
                start = end;
            }
        }
    }
    shares
}

fn account(problem: &Problem, shares: &[Share]) -> Construct {
    let mut loads = vec![0_u64; problem.slots.len()];
    let (row, mut bytes) = (u64::from(problem.heads.dim) * u64::from(problem.element_bytes), 0);
    let group = u64::from(problem.heads.query / problem.heads.kv);
    let mut keys: BTreeMap<(usize, u32, u16), u32> = BTreeMap::new();
    let away = |slot: usize, document: u32, rows: Range<u32>| -> u64 {
        let pieces = problem.layout.locate(cadre_planner::DocumentId(document), rows);
        let away = pieces.filter(|it| Some(it.rank) != problem.slots[slot].home);
        away.map(|it| u64::from(it.rows.end - it.rows.start)).sum()
    };
    for it in shares {
        loads[it.slot] += work(problem, it.document, &it.rows);
        bytes += away(it.slot, it.document, it.rows.clone()) * group * row;
        let end = keys.entry((it.slot, it.document, it.head)).or_default();
        let of = problem.layout.documents()[it.document as usize];
        *end = (*end).max(of.mask.keys(of.rows, it.rows.clone()).end);
    }
    for ((slot, document, _), end) in keys {
        bytes += away(slot, document, 0..end) * 2 * row;
    }
    let most = loads.iter().copied().max().unwrap_or(0) as f64;
    let mean = loads.iter().sum::<u64>() as f64 / loads.len() as f64;
    Construct { bytes, max_over_mean: most / mean }
}

/// The better of two orders of the slots: one after the other, and slots that are neighbours with the same run of rows.
fn construct(problem: &Problem) -> Construct {
    let slots: Vec<usize> = (0..problem.slots.len()).collect();
    let heads = usize::from(problem.heads.kv);
    let mut best = account(problem, &shares(problem, &slots));
    if problem.lanes == 1 && slots.len().is_multiple_of(heads) {
        let runs = slots.len() / heads;
        let turned: Vec<usize> = slots.iter().map(|it| it % runs * heads + it / runs).collect();
        let other = account(problem, &shares(problem, &turned));
        if other.bytes < best.bytes {
            best = other;
        }
    }
    best
}

/// Where slots stand.
#[derive(Clone, Copy, Debug)]
enum Where {
    InPlace,
    Dedicated,
    /// Every other rank has a slot, and there are as many dedicated ones.
    Mixed,
}

fn case(layout: Layout, slots: u32, place: Where, kv: u16, lanes: u16) -> Problem {
    let home = |slot: u32| match place {
        Where::InPlace => Some(RankId(slot)),
        Where::Dedicated => None,
        Where::Mixed => slot.is_multiple_of(2).then_some(RankId(slot)),
    };
    let slot = |slot| Slot { home: home(slot), ..dedicated(100) };
    Problem {
        layout,
        heads: Heads { query: 32, kv, dim: 128 },
        element_bytes: 2,
        lanes,
        ..problem(vec![causal(1)], 1, (0..slots).map(slot).collect())
    }
}

fn documents(lengths: impl IntoIterator<Item = u32>) -> Vec<Document> {
    lengths.into_iter().map(causal).collect()
}

/// A layout with the number of its slots, and where they may stand.
type Shape = (&'static str, Layout, u32, &'static [Where]);

fn shapes() -> Vec<Shape> {
    const K: u32 = 1_024;
    const AT_RANKS: &[Where] = &[Where::InPlace, Where::Mixed, Where::Dedicated];
    const POOL: &[Where] = &[Where::Dedicated];
    let end_to_end =
        |lengths: Vec<u32>, rank| Layout::end_to_end(documents(lengths), rank).unwrap();
    let head_tail = |lengths: Vec<u32>, rank| Layout::head_tail(documents(lengths), rank).unwrap();
    let one_long = std::iter::once(K * K).chain(std::iter::repeat_n(4 * K, 256)).collect();
    let two_long = [517_633, 255_456, 44_277, 31_245, 20_219, 13_988, 11_719];
    let two_long: Vec<u32> = two_long.into_iter().chain([6_000; 25]).chain([4_039]).collect();
    let full = |rows| Document { rows, mask: Mask::Full };
    let two_long = Layout::end_to_end(two_long.into_iter().map(full).collect(), 64 * K).unwrap();
    vec![
        ("two long ones that keep all keys over 16 ranks", two_long, 16, AT_RANKS),
        ("1M over 64 ranks, end to end", end_to_end(vec![K * K], 16 * K), 64, AT_RANKS),
        ("1M over 64 ranks, head and tail", head_tail(vec![K * K], 16 * K), 64, AT_RANKS),
        ("512K, 16 slots", end_to_end(vec![512 * K], 512 * K), 16, POOL),
        ("8 x 512K, 64 slots", end_to_end(vec![512 * K; 8], 512 * K), 64, POOL),
        ("8 x 512K, 20 slots", end_to_end(vec![512 * K; 8], 512 * K), 20, POOL),
        ("3 x 256K, 41 slots", end_to_end(vec![256 * K; 3], 256 * K), 41, POOL),
        ("1M and many 4K over 32 ranks", end_to_end(one_long, 64 * K), 32, AT_RANKS),
    ]
}

#[test]
fn long_documents_move_no_more_than_plain_constructs() {
    let mut worse = Vec::new();
    for (name, layout, slots, places) in shapes() {
        for kv in [1, 2, 4, 8, 16] {
            for &place in places {
                for lanes in [1, kv] {
                    if lanes == kv && kv > 1 && kv != 8 {
                        continue;
                    }
                    let problem = case(layout.clone(), slots, place, kv, lanes);
                    let known = construct(&problem);
                    let plan = plan(&problem).unwrap();
                    let forward = Traffic::of(&problem, &plan).forward;
                    let bytes = forward.queries + forward.keys;
                    let loads: Vec<u64> =
                        (0..slots).map(|it| plan.load(&problem, SlotId(it))).collect();
                    let mean = loads.iter().sum::<u64>() as f64 / loads.len() as f64;
                    let even = *loads.iter().max().unwrap() as f64 / mean;
                    let ratio = bytes as f64 / known.bytes as f64;
                    let text = format!(
                        "{name}, {place:?}, {kv} kv heads, {lanes} lanes: {:.2} GB x {ratio:.3}, max/mean {even:.5} (construct {:.5})",
                        bytes as f64 / 1e9,
                        known.max_over_mean
                    );
                    println!("{text}");
                    if ratio > MOST || even > known.max_over_mean.max(1.002) {
                        worse.push(text);
                    }
                }
            }
        }
    }
    assert!(worse.is_empty(), "{} behind a construct:\n{}", worse.len(), worse.join("\n"));
}

/// Recorded of constructs, forward and backward together: 32 query and 8 KV heads, one lane, GB and milliseconds.
#[test]
fn bytes_and_the_busiest_link_are_those_of_known_constructs() {
    const K: u32 = 1_024;
    let spread = |lengths: Vec<u32>, rank| Layout::end_to_end(documents(lengths), rank).unwrap();
    let long = Layout::head_tail(documents([K * K]), 16 * K).unwrap();
    let giant = std::iter::once(4 * K * K).chain(std::iter::repeat_n(4 * K, 1_024)).collect();
    for (name, layout, slots, place, gigabytes, milliseconds) in [
        ("1M, end to end", spread(vec![K * K], 16 * K), 64, Where::InPlace, 32.6, 62.0),
        ("1M, head and tail", long, 64, Where::InPlace, 32.8, 58.0),
        ("512K", spread(vec![512 * K], 128 * K), 16, Where::Dedicated, 8.0, 108.5),
        ("8 x 512K", spread(vec![512 * K; 8], 128 * K), 64, Where::Dedicated, 51.5, 87.0),
        ("4M and many 4K", spread(giant, 128 * K), 64, Where::InPlace, 129.9, 389.0),
    ] {
        let problem = case(layout, slots, place, 8, 1);
        let plan = plan(&problem).unwrap();
        let bounds = plan.bounds();
        let (bytes, link) = (bounds.pulled as f64 / 1e9, bounds.link as f64 / 1e6);
        println!(
            "{name}: {bytes:.2} GB, {link:.1} ms, at least {:.1} ms",
            plan.least(&problem).link as f64 / 1e6
        );
        assert!(bytes <= MOST * gigabytes && link <= milliseconds, "{name}: {bytes} GB, {link} ms");
    }
}

/// With one KV head, or two, queries are what is dear: dealt out, a document moves a third more.
#[test]
fn a_document_stays_home_where_that_moves_less() {
    const K: u32 = 1_024;
    for (kv, place, most) in
        [(1, Where::InPlace, 0.80), (1, Where::Mixed, 0.94), (2, Where::InPlace, 0.94)]
    {
        let lengths = std::iter::once(K * K).chain(std::iter::repeat_n(4 * K, 256));
        let layout = Layout::end_to_end(documents(lengths), 64 * K).unwrap();
        let problem = case(layout, 32, place, kv, 1);
        let known = construct(&problem).bytes as f64;
        let ratio = plan(&problem).unwrap().bounds().pulled as f64 / known;
        assert!(ratio <= most, "{place:?}, {kv} KV heads: {ratio:.3} of the construct");
    }
}

/// Slow and fast slots in place, the same short documents at each: the slow ones have to give half of theirs away. With few
/// KV heads keys are cheap, and the upper rows of all documents cost less than half of the documents whole.
#[test]
fn tails_of_short_documents_move_where_they_are_cheaper_than_whole_ones() {
    const ROWS: u32 = 2_048;
    for (kv, count, most) in [(1, 64, 0.75), (2, 64, 0.80), (2, 8, 0.95), (8, 64, 0.95)] {
        let layout = Layout::end_to_end(documents(vec![ROWS; 16 * count]), ROWS * count as u32);
        let mut problem = case(layout.unwrap(), 16, Where::InPlace, kv, 1);
        for (at, slot) in problem.slots.iter_mut().enumerate() {
            slot.weight = [50, 150][at % 2];
        }
        let bounds = plan(&problem).unwrap().bounds();
        let row = u64::from(problem.heads.dim) * u64::from(problem.element_bytes);
        let whole = 8 * (count as u64 / 2) * u64::from(ROWS) * (32 + 2 * u64::from(kv)) * row;
        let ratio = bounds.pulled as f64 / whole as f64;
        println!("{kv} KV heads, {count} documents a rank: {ratio:.3} of whole ones");
        assert!(ratio <= most && bounds.gap_ppm <= 2_100, "{kv}, {count}: {ratio:.3}, {bounds:?}");
    }
}

/// A row beyond a tile: 31 or 32 documents a rank, and nothing but their last rows makes slots even, each for keys of its own.
/// Where a tile row is that coarse, slots may be as uneven as the construct; where heads may part, documents that lie at two
/// ranks make them even.
#[test]
fn evenness_that_only_ends_of_documents_bring_is_let_go_where_it_is_dear() {
    for (kv, lanes, most) in [(8, 8, 1.0), (1, 1, 1.0), (4, 1, 1.4), (8, 1, 1.4), (16, 1, 1.4)] {
        let lengths = std::iter::repeat_n(129, 254).chain([2]);
        let layout = Layout::end_to_end(documents(lengths), 4_096).unwrap();
        let problem = case(layout, 8, Where::InPlace, kv, lanes);
        let known = construct(&problem);
        let bounds = plan(&problem).unwrap().bounds();
        let ratio = bounds.pulled as f64 / known.bytes as f64;
        let late = bounds.finish as f64 / bounds.level as f64;
        println!("{kv} KV heads, {lanes} lanes: {ratio:.3}, {late:.5}, {:.5}", known.max_over_mean);
        assert!(ratio <= most && late <= known.max_over_mean.max(1.002), "{kv}, {lanes}: {ratio}");
    }
}
