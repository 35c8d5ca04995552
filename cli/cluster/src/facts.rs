//! What the status of a pod or a node says, in few words.
//!
//! In: an object of the core API. Out: its state and the words of who knows: scheduler, kubelet, container.
//! No remedies here.

use k8s_openapi::api::core::v1::{
    ContainerState, ContainerStateTerminated, ContainerStatus, Node, Pod,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::Timestamp;

/// Where a pod is in its life.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Life {
    /// The pod may not be scheduled yet.
    Gated,
    /// The pod has no node.
    Unscheduled,
    /// The pod has a node and is not ready.
    Starting,
    /// The pod is ready.
    Ready,
    /// The pod is being deleted.
    Leaving,
    /// All containers exited with code 0.
    Succeeded,
    /// A container failed.
    Failed,
}

pub(crate) fn life(pod: &Pod) -> Life {
    let status = pod.status.as_ref();
    match status.and_then(|it| it.phase.as_deref()) {
        Some("Succeeded") => return Life::Succeeded,
        Some("Failed") => return Life::Failed,
        _ => {}
    }
    if pod.metadata.deletion_timestamp.is_some() {
        return Life::Leaving;
    }
    if node(pod).is_none() {
        let gated = pod_condition(pod, "PodScheduled").is_some_and(|it| it.1 == "SchedulingGated");
        return if gated { Life::Gated } else { Life::Unscheduled };
    }
    let ready = status
        .and_then(|it| it.conditions.as_ref())
        .is_some_and(|all| all.iter().any(|it| it.type_ == "Ready" && it.status == "True"));
    if ready { Life::Ready } else { Life::Starting }
}

/// The node that a pod is on.
pub(crate) fn node(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref().filter(|it| !it.is_empty())
}

/// Status, reason and message of a pod's condition.
pub(crate) fn pod_condition<'a>(pod: &'a Pod, name: &str) -> Option<(&'a str, &'a str, &'a str)> {
    let all = pod.status.as_ref()?.conditions.as_ref()?;
    let it = all.iter().find(|it| it.type_ == name)?;
    let text = |it: &'a Option<String>| it.as_deref().unwrap_or_default();
    Some((&it.status, text(&it.reason), text(&it.message)))
}

/// Statuses of a pod's containers, those that run before the others first.
pub(crate) fn containers(pod: &Pod) -> impl Iterator<Item = &ContainerStatus> {
    let status = pod.status.as_ref();
    let first = status.and_then(|it| it.init_container_statuses.as_ref()).into_iter().flatten();
    first.chain(status.and_then(|it| it.container_statuses.as_ref()).into_iter().flatten())
}

/// Reason and message of the first container that cannot start.
pub(crate) fn stuck(pod: &Pod) -> Option<(&str, &str, String)> {
    containers(pod).find_map(|it| {
        let waiting = it.state.as_ref()?.waiting.as_ref()?;
        let reason = waiting.reason.as_deref().unwrap_or_default();
        let normal = ["", "ContainerCreating", "PodInitializing"].contains(&reason);
        let message = waiting.message.clone().unwrap_or_default();
        (!normal).then_some((it.name.as_str(), reason, message))
    })
}

/// How the first container that ended badly did so, now or the last time.
pub(crate) fn ended(pod: &Pod) -> Option<(&str, &ContainerStateTerminated)> {
    let of = |state: Option<&'_ ContainerState>| state.and_then(|it| it.terminated.clone());
    let bad = |it: &&ContainerStatus| {
        let now = of(it.state.as_ref()).or_else(|| of(it.last_state.as_ref()));
        now.is_some_and(|it| it.exit_code != 0 || it.reason.as_deref() == Some("OOMKilled"))
    };
    let it = containers(pod).find(bad)?;
    let now = it.state.as_ref().and_then(|it| it.terminated.as_ref());
    let end = now.or_else(|| it.last_state.as_ref()?.terminated.as_ref())?;
    Some((&it.name, end))
}

/// The last line that is not empty, cut to a line of a terminal.
pub(crate) fn last_line(text: &str) -> String {
    let line = text.lines().rev().find(|it| !it.trim().is_empty()).unwrap_or_default();
    line.trim().chars().take(240).collect()
}

/// How long ago, in the largest unit that fits.
pub(crate) fn ago(then: Timestamp, now: Timestamp) -> String {
    let seconds = (now.as_second() - then.as_second()).max(0);
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// A condition of one of our objects.
pub(crate) fn condition<'a>(all: &'a [Condition], name: &str) -> Option<&'a Condition> {
    all.iter().find(|it| it.type_ == name)
}

/// What is wrong with a node, in the order of how much it explains.
pub(crate) fn troubles(node: &Node) -> Vec<Trouble> {
    let mut found = Vec::new();
    let conditions = node.status.as_ref().and_then(|it| it.conditions.as_ref());
    for it in conditions.into_iter().flatten() {
        let text = it.message.clone().unwrap_or_default();
        if it.type_ == "Ready" && it.status != "True" {
            found.push(Trouble::NotReady(text));
        } else if it.type_ != "Ready" && it.type_.ends_with("Pressure") && it.status == "True" {
            found.push(Trouble::Pressure(it.type_.clone(), text));
        } else if it.type_ == "NetworkUnavailable" && it.status == "True" {
            found.push(Trouble::Network(text));
        }
    }
    let spec = node.spec.as_ref();
    if spec.and_then(|it| it.unschedulable) == Some(true) {
        found.push(Trouble::Cordoned);
    }
    let status = node.status.as_ref();
    let all = status.and_then(|it| it.capacity.as_ref()).into_iter().flatten();
    for (resource, there) in all.filter(|it| it.0.contains('/')) {
        let usable = status.and_then(|it| it.allocatable.as_ref()?.get(resource));
        let number = |text: &str| text.parse::<u64>().ok();
        let usable = usable.and_then(|it| number(&it.0)).unwrap_or(0);
        if let Some(there) = number(&there.0).filter(|it| usable < *it) {
            found.push(Trouble::Sick { resource: resource.clone(), usable, there });
        }
    }
    found
}

/// Something that keeps pods from a node, or from being well on it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Trouble {
    NotReady(String),
    Network(String),
    Pressure(String, String),
    Cordoned,
    Sick { resource: String, usable: u64, there: u64 },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_told_in_the_largest_unit_that_fits() {
        let at = |second| Timestamp::from_second(second).expect("a good second");
        let told = [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7_200, "2 h"), (172_800, "2 d")];
        for (seconds, text) in told {
            assert_eq!(ago(at(0), at(seconds)), text);
        }
        assert_eq!(ago(at(9), at(0)), "0 s", "clocks differ");
    }
}
