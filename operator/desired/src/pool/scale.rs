//! How many dedicated servers a pool wants.
//!
//! In: the spec, the servers' reports and what was recommended before. Out: a number of servers, what is to be written as
//! `spec.replicas`, and the memory.
//!
//! | mode | servers | who writes `spec.replicas` |
//! |---|---|---|
//! | `Fixed`, `External` | `spec.replicas` | somebody else |
//! | `Auto` | `spec.replicas`, between `min` and `max` | the operator, through the scale subresource, from the load |
//!
//! So there is one number, and nothing has to be read from a status. Who has written it stands in the object's
//! `managedFields`. A number of somebody else in mode `Auto` (a manifest, an autoscaler) never takes servers away: the
//! operator begins with the servers that are there, and writes their number. Where others write [`RIVAL_WRITES`] times
//! within [`RIVAL_SECONDS`] it writes no more, and says so, until they have been quiet for as long.
//!
//! `Auto` asks how many servers would be busy for `targetUtilizationPercent` with the work at hand.
//! It grows when they are busier than a tenth above the target in two looks in a row, by doubling at
//! most. It shrinks when they are less busy than a fifth below the target, to a number that would be a
//! tenth below it, and only when every look within `scaleDownStabilizationSeconds` wanted that.
//! Between the two it stays, and it lands well inside: at constant load it finds a number and stays.
//! While a server that works is silent it stays too, and where some of the wanted servers are not there, it does not take
//! their share for idle. Servers without a job are idle. A pool has one server at least while a job is there, and else
//! `min`, so it goes to 0 and comes back.
//!
//! Whole numbers only; the memory is bounded.

use std::collections::VecDeque;

use cadre_crds::{AttentionPool, ScaleDecision, ScalingMode};
use cadre_planner::servers_for;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, Time};
use k8s_openapi::jiff::Timestamp;

use super::Observed;
use super::server::servers;
use crate::names::MANAGER;
use crate::pod::{State, state};

/// Writes of others after which `Auto` leaves `spec.replicas` to them, when they came within so many seconds.
const RIVAL_WRITES: usize = 3;
const RIVAL_SECONDS: i64 = 3_600;
/// Looks that are remembered at most; within a window older ones are thinned out.
const REMEMBERED: usize = 128;
/// Seconds between two looks at the load.
const LOOK_SECONDS: i64 = 15;
/// Busy share, in percent of the target, above which a pool grows, below which it shrinks, and that a
/// pool that shrinks lands at.
const GROW_PERCENT: u64 = 110;
const SHRINK_PERCENT: u64 = 80;
const LAND_PERCENT: u64 = 90;

/// What `Auto` remembers of its looks: when, and how many servers sufficed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    looks: VecDeque<(i64, u32)>,
    /// Since when there is a memory; shrinking waits until it covers the whole window.
    since: Option<i64>,
    /// The last change, until a status tells it.
    pub decision: Option<ScaleDecision>,
    /// The number of the last look.
    number: Option<u32>,
    /// When others wrote another number, the newest last.
    rivals: VecDeque<i64>,
}

/// How many servers, and why.
#[derive(Clone, Debug)]
pub(crate) struct Scale {
    pub(crate) servers: u32,
    /// What `spec.replicas` is to be from now on, if it is something else.
    pub(crate) write: Option<u32>,
    pub(crate) memory: Memory,
    pub(crate) again: Option<i64>,
}

impl Scale {
    /// A pool that is being deleted.
    pub(crate) fn none(observed: &Observed) -> Self {
        Self { servers: 0, write: None, memory: observed.memory.clone(), again: None }
    }
}

