//! Lends what a job does not use to the others of its pool.
//!
//! In: the jobs with what they use, the division by shares. Out: a division in which jobs that lend keep what they need,
//! and the others have the rest by their shares. A server changes hands as by an edited share.
//!
//! Invariants: nobody gets less than its share but who lends; a job that lends keeps at least one slot; a slot that
//! nobody else can use stays where it is.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::job::Job;
use crate::pool::Pool;
use crate::shares::{Claim, divide};
use crate::types::{Facts, JobKey};

/// Slots of a pool with the data versions of their servers, and who holds them.
pub(crate) struct Held<'a> {
    pub(crate) slots: &'a BTreeMap<u32, Option<u32>>,
    pub(crate) by: &'a BTreeMap<u32, JobKey>,
}

impl Pool {
    /// Settles who of these lends.
    pub(crate) fn settle_usage(&mut self, claims: &[Claim<JobKey>], facts: &Facts, now: Duration) {
        let uses = |key: &JobKey| self.jobs.get(key).is_some_and(|it| it.usage.borrows(now));
        let others = |key: &JobKey| {
            let version = claims.iter().find(|it| it.job == *key).map(|it| it.version);
            let others = claims.iter().filter(|it| it.job != *key && Some(it.version) == version);
            others.map(|it| uses(&it.job)).collect::<Vec<_>>()
        };
        let seen = |(key, job): (&JobKey, &Job)| {
            let others = others(key);
            let is_alone = others.is_empty();
            let own = if is_alone { (false, false) } else { self.servers_of(key, job, facts, now) };
            (key.clone(), (own, (others.contains(&true), is_alone)))
        };
        let seen: BTreeMap<_, _> = self.jobs.iter().map(seen).collect();
        for (key, job) in &mut self.jobs {
            if let Some(&(own, others)) = seen.get(key) {
                job.usage.settle(now, own, others);
            }
        }
    }

    /// Notes which jobs have back what they had lent, after slots were given.
    pub(crate) fn note_returns(&mut self, facts: &Facts, now: Duration) {
        let awaiting = self.jobs.iter().filter(|it| it.1.usage.awaits());
        let whole = awaiting.filter(|(key, job)| self.servers_of(key, job, facts, now).0);
        for key in whole.map(|it| it.0.clone()).collect::<Vec<_>>() {
            if let Some(job) = self.jobs.get_mut(&key) {
                job.usage.has_all_back(now);
            }
        }
    }

    /// Whether each slot of a job has a server that is well, and whether all of these are spare.
    fn servers_of(&self, key: &JobKey, job: &Job, facts: &Facts, now: Duration) -> (bool, bool) {
        let serving = self.servers.iter().filter(|it| it.1.offer(key, now).is_some());
        let serving: BTreeMap<u32, bool> =
            serving.map(|(id, it)| (id.index, it.load.is_spare(now, facts.health))).collect();
        let mut slots = job.slots.iter().flat_map(|it| it.dedicated().collect::<Vec<_>>());
        let is_whole = !serving.is_empty() && slots.all(|it| serving.contains_key(&it));
        (is_whole, serving.values().all(|it| *it))
    }

    /// Divides the slots, so that others have what a job does not use, and notes who lends how many.
    pub(crate) fn divide_lent(
        &mut self,
        claims: &[Claim<JobKey>],
        held: &Held<'_>,
    ) -> BTreeMap<u32, JobKey> {
        let by_shares = divide(held.slots, claims, held.by);
        let count = |of: &BTreeMap<u32, JobKey>, key: &JobKey| {
            u32::try_from(of.values().filter(|it| *it == key).count()).unwrap_or(u32::MAX)
        };
        let cap_of = |claim: &Claim<JobKey>| {
            let job = self.jobs.get(&claim.job)?;
            let keeps = job.facts.keeps.filter(|_| !job.facts.reproducible).unwrap_or(u32::MAX);
            let share = count(&by_shares, &claim.job);
            job.usage.cap(count(held.by, &claim.job), keeps.min(share))
        };
        let caps: BTreeMap<&JobKey, u32> =
            claims.iter().filter_map(|it| Some((&it.job, cap_of(it)?))).collect();
        let mut lent = BTreeMap::new();
        let given = if caps.is_empty() {
            by_shares
        } else {
            // Bits of a reproducible job do not depend on what others do not use.
            let is_fixed =
                |key: &JobKey| self.jobs.get(key).is_some_and(|it| it.facts.reproducible);
            let capped = |it: &Claim<JobKey>| {
                let fixed = is_fixed(&it.job).then(|| count(&by_shares, &it.job).max(1));
                let own = caps.get(&it.job).copied();
                Claim { cap: it.cap.into_iter().chain(own).chain(fixed).min(), ..it.clone() }
            };
            let capped: Vec<_> = claims.iter().map(capped).collect();
            let mut given = divide(held.slots, &capped, held.by);
            let lend = || claims.iter().filter(|it| caps.contains_key(&it.job));
            for claim in lend() {
                let own = held.by.iter().filter(|it| *it.1 == claim.job).map(|it| *it.0);
                let has = given.values().filter(|it| **it == claim.job).count();
                let most = claim.cap.map_or(usize::MAX, |cap| (cap as usize).saturating_sub(has));
                stay(claim, held, own, most, &mut given);
            }
            for claim in lend() {
                let lacks = count(&by_shares, &claim.job).saturating_sub(count(&given, &claim.job));
                stay(claim, held, held.slots.keys().copied(), lacks as usize, &mut given);
            }
            let lacks = |key: &JobKey| count(&by_shares, key).saturating_sub(count(&given, key));
            lent = caps.keys().map(|it| ((*it).clone(), lacks(it))).filter(|it| it.1 > 0).collect();
            given
        };
        self.lent = lent;
        given
    }
}

/// At most so many of these slots, which nobody else wants or can use, stay with a job that lends, or go back to it.
fn stay(
    claim: &Claim<JobKey>,
    held: &Held<'_>,
    slots: impl Iterator<Item = u32>,
    most: usize,
    given: &mut BTreeMap<u32, JobKey>,
) {
    let fits = |slot: &u32| {
        let own = held.slots.get(slot);
        own.is_some_and(|own| own.is_none_or(|it| it == claim.version))
    };
    let free: BTreeSet<u32> = slots.filter(|it| fits(it) && !given.contains_key(it)).collect();
    given.extend(free.into_iter().take(most).map(|it| (it, claim.job.clone())));
}
