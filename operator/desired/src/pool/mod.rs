//! An `AttentionPool`: a pod for each dedicated server, and how servers come and go.
//!
//! In: an [`Observed`] and the time. Out: [`decide`], the actions, the scale and when to look again;
//! [`status`], what is there.
//!
//! ```text
//!            schedule      ready              a reason to leave
//! created ─▶ unscheduled ─▶ starting ─▶ ready ──────────────────▶ draining ─▶ deleted
//!    ▲                                    │ ends by itself            idle, or late
//!    └── after a pause that doubles ──────┘
//! ```
//!
//! A server leaves in one way: it is marked, its slot's work goes elsewhere, and only then it is
//! deleted. Reasons are a smaller pool, a quarantine, a cordoned node, a new template, the pool's own
//! end. A server that nobody is connected to has nothing to hand over.
//!
//! Invariants: at most the wanted number of servers is made; a slot has one successor at a time; a
//! replacement takes the lowest free slot, which is the one of the server that it replaces. What a
//! replacement is made from is decided in `revision.rs`.

mod facts;
mod holders;
mod manifest;
mod revision;
pub mod scale;
mod server;
mod status;
mod victims;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cadre_crds::AttentionPool;
use cadre_crds::contract::{ANNOTATION_TAKEN_OVER, FINALIZER};
use cadre_crds::validate::{self, Refusal};
use cadre_views::{JobKey, Unserved};
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;

use crate::action::{Action, Kind, Object, Reference};
use crate::job::Decision;
use crate::names::{LAST_INCARNATION, annotation, is_owned, owned_by, pool_labels};
use crate::owned;
use crate::pod::{State, set_up_by, unscheduled};
use crate::settings::Settings;
pub use facts::facts;
use revision::Rollout;
use scale::{Demand, Memory, Scale};
use server::{Server, servers};
pub use status::status;

/// Seconds before the first retry of a slot whose server failed; each further one doubles them.
const PAUSE_SECONDS: i64 = 10;
/// Longest pause.
const LONGEST_PAUSE_SECONDS: i64 = 300;

/// Seconds after which servers that the API server refuses to make are taken for missing until further notice. Before, one
/// that was evicted may leave its quota to its successor with a delay.
const UNMADE_SECONDS: i64 = 60;

/// Seconds between two looks while servers may still come back to a new leader.
const LOOK_AGAIN_SECONDS: i64 = 5;

/// Second since 1970 that incarnations of servers count from: the start of 2020. They count from no time of the pool: workers
/// that outlive it turn an older server of a slot away than they have seen, also where another pool has its name.
const FIRST_INCARNATION: i64 = 1_577_836_800;

/// Maximum servers that one reconcile creates; the next one, a second later, creates more. So a
/// large pool needs no more memory than a small one, and its status shows the progress.
const MADE_AT_ONCE: usize = 250;

/// State of a pool in the cluster, and what its servers reported.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// The object.
    pub pool: AttentionPool,
    /// Why a part of the object cannot be read; then nothing is made from its spec.
    pub unreadable: Option<Refusal>,
    /// The Service of its servers, if there is one by that name.
    pub service: Option<Service>,
    /// The disruption budget of its servers, if there is one by that name.
    pub budget: Option<PodDisruptionBudget>,
    /// The revisions that its servers are made from, and former ones.
    pub revisions: Vec<Arc<ControllerRevision>>,
    /// Pods of its servers.
    pub pods: Vec<Arc<Pod>>,
    /// Pods of trainers, of any kind, that joined the pool by its label.
    pub trainers: Vec<Arc<Pod>>,
    /// Nodes that servers and trainers run on, and those that are cordoned.
    pub nodes: BTreeMap<String, Node>,
    /// What the control service knows about servers, by the name of the pod.
    pub reports: BTreeMap<String, Report>,
    /// The attempts that servers work for, by the name of the pod.
    pub holders: BTreeMap<String, JobKey>,
    /// Servers of the shares of attempts that others have, since these use none.
    pub lent: BTreeMap<JobKey, u32>,
    /// Trainers that serve in place.
    pub in_place: u32,
    /// Whether every connected server has had time to report. If so, a server that is not in
    /// `reports` is not connected.
    pub reports_complete: bool,
    /// Whether there is a control service; without one no server reports.
    pub has_control: bool,
    /// When servers lost their connection that have had one, by the name of the pod.
    pub lost: BTreeMap<String, Timestamp>,
    /// Since when the API server refuses to make further servers, if it does: for a quota or an admission policy.
    pub unmade_since: Option<Timestamp>,
    /// Demand of the jobs whose trainers are there, by namespace and name. Read in mode `Auto` alone.
    pub demands: BTreeMap<(String, String), Demand>,
    /// Attempts that have no servers though their conductor is there, and why. Read in mode `Auto` alone.
    pub unserved: BTreeMap<JobKey, Unserved>,
    /// What mode `Auto` remembers.
    pub memory: Memory,
}

