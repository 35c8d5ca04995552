//! How many dedicated servers a pool wants.
//!
//! In: the spec, the servers' reports, figures of jobs and what was recommended before. Out: a number of servers, what is to
//! be written as `spec.replicas`, and the memory.
//!
//! | mode | servers | who writes `spec.replicas` |
//! |---|---|---|
//! | `Fixed`, `External` | `spec.replicas` | somebody else |
//! | `Auto` | `spec.replicas`, between `min` and `max` | the operator, from the load |
//!
//! So there is one number, and nothing is read from a status. A number that somebody else has written in mode `Auto` takes no
//! server away: the pool keeps those that are there, or begins with more if the number says so, and the operator writes
//! that. Where others write again and again it writes no more, and says so (`owner.rs`). A new number counts from the
//! look on that finds it in the spec, so one that the API server refuses changes nothing.
//!
//! `Auto` asks how many servers would be busy for `targetUtilizationPercent` with the work at hand (`demand.rs`).
//! It grows when they are busier than a tenth above the target in two looks in a row, by doubling at
//! most. It shrinks when they are less busy than a fifth below the target, to a number that would be a
//! tenth below it, and only when every look within `scaleDownStabilizationSeconds` wanted that.
//! Between the two it stays, and it lands well inside: at constant load it finds a number and stays.
//! While a server that works is silent it stays too, and that time is none of little load. Where some of the wanted servers are
//! not there, it does not take their share for idle, unless no job is there. Servers without a job are idle. A job without a
//! server gets what it needs at once. A pool has one server at least for each job that is there, and else `min`, so it goes to 0
//! and comes back. Jobs that no server can work for ask for none (`strangers.rs`).
//!
//! Whole numbers only; the memory is bounded.

mod demand;
mod memory;
mod owner;
mod strangers;

use std::collections::BTreeSet;

use cadre_crds::{AttentionPool, ScaleDecision, ScalingMode};
use cadre_planner::servers_for;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::Observed;
use super::server::servers;
use crate::settings::Settings;
pub use demand::Demand;
use demand::Load;
pub use memory::Memory;
pub(crate) use owner::writer;
pub use owner::writes_replicas;
use strangers::Strangers;

/// Seconds between two looks at the load.
const LOOK_SECONDS: i64 = 15;
/// Busy share, in percent of the target, above which a pool grows, below which it shrinks, and that a
/// pool that shrinks lands at.
const GROW_PERCENT: u64 = 110;
const SHRINK_PERCENT: u64 = 80;
const LAND_PERCENT: u64 = 90;

/// How many servers, and why.
#[derive(Clone, Debug)]
pub(crate) struct Scale {
    pub(crate) servers: u32,
    /// What is to be written as `spec.replicas`.
    pub(crate) write: Option<u32>,
    /// When numbers of others were taken over, with that of this look; to be noted before the number is written.
    pub(crate) taken_over: String,
    pub(crate) memory: Memory,
    pub(crate) again: Option<i64>,
}

impl Scale {
    /// A pool that is being deleted.
    pub(crate) fn none(observed: &Observed) -> Self {
        Self { memory: observed.memory.clone(), ..Self::as_written(0) }
    }

    /// A number that somebody else decides on.
    fn as_written(servers: u32) -> Self {
        let (memory, taken_over) = (Memory::default(), String::new());
        Self { servers, write: None, taken_over, memory, again: None }
    }
}

pub(crate) fn of(observed: &Observed, settings: &Settings, now: Timestamp) -> Scale {
    let pool = &observed.pool;
    let replicas = pool.spec.replicas;
    if pool.spec.scaling.mode != ScalingMode::Auto {
        return Scale::as_written(replicas);
    }
    let second = now.as_second();
    let current = decided(observed);
    let mut memory = observed.memory.clone();
    memory.meet(observed, current, now);
    memory.strangers.look(observed, settings);
    let Wish { servers: wanted, percent, reason } = wish(observed, &mut memory, current, second);
    let is_ours = owner::is_ours(pool);
    let is_due = !is_ours || wanted != replicas;
    let write = (is_due && !memory.leaves_alone(second)).then_some(wanted);
    if write.is_some() {
        memory.writes(observed, now);
    }
    memory.intent = write.filter(|it| *it != replicas).map(|_| ScaleDecision {
        time: Time(now),
        from: replicas,
        to: wanted,
        utilization_percent: percent,
        reason: match wanted == current {
            false => reason,
            true if (pool.spec.scaling.min..=most(pool)).contains(&replicas) => {
                format!("somebody else wrote {replicas}; the servers stay")
            }
            true => format!("{replicas} is not between spec.scaling.min and spec.scaling.max"),
        },
    });
    let taken_over = memory.takeovers();
    Scale { servers: current, write, taken_over, memory, again: Some(LOOK_SECONDS) }
}

/// Servers that are wanted from now on.
struct Wish {
    servers: u32,
    /// Busy share that it was made from.
    percent: u32,
    reason: String,
}

