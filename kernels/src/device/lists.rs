//! Tile lists of a launch, the most expensive units first, made on the host.
//!
//! In: tasks and bundles in the form of [`super::tables`]. Out: lists that the kernels' blocks claim from the front. Expensive
//! tiles go first, so that the last ones are short and all blocks end together. Neighbours of equal cost are heads of one tile,
//! which find its keys in the cache.
//!
//! Invariants: every kept pair lies in exactly one tile of a list; slots of a query tile are consecutive, keys ascending;
//! key tiles of one bundle and KV head come in ascending order, since ordered dQ waits for the one before.

use std::cmp::Reverse;
use std::ops::Range;

use super::backward::Order;
use super::tables::{BackwardTile, Bundle, ForwardTile, MergeTile, QueryTile, Task};
use super::tiles::{BACKWARD_ROWS, UNBOUNDED, key_tiles, own_tiles, query_tiles};
use crate::attention::Heads;

/// Keys of a canonical segment, counted from the document's start.
pub(crate) const SEGMENT: i32 = 1 << 16;

/// A forward launch.
#[derive(Debug, Default, Eq, PartialEq)]
pub(crate) struct ForwardList {
    /// Units, dearest first.
    pub(crate) tiles: Vec<ForwardTile>,
    /// Query tiles whose keys lie in several segments.
    pub(crate) merges: Vec<MergeTile>,
    /// Parts that the units write.
    pub(crate) slots: usize,
}

/// Lists the units of `tasks` under `heads` query heads, for a kernel with tiles of `rows` by `keys` keys; `segment` is a multiple
/// of 128.
pub(crate) fn forward(
    tasks: &[Task],
    heads: i32,
    (rows, keys): (i32, i32),
    segment: i32,
) -> ForwardList {
    let mut list = ForwardList::default();
    let mut costed: Vec<(i32, ForwardTile)> = Vec::new();
    for (task, it) in (0..).zip(tasks) {
        let last_segment = (it.kv_offset + it.kv_rows - 1).max(0) / segment;
        for q_tile in own_tiles(it, rows) {
            let pieces: Vec<(i32, i32)> = (0..=last_segment)
                .map(|segment_of| {
                    let held = segment_of * segment..(segment_of + 1).saturating_mul(segment);
                    (segment_of, key_tiles(it, rows, keys, q_tile, &held).len() as i32)
                })
                .filter(|&(_, cost)| cost > 0)
                .collect();
            let pieces = if pieces.is_empty() { vec![(0, 0)] } else { pieces };
            for head in 0..heads {
                let first_slot = list.slots as i32;
                let slots = if pieces.len() > 1 { pieces.len() as i32 } else { 0 };
                if slots > 0 {
                    list.merges.push(MergeTile { task, q_tile, head, first_slot, slots });
                }
                list.slots += slots as usize;
                for (index, &(segment, cost)) in (0..).zip(&pieces) {
                    let slot = if slots > 0 { first_slot + index } else { -1 };
                    costed.push((cost, ForwardTile { task, q_tile, head, segment, slot }));
                }
            }
        }
    }
    costed.sort_by_key(|&(cost, _)| Reverse(cost));
    list.tiles = costed.into_iter().map(|(_, tile)| tile).collect();
    list
}

/// A backward launch: some key tiles of every bundle.
#[derive(Debug, Eq, PartialEq)]
pub(crate) struct BackwardList {
    /// The bundles, with the lowest key tile of this launch.
    pub(crate) bundles: Vec<Bundle>,
    /// Units.
    pub(crate) tiles: Vec<BackwardTile>,
}

/// Steps by which a turn of dQ delays the next key tile: the step itself, and about as long until the next tile may add.
const TURN: i64 = 2;