/// A node, as far as it matters here.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Node {
    /// Labels of the node.
    pub labels: BTreeMap<String, String>,
    /// Nothing new may start there.
    pub cordoned: bool,
}

/// What the control service knows about a server.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Report {
    /// Share of the time in which it computes, in millionths; none when its last report is too old.
    pub busy_ppm: Option<u32>,
    /// Observed over expected time, in percent; 0 while unknown.
    pub slow_factor_percent: u32,
    /// Whether it is in quarantine: it was slow or failed too often.
    pub quarantined: bool,
    /// Whether it is out of the view, the conductor has confirmed a step without it, and it has no
    /// work left.
    pub drained: bool,
    /// Version of its data formats and bits; equal among the workers of a job.
    pub data_version: u32,
    /// Whether it works for a job.
    pub serves: bool,
    /// The slowest way from one of its job's trainers to it, measured when it joined.
    pub link: Option<Link>,
    /// How many of those trainers' rows come by each path: `shm`, `ucx`, `tcp`, `node`.
    pub paths: BTreeMap<String, u32>,
}

/// A way between a trainer and a server.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Link {
    /// Megabits a second; 0: the trainer was not reached.
    pub mbps: u32,
    /// Rank of the trainer.
    pub trainer: u32,
    /// The bytes went through the kernel's TCP.
    pub is_tcp: bool,
    /// Why they did, as the server says it; may be empty.
    pub why: String,
}

/// Decides what to do for a pool; the memory is for the next time.
pub fn decide(observed: &Observed, settings: &Settings, now: Timestamp) -> (Decision, Memory) {
    let pool = &observed.pool;
    let all = servers(observed);
    let deleted = pool.metadata.deletion_timestamp.is_some();
    let mut decision = Decision { has_workers: !deleted, ..Decision::default() };
    if !deleted && refusal(observed).is_some() {
        return (decision, observed.memory.clone());
    }
    let scale = if deleted { Scale::none(observed) } else { scale::of(observed, settings, now) };
    guard(observed, &all, deleted, &mut decision);
    if !deleted {
        surroundings(observed, (&all, &scale), now, &mut decision);
    }
    // In this look those stay wanted who were; the number that is written counts from the next one on.
    decision.actions.extend(scale.write.map(|replicas| Action::Scale { replicas }));
    let wanted = scale.servers as usize;
    if !deleted {
        revision::keep(observed, &all, wanted, &mut decision.actions);
    }
    leave(observed, settings, (&all, wanted), now, &mut decision);
    come(observed, settings, (&all, wanted), now, &mut decision);
    bury(&all, wanted, &mut decision);
    // What is late by then is told.
    let late = all.iter().filter_map(|it| set_up_by(it.pod).or_else(|| it.joins_by(observed)));
    let late = late.map(|it| it - now.as_second()).filter(|it| *it > 0).min();
    decision.again = soonest(soonest(decision.again, scale.again), late);
    (decision, scale.memory)
}