fn wish(observed: &Observed, memory: &mut Memory, current: u32, now: i64) -> Wish {
    let scaling = &observed.pool.spec.scaling;
    let window = i64::from(scaling.scale_down_stabilization_seconds);
    let load = demand::load(observed);
    let least = least((observed, &memory.strangers), load.as_ref(), current);
    let [percent, waited] = load.map_or([0, 0], |it| it.percent());
    let waits = || "a job waits for servers".to_owned();
    let Some(load) = load else {
        // The silent one may be what all of them are needed for.
        let servers = current.max(least);
        memory.look(now, servers, window);
        return Wish { servers, percent, reason: waits() };
    };
    let needed = match load.mean() {
        Some(mean) => needed(load.sum, mean, scaling.target_utilization_percent, current),
        // None of them has come.
        None if demand::has_job(observed) => current,
        None => 0,
    };
    let needed = needed.max(least).min(most(&observed.pool));
    memory.look(now, needed, window);
    let grown = memory.lacked(now).min(needed);
    if current < least {
        return Wish { servers: least, percent, reason: waits() };
    }
    if grown > current {
        // Doubling at most: load that was held back shows itself in the next look.
        let servers = grown.min(current.saturating_mul(2).max(1));
        let held_back = if waited == 0 {
            String::new()
        } else {
            format!(" and trainers waited for them for {waited} %")
        };
        let reason = format!("servers were busy for {percent} %{held_back}, above the target");
        return Wish { servers, percent, reason };
    }
    let servers = if needed > current { current } else { memory.sufficed(now, window, current) };
    Wish { servers, percent, reason: format!("{servers} servers sufficed for {window} s") }
}

/// Servers that a pool has at least: one for each job that is there, since a job that gets none asks for its own again; and for
/// jobs without a server what they need, beside what the others keep busy.
fn least((observed, strangers): (&Observed, &Strangers), load: Option<&Load>, current: u32) -> u32 {
    let scaling = &observed.pool.spec.scaling;
    let jobs = demand::live(observed, strangers);
    let waiting = demand::waiting(observed, &jobs);
    let busy = load.map_or(current, |it| {
        busy_at(it.sum, scaling.target_utilization_percent, 100).min(current)
    });
    let beside = if waiting == 0 { 0 } else { busy.saturating_add(waiting) };
    let jobs = u32::try_from(jobs.len()).unwrap_or(u32::MAX);
    let least = beside.max(jobs).max(scaling.min);
    least.min(most(&observed.pool))
}

/// Servers that a load (in millionths of a server) keeps busy for so many percent of the target. They are counted as `cadre
/// plan` counts them.
fn busy_at(load: u64, target_percent: u32, percent: u64) -> u32 {
    let servers = servers_for(load.saturating_mul(100), percent * 1_000_000, target_percent, false);
    u32::try_from(servers).unwrap_or(u32::MAX)
}

/// Servers for the load (in millionths of a server), or as many as there are when that is near enough, or when those of
/// them that are there are busy (`mean`).
fn needed(load: u64, mean: u64, target_percent: u32, current: u32) -> u32 {
    let target = u64::from(target_percent) * 10_000;
    let share = |percent: u64| (target * percent / 100).max(1);
    if load > share(GROW_PERCENT) * u64::from(current) {
        return busy_at(load, target_percent, 100);
    }
    if load < share(SHRINK_PERCENT) * u64::from(current) && mean < share(SHRINK_PERCENT) {
        return busy_at(load, target_percent, LAND_PERCENT).min(current);
    }
    current
}

/// Most servers of a pool of mode `Auto`.
fn most(pool: &AttentionPool) -> u32 {
    let scaling = &pool.spec.scaling;
    scaling.max.unwrap_or(pool.spec.replicas).max(scaling.min)
}

/// The number of servers: `spec.replicas`. In mode `Auto` between `min` and `max`, and where somebody else has written it, at
/// least as many as are there or were wanted before.
pub(crate) fn decided(observed: &Observed) -> u32 {
    let pool = &observed.pool;
    let replicas = pool.spec.replicas;
    if pool.spec.scaling.mode != ScalingMode::Auto {
        return replicas;
    }
    let number = if owner::is_ours(pool) {
        replicas
    } else {
        replicas.max(there(observed)).max(observed.memory.number.unwrap_or(0))
    };
    number.clamp(pool.spec.scaling.min, most(pool))
}

/// Slots that have a pod, also one that has failed or was evicted, since it gets a successor; without those that shrink away.
pub(crate) fn there(observed: &Observed) -> u32 {
    let all = servers(observed);
    let slots: BTreeSet<u32> = all.iter().filter(|it| !it.shrinks()).map(|it| it.slot).collect();
    u32::try_from(slots.len()).unwrap_or(u32::MAX)
}

/// Who else writes `spec.replicas`, so that mode `Auto` does not any more.
pub(crate) fn rival(observed: &Observed, now: Timestamp) -> Option<&str> {
    let pool = &observed.pool;
    let is_auto = pool.spec.scaling.mode == ScalingMode::Auto;
    let leaves_alone = is_auto && observed.memory.leaves_alone(now.as_second());
    leaves_alone.then(|| writer(pool).unwrap_or("somebody"))
}

/// Whether mode `Auto` knows how much work there is.
pub(crate) fn is_known(observed: &Observed) -> bool {
    let load = demand::load(observed);
    let is_idle = || !demand::has_job(observed) || decided(observed) == 0;
    load.is_some_and(|it| it.mean().is_some() || is_idle())
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
