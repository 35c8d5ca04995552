//! Baselines without a pool: documents stay in groups of ranks, each with context parallelism inside.
//!
//! In: documents, groups, ranks of a group. Out: which group has which documents, and the [`Phase`] of that. Inside a
//! group every document is cut into heads and tails over all ranks, so a group is balanced; K and V are gathered from
//! all its ranks in a ring before attention and their gradients are spread the same way after it. What differs
//! between groups stays: they meet at the end of the step. A rank can do one part in `ranks` of its work before keys of
//! others come: its head and its tail with the keys of both.
//!
//! [`fixed`] keeps sequences as they are drawn. [`variable`] spreads documents over groups by the time that they take,
//! as far as memory lets it (after WLB-LLM).

use std::cmp::Reverse;

use crate::machine::{Direction, Kernel, Machine, Model, Nanos};
use crate::phase::{Bytes, Phase, triangle};

/// Deals whole sequences to the groups in turn.
pub(crate) fn fixed(sequences: &[Vec<u32>], groups: usize) -> Vec<Vec<u32>> {
    let mut all = vec![Vec::new(); groups];
    for (index, documents) in sequences.iter().enumerate() {
        all[index % groups.max(1)].extend(documents);
    }
    all
}

/// Deals documents out, the dearest first, each to the group that finishes first among those with
/// room. `None` if a document fits in no group.
///
/// A group holds at most `percent` of the mean number of tokens.
pub(crate) fn variable(
    machine: &Machine,
    model: &Model,
    sequences: &[Vec<u32>],
    groups: usize,
    percent: u64,
) -> Option<Vec<Vec<u32>>> {
    let mut documents: Vec<u32> = sequences.concat();
    documents.sort_by_key(|it| Reverse(*it));
    let tokens: u64 = documents.iter().map(|it| u64::from(*it)).sum();
    let room = tokens * percent / 100 / groups.max(1) as u64;
    let mut all: Vec<(Nanos, u64, Vec<u32>)> = vec![(0, 0, Vec::new()); groups];
    for document in documents {
        let rows = u64::from(document);
        let cost = triangle(document) * u64::from(model.heads.query);
        let time = machine.linear(model, rows, Direction::Forward)
            + machine.attention(model, cost, Direction::Forward);
        let to = all.iter_mut().filter(|it| it.1 + rows <= room).min_by_key(|it| it.0)?;
        to.0 += time;
        to.1 += rows;
        to.2.push(document);
    }
    Some(all.into_iter().map(|it| it.2).collect())
}

/// The phase of groups of `ranks` ranks each.
pub(crate) fn phase(model: &Model, groups: &[Vec<u32>], ranks: usize) -> Phase {
    let places = groups.len() * ranks;
    let mut phase =
        Phase { tokens: Vec::new(), cost: Vec::new(), local: Vec::new(), ..Phase::default() };
    for (group, documents) in groups.iter().enumerate() {
        let tokens: u64 = documents.iter().map(|it| u64::from(*it)).sum();
        let cost: u64 = documents.iter().map(|it| cost(model, *it, ranks)).sum();
        let share = |all: u64, rank: usize| {
            all * (rank as u64 + 1) / ranks as u64 - all * rank as u64 / ranks as u64
        };
        let row = 4 * u64::from(model.heads.kv) * u64::from(model.heads.dim);
        let gathered = tokens * row * (ranks as u64 - 1) / ranks as u64;
        for rank in 0..ranks {
            phase.tokens.push(share(tokens, rank));
            let cost = share(cost, rank);
            phase.cost.push(cost);
            phase.local.push(cost / ranks as u64);
            if gathered > 0 {
                let next = group * ranks + (rank + 1) % ranks;
                let bytes = Bytes {
                    inputs: gathered,
                    backward_inputs: gathered,
                    backward_results: gathered,
                    keys: gathered,
                    ..Bytes::default()
                };
                phase.wires.insert((group * ranks + rank, next), bytes);
            }
        }
    }
    debug_assert_eq!(phase.tokens.len(), places);
    phase
}

/// Cost of a document over a group: short pieces are charged as the kernel's tile.
fn cost(model: &Model, rows: u32, ranks: usize) -> u64 {
    let pairs = triangle(rows) * u64::from(model.heads.query);
    if ranks == 1 {
        return pairs;
    }
    let piece = (u64::from(rows) / (2 * ranks as u64)).max(1);
    pairs * Kernel::charged_rows(piece) / piece
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_go_where_time_and_memory_allow() {
        let machine = Machine::h200(Kernel::FLASH_2);
        let sequences = [vec![60_000, 4_000], vec![1_000; 64]];
        let groups = variable(&machine, &Model::B8, &sequences, 2, 150).unwrap();
        assert_eq!(groups[0][0], 60_000);
        let tokens = |group: &Vec<u32>| group.iter().sum::<u32>();
        assert!(tokens(&groups[1]) > tokens(&groups[0]), "the long document's group has less else");
        assert_eq!(groups.concat().len(), 66);
        assert!(tokens(&groups[1]) <= 96_000);
        assert_eq!(variable(&machine, &Model::B8, &sequences, 4, 150), None);
        assert_eq!(fixed(&sequences, 2)[0], [60_000, 4_000]);
    }

    #[test]
    fn a_group_gathers_what_its_other_ranks_hold() {
        let phase = phase(&Model::B8, &[vec![8192], vec![4096, 4096]], 4);
        assert_eq!(phase.tokens, [2048; 8]);
        assert_eq!(phase.wires[&(0, 1)].inputs, 8192 * 4 * 1024 * 3 / 4);
        assert!(phase.wires.contains_key(&(7, 4)));
        assert!(phase.cost[0] > phase.cost[4], "one document of all tokens costs more than two");
    }

    /// Head and tail of every rank, counted row by row.
    #[test]
    fn what_needs_no_keys_of_others_is_local() {
        let (rows, ranks) = (4_096, 4);
        let phase = phase(&Model::B8, &[vec![rows]], ranks);
        let piece = rows / (2 * ranks as u32);
        for rank in 0..ranks as u32 {
            let tail = 2 * ranks as u32 - 1 - rank;
            let own = |row: u32| [rank, tail].contains(&(row / piece));
            let pairs = |row: u32| (0..=row).filter(|key| own(*key)).count() as u64;
            let local: u64 = (0..rows).filter(|row| own(*row)).map(pairs).sum();
            let local = local * u64::from(Model::B8.heads.query);
            let told = phase.local[rank as usize];
            assert!(told.abs_diff(local) < local / 100, "{rank}: {told}, counted {local}");
        }
    }
}