/// What is wrong with the pool's spec.
pub(crate) fn refusal(observed: &Observed) -> Option<Refusal> {
    observed.unreadable.clone().or_else(|| validate::pool(&observed.pool).err())
}

/// Sets the finalizer while a server has work to hand over, and removes it otherwise. A new leader
/// knows this only when all connected servers have come back, so it keeps the finalizer until then.
fn guard(observed: &Observed, all: &[Server<'_>], deleted: bool, decision: &mut Decision) {
    let finalizers = observed.pool.metadata.finalizers.as_deref().unwrap_or_default();
    let guarded = finalizers.iter().any(|it| it == FINALIZER);
    let serving = all.iter().any(|it| it.is_present() && it.report.is_some());
    let awaited = all.iter().any(|it| it.is_awaited(observed.reports_complete));
    if guarded && !serving && !awaited {
        decision.actions.push(Action::Release);
    } else if !guarded && serving && !deleted {
        decision.actions.push(Action::Guard);
    }
    let waits = guarded || all.iter().any(|it| it.drain.is_some());
    if awaited && waits {
        decision.again = soonest(decision.again, Some(LOOK_AGAIN_SECONDS));
    }
}

/// The Service and the disruption budget. Those of somebody else are left alone.
fn surroundings(
    observed: &Observed,
    (all, scale): (&[Server<'_>], &Scale),
    now: Timestamp,
    decision: &mut Decision,
) {
    let actions = &mut decision.actions;
    let pool = &observed.pool;
    let service = manifest::service(pool);
    match &observed.service {
        None => actions.push(Action::Create(Object::Service(Box::new(service)))),
        Some(found) if is_owned(&found.metadata, &pool.metadata) => {
            if !owned::is_service(found, &service) {
                actions.push(Action::Apply(Object::Service(Box::new(service))));
            }
        }
        Some(_) => {}
    }
    let finds_none =
        |it: &&Server<'_>| it.state == State::Unscheduled && unscheduled(it.pod).is_some();
    let without_node = all.iter().filter(finds_none).count();
    let taken_over = scale.taken_over.as_str();
    let lasts = observed.unmade_since.map(|it| now.as_second() - it.as_second());
    let unmade = match lasts {
        Some(lasts) if lasts >= UNMADE_SECONDS => {
            (scale.servers.saturating_sub(scale::there(observed))) as usize
        }
        Some(lasts) => {
            decision.again = soonest(decision.again, Some(UNMADE_SECONDS - lasts.max(0)));
            0
        }
        None => 0,
    };
    let budget = manifest::budget(pool, without_node + unmade, taken_over);
    match &observed.budget {
        None => actions.push(Action::Create(Object::Budget(Box::new(budget)))),
        Some(found) if is_owned(&found.metadata, &pool.metadata) => {
            // Earlier builds said it so, and an apply does not take away what a create has set.
            if found.spec.as_ref().is_some_and(|it| it.min_available.is_some()) {
                actions.push(Action::Delete(Reference::new(Kind::Budget, &found.metadata)));
            } else if !owned::is_budget(found, &budget)
                || !taken_over.is_empty()
                    && annotation(&found.metadata, ANNOTATION_TAKEN_OVER) != Some(taken_over)
            {
                actions.push(Action::Apply(Object::Budget(Box::new(budget))));
            }
        }
        Some(_) => {}
    }
}

/// Drains the servers that have to leave, and deletes those that have drained or ran out of time.
fn leave(
    observed: &Observed,
    settings: &Settings,
    (all, wanted): (&[Server<'_>], usize),
    now: Timestamp,
    decision: &mut Decision,
) {
    let timeout = i64::from(observed.pool.spec.drain.timeout_seconds);
    for server in all.iter().filter(|it| it.is_present()) {
        let Some(drain) = &server.drain else { continue };
        let left = drain.since.as_second() + timeout - now.as_second();
        if let Some(reason) = drain.comes_from_another_clock(now) {
            let pod = Reference::new(Kind::Pod, &server.pod.metadata);
            decision.actions.push(Action::Drain { pod, reason, since: now });
        }
        if server.may_go(observed.reports_complete) || left <= 0 {
            decision.actions.push(Action::Delete(Reference::new(Kind::Pod, &server.pod.metadata)));
        } else {
            decision.again = soonest(decision.again, Some(left));
        }
    }
    let marked = victims::choose(observed, settings, all, wanted);
    for (server, reason) in marked {
        let pod = Reference::new(Kind::Pod, &server.pod.metadata);
        decision.actions.push(Action::Drain { pod, reason, since: now });
        // The next reconcile, at once, deletes those that have nothing to hand over.
        decision.again = Some(1);
    }
}

/// Fills free slots, the lowest first; a slot whose servers failed waits for its pause.
fn come(
    observed: &Observed,
    settings: &Settings,
    (all, wanted): (&[Server<'_>], usize),
    now: Timestamp,
    decision: &mut Decision,
) {
    // A server that a successor replaces keeps its place until then; one that leaves a shrinking
    // pool does not.
    let held = all.iter().filter(|it| it.is_present() && !it.shrinks()).count();
    let taken: BTreeSet<u32> = all.iter().filter(|it| it.is_present()).map(|it| it.slot).collect();
    let free = (0_u32..).filter(|slot| !taken.contains(slot));
    let mut rollout = Rollout::new(observed, all);
    let mut made = 0;
    for slot in free.take(wanted.saturating_sub(held)) {
        if made == MADE_AT_ONCE {
            decision.again = Some(1);
            break;
        }
        let last = all.iter().filter(|it| it.slot == slot).max_by_key(|it| it.incarnation);
        let failures = last.map_or(0, Server::failures);
        if let Some(last) = last.filter(|_| failures > 0) {
            let doubled = PAUSE_SECONDS.saturating_mul(1 << (failures - 1).min(16));
            let left =
                last.ended(now).as_second() + doubled.min(LONGEST_PAUSE_SECONDS) - now.as_second();
            if left > 0 {
                decision.again = soonest(decision.again, Some(left));
                continue;
            }
        }
        let second = (now.as_second() - FIRST_INCARNATION).clamp(0, i64::from(LAST_INCARNATION));
        let second = u32::try_from(second).unwrap_or(0);
        let incarnation = last.map_or(second, |it| second.max(it.incarnation.saturating_add(1)));
        let avoid = last.map_or_else(Vec::new, |it| it.avoided(&observed.pool));
        let start = manifest::Start { slot, incarnation, failures, avoid };
        let pod = manifest::server(observed, settings, rollout.next(last), &start);
        decision.actions.push(Action::Create(Object::Pod(Box::new(pod))));
        made += 1;
    }
}

/// Deletes pods that have ended: once a later one fills the slot, or the slot is not wanted. Until then
/// the newest stays, since it says how often the slot has failed.
fn bury(all: &[Server<'_>], wanted: usize, decision: &mut Decision) {
    let held = all.iter().filter(|it| it.is_present() && !it.shrinks()).count();
    for server in all.iter().filter(|it| it.state == State::Ended && !it.is_going()) {
        let later =
            |it: &&Server<'_>| it.slot == server.slot && it.incarnation > server.incarnation;
        if held >= wanted || all.iter().any(|it| later(&it)) {
            decision.actions.push(Action::Delete(Reference::new(Kind::Pod, &server.pod.metadata)));
        }
    }
}

fn soonest(one: Option<i64>, other: Option<i64>) -> Option<i64> {
    one.into_iter().chain(other).min()
}

/// Metadata of an object that belongs to a pool.
fn meta(pool: &AttentionPool, name: String) -> ObjectMeta {
    ObjectMeta {
        name: Some(name),
        namespace: pool.metadata.namespace.clone(),
        labels: Some(pool_labels(&pool.metadata)),
        owner_references: Some(vec![owned_by::<AttentionPool>(&pool.metadata)]),
        ..ObjectMeta::default()
    }
}
