//! Why a pod is not well, and whether its node is the reason.
//!
//! In: pods. Out: a finding for each that is not fine, and one that counts those that are.

use cadre_crds::contract::ANNOTATION_DRAIN;
use k8s_openapi::api::core::v1::{Node, Pod};

use super::{Finding, Verdict, remedy};
use crate::facts::{
    Life, Trouble, ago, containers, ended, last_line, life, node, pod_condition, stuck, troubles,
};
use crate::seen::{Seen, annotation, name, namespace};

/// Maximum pods that are explained one by one; the others are only counted.
const MAX_PODS_TOLD: usize = 8;
/// Seconds beyond its grace period after which a pod that should be gone is stuck.
const STUCK_AFTER_SECONDS: i64 = 10;
/// Seconds after which a pod that gets ready is slow.
const SLOW_AFTER_SECONDS: i64 = 300;

/// Findings about pods, the worst first.
pub(super) fn all(seen: &Seen, what: &str, pods: &[&Pod]) -> Vec<Finding> {
    let mut found: Vec<Finding> = pods.iter().filter_map(|it| one(seen, it)).collect();
    found.sort_by_key(|it| std::cmp::Reverse(it.verdict));
    let fine = pods.len() - found.len();
    let more = found.len().saturating_sub(MAX_PODS_TOLD);
    let rest = found.get(MAX_PODS_TOLD).map(|it| it.verdict);
    found.truncate(MAX_PODS_TOLD);
    if let Some(verdict) = rest {
        found.push(Finding::new(format!("{more} more {what}"), verdict, "are not fine either"));
    }
    if fine > 0 {
        found.push(Finding::new(format!("{fine} {what}"), Verdict::Fine, "ready or done"));
    }
    found
}

/// What keeps a pod from being ready, if anything.
pub(super) fn one(seen: &Seen, pod: &Pod) -> Option<Finding> {
    let meta = &pod.metadata;
    let what = format!("pod {}/{}", namespace(meta), name(meta));
    let finding = match life(pod) {
        Life::Ready | Life::Succeeded => return None,
        Life::Gated => {
            let gates = pod.spec.as_ref().and_then(|it| it.scheduling_gates.as_ref());
            let gates: Vec<_> = gates.into_iter().flatten().map(|it| it.name.as_str()).collect();
            let says = format!("a queue has not admitted it yet ({})", gates.join(", "));
            Finding::new(what, Verdict::Waiting, says).with(remedy::of_reason("Queued"))
        }
        Life::Unscheduled => unscheduled(pod, what),
        Life::Starting => starting(seen, pod, what),
        Life::Leaving => leaving(seen, pod, what),
        Life::Failed => failed(pod, what),
    };
    // A node that is well explains nothing.
    let below = node(pod).and_then(|it| of_node(seen, it));
    Some(finding.over(below))
}

fn unscheduled(pod: &Pod, what: String) -> Finding {
    let Some(("False", _, message)) = pod_condition(pod, "PodScheduled") else {
        return Finding::new(what, Verdict::Waiting, "the scheduler has not looked at it yet");
    };
    let makes_room = pod.status.as_ref().and_then(|it| it.nominated_node_name.as_deref());
    match makes_room.filter(|it| !it.is_empty()) {
        Some(node) => {
            let says = format!("room is being made on node {node}");
            Finding::new(what, Verdict::Waiting, says)
        }
        None => Finding::new(what, Verdict::Bad, format!("no node: {message}"))
            .with(remedy::of_scheduling(message)),
    }
}

fn starting(seen: &Seen, pod: &Pod, what: String) -> Finding {
    if let Some((container, reason, message)) = stuck(pod) {
        let says = format!("container {container}: {reason} {message}").trim_end().to_owned();
        let end = ended(pod).map(|(container, end)| end_of(container, end));
        let remedy = remedy::of_waiting(reason, &message);
        // The end is the cause, the waiting only follows from it.
        return Finding::new(what, Verdict::Bad, says)
            .with(if end.is_some() { None } else { remedy })
            .over(end);
    }
    if let Some(warning) = seen.warnings("Pod", &pod.metadata).first() {
        let message = warning.message.as_deref().unwrap_or_default();
        let reason = warning.reason.as_deref().unwrap_or_default();
        let says = format!("{reason}: {}", last_line(message));
        let remedy = remedy::of_warning(message);
        let verdict = if remedy.is_some() { Verdict::Bad } else { Verdict::Waiting };
        return Finding::new(what, verdict, says).with(remedy);
    }
    let since = pod.status.as_ref().and_then(|it| it.start_time.as_ref()).map(|it| it.0);
    let age = since.map_or_else(|| "some time".to_owned(), |it| ago(it, seen.now));
    let slow = since.is_some_and(|it| it.as_second() + SLOW_AFTER_SECONDS <= seen.now.as_second());
    let running =
        containers(pod).any(|it| it.state.as_ref().is_some_and(|state| state.running.is_some()));
    let verdict = if slow { Verdict::Bad } else { Verdict::Waiting };
    if running {
        Finding::new(what, verdict, format!("runs for {age} and is not ready"))
            .with(slow.then_some("read its log (`cadre logs`): it does not say that it is ready"))
    } else {
        Finding::new(what, verdict, format!("its containers are being made for {age}"))
            .with(slow.then_some("look at the kubelet of its node: it says nothing"))
    }
}

