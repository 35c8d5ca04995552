//! What a pod's status says, in the words of the decisions.
//!
//! In: a [`Pod`] as the API server has it. Out: its [`State`], why it is not scheduled, how it ended.
//! Only our own container counts; sidecars do not decide about a worker.

use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod, PodCondition};
use k8s_openapi::jiff::Timestamp;

/// Seconds that a node has for a pod's volumes and network before it is told that they are missing.
const SET_UP_SECONDS: i64 = 60;

/// Seconds that the worker of a ready pod has to join the control service before it is told that it has not.
pub(crate) const JOINS_SECONDS: i64 = 30;

/// What keeps a worker that runs from joining, mostly.
pub(crate) const JOINS: &str = "let it reach the operator, which a NetworkPolicy may forbid, and see that the clocks of the nodes agree \
     and that ConfigMap cadre-control-ca has ca.crt; its log says more";

/// Condition of a pod that the platform takes away.
pub(crate) const DISRUPTED: &str = "DisruptionTarget";
/// Reason of that condition where the kubelet ends the pod: its node lacks memory or disk, or the pod has used more disk than it
/// may.
pub(crate) const NODE_PRESSURE: &str = "TerminationByKubelet";
/// Where the kubelet ends it for another cause, which it names elsewhere: its node shuts down, or needs the place for a pod of
/// the system.
pub(crate) const NODE_SHUTDOWN: &str = "NodeShutdown";

/// Where a pod is in its life.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum State {
    /// No node yet.
    Unscheduled,
    /// On a node, not ready.
    Starting,
    /// Ready.
    Ready,
    /// Being deleted.
    Leaving,
    /// The pod's containers have ended and will not be restarted.
    Ended,
}

pub(crate) fn state(pod: &Pod) -> State {
    let phase = pod.status.as_ref().and_then(|it| it.phase.as_deref()).unwrap_or_default();
    if phase == "Failed" || phase == "Succeeded" {
        return State::Ended;
    }
    if pod.metadata.deletion_timestamp.is_some() {
        return State::Leaving;
    }
    if node(pod).is_none() {
        return State::Unscheduled;
    }
    if condition(pod, "Ready").is_some_and(|it| it.status == "True") {
        State::Ready
    } else {
        State::Starting
    }
}

pub(crate) fn node(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref().filter(|it| !it.is_empty())
}

pub(crate) fn condition<'a>(pod: &'a Pod, name: &str) -> Option<&'a PodCondition> {
    pod.status.as_ref()?.conditions.as_ref()?.iter().find(|it| it.type_ == name)
}

/// Why the platform takes a pod away. The kubelet has one reason for all; what it ends for lack of memory or disk it calls
/// `Evicted` beside it, or says nothing where it only begins to.
pub(crate) fn disruption(pod: &Pod) -> &str {
    let reason = condition(pod, DISRUPTED).and_then(|it| it.reason.as_deref()).unwrap_or_default();
    let beside = pod.status.as_ref().and_then(|it| it.reason.as_deref());
    match (reason, beside) {
        (NODE_PRESSURE, Some("Terminated" | "Preempting")) => NODE_SHUTDOWN,
        (reason, _) => reason,
    }
}

/// What the scheduler says about a pod that it finds no node for.
pub(crate) fn unscheduled(pod: &Pod) -> Option<&str> {
    let said = condition(pod, "PodScheduled").filter(|it| it.status == "False")?;
    Some(said.message.as_deref().unwrap_or("the scheduler gives no reason"))
}

/// How a container of this name ended.
pub(crate) fn end<'a>(pod: &'a Pod, container: &str) -> Option<&'a ContainerStateTerminated> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    let status = statuses.iter().find(|it| it.name == container)?;
    status.state.as_ref()?.terminated.as_ref()
}

/// Why a container of this name cannot start, if it cannot: nor can it while one before it cannot, nor while its node lacks what
/// the pod needs.
pub(crate) fn stuck(pod: &Pod, container: &str, now: Timestamp) -> Option<String> {
    let said = waits(pod, container);
    if said.is_some() {
        return said;
    }
    set_up_by(pod).filter(|it| *it <= now.as_second()).map(|_| {
        format!(
            "for {SET_UP_SECONDS} s its node has not got its volumes and its network ready; kubectl describe pod {} has \
             the node's words",
            pod.metadata.name.as_deref().unwrap_or_default()
        )
    })
}

/// Why a container of this name cannot start, or one before it, by what their kubelet says.
pub(crate) fn waits(pod: &Pod, container: &str) -> Option<String> {
    let status = pod.status.as_ref()?;
    let before = status.init_container_statuses.iter().flatten();
    let own = status.container_statuses.iter().flatten().filter(|it| it.name == container);
    let of = |it: &ContainerStatus| {
        let said = waiting(it)?;
        Some(if it.name == container { said } else { format!("container {}: {said}", it.name) })
    };
    before.chain(own).find_map(of)
}

/// The second from which on it is late that a pod's volumes and network are not ready, if they are not.
pub(crate) fn set_up_by(pod: &Pod) -> Option<i64> {
    let is_ready =
        condition(pod, "PodReadyToStartContainers").is_some_and(|it| it.status == "True");
    if is_ready || state(pod) != State::Starting || has_begun(pod) {
        return None;
    }
    let since = condition(pod, "PodScheduled")
        .filter(|it| it.status == "True")?
        .last_transition_time
        .as_ref()?;
    Some(since.0.as_second() + SET_UP_SECONDS)
}

/// The second from which on it is late that the worker of a ready pod has not joined.
pub(crate) fn joins_by(pod: &Pod, within: i64) -> Option<i64> {
    let ready = condition(pod, "Ready").filter(|it| it.status == "True")?;
    Some(ready.last_transition_time.as_ref()?.0.as_second() + within)
}

/// Whether a container of the pod runs or has run.
fn has_begun(pod: &Pod) -> bool {
    pod.status.as_ref().and_then(|it| it.phase.as_deref()) == Some("Running")
}

/// Why a container waits, if it is not only its turn.
fn waiting(status: &ContainerStatus) -> Option<String> {
    let waiting = status.state.as_ref()?.waiting.as_ref()?;
    let reason = waiting.reason.as_deref().unwrap_or_default();
    if reason.is_empty() || reason == "ContainerCreating" || reason == "PodInitializing" {
        return None;
    }
    let text = waiting.message.as_deref().unwrap_or_default();
    Some(format!("{reason} {text}").trim().to_owned())
}