pub(crate) fn of(observed: &Observed, now: Timestamp) -> Scale {
    let scaling = &observed.pool.spec.scaling;
    let replicas = observed.pool.spec.replicas;
    if scaling.mode != ScalingMode::Auto {
        return Scale { servers: replicas, write: None, memory: Memory::default(), again: None };
    }
    let most = scaling.max.unwrap_or(replicas).max(scaling.min);
    let current = decided(observed);
    let mut memory = observed.memory.clone();
    let second = now.as_second();
    memory.note_rival(&observed.pool, second);
    memory.number = Some(current);
    let may_write = !memory.has_rival(second);
    let write = |wanted: u32| Some(wanted).filter(|it| may_write && *it != replicas);
    let again = Some(LOOK_SECONDS);
    let Some(load) = load_ppm(observed) else {
        return Scale { servers: current, write: write(current), memory, again };
    };
    let least = least(observed).min(most);
    let busy = load.busy();
    let wish = match busy {
        Some(busy) => wish(load.sum, busy, scaling.target_utilization_percent, current),
        None => current,
    };
    let wish = wish.clamp(least, most);
    memory.look(second, wish, i64::from(scaling.scale_down_stabilization_seconds));
    let grown = memory.lacked(second).min(wish);
    let wanted = if current < least {
        least
    } else if grown > current {
        // Doubling at most: load that was held back shows itself in the next look.
        grown.min(current.saturating_mul(2).max(1))
    } else if wish > current {
        current
    } else {
        memory.sufficed(second, i64::from(scaling.scale_down_stabilization_seconds), current)
    };
    if write(wanted).is_some() {
        let percent = u32::try_from(busy.unwrap_or(0) / 10_000).unwrap_or(100);
        let reason = if current < least {
            "a job waits for a server".to_owned()
        } else if wanted > current {
            format!("servers were busy for {percent} %, above the target")
        } else if wanted < current {
            format!("{wanted} servers sufficed for {} s", scaling.scale_down_stabilization_seconds)
        } else {
            format!("somebody else wrote {replicas}, or min or max is another")
        };
        memory.decision = Some(ScaleDecision {
            time: Time(now),
            from: replicas,
            to: wanted,
            utilization_percent: percent,
            reason,
        });
    }
    Scale { servers: current, write: write(wanted), memory, again }
}

/// Whether an entry of a pool's `managedFields` is of somebody who has written `spec.replicas`.
pub fn writes_replicas(entry: &ManagedFieldsEntry) -> bool {
    entry.fields_v1.as_ref().is_some_and(|it| it.0.pointer("/f:spec/f:replicas").is_some())
}

/// Who has written `spec.replicas` as it is.
fn writers(pool: &AttentionPool) -> impl Iterator<Item = &ManagedFieldsEntry> {
    pool.metadata.managed_fields.iter().flatten().filter(|it| writes_replicas(it))
}

fn is_ours(pool: &AttentionPool) -> bool {
    writers(pool).any(|it| it.manager.as_deref() == Some(MANAGER))
}

/// Who else writes `spec.replicas`, so that `Auto` does not any more.
pub(crate) fn rival(observed: &Observed, now: Timestamp) -> Option<&str> {
    let is_auto = observed.pool.spec.scaling.mode == ScalingMode::Auto;
    let has_rival = is_auto && observed.memory.has_rival(now.as_second());
    let name = || writers(&observed.pool).find_map(|it| it.manager.as_deref());
    has_rival.then(|| name().unwrap_or("somebody"))
}

/// Servers that a pool has at least: one for a job that is there.
fn least(observed: &Observed) -> u32 {
    let is_there = observed.trainers.iter().any(|it| state(it) != State::Ended);
    observed.pool.spec.scaling.min.max(u32::from(is_there))
}

/// Servers for the load (in millionths of a server), or as many as there are when that is near enough, or when those of
/// them that are there are `busy`. They are counted as `cadre plan` counts them.
fn wish(load: u64, busy: u64, target_percent: u32, current: u32) -> u32 {
    let target = u64::from(target_percent) * 10_000;
    let share = |percent: u64| (target * percent / 100).max(1);
    let busy_at = |percent: u64| {
        let servers =
            servers_for(load.saturating_mul(100), percent * 1_000_000, target_percent, false);
        u32::try_from(servers).unwrap_or(u32::MAX)
    };
    if load > share(GROW_PERCENT) * u64::from(current) {
        return busy_at(100);
    }
    if load < share(SHRINK_PERCENT) * u64::from(current) && busy < share(SHRINK_PERCENT) {
        return busy_at(LAND_PERCENT).min(current);
    }
    current
}

/// The number of servers: `spec.replicas`. In mode `Auto` between `min` and `max`, and where somebody else has written it at
/// least as many as there are, or were a look ago.
pub(crate) fn decided(observed: &Observed) -> u32 {
    let pool = &observed.pool;
    let (scaling, replicas) = (&pool.spec.scaling, pool.spec.replicas);
    if scaling.mode != ScalingMode::Auto {
        return replicas;
    }
    let most = scaling.max.unwrap_or(replicas).max(scaling.min);
    let number = if is_ours(pool) {
        replicas
    } else {
        let there = servers(observed).iter().filter(|it| it.stays()).count();
        let there = u32::try_from(there).unwrap_or(u32::MAX);
        replicas.max(there).max(observed.memory.number.unwrap_or(0))
    };
    number.clamp(scaling.min, most)
}