fn leaving(seen: &Seen, pod: &Pod, what: String) -> Finding {
    let until = pod.metadata.deletion_timestamp.as_ref().map_or(seen.now, |it| it.0);
    let why = annotation(&pod.metadata, ANNOTATION_DRAIN)
        .map_or_else(String::new, |it| format!(": {it}"));
    if until.as_second() + STUCK_AFTER_SECONDS <= seen.now.as_second() {
        let says = format!("should be gone since {}{why}", ago(until, seen.now));
        return Finding::new(what, Verdict::Bad, says)
            .with(Some("its node does not answer; repair it, or delete the pod with --force"));
    }
    Finding::new(what, Verdict::Waiting, format!("is being deleted{why}"))
}

fn failed(pod: &Pod, what: String) -> Finding {
    if let Some((container, end)) = ended(pod) {
        let it = end_of(container, end);
        return Finding::new(what, Verdict::Bad, it.says).with(it.remedy);
    }
    let status = pod.status.as_ref();
    let reason = status.and_then(|it| it.reason.as_deref()).unwrap_or("Failed");
    let message = status.and_then(|it| it.message.as_deref()).unwrap_or_default();
    let disrupted = pod_condition(pod, "DisruptionTarget").map_or("", |it| it.2);
    let says = [reason, message, disrupted].join(" ");
    let says = says.split_whitespace().collect::<Vec<_>>().join(" ");
    Finding::new(what, Verdict::Bad, says)
}

fn end_of(container: &str, end: &k8s_openapi::api::core::v1::ContainerStateTerminated) -> Finding {
    let reason = end.reason.as_deref().unwrap_or_default();
    let last = last_line(end.message.as_deref().unwrap_or_default());
    let last = if last.is_empty() { String::new() } else { format!(": {last}") };
    let code = end.exit_code;
    let says = format!("ended with exit code {code} {reason}").trim_end().to_owned() + &last;
    Finding::new(format!("container {container}"), Verdict::Bad, says)
        .with(remedy::of_end(code, reason))
}

/// What is wrong with a node, if anything.
fn of_node(seen: &Seen, node: &str) -> Option<Finding> {
    let what = format!("node {node}");
    match seen.node(node) {
        Some(it) => worst(it, &what),
        None if seen.knows_nodes() => Some(
            Finding::new(what, Verdict::Bad, "is not in the cluster any more")
                .with(Some("delete its pods with --force if they stay")),
        ),
        None => None,
    }
}

fn worst(node: &Node, what: &str) -> Option<Finding> {
    let told = troubles(node).into_iter().map(|trouble| {
        let (verdict, says, remedy) = match trouble {
            Trouble::NotReady(why) => (
                Verdict::Bad,
                format!("is not ready: {why}"),
                "repair the node; its servers are replaced by themselves, a job starts anew",
            ),
            Trouble::Network(why) => {
                (Verdict::Bad, format!("has no network: {why}"), "repair the node's network")
            }
            Trouble::Pressure(name, why) => {
                (Verdict::Bad, format!("{name}: {why}"), "free that resource on the node")
            }
            Trouble::Cordoned => {
                (Verdict::Waiting, "is cordoned".to_owned(), "uncordon it when it is well")
            }
            Trouble::Sick { resource, usable, there } => (
                Verdict::Bad,
                format!("has {usable} of {there} {resource} that work"),
                "look at the device plugin and at the hardware",
            ),
        };
        Finding::new(what, verdict, says).with(Some(remedy))
    });
    told.max_by_key(|it| it.verdict)
}
