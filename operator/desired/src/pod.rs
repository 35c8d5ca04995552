//! What a pod's status says, in the words of the decisions.
//!
//! In: a [`Pod`] as the API server has it. Out: its [`State`], why it is not scheduled, how it ended.
//! Only our own container counts; sidecars do not decide about a worker.

use k8s_openapi::api::core::v1::{ContainerStateTerminated, Pod, PodCondition};
use k8s_openapi::jiff::Timestamp;

/// Seconds after which a pod that should be gone is taken for lost with its node.
const OVERDUE_SECONDS: i64 = 10;

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

/// Whether the pod computes nothing any more, now or because its node is lost.
pub(crate) fn is_quiet(pod: &Pod, now: Timestamp) -> bool {
    state(pod) == State::Ended || is_overdue(pod, now)
}

/// Whether the pod should have been gone for so long that its node must be lost.
pub(crate) fn is_overdue(pod: &Pod, now: Timestamp) -> bool {
    let until = pod.metadata.deletion_timestamp.as_ref();
    until.is_some_and(|it| it.0.as_second() + OVERDUE_SECONDS <= now.as_second())
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

/// Why a container of this name cannot start, if it cannot.
pub(crate) fn stuck(pod: &Pod, container: &str) -> Option<String> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    let status = statuses.iter().find(|it| it.name == container)?;
    let waiting = status.state.as_ref()?.waiting.as_ref()?;
    let reason = waiting.reason.as_deref().unwrap_or_default();
    if reason.is_empty() || reason == "ContainerCreating" || reason == "PodInitializing" {
        return None;
    }
    let text = waiting.message.as_deref().unwrap_or_default();
    Some(format!("{reason} {text}").trim().to_owned())
}