/// Divides the key tiles, of `keys` keys, of `bundles` over `launches` launches, which run one after the other.
///
/// With ordered dQ, the cost of a key tile includes the turns of later tiles that wait for it one by one. So a long bundle of few
/// rows begins early.
pub(crate) fn backward(
    tasks: &[Task],
    bundles: &[Bundle],
    (heads, keys): (Heads, i32),
    order: Order,
    launches: i32,
) -> Vec<BackwardList> {
    let (kv_heads, group) = (heads.kv as i32, (heads.query / heads.kv) as i64);
    let turn = if order == Order::Fixed { TURN } else { 0 };
    (0..launches)
        .map(|launch| {
            let mut list = BackwardList { bundles: bundles.to_vec(), tiles: Vec::new() };
            let mut costed: Vec<(i64, BackwardTile)> = Vec::new();
            for (index, bundle) in (0..).zip(&mut list.bundles) {
                let held = own_key_tiles(bundle, keys);
                let share = |launch| {
                    let tiles = i64::from(held.end - held.start);
                    held.start + (tiles * i64::from(launch) / i64::from(launches)) as i32
                };
                bundle.first_key_tile = share(launch);
                let mut dearest_behind = 0;
                for (behind, key_tile) in (0..).zip((share(launch)..share(launch + 1)).rev()) {
                    // A tile is never listed behind a later tile of the same bundle, whose dQ waits for it.
                    dearest_behind = dearest_behind.max(cost(tasks, bundle, keys, key_tile));
                    let cost = dearest_behind * group + behind * turn;
                    for kv_head in 0..kv_heads {
                        costed.push((cost, BackwardTile { bundle: index, key_tile, kv_head }));
                    }
                }
            }
            costed.sort_by_key(|&(cost, tile)| {
                (Reverse(cost), tile.key_tile, tile.bundle, tile.kv_head)
            });
            list.tiles = costed.into_iter().map(|(_, tile)| tile).collect();
            list
        })
        .collect()
}

/// Key tiles that a bundle's keys touch.
pub(crate) fn own_key_tiles(bundle: &Bundle, keys: i32) -> Range<i32> {
    if bundle.kv_rows == 0 {
        return 0..0;
    }
    bundle.kv_offset / keys..(bundle.kv_offset + bundle.kv_rows - 1) / keys + 1
}

fn cost(tasks: &[Task], bundle: &Bundle, keys: i32, key_tile: i32) -> i64 {
    let own = bundle.first_task as usize..(bundle.first_task + bundle.tasks) as usize;
    let steps = |task: &Task| query_tiles(task, BACKWARD_ROWS, keys, key_tile).len();
    tasks[own].iter().map(|it| steps(it) as i64).sum()
}

/// Every query tile of the tasks, for `finish_dq`.
pub(crate) fn finish(tasks: &[Task]) -> Vec<QueryTile> {
    let tiles =
        |(task, it)| own_tiles(it, BACKWARD_ROWS).map(move |q_tile| QueryTile { task, q_tile });
    (0..).zip(tasks).flat_map(tiles).collect()
}

/// Assigns each task its tiles in the sums of dQ. Returns the number of tiles.
pub(crate) fn place_sums(tasks: &mut [Task]) -> usize {
    let mut next = 0;
    for task in tasks {
        task.dq_tile = next;
        next += own_tiles(task, BACKWARD_ROWS).len() as i32;
    }
    next as usize
}

