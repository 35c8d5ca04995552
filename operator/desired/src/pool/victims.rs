//! Who leaves a pool, and in which order.
//!
//! In: the servers and the wanted number. Out: the servers to drain now, each with its reason.
//!
//! A pool that shrinks gives up, in this order: who has no node, who is quarantined, who is not ready,
//! the slowest, the farthest from the trainers, who sits most alone (the most fragmented place), the
//! highest slot. Replacements (quarantine, cordoned node, new template) take turns: at most a quarter
//! of the pool at a time, and for a new template one after the other.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;

use super::Observed;
use super::manifest::{levels, revision};
use super::server::{POOL_DELETED, QUARANTINED, SHRINK, Server};
use crate::pod::{State, node};
use crate::settings::Settings;

pub(crate) fn choose<'s, 'a>(
    observed: &Observed,
    settings: &Settings,
    all: &'s [Server<'a>],
    wanted: usize,
) -> Vec<(&'s Server<'a>, &'static str)> {
    let deleted = observed.pool.metadata.deletion_timestamp.is_some();
    let mut staying: Vec<&Server<'_>> = all.iter().filter(|it| it.stays()).collect();
    let places = Places::new(observed, settings, &staying);
    staying.sort_by_cached_key(|it| places.rank(it));
    let surplus = staying.len().saturating_sub(wanted);
    let mut chosen: Vec<_> = staying
        .drain(..surplus)
        .map(|it| (it, if deleted { POOL_DELETED } else { SHRINK }))
        .collect();

    let leaving = all.iter().filter(|it| it.is_present() && it.drain.is_some() && !it.shrinks());
    let mut turns = (wanted / 4).max(1).saturating_sub(leaving.count());
    let cordoned = |it: &Server<'_>| {
        it.node().and_then(|name| observed.nodes.get(name)).is_some_and(|node| node.cordoned)
    };
    for server in &staying {
        if turns == 0 {
            break;
        }
        let reason = if server.report.is_some_and(|it| it.quarantined) {
            QUARANTINED
        } else if cordoned(server) {
            "NodeCordoned"
        } else {
            continue;
        };
        chosen.push((*server, reason));
        turns -= 1;
    }
    if chosen.is_empty()
        && let Some(server) = outdated(observed, all, &staying, wanted)
    {
        chosen.push((server, "TemplateChanged"));
    }
    chosen
}

/// The next server of an old template, when all others are well.
fn outdated<'s, 'a>(
    observed: &Observed,
    all: &[Server<'_>],
    staying: &[&'s Server<'a>],
    wanted: usize,
) -> Option<&'s Server<'a>> {
    let current = revision(&observed.pool.spec);
    let is_old = |it: &Server<'_>| it.revision() != Some(current.as_str());
    let new_ones_are_well =
        staying.iter().filter(|it| !is_old(it)).all(|it| it.state == State::Ready);
    let nobody_is_on_the_way =
        staying.len() == wanted && all.iter().all(|it| it.stays() || it.state == State::Ended);
    let old = staying.iter().copied().find(|it| is_old(it))?;
    (new_ones_are_well && nobody_is_on_the_way).then_some(old)
}

/// How near servers are to the trainers and to each other.
struct Places<'a> {
    levels: &'a [String],
    nodes: &'a BTreeMap<String, super::Node>,
    trainers: Vec<&'a str>,
    servers: Vec<&'a str>,
}

impl<'a> Places<'a> {
    fn new(observed: &'a Observed, settings: &'a Settings, staying: &[&Server<'a>]) -> Self {
        Self {
            levels: levels(&observed.pool.spec, settings),
            nodes: &observed.nodes,
            trainers: observed.trainers.iter().filter_map(node).collect(),
            servers: staying.iter().filter_map(|it| node(it.pod)).collect(),
        }
    }

    /// Who leaves first has the lowest rank.
    fn rank(&self, server: &Server<'_>) -> impl Ord + use<> {
        let report = server.report.unwrap_or_default();
        let place = server.node();
        let distance = place.map_or(usize::MAX, |it| self.distance(it));
        let company = place.map_or(0, |it| self.company(it));
        (
            server.state != State::Unscheduled,
            !report.quarantined,
            server.state == State::Ready,
            Reverse(report.slow_factor_percent),
            Reverse(distance),
            company,
            Reverse(server.slot),
            Reverse(server.incarnation),
        )
    }

    /// Levels between a node and the nearest trainer; 0 is the nearest level.
    fn distance(&self, place: &str) -> usize {
        let shared = |key: &String| self.trainers.iter().any(|it| self.together(key, place, it));
        self.levels.iter().position(shared).unwrap_or(self.levels.len())
    }

    /// Servers of the pool in the same place of the nearest level.
    fn company(&self, place: &str) -> usize {
        let Some(key) = self.levels.first() else { return 0 };
        self.servers.iter().filter(|it| self.together(key, place, it)).count()
    }

    fn together(&self, key: &str, one: &str, other: &str) -> bool {
        let place = |node: &str| self.nodes.get(node)?.labels.get(key);
        one == other || place(one).is_some_and(|it| Some(it) == place(other))
    }
}

/// Servers that are as near to a trainer as the farthest level asks; none while there is no trainer.
pub(crate) fn near(observed: &Observed, levels: &[String], servers: &[&Pod]) -> Option<usize> {
    let places = Places {
        levels,
        nodes: &observed.nodes,
        trainers: observed.trainers.iter().filter_map(node).collect(),
        servers: Vec::new(),
    };
    if places.trainers.is_empty() {
        return None;
    }
    let near = |it: &&&Pod| node(it).is_some_and(|it| places.distance(it) < levels.len());
    Some(servers.iter().filter(near).count())
}
