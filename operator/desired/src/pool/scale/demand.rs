//! Work at hand, and servers that jobs wait for.
//!
//! In: reports of servers, figures and specs of jobs. Out: a load in millionths of a server, and a number of servers for the jobs
//! that have none.
//!
//! The time in which a job's worst trainer waits for attention is work that was held back, so it counts as load of the
//! job's servers. It counts for as much as they compute at most: what else a trainer waits for, more servers do not shorten. So
//! it can ask for twice the servers at most that the work alone would.

use std::collections::{BTreeMap, BTreeSet};

use cadre_crds::contract::TRAINER_CONTAINER;
use cadre_views::JobKey;

use super::super::Observed;
use super::super::server::servers;
use super::strangers::Strangers;
use crate::identity::job_of;
use crate::names::name;
use crate::pod::{State, state, waits};

/// What is known of a job's demand.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Demand {
    /// Dedicated servers that it needs by its spec; none where that does not say.
    pub servers: Option<u32>,
    /// Share of its last step in which its worst trainer waited for attention, in millionths.
    pub exposed_wait_ppm: u32,
}

/// Work at hand.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    /// In millionths of a server.
    pub(super) sum: u64,
    /// The part of it that is work held back.
    waits: u64,
    /// Servers that it is of.
    servers: u64,
}

impl Load {
    /// Mean load of its servers, in millionths; none where there are none.
    pub(super) fn mean(&self) -> Option<u64> {
        self.sum.checked_div(self.servers)
    }

    /// Mean busy share of its servers, and of the wait that counts, in percent.
    pub(super) fn percent(&self) -> [u32; 2] {
        let percent = |part: u64| {
            let mean = part.checked_div(self.servers).unwrap_or(0);
            u32::try_from(mean / 10_000).unwrap_or(100)
        };
        [percent(self.sum - self.waits), percent(self.waits)]
    }
}

/// The load of all servers that are connected. None while one that works is silent, since its part is not known. Servers
/// that have just come have no part yet, and those without a job none.
pub(super) fn load(observed: &Observed) -> Option<Load> {
    let mut load = Load { sum: 0, waits: 0, servers: 0 };
    for server in servers(observed).iter().filter(|it| it.stays()) {
        let Some(report) = server.report else { continue };
        let busy = match report.busy_ppm {
            Some(busy) => busy,
            None if report.serves => return None,
            None => 0,
        };
        let of = observed
            .holders
            .get(name(&server.pod.metadata))
            .and_then(|it| observed.demands.get(&(it.namespace.clone(), it.name.clone())));
        let waits = of.map_or(0, |it| it.exposed_wait_ppm.min(busy));
        load.sum += u64::from(busy) + u64::from(waits);
        load.waits += u64::from(waits);
        load.servers += 1;
    }
    Some(load)
}

/// Whether some job is there.
pub(super) fn has_job(observed: &Observed) -> bool {
    observed.trainers.iter().any(|it| state(it) != State::Ended)
}

/// Jobs by namespace and name, and whether they have nodes; none is that of trainers of no job of ours.
pub(super) type Jobs = BTreeMap<Option<(String, String)>, bool>;

/// Jobs whose trainers are there. A job with a trainer that cannot start is none: its image may never come. Nor is one that no
/// server can work for.
pub(super) fn live(observed: &Observed, strangers: &Strangers) -> Jobs {
    let mut jobs: Jobs = BTreeMap::new();
    let mut stuck = BTreeSet::new();
    for pod in observed.trainers.iter().filter(|it| state(it) != State::Ended) {
        let attempt = job_of(pod);
        if attempt.as_ref().is_some_and(|it| strangers.has(observed, it)) {
            continue;
        }
        let of = attempt.map(|it| (it.namespace, it.name));
        if waits(pod, TRAINER_CONTAINER).is_some() {
            stuck.insert(of.clone());
        }
        *jobs.entry(of).or_default() |= state(pod) != State::Unscheduled;
    }
    jobs.retain(|it, _| !stuck.contains(it));
    jobs
}

/// Servers that those of these jobs need that have none: as many as their specs say and the pool lets one job have, else one. A job whose trainers
/// wait for nodes asks for one until then, since more could take the nodes that they wait for.
/// While servers may still come back to a new leader, it does not know which jobs have some.
pub(super) fn waiting(observed: &Observed, jobs: &Jobs) -> u32 {
    if !observed.reports_complete {
        return 0;
    }
    let has_one = |job: &Option<(String, String)>| match job {
        Some(job) => observed
            .holders
            .values()
            .any(|it: &JobKey| (&it.namespace, &it.name) == (&job.0, &job.1)),
        None => observed.reports.values().any(|it| it.serves),
    };
    let most = observed.pool.spec.access.max_servers_per_job.unwrap_or(u32::MAX);
    let needs = |(job, is_placed): (&Option<(String, String)>, &bool)| {
        let asked = job.as_ref().and_then(|it| observed.demands.get(it)?.servers);
        asked.filter(|_| *is_placed).unwrap_or(1).min(most).max(1)
    };
    let waiting = jobs.iter().filter(|it| !has_one(it.0)).map(needs);
    waiting.fold(0, u32::saturating_add)
}