/// Work at hand.
struct Load {
    /// In millionths of a server.
    sum: u64,
    /// Servers that it is of.
    servers: u64,
}

impl Load {
    /// Mean busy share of its servers, in millionths; none where there are none.
    fn busy(&self) -> Option<u64> {
        self.sum.checked_div(self.servers)
    }
}

/// The load of all servers that are connected. None while one that works is silent, since its part is not known. Servers
/// that have just come have no part yet, and those without a job none.
fn load_ppm(observed: &Observed) -> Option<Load> {
    let mut load = Load { sum: 0, servers: 0 };
    for report in servers(observed).iter().filter(|it| it.stays()).filter_map(|it| it.report) {
        load.sum += match report.busy_ppm {
            Some(busy) => u64::from(busy),
            None if report.serves => return None,
            None => 0,
        };
        load.servers += 1;
    }
    Some(load)
}

/// Whether mode `Auto` knows how much work there is.
pub(crate) fn is_known(observed: &Observed) -> bool {
    load_ppm(observed).is_some_and(|it| it.servers > 0 || decided(observed) == 0)
}

/// Mean busy share of the servers that report, in millionths; none while none does.
pub(crate) fn utilization_ppm(observed: &Observed) -> Option<u32> {
    let serving = servers(observed);
    let busy: Vec<u64> = serving
        .iter()
        .filter(|it| it.stays())
        .filter_map(|it| it.report?.busy_ppm.map(u64::from))
        .collect();
    let mean = busy.iter().sum::<u64>().checked_div(busy.len() as u64)?;
    u32::try_from(mean).ok()
}

impl Memory {
    /// Notes when somebody else has written another number than the last look's, once.
    fn note_rival(&mut self, pool: &AttentionPool, now: i64) {
        let is_other = self.number.is_some_and(|it| it != pool.spec.replicas);
        if !is_other || is_ours(pool) {
            return;
        }
        let written = writers(pool).filter_map(|it| Some(it.time.as_ref()?.0.as_second())).max();
        let written = written.unwrap_or(now);
        if self.rivals.back().is_none_or(|it| *it < written) {
            self.rivals.push_back(written);
        }
        while self.rivals.len() > RIVAL_WRITES {
            self.rivals.pop_front();
        }
    }

    /// Whether others write again and again.
    fn has_rival(&self, now: i64) -> bool {
        let ends = self.rivals.front().zip(self.rivals.back());
        self.rivals.len() == RIVAL_WRITES
            && ends.is_some_and(|(first, last)| {
                last - first <= RIVAL_SECONDS && now < last + RIVAL_SECONDS
            })
    }

    fn look(&mut self, now: i64, wish: u32, window: i64) {
        self.since.get_or_insert(now);
        // Looks closer together than the window's share of the memory count as one, by their largest.
        let apart = (window / REMEMBERED as i64).max(1);
        match self.looks.back_mut() {
            Some((at, most)) if now - *at < apart => *most = wish.max(*most),
            _ => self.looks.push_back((now, wish)),
        }
        while self.looks.front().is_some_and(|&(at, _)| at + window < now)
            || self.looks.len() > REMEMBERED + 2
        {
            self.looks.pop_front();
        }
    }

    /// The least that was wanted in the last looks; 0 until there are two, some seconds apart.
    fn lacked(&self, now: i64) -> u32 {
        let recent = || self.looks.iter().filter(|(at, _)| at + 2 * LOOK_SECONDS >= now);
        let apart = recent().map(|(at, _)| now - at).max().unwrap_or(0);
        let least = recent().map(|&(_, wish)| wish).min().unwrap_or(0);
        if apart < LOOK_SECONDS { 0 } else { least }
    }

    /// The most that was wanted within the window; `current` until the memory covers it.
    fn sufficed(&self, now: i64, window: i64, current: u32) -> u32 {
        if self.since.is_none_or(|it| now - it < window) {
            return current;
        }
        let most = self.looks.iter().map(|&(_, wish)| wish).max();
        most.map_or(current, |it| it.min(current))
    }
}
