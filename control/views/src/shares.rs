//! Which job is given which slots of a pool.
//!
//! In: the pool's slots, the jobs with their shares and caps, who holds what. Out: the holder of every
//! slot. Jobs get numbers in proportion to their shares (highest averages), at least one each while
//! there are slots; the earlier one goes first where two have the same claim. A job keeps what it holds up
//! to its number, so that as little as possible moves.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// What a job may have.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Claim<J> {
    /// The job.
    pub job: J,
    /// Its weight among the jobs, at least 1.
    pub share: u32,
    /// Most slots that it may be given.
    pub cap: Option<u32>,
}

/// Gives slots to jobs, which come in the order of their arrival. A job that is not among `claims` holds nothing any more.
pub fn divide<J: Clone + Ord>(
    slots: &BTreeSet<u32>,
    claims: &[Claim<J>],
    held: &BTreeMap<u32, J>,
) -> BTreeMap<u32, J> {
    let numbers = numbers(slots.len() as u64, claims);
    let mut left: BTreeMap<&J, u64> = claims.iter().map(|it| &it.job).zip(numbers).collect();
    let mut given = BTreeMap::new();
    for (&slot, job) in held.iter().filter(|it| slots.contains(it.0)) {
        if let Some(left) = left.get_mut(job).filter(|it| **it > 0) {
            *left -= 1;
            given.insert(slot, job.clone());
        }
    }
    let mut free = slots.iter().filter(|it| !held.contains_key(it));
    let mut released = slots.iter().filter(|it| held.contains_key(it) && !given.contains_key(it));
    let mut more = Vec::new();
    for claim in claims {
        for _ in 0..left[&claim.job] {
            // A slot that nobody holds is there at once; one of another job has to be drained first.
            let Some(slot) = free.next().or_else(|| released.next()) else { break };
            more.push((*slot, claim.job.clone()));
        }
    }
    given.extend(more);
    given
}

/// How many slots each claim gets.
fn numbers<J>(slots: u64, claims: &[Claim<J>]) -> Vec<u64> {
    let cap = |it: &Claim<J>| it.cap.map_or(slots, u64::from).min(slots);
    let mut numbers = vec![0_u64; claims.len()];
    let mut left = slots;
    for (number, claim) in numbers.iter_mut().zip(claims) {
        if left > 0 && cap(claim) > 0 {
            *number = 1;
            left -= 1;
        }
    }
    // One at a time to whoever is farthest below its share: the highest averages, which no cap upsets.
    while left > 0 {
        let open = (0..claims.len()).filter(|&at| numbers[at] < cap(&claims[at]));
        let claim_of = |at: usize| {
            let share = u64::from(claims[at].share.max(1));
            // share / (number + 1), as a whole number fine enough for shares up to 1000.
            (share << 32) / (numbers[at] + 1)
        };
        let Some(next) = open.max_by_key(|&at| (claim_of(at), Reverse(at))) else { break };
        numbers[next] += 1;
        left -= 1;
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn claim(job: u8, share: u32, cap: Option<u32>) -> Claim<u8> {
        Claim { job, share, cap }
    }

    #[test]
    fn shares_are_kept_to_and_caps_too() {
        for (slots, claims, expected) in [
            (4, vec![claim(1, 100, None)], vec![4]),
            (4, vec![claim(1, 100, None), claim(2, 100, None)], vec![2, 2]),
            (4, vec![claim(1, 300, None), claim(2, 100, None)], vec![3, 1]),
            (5, vec![claim(1, 100, None), claim(2, 100, None)], vec![3, 2]),
            (8, vec![claim(1, 900, Some(2)), claim(2, 100, None)], vec![2, 6]),
            (1, vec![claim(1, 1, None), claim(2, 1000, None)], vec![1, 0]),
            (3, vec![], vec![]),
        ] {
            assert_eq!(numbers(slots, &claims), expected, "{slots} for {claims:?}");
        }
    }

    #[test]
    fn a_new_job_gets_free_slots_first() {
        let held = BTreeMap::from([(0, 1), (1, 1), (2, 1)]);
        let claims = [claim(1, 100, None), claim(2, 100, None)];
        let given = divide(&(0..6).collect(), &claims, &held);
        assert_eq!(given, BTreeMap::from([(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]));
    }

    proptest! {
        #[test]
        fn every_slot_is_used_nobody_is_above_its_cap_and_the_second_time_nothing_moves(
            slots in prop::collection::btree_set(0_u32..40, 0..30),
            wants in prop::collection::vec((1_u32..1000, prop::option::of(1_u32..10)), 0..6),
            held in prop::collection::btree_map(0_u32..40, 0_u8..8, 0..30),
        ) {
            let claims: Vec<_> =
                (0..).zip(&wants).map(|(job, &(share, cap))| claim(job, share, cap)).collect();
            let given = divide(&slots, &claims, &held);
            let room: u64 = claims.iter().map(|it| it.cap.map_or(99, u64::from)).sum();
            prop_assert_eq!(given.len() as u64, room.min(slots.len() as u64));
            for it in &claims {
                let has = given.values().filter(|job| **job == it.job).count() as u32;
                prop_assert!(it.cap.is_none_or(|cap| has <= cap));
            }
            prop_assert!(given.keys().all(|it| slots.contains(it)));
            prop_assert_eq!(divide(&slots, &claims, &given), given);
        }
    }
}
