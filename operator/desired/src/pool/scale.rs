//! How many dedicated servers a pool wants.
//!
//! In: the spec, the servers' reports and what was recommended before. Out: a number of servers and the memory.
//!
//! | mode | servers |
//! |---|---|
//! | `Fixed`, `External` | `spec.replicas`, whoever writes it |
//! | `Auto` | from the load, between `min` and `max` |
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

use cadre_crds::{ScaleDecision, ScalingMode};
use cadre_planner::servers_for;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::Observed;
use super::server::servers;
use crate::pod::{State, state};

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
}

/// How many servers, and why.
#[derive(Clone, Debug)]
pub(crate) struct Scale {
    pub(crate) servers: u32,
    pub(crate) memory: Memory,
    pub(crate) again: Option<i64>,
}

impl Scale {
    /// A pool that is being deleted.
    pub(crate) fn none(observed: &Observed) -> Self {
        Self { servers: 0, memory: observed.memory.clone(), again: None }
    }
}

pub(crate) fn of(observed: &Observed, now: Timestamp) -> Scale {
    let scaling = &observed.pool.spec.scaling;
    let replicas = observed.pool.spec.replicas;
    if scaling.mode != ScalingMode::Auto {
        return Scale { servers: replicas, memory: Memory::default(), again: None };
    }
    let most = scaling.max.unwrap_or(replicas).max(scaling.min);
    let current = decided(observed);
    let mut memory = observed.memory.clone();
    let second = now.as_second();
    let again = Some(LOOK_SECONDS);
    let Some(load) = load_ppm(observed) else {
        return Scale { servers: current, memory, again };
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
    let servers = if current < least {
        least
    } else if grown > current {
        // Doubling at most: load that was held back shows itself in the next look.
        grown.min(current.saturating_mul(2).max(1))
    } else if wish > current {
        current
    } else {
        memory.sufficed(second, i64::from(scaling.scale_down_stabilization_seconds), current)
    };
    if servers != current {
        let percent = u32::try_from(busy.unwrap_or(0) / 10_000).unwrap_or(100);
        let reason = if current < least {
            "a job waits for a server".to_owned()
        } else if servers > current {
            format!("servers were busy for {percent} %, above the target")
        } else {
            format!("{servers} servers sufficed for {} s", scaling.scale_down_stabilization_seconds)
        };
        memory.decision = Some(ScaleDecision {
            time: Time(now),
            from: current,
            to: servers,
            utilization_percent: percent,
            reason,
        });
    }
    Scale { servers, memory, again }
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

/// The number that was decided last: mode `Auto`'s own, and in the other modes the spec's. Before its first decision, and where
/// that is lost with the status, `Auto` begins with the spec's, or with the servers that are there, if these are more.
pub(crate) fn decided(observed: &Observed) -> u32 {
    let pool = &observed.pool;
    let scaling = &pool.spec.scaling;
    if scaling.mode != ScalingMode::Auto {
        return pool.spec.replicas;
    }
    let told = pool.status.as_ref().and_then(|it| it.last_scale_decision.as_ref());
    let last = observed.memory.decision.as_ref().or(told);
    let most = scaling.max.unwrap_or(pool.spec.replicas).max(scaling.min);
    let there = || servers(observed).iter().filter(|it| it.stays()).count();
    let begin = || u32::try_from(there()).unwrap_or(u32::MAX).max(pool.spec.replicas);
    last.map_or_else(begin, |it| it.to).clamp(scaling.min, most)
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
