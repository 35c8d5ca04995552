//! What a pool's status says, with the one true reason of each condition.
//!
//! In: an observation made after the actions, with the memory of the decision. Out: the status; equal
//! to the old one when nothing that it tells has changed. Load is rounded, so that a pool at rest is
//! not written.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use cadre_crds::contract::SERVER_CONTAINER;
use cadre_crds::{AttentionPoolSpec, AttentionPoolStatus, ScalingMode, WorstServer};
use k8s_openapi::api::core::v1::ContainerStateTerminated;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::Timestamp;

use super::holders::holders;
use super::manifest::levels;
use super::revision::held_back;
use super::revision::{self, at_once};
use super::scale::{self, utilization_ppm};
use super::server::{Server, servers};
use super::victims::near;
use super::{Observed, refusal};
use crate::action::{Applied, Failure};
use crate::conditions::{Conditions, Said, Truth, said};
use crate::names::{is_owned, name, server_selector};
use crate::pod::{JOINS, JOINS_SECONDS, State, condition, end, stuck, unscheduled};
use crate::settings::Settings;

/// Nothing is to come.
const SETTLED: &str = "Settled";
/// Servers that the status names.
const WORST: usize = 8;
/// Utilization in the status is rounded to multiples of this percentage.
const PERCENT_STEP: u32 = 5;
/// Busiest server over the mean, in percent, up to which a pool is balanced, and is so again after it was not.
const BALANCED_PERCENT: [u64; 2] = [120, 110];

/// The status of a pool.
pub fn status(
    applied: &Applied<Observed>,
    settings: &Settings,
    now: Timestamp,
) -> AttentionPoolStatus {
    let observed: &Observed = applied;
    let pool = &observed.pool;
    let mut status = pool.status.clone().unwrap_or_default();
    let refusal = refusal(observed);
    let deleted = pool.metadata.deletion_timestamp.is_some();
    let all = servers(observed);
    status.observed_generation = pool.metadata.generation.unwrap_or_default();
    if pool.spec.scaling.mode != ScalingMode::Auto {
        status.last_scale_decision = None;
    } else if let Some(decision) = &observed.memory.decision {
        status.last_scale_decision = Some(decision.clone());
    }
    status.desired = match (deleted, &refusal) {
        (true, _) => 0,
        (false, None) => scale::decided(observed),
        (false, Some(_)) => status.desired,
    };
    status.replicas = number(all.iter().filter(|it| it.is_present()));
    status.ready = number(all.iter().filter(|it| it.state == State::Ready));
    status.registered = number(all.iter().filter(|it| it.is_present() && it.report.is_some()));
    let is_new = revision::is_new(observed);
    status.updated_replicas = number(all.iter().filter(|it| it.is_present() && is_new(it)));
    let outdated = number(all.iter().filter(|it| it.stays() && !is_new(it)));
    status.draining = number(all.iter().filter(|it| it.is_present() && it.drain.is_some()));
    status.quarantined = number(
        all.iter().filter(|it| it.is_present() && it.report.is_some_and(|it| it.quarantined)),
    );
    status.in_place_servers = match (pool.spec.in_place, observed.reports_complete) {
        (false, _) => 0,
        (true, true) => observed.in_place,
        // Who is not back at a new leader yet goes on serving.
        (true, false) => observed.in_place.max(status.in_place_servers),
    };
    let selector = server_selector(name(&pool.metadata));
    let selector = selector.iter().map(|(key, value)| format!("{key}={value}"));
    status.selector = selector.collect::<Vec<_>>().join(",");
    let percent = utilization_ppm(observed).map(|it| it / 10_000);
    status.utilization_percent =
        percent.map(|it| (it + PERCENT_STEP / 2) / PERCENT_STEP * PERCENT_STEP);
    status.worst_servers = worst(&all);
    status.holders = holders(observed, &all, now);

    if !deleted && refusal.is_none() {
        [status.current_revision, status.update_revision] = revision::told(observed);
    }
    let desired = status.desired;
    let (ready, draining) = (status.ready, status.draining);
    let in_place = status.in_place_servers;
    let generation = pool.metadata.generation;
    let is_imbalanced = |it: &Condition| it.type_ == "Balanced" && it.status == "False";
    let at_most = BALANCED_PERCENT[usize::from(status.conditions.iter().any(is_imbalanced))];
    let mut conditions = Conditions { list: &mut status.conditions, generation, now };
    if let Some(refusal) = refusal.filter(|_| !deleted) {
        conditions.set("Available", said(ready + in_place > 0, "Invalid", refusal.to_string()));
        let invalid = || said(true, "Invalid", refusal.to_string());
        conditions.set("Degraded", invalid());
        conditions.set("Ready", said(false, "Invalid", refusal.to_string()));
        conditions.waits(Some(invalid()), None);
        return status;
    }
    conditions.set("Available", available(ready, in_place, desired));
    let held_back = held_back(observed, &all);
    let progressing = progressing((ready, draining, desired), held_back, deleted);
    let updates = updates(&pool.spec, outdated, desired).filter(|_| progressing.reason == SETTLED);
    let progressing = updates.unwrap_or(progressing);
    conditions.set("Progressing", progressing.clone());
    conditions.set("Balanced", balanced(&all, at_most));
    conditions.set("ScalingActive", scaling(observed, now));
    conditions.set("PlacementSatisfied", placement(observed, settings, &all));
    let degraded = degraded(observed, &all, applied.failure(), now);
    conditions.set("Degraded", degraded.clone());
    conditions.set("Ready", whole(&degraded, &progressing, desired));
    let moves = progressing.status == Truth::Yes;
    conditions.waits(Some(degraded).filter(Said::stalls), Some(progressing).filter(|_| moves));
    status
}

