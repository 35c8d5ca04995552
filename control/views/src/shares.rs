//! Which job is given which slots of a pool.
//!
//! In: the pool's slots with the data version of each one's server, the jobs with their shares, caps and versions, who holds
//! what. Out: the holder of every slot that a job may have. A job is served by servers of its own data version alone. Among
//! the jobs of one version the slots are divided in proportion to their shares (highest averages), at least one each
//! while there are slots; the earlier one goes first where two have the same claim. A job keeps what it holds up to its
//! number, so that as little as possible moves.
//!
//! A slot without a server goes to whoever is farthest below its share, of any version; one that is held is its holder's,
//! who waits for a server in it. A slot whose server is of a version that no job has is given to nobody.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// What a job may have.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Claim<J> {
    /// The job.
    pub job: J,
    /// Weight of the job among the jobs of the pool, at least 1.
    pub share: u32,
    /// Most slots that it may be given.
    pub cap: Option<u32>,
    /// Data version of its workers.
    pub version: u32,
}

/// Gives slots to jobs, which come in the order of their arrival. Of a slot without a server there is no version. A job that
/// is not among `claims` holds nothing any more.
pub fn divide<J: Clone + Ord>(
    slots: &BTreeMap<u32, Option<u32>>,
    claims: &[Claim<J>],
    held: &BTreeMap<u32, J>,
) -> BTreeMap<u32, J> {
    let mut given = divide_once(slots, claims, held);
    // A slot without a server that its holder gives up is free for every job, so divide again.
    for _ in slots {
        let next = divide_once(slots, claims, &given);
        if next == given {
            break;
        }
        given = next;
    }
    given
}

fn divide_once<J: Clone + Ord>(
    slots: &BTreeMap<u32, Option<u32>>,
    claims: &[Claim<J>],
    held: &BTreeMap<u32, J>,
) -> BTreeMap<u32, J> {
    let version_of = |job: &J| claims.iter().find(|it| it.job == *job).map(|it| it.version);
    let mut room = Room::default();
    for (&slot, &own) in slots {
        match own.or_else(|| held.get(&slot).and_then(version_of)) {
            Some(version) => drop(room.of.entry(version).or_default().insert(slot)),
            None => drop(room.open.insert(slot)),
        }
    }
    let numbers = numbers(&room, claims);
    let mut left: BTreeMap<&J, u64> = claims.iter().map(|it| &it.job).zip(numbers).collect();
    // What each version needs beyond the slots of its own.
    let mut beyond = BTreeMap::<u32, u64>::new();
    for claim in claims {
        *beyond.entry(claim.version).or_default() += left[&claim.job];
    }
    for (version, wanted) in &mut beyond {
        *wanted = wanted.saturating_sub(room.own(*version));
    }
    let mut given = BTreeMap::new();
    for (&slot, job) in held {
        let fits = version_of(job).is_some_and(|it| room.is_of(it, slot));
        if let Some(left) = left.get_mut(job).filter(|left| fits && **left > 0) {
            *left -= 1;
            given.insert(slot, job.clone());
        }
    }
    for claim in claims {
        let beyond = beyond.entry(claim.version).or_default();
        let mut wanted = left[&claim.job];
        // Slots without a holder come first: one of another job has to be drained before it can be
        // used.
        let free = slots.keys().filter(|it| !held.contains_key(it));
        let released = slots.keys().filter(|it| held.contains_key(it));
        for &slot in free.chain(released) {
            let is_open = room.open.contains(&slot);
            let fits = room.is_of(claim.version, slot) || is_open && *beyond > 0;
            if wanted > 0 && fits && !given.contains_key(&slot) {
                wanted -= 1;
                *beyond -= u64::from(is_open);
                given.insert(slot, claim.job.clone());
            }
        }
    }
    given
}

/// Slots by the jobs that may have them.
#[derive(Debug, Default)]
struct Room {
    /// By data version: slots whose server has it.
    of: BTreeMap<u32, BTreeSet<u32>>,
    /// Slots without a server, which any job may have.
    open: BTreeSet<u32>,
}

impl Room {
    fn own(&self, version: u32) -> u64 {
        self.of.get(&version).map_or(0, |it| it.len() as u64)
    }

    fn is_of(&self, version: u32, slot: u32) -> bool {
        self.of.get(&version).is_some_and(|it| it.contains(&slot))
    }
}

