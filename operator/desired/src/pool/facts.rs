//! What the control service has to know of a pool.
//!
//! In: an observation. Out: [`Facts`] for the decisions about views: the slots that are wanted, the servers
//! whose pods are there, the attempts that run. The rules for slots are those by which pods are made.

use std::collections::BTreeSet;
use std::time::Duration;

use cadre_views::{Facts, Fate, Health, ServerId};

use super::Observed;
use super::scale;
use super::server::servers;
use crate::identity::job_of;
use crate::pod::{State, state};

/// What the cluster says of a pool.
pub fn facts(observed: &Observed) -> Facts {
    let spec = &observed.pool.spec;
    let deleted = observed.pool.metadata.deletion_timestamp.is_some();
    let wanted = if deleted { 0 } else { scale::decided(observed) as usize };
    let all = servers(observed);
    let held = all.iter().filter(|it| it.is_present() && !it.shrinks()).map(|it| it.slot);
    let mut slots: BTreeSet<u32> = held.collect();
    let taken: BTreeSet<u32> = all.iter().filter(|it| it.is_present()).map(|it| it.slot).collect();
    let free: Vec<u32> = (0..)
        .filter(|slot| !taken.contains(slot))
        .take(wanted.saturating_sub(slots.len()))
        .collect();
    slots.extend(free);
    let fate = |it: &super::server::Server<'_>| {
        let stays = it.stays();
        if stays { Fate::Stays } else { Fate::Drains }
    };
    let health = &spec.health;
    Facts {
        slots,
        servers: all
            .iter()
            .filter(|it| it.state != State::Ended)
            .map(|it| (ServerId { index: it.slot, incarnation: it.incarnation }, fate(it)))
            .collect(),
        jobs: observed
            .trainers
            .iter()
            .filter(|it| state(it) != State::Ended)
            .filter_map(|it| job_of(it))
            .collect(),
        in_place: spec.in_place,
        cap: spec.access.max_servers_per_job,
        health: Health {
            report_timeout: Duration::from_secs(health.report_timeout_seconds.into()),
            reshape_after: Duration::from_secs(health.reshape_after_seconds.into()),
            slow_factor_percent: health.slow_factor_percent,
            quarantine_after: health.quarantine_after,
        },
    }
}
