//! Who leaves a pool, and in which order.
//!
//! In: the servers and the wanted number. Out: the servers to drain now, each with its reason.
//!
//! A pool that shrinks gives up, in this order: who has no node, who is quarantined, who is not ready, who works for no
//! job, the slowest, the farthest from the trainers, who sits most alone (the most fragmented place), the
//! highest slot. Replacements (quarantine, cordoned node, new template) take turns: at most a quarter
//! of the pool at a time, and for a new template one first, then as many as `spec.updateStrategy` says. Who is ready on a
//! cordoned node also stays while a quarter is missing: where many nodes are cordoned at a time, successors come late.
//!
//! A server that works for a job is replaced by one of a new template only while that one may work for the same job: the
//! first one goes alone, and where its successor turns out to be of another data version, the others stay until their job
//! has ended.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;

use super::Observed;
use super::manifest::levels;
use super::revision::{at_once_now, digest, may_follow};
use super::server::{NODE_CORDONED, POOL_DELETED, QUARANTINED, SHRINK, Server, TEMPLATE_CHANGED};
use crate::pod::{State, node, state};
use crate::settings::Settings;

pub(crate) fn choose<'s, 'a>(
    observed: &Observed,
    settings: &Settings,
    all: &'s [Server<'a>],
    wanted: usize,
) -> Vec<(&'s Server<'a>, &'static str)> {
    let deleted = observed.pool.metadata.deletion_timestamp.is_some();
    let mut staying: Vec<&Server<'_>> = all.iter().filter(|it| it.stays()).collect();
    let taken = staying.iter().filter_map(|it| node(it.pod));
    let places = Places::new(observed, levels(&observed.pool.spec, settings), taken);
    staying.sort_by_cached_key(|it| places.rank(it));
    let surplus = staying.len().saturating_sub(wanted);
    let mut chosen: Vec<_> = staying
        .drain(..surplus)
        .map(|it| (it, if deleted { POOL_DELETED } else { SHRINK }))
        .collect();

    let leaving = all.iter().filter(|it| it.is_present() && it.drain.is_some() && !it.shrinks());
    let quarter = (wanted / 4).max(1);
    let mut turns = quarter.saturating_sub(leaving.count());
    let ready = staying.iter().filter(|it| it.state == State::Ready).count();
    let mut spare = quarter.saturating_sub(wanted.saturating_sub(ready));
    let cordoned = |it: &Server<'_>| {
        it.node().and_then(|name| observed.nodes.get(name)).is_some_and(|node| node.cordoned)
    };
    for server in &staying {
        if turns == 0 {
            break;
        }
        let reason = if server.report.is_some_and(|it| it.quarantined) {
            QUARANTINED
        } else if cordoned(server) && (server.state != State::Ready || spare > 0) {
            spare -= usize::from(server.state == State::Ready);
            NODE_CORDONED
        } else {
            continue;
        };
        chosen.push((*server, reason));
        turns -= 1;
    }
    if chosen.is_empty() {
        let outdated = outdated(observed, all, &staying, wanted);
        chosen.extend(outdated.into_iter().map(|it| (it, TEMPLATE_CHANGED)));
    }
    chosen
}

/// The next servers of an old template: as many as may be missing beside those that are not there, not ready or on their way.
fn outdated<'s, 'a>(
    observed: &Observed,
    all: &[Server<'_>],
    staying: &[&'s Server<'a>],
    wanted: usize,
) -> Vec<&'s Server<'a>> {
    let Some(most) = at_once_now(observed, all) else { return Vec::new() };
    let current = digest(&observed.pool.spec);
    let (new, old): (Vec<&Server<'_>>, Vec<_>) =
        staying.iter().copied().partition(|it| it.revision() == Some(current.as_str()));
    let not_ready = new.iter().filter(|it| it.state != State::Ready).count();
    let missing = wanted.saturating_sub(staying.len()) + not_ready;
    let leaving = all.iter().filter(|it| !it.stays() && it.state != State::Ended).count();
    let room = most.saturating_sub(missing.max(leaving));
    old.into_iter().filter(|it| may_follow(it, &new)).take(room).collect()
}

/// How near servers are to the trainers and to each other. Counted once for all servers: a pool may have
/// thousands.
struct Places<'a> {
    levels: &'a [String],
    nodes: &'a BTreeMap<String, super::Node>,
    /// Nodes of trainers, and of each level the places that have one.
    trainers: BTreeSet<&'a str>,
    with_trainers: Vec<BTreeSet<&'a str>>,
    /// Servers in each place of the nearest level.
    company: BTreeMap<&'a str, usize>,
}

impl<'a> Places<'a> {
    fn new(
        observed: &'a Observed,
        levels: &'a [String],
        servers: impl Iterator<Item = &'a str>,
    ) -> Self {
        let nodes = &observed.nodes;
        // Pods that have ended stay for their logs.
        let train = observed.trainers.iter().filter(|it| state(it) != State::Ended);
        let trainers: BTreeSet<_> = train.filter_map(|it| node(it)).collect();
        let places =
            |key: &String| trainers.iter().filter_map(|it| place(nodes, key, it)).collect();
        let with_trainers = levels.iter().map(places).collect();
        let mut company = BTreeMap::new();
        if let Some(key) = levels.first() {
            for server in servers {
                *company.entry(place(nodes, key, server).unwrap_or(server)).or_default() += 1;
            }
        }
        Self { levels, nodes, trainers, with_trainers, company }
    }

    /// Order in which servers leave: the lowest rank first.
    fn rank(&self, server: &Server<'_>) -> impl Ord + use<> {
        let report = server.report.cloned().unwrap_or_default();
        let place = server.node();
        let distance = place.map_or(usize::MAX, |it| self.distance(it));
        let company = place.map_or(0, |it| self.company(it));
        (
            server.state != State::Unscheduled,
            !report.quarantined,
            server.state == State::Ready,
            report.serves,
            Reverse(report.slow_factor_percent),
            Reverse(distance),
            company,
            Reverse(server.slot),
            Reverse(server.incarnation),
        )
    }

    /// Levels between a node and the nearest trainer; 0 is the nearest level.
    fn distance(&self, server: &str) -> usize {
        let beside = self.trainers.contains(server);
        let shared = |(key, places): (&String, &BTreeSet<&str>)| {
            beside || place(self.nodes, key, server).is_some_and(|it| places.contains(it))
        };
        let level = self.levels.iter().zip(&self.with_trainers).position(shared);
        level.unwrap_or(self.levels.len())
    }

    /// Servers of the pool in the same place of the nearest level.
    fn company(&self, server: &str) -> usize {
        let Some(key) = self.levels.first() else { return 0 };
        let place = place(self.nodes, key, server).unwrap_or(server);
        self.company.get(place).copied().unwrap_or(0)
    }
}

/// Where a node is, by a topology key.
fn place<'a>(nodes: &'a BTreeMap<String, super::Node>, key: &str, node: &str) -> Option<&'a str> {
    nodes.get(node)?.labels.get(key).map(String::as_str)
}

/// Servers that are as near to a trainer as the farthest level asks; none while there is no trainer.
pub(crate) fn near(observed: &Observed, levels: &[String], servers: &[&Pod]) -> Option<usize> {
    let places = Places::new(observed, levels, std::iter::empty());
    if places.trainers.is_empty() {
        return None;
    }
    let near = |it: &&&Pod| node(it).is_some_and(|it| places.distance(it) < levels.len());
    Some(servers.iter().filter(near).count())
}