/// Number of tile pairs that a forward list multiplies, to compute rates. Each pair is `rows` rows by `keys` keys.
pub(crate) fn forward_steps(
    list: &ForwardList,
    tasks: &[Task],
    (rows, keys): (i32, i32),
    segment: i32,
) -> u64 {
    let steps = |tile: &ForwardTile| {
        let begin = tile.segment * segment;
        let held = begin..begin.saturating_add(segment).min(UNBOUNDED);
        key_tiles(&tasks[tile.task as usize], rows, keys, tile.q_tile, &held).len()
    };
    list.tiles.iter().map(|it| steps(it) as u64).sum()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::super::tiles::distances;
    use super::*;
    use crate::Mask;

    /// Documents of up to two tasks, each a bundle of its own.
    fn batches() -> impl Strategy<Value = (Vec<Task>, Vec<Bundle>)> {
        let masks = prop_oneof![
            Just(Mask::Causal),
            Just(Mask::Full),
            (0_u32..400).prop_map(|left| Mask::Window { left })
        ];
        let document = (masks, 0_i32..300, 0_i32..400, 0_i32..400, 1_i32..900, 0_i32..300);
        prop::collection::vec(document, 1..5).prop_map(|documents| {
            let (mut tasks, mut bundles) = (Vec::new(), Vec::new());
            for (mask, q_offset, first, second, kv_rows, kv_offset) in documents {
                let (left, right) = distances(mask);
                let bundle = bundles.len() as i32;
                let first_task = tasks.len() as i32;
                for (q_offset, q_rows) in [(q_offset, first), (q_offset + first + 9, second)] {
                    let task = Task {
                        q_rows,
                        q_offset,
                        kv_rows,
                        kv_offset,
                        left,
                        right,
                        bundle,
                        ..Task::default()
                    };
                    tasks.push(task);
                }
                bundles.push(Bundle {
                    kv_rows,
                    kv_offset,
                    first_task,
                    tasks: 2,
                    ..Bundle::default()
                });
            }
            (tasks, bundles)
        })
    }

    proptest! {
        #[test]
        fn a_forward_list_has_every_step_once_and_the_dearest_first(
            (tasks, _) in batches(), wide in 5_u32..8, narrow: bool, tall: bool,
        ) {
            let (keys, heads, segment) = (1 << wide, 2, if narrow { 128 } else { SEGMENT });
            let tile = (if tall { 192 } else { 128 }, keys);
            let list = forward(&tasks, heads, tile, segment);
            let (mut seen, mut slots, mut last) = (BTreeSet::new(), BTreeSet::new(), usize::MAX);
            let mut rows = BTreeSet::new();
            for it in &list.tiles {
                let held = it.segment * segment..(it.segment + 1) * segment;
                let tiles = key_tiles(&tasks[it.task as usize], tile.0, keys, it.q_tile, &held);
                prop_assert!(tiles.len() <= last);
                last = tiles.len();
                rows.insert((it.task, it.q_tile, it.head));
                for n in tiles {
                    prop_assert!(seen.insert((it.task, it.q_tile, it.head, n)));
                }
                prop_assert!(it.slot < 0 || slots.insert(it.slot));
            }
            let mut expected = BTreeSet::new();
            let mut expected_rows = BTreeSet::new();
            for (task, it) in (0..).zip(&tasks) {
                for m in own_tiles(it, tile.0) {
                    for head in 0..heads {
                        expected_rows.insert((task, m, head));
                        let all = key_tiles(it, tile.0, keys, m, &(0..UNBOUNDED));
                        expected.extend(all.map(|n| (task, m, head, n)));
                    }
                }
            }
            prop_assert_eq!(&seen, &expected);
            prop_assert_eq!(&rows, &expected_rows);
            prop_assert_eq!(slots.len(), list.slots);
            prop_assert_eq!(forward_steps(&list, &tasks, tile, segment), seen.len() as u64);
            // Parts of a query tile lie side by side, keys ascending.
            for merge in &list.merges {
                let mut parts: Vec<_> = list.tiles.iter()
                    .filter(|it| (it.task, it.q_tile, it.head) == (merge.task, merge.q_tile, merge.head))
                    .map(|it| (it.slot, it.segment))
                    .collect();
                parts.sort_unstable();
                prop_assert_eq!(parts.len() as i32, merge.slots);
                prop_assert!(merge.slots > 1 && parts[0].0 == merge.first_slot);
                prop_assert!(parts.windows(2).all(|it| it[0].0 + 1 == it[1].0 && it[0].1 < it[1].1));
            }
        }

        #[test]
        fn backward_lists_have_every_key_tile_once_and_ascending(
            (tasks, bundles) in batches(), wide in 5_u32..8, fixed: bool, launches in 1_i32..4,
        ) {
            let (keys, kv_heads) = (1 << wide, 2);
            let heads = Heads { query: 4, kv: kv_heads, dim: 128 };
            let order = if fixed { Order::Fixed } else { Order::Arrival };
            let mut seen = BTreeSet::new();
            for list in backward(&tasks, &bundles, (heads, keys), order, launches) {
                let mut last = std::collections::BTreeMap::new();
                for it in &list.tiles {
                    prop_assert!(seen.insert((it.bundle, it.key_tile, it.kv_head)));
                    prop_assert!(it.key_tile >= list.bundles[it.bundle as usize].first_key_tile);
                    let before = last.insert((it.bundle, it.kv_head), it.key_tile);
                    prop_assert!(before.is_none_or(|before| before < it.key_tile));
                }
            }
            let all: usize = bundles.iter().map(|it| own_key_tiles(it, keys).len()).sum();
            prop_assert_eq!(seen.len(), all * kv_heads);
        }

        #[test]
        fn sums_of_tasks_do_not_overlap((mut tasks, _) in batches()) {
            let tiles = place_sums(&mut tasks);
            let listed: BTreeSet<_> = finish(&tasks).iter().map(|it| {
                let task = &tasks[it.task as usize];
                task.dq_tile + it.q_tile - task.q_offset / BACKWARD_ROWS
            }).collect();
            prop_assert_eq!(listed.len(), tiles);
            prop_assert!(listed.iter().all(|it| (0..tiles as i32).contains(it)));
        }
    }

    /// When `blocks` blocks are done with a list, in half steps, if a turn takes one half step to pass; each walks its key
    /// tile as `backward_walk` of the kernel does.
    fn half_steps(task: &Task, list: &BackwardList, group: i32, blocks: usize, fixed: bool) -> u64 {
        let mut free = vec![0_u64; blocks];
        let mut added = std::collections::BTreeMap::new();
        for it in &list.tiles {
            let block = (0..blocks).min_by_key(|&it| free[it]).expect("some blocks");
            for m in query_tiles(task, BACKWARD_ROWS, 128, it.key_tile).rev() {
                for head in 0..group {
                    let before = added.get(&(m, it.kv_head, head)).map_or(0, |it| it + 1);
                    free[block] = free[block].max(if fixed { before } else { 0 }) + 2;
                    added.insert((m, it.kv_head, head), free[block]);
                }
            }
        }
        free.into_iter().max().unwrap_or(0)
    }

    #[test]
    fn key_tiles_of_a_causal_document_hardly_wait_for_their_turns() {
        let (left, right) = distances(Mask::Causal);
        for (rows, kv_heads, group, least) in
            [(8192, 8, 8, 0.98), (8192, 4, 8, 0.94), (16384, 4, 4, 0.97)]
        {
            let task = Task { q_rows: rows, kv_rows: rows, left, right, ..Task::default() };
            let bundle = Bundle { kv_rows: rows, tasks: 1, ..Bundle::default() };
            let heads =
                Heads { query: (kv_heads * group) as usize, kv: kv_heads as usize, dim: 128 };
            let [fixed, arrival] = [Order::Fixed, Order::Arrival].map(|order| {
                let list = &backward(&[task], &[bundle], (heads, 128), order, 1)[0];
                half_steps(&task, list, group, 132, order == Order::Fixed)
            });
            let share = arrival as f64 / fixed as f64;
            assert!(share >= least, "{rows} rows, {kv_heads} KV heads of {group}: {share}");
        }
    }

    #[test]
    fn a_causal_document_begins_with_its_dearest_key_tile() {
        let (left, right) = distances(Mask::Causal);
        let task = Task { q_rows: 1024, kv_rows: 1024, left, right, ..Task::default() };
        let bundle = Bundle { kv_rows: 1024, tasks: 1, ..Bundle::default() };
        let heads = Heads { query: 1, kv: 1, dim: 64 };
        let list = &backward(&[task], &[bundle], (heads, 128), Order::Arrival, 1)[0];
        let order: Vec<_> = list.tiles.iter().map(|it| it.key_tile).collect();
        assert_eq!(order, [0, 1, 2, 3, 4, 5, 6, 7]);
        let first = forward(&[task], 1, (128, 128), SEGMENT).tiles[0];
        assert_eq!(first.q_tile, 7, "the last rows have most keys");
    }
}