/// How many slots each claim gets.
fn numbers<J>(room: &Room, claims: &[Claim<J>]) -> Vec<u64> {
    let mut own: BTreeMap<u32, u64> =
        claims.iter().map(|it| (it.version, room.own(it.version))).collect();
    let mut open = room.open.len() as u64;
    let mut numbers = vec![0_u64; claims.len()];
    let may = |claim: &Claim<J>, number: u64, own: &BTreeMap<u32, u64>, open: u64| {
        claim.cap.is_none_or(|cap| number < u64::from(cap)) && own[&claim.version] + open > 0
    };
    let take = |version: u32, own: &mut BTreeMap<u32, u64>, open: &mut u64| match own
        .get_mut(&version)
        .filter(|it| **it > 0)
    {
        Some(own) => *own -= 1,
        None => *open -= 1,
    };
    for (number, claim) in numbers.iter_mut().zip(claims) {
        if may(claim, *number, &own, open) {
            *number = 1;
            take(claim.version, &mut own, &mut open);
        }
    }
    // One slot at a time to the job that is farthest below its share: the method of highest
    // averages, which stays fair under caps.
    loop {
        let able = (0..claims.len()).filter(|&at| may(&claims[at], numbers[at], &own, open));
        let claim_of = |at: usize| {
            let share = u64::from(claims[at].share.max(1));
            // share / (number + 1), as a whole number fine enough for shares up to 1000.
            (share << 32) / (numbers[at] + 1)
        };
        let Some(next) = able.max_by_key(|&at| (claim_of(at), Reverse(at))) else { break };
        numbers[next] += 1;
        take(claims[next].version, &mut own, &mut open);
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn claim(job: u8, share: u32, cap: Option<u32>) -> Claim<u8> {
        Claim { job, share, cap, version: 3 }
    }

    fn of(job: u8, version: u32) -> Claim<u8> {
        Claim { version, ..claim(job, 100, None) }
    }

    /// Slots with servers of these versions, from 0; 0: without one.
    fn slots(versions: &[u32]) -> BTreeMap<u32, Option<u32>> {
        (0..).zip(versions).map(|(slot, &it)| (slot, (it > 0).then_some(it))).collect()
    }

    #[test]
    fn shares_are_kept_to_and_caps_too() {
        for (count, claims, expected) in [
            (4, vec![claim(1, 100, None)], vec![4]),
            (4, vec![claim(1, 100, None), claim(2, 100, None)], vec![2, 2]),
            (4, vec![claim(1, 300, None), claim(2, 100, None)], vec![3, 1]),
            (5, vec![claim(1, 100, None), claim(2, 100, None)], vec![3, 2]),
            (8, vec![claim(1, 900, Some(2)), claim(2, 100, None)], vec![2, 6]),
            (1, vec![claim(1, 1, None), claim(2, 1000, None)], vec![1, 0]),
            (3, vec![], vec![]),
        ] {
            for version in [0, 3] {
                let given = divide(&slots(&vec![version; count]), &claims, &BTreeMap::new());
                let has = |job| given.values().filter(|it| **it == job).count();
                let numbers: Vec<_> = claims.iter().map(|it| has(it.job)).collect();
                assert_eq!(numbers, expected, "{count} for {claims:?}");
            }
        }
    }

    #[test]
    fn a_new_job_gets_free_slots_first() {
        let held = BTreeMap::from([(0, 1), (1, 1), (2, 1)]);
        let claims = [claim(1, 100, None), claim(2, 100, None)];
        let given = divide(&slots(&[3; 6]), &claims, &held);
        assert_eq!(given, BTreeMap::from([(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]));
    }

    #[test]
    fn a_job_gets_servers_of_its_own_version_and_slots_that_have_none() {
        let check = |versions: &[u32],
                     claims: &[Claim<u8>],
                     held: &[(u32, u8)],
                     expected: &[(u32, u8)]| {
            let held = held.iter().copied().collect();
            let given = divide(&slots(versions), claims, &held);
            assert_eq!(given, expected.iter().copied().collect(), "{versions:?} for {claims:?}");
        };
        let two = [of(1, 3), of(2, 4)];
        // All are of the first one's build: the second waits.
        check(&[3, 3], &two, &[(0, 1), (1, 1)], &[(0, 1), (1, 1)]);
        check(&[3, 4, 4], &two, &[(0, 1), (1, 1), (2, 1)], &[(0, 1), (1, 2), (2, 2)]);
        // Nobody's build; and a slot that waits for a server is its holder's.
        check(&[3, 9, 0], &two, &[(2, 1)], &[(0, 1), (2, 1)]);
        check(&[3, 3, 0, 0], &two, &[(0, 1), (1, 1)], &[(0, 1), (1, 1), (2, 2), (3, 2)]);
        // A slot without a server that its holder may not keep is free for the other build at once.
        let capped = [Claim { cap: Some(1), ..of(1, 3) }, of(2, 4)];
        check(&[0, 0], &capped, &[(0, 1), (1, 1)], &[(0, 1), (1, 2)]);
        // Jobs of one build share what is of their build.
        let three = [of(1, 3), of(2, 4), of(3, 4)];
        check(&[3, 4, 4], &three, &[(1, 2), (2, 2)], &[(0, 1), (1, 2), (2, 3)]);
    }

    proptest! {
        #[test]
        fn every_slot_is_used_nobody_is_above_its_cap_and_the_second_time_nothing_moves(
            slots in prop::collection::btree_map(0_u32..40, prop::option::of(3_u32..6), 0..30),
            wants in prop::collection::vec((1_u32..1000, prop::option::of(1_u32..10), 3_u32..5), 0..6),
            held in prop::collection::btree_map(0_u32..40, 0_u8..8, 0..30),
        ) {
            let claims: Vec<_> = (0..)
                .zip(&wants)
                .map(|(job, &(share, cap, version))| Claim { version, ..claim(job, share, cap) })
                .collect();
            let given = divide(&slots, &claims, &held);
            let version_of = |job: u8| claims.get(usize::from(job)).map(|it| it.version);
            for it in &claims {
                let has = given.values().filter(|job| **job == it.job).count() as u32;
                prop_assert!(it.cap.is_none_or(|cap| has <= cap));
            }
            for (slot, &job) in &given {
                let own = slots.get(slot).expect("a slot of the pool");
                prop_assert!(own.is_none() || *own == version_of(job), "slot {} for {}", slot, job);
            }
            // Nobody who has room could be given more.
            for (slot, own) in slots.iter().filter(|it| !given.contains_key(it.0)) {
                let holder = held.get(slot).and_then(|it| version_of(*it));
                for it in claims.iter().filter(|it| own.or(holder).is_none_or(|own| own == it.version)) {
                    let has = given.values().filter(|job| **job == it.job).count() as u32;
                    prop_assert_eq!(Some(has), it.cap, "slot {} for {:?}", slot, it);
                }
            }
            prop_assert_eq!(divide(&slots, &claims, &given), given);
        }
    }
}