fn number<T>(some: impl Iterator<Item = T>) -> u32 {
    u32::try_from(some.count()).unwrap_or(u32::MAX)
}

/// The slowest servers; those that run as expected are left out.
fn worst(all: &[Server<'_>]) -> Vec<WorstServer> {
    let slow = all.iter().filter(|it| it.is_present()).filter_map(|it| {
        let percent = it.report?.slow_factor_percent;
        let rounded = (percent + PERCENT_STEP / 2) / PERCENT_STEP * PERCENT_STEP;
        (rounded > 100).then(|| WorstServer {
            name: name(&it.pod.metadata).to_owned(),
            slow_factor_percent: rounded,
        })
    });
    let mut slow: Vec<_> = slow.collect();
    slow.sort_by_key(|it| (Reverse(it.slow_factor_percent), it.name.clone()));
    slow.truncate(WORST);
    slow
}

fn available(ready: u32, in_place: u32, desired: u32) -> Said {
    let text =
        format!("{ready} of {desired} dedicated servers are ready, {in_place} serve in place");
    match (ready, in_place) {
        (0, 0) if desired == 0 => said(false, "NoTrainer", format!("{text}; a job brings its own")),
        (0, 0) => said(false, "NoServer", text),
        _ => said(true, "Serving", text),
    }
}

fn progressing(
    (ready, draining, desired): (u32, u32, u32),
    held_back: usize,
    deleted: bool,
) -> Said {
    if deleted {
        return said(true, "Deleting", format!("{draining} servers drain"));
    }
    if draining > 0 {
        return said(true, "Draining", format!("{draining} servers drain"));
    }
    if ready < desired {
        return said(true, "Starting", format!("{ready} of {desired} servers are ready"));
    }
    if held_back > 0 {
        let text = format!(
            "{held_back} servers of the former template work for jobs of another build than the new one; they are \
             replaced when these jobs end"
        );
        return said(true, "WaitsForJobs", text);
    }
    said(false, SETTLED, "")
}

/// How servers of former revisions are going to be replaced, if there are any.
fn updates(spec: &AttentionPoolSpec, outdated: u32, desired: u32) -> Option<Said> {
    let updated = desired.saturating_sub(outdated);
    let said = if at_once(spec).is_some() {
        said(true, "Updating", format!("{updated} of {desired} servers are of the new template"))
    } else {
        let text = format!(
            "{outdated} servers are of a former template; spec.updateStrategy.type is OnDelete: delete their pods for the \
             new one"
        );
        said(false, "WaitsForDeletes", text)
    };
    (outdated > 0).then_some(said)
}

/// Whether the pool has all that it asks for.
fn whole(degraded: &Said, progressing: &Said, desired: u32) -> Said {
    let missing = [degraded, progressing].into_iter().find(|it| it.status == Truth::Yes);
    match missing {
        Some(it) => said(false, it.reason, &it.message),
        None => said(true, "Ready", format!("{desired} of {desired} servers are ready")),
    }
}

/// Whether the busiest server has at most `at_most` percent of the mean.
fn balanced(all: &[Server<'_>], at_most: u64) -> Said {
    let busy = all.iter().filter(|it| it.stays()).filter_map(|it| it.report?.busy_ppm);
    let busy: Vec<u64> = busy.map(u64::from).collect();
    let most = busy.iter().max().copied().unwrap_or(0);
    let sum: u64 = busy.iter().sum();
    if sum == 0 {
        return said(Truth::Unknown, "NoReports", "no server reports load");
    }
    if most * busy.len() as u64 * 100 <= sum * at_most {
        return said(true, "Balanced", "");
    }
    said(
        false,
        "Imbalanced",
        "the busiest server is a fifth above the mean, or was and is a tenth above it",
    )
}

fn scaling(observed: &Observed, now: Timestamp) -> Said {
    if let Some(rival) = scale::rival(observed, now) {
        let text = format!(
            "{rival} writes spec.replicas again and again, and so does mode Auto; it leaves the number alone until it has been \
             the same for an hour: leave spec.replicas out of what {rival} writes, or set spec.scaling.mode to External"
        );
        return said(false, "OthersScale", text);
    }
    match (observed.pool.spec.scaling.mode, scale::is_known(observed)) {
        (ScalingMode::Fixed, _) => said(false, "Fixed", "spec.replicas is what is wanted"),
        (ScalingMode::External, _) => said(true, "External", "an autoscaler writes spec.replicas"),
        (ScalingMode::Auto, true) => said(true, "Auto", ""),
        (ScalingMode::Auto, false) => {
            let text = "servers that work are silent, or none has come; the number stays as it is";
            said(false, "NoReports", text)
        }
    }
}

fn placement(observed: &Observed, settings: &Settings, all: &[Server<'_>]) -> Said {
    let placed: Vec<_> = all.iter().filter(|it| it.stays() && it.node().is_some()).collect();
    let pods: Vec<_> = placed.iter().map(|it| it.pod).collect();
    let levels = levels(&observed.pool.spec, settings);
    let Some(near) = near(observed, levels, &pods) else {
        return said(Truth::Unknown, "NoTrainer", "there is no trainer to be near to");
    };
    let text = format!("{near} of {} servers are near to a trainer", pods.len());
    if near < pods.len() {
        let widest = levels.last().map_or("", String::as_str);
        return said(false, "Far", format!("{text}; the others share no {widest} with any"));
    }
    measured(observed, all).unwrap_or_else(|| said(true, "Near", text + &paths(all)))
}

/// By what paths rows of trainers come to servers, as far as they have measured.
fn paths(all: &[Server<'_>]) -> String {
    let mut pairs: BTreeMap<&str, u32> = BTreeMap::new();
    for (path, count) in all.iter().filter_map(|it| it.report).flat_map(|it| &it.paths) {
        *pairs.entry(path).or_default() += count;
    }
    let said: Vec<_> =
        pairs.iter().map(|(path, count)| format!("{path} ({count} pairs)")).collect();
    if said.is_empty() { String::new() } else { format!("; rows come by {}", said.join(", ")) }
}

/// A problem of the measured links, if there is one; names the slowest.
fn measured(observed: &Observed, all: &[Server<'_>]) -> Option<Said> {
    let fabric = &observed.pool.spec.fabric;
    let links =
        all.iter().filter(|it| it.stays()).filter_map(|it| Some((it, it.report?.link.as_ref()?)));
    let (server, link) = links.min_by_key(|(it, link)| (link.mbps, it.slot))?;
    let way = format!("pod {} reaches trainer {}", name(&server.pod.metadata), link.trainer);
    if link.mbps == 0 {
        return Some(said(
            false,
            "NotReached",
            format!(
                "pod {} does not reach trainer {}; allow traffic between pods of the pool and its jobs",
                name(&server.pod.metadata),
                link.trainer
            ),
        ));
    }
    if let Some(least) = fabric.min_bandwidth_mbps.filter(|it| link.mbps < *it) {
        let text = format!(
            "{way} with {} Mbit/s, spec.fabric.minBandwidthMbps is {least}",
            rounded(link.mbps)
        );
        return Some(said(false, "SlowLink", text));
    }
    if link.is_tcp && !fabric.rdma_resources.is_empty() {
        let text = format!(
            "{way} over TCP with {} Mbit/s although spec.fabric.rdmaResources are asked for",
            rounded(link.mbps)
        );
        let why = if link.why.is_empty() { String::new() } else { format!(": {}", link.why) };
        return Some(said(false, "Tcp", text + &why));
    }
    None
}

/// Two digits of a measure: more would change with every server that joins.
fn rounded(mbps: u32) -> u32 {
    let unit = 10_u32.pow(mbps.max(1).ilog10().saturating_sub(1));
    mbps / unit * unit
}

fn degraded(
    observed: &Observed,
    all: &[Server<'_>],
    failure: Option<&Failure>,
    now: Timestamp,
) -> Said {
    let metas = observed.service.iter().map(|it| &it.metadata);
    let mut metas = metas.chain(observed.budget.iter().map(|it| &it.metadata));
    if metas.any(|it| !is_owned(it, &observed.pool.metadata)) {
        return said(
            true,
            "NameTaken",
            "a Service or PodDisruptionBudget that is not this pool's has the name NAME-servers; \
             rename one of the two",
        );
    }
    if let Some(Failure { reason, message }) = failure {
        return said(true, reason, message);
    }
    for server in all {
        let pod = name(&server.pod.metadata);
        let problem = match server.state {
            State::Unscheduled => unscheduled(server.pod)
                .or_else(|| gated(server))
                .map(|it| ("Unschedulable", it.to_owned())),
            State::Starting => {
                stuck(server.pod, SERVER_CONTAINER, now).map(|it| ("NotStarting", it))
            }
            State::Ended if server.failures() > 0 => Some(("ServerFailed", failed(server))),
            State::Ready | State::Leaving | State::Ended => None,
        };
        if let Some((reason, why)) = problem {
            return said(true, reason, format!("pod {pod}: {why}"));
        }
        if server.is_present() && server.report.is_some_and(|it| it.quarantined) {
            let text = format!("pod {pod} is too slow or failed too often");
            return said(true, "Quarantined", text);
        }
    }
    // Whatever else is wrong comes first: it is known for sure.
    let late = |it: &&Server<'_>| it.joins_by(observed).is_some_and(|it| it <= now.as_second());
    match all.iter().find(late) {
        Some(server) => {
            let pod = name(&server.pod.metadata);
            let text =
                format!("pod {pod}: it is ready and has not joined for {JOINS_SECONDS} s; {JOINS}");
            said(true, "NotJoined", text)
        }
        None => said(false, "AsItShould", ""),
    }
}

/// What a queue or another controller says of a pod that the scheduler may not look at.
fn gated<'a>(server: &Server<'a>) -> Option<&'a str> {
    let said = condition(server.pod, "PodScheduled")?;
    (said.reason.as_deref() == Some("SchedulingGated")).then_some("a queue has not admitted it yet")
}

fn failed(server: &Server<'_>) -> String {
    let times = server.failures();
    let end = end(server.pod, SERVER_CONTAINER);
    let (how, words) = if server.is_put_out() {
        let words = server.pod.status.as_ref().and_then(|it| it.message.as_deref());
        ("its node lacks memory or disk and has ended it".to_owned(), words)
    } else {
        let how = |it: &ContainerStateTerminated| format!("exit code {}", it.exit_code);
        (end.map_or_else(|| "ended".to_owned(), how), end.and_then(|it| it.message.as_deref()))
    };
    let words = words.unwrap_or_default();
    let last = words.lines().last().unwrap_or_default();
    format!("{how}, {times} times in a row; {last}").trim_end_matches("; ").to_owned()
}
