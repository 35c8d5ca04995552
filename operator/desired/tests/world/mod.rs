//! Small pieces of a cluster for the tests: objects with uids, pods with states, time.
//!
//! It plays what Kubernetes does to an object (a uid, a creation time, a deletion that takes a while)
//! and decides nothing.

use cadre_desired::Settings;
use k8s_openapi::api::core::v1::{
    ContainerState, ContainerStateTerminated, ContainerStateWaiting, ContainerStatus, Pod,
    PodCondition,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;

/// Uids and time.
#[derive(Clone, Debug)]
pub(crate) struct Clock {
    /// Seconds since 1970.
    pub(crate) second: i64,
    pub(crate) uids: u64,
}

impl Clock {
    pub(crate) fn new() -> Self {
        Self { second: 1_700_000_000, uids: 0 }
    }

    pub(crate) fn now(&self) -> Timestamp {
        Timestamp::from_second(self.second).expect("a second of this century")
    }

    /// What the API server adds to a new object.
    pub(crate) fn born(&mut self, meta: &mut ObjectMeta) {
        self.uids += 1;
        meta.uid = Some(format!("uid-{}", self.uids));
        meta.creation_timestamp = Some(Time(self.now()));
        meta.generation = Some(1);
    }
}

pub(crate) fn settings() -> Settings {
    Settings { levels: vec!["leaf".into(), "block".into()], ..Settings::default() }
}

pub(crate) fn name(meta: &ObjectMeta) -> String {
    meta.name.clone().unwrap_or_default()
}

/// The phase alone decides most; conditions follow.
pub(crate) fn set_phase(pod: &mut Pod, phase: &str, ready: bool) {
    let status = pod.status.get_or_insert_default();
    status.phase = Some(phase.to_owned());
    set_condition(pod, "Ready", ready);
}

pub(crate) fn set_condition(pod: &mut Pod, name: &str, holds: bool) {
    let conditions = pod.status.get_or_insert_default().conditions.get_or_insert_with(Vec::new);
    conditions.retain(|it| it.type_ != name);
    let status = if holds { "True" } else { "False" };
    conditions.push(PodCondition {
        type_: name.to_owned(),
        status: status.to_owned(),
        ..PodCondition::default()
    });
}

pub(crate) fn on_node(pod: &mut Pod, node: &str) {
    pod.spec.get_or_insert_default().node_name = Some(node.to_owned());
}

/// A pod's container ended with this code after so many seconds.
pub(crate) fn end(pod: &mut Pod, container: &str, code: i32, ran: i64, clock: &Clock) {
    set_phase(pod, if code == 0 { "Succeeded" } else { "Failed" }, false);
    let time = |second| Some(Time(Timestamp::from_second(second).expect("a good second")));
    let terminated = ContainerStateTerminated {
        exit_code: code,
        started_at: time(clock.second - ran),
        finished_at: time(clock.second),
        ..ContainerStateTerminated::default()
    };
    let state = ContainerState { terminated: Some(terminated), ..ContainerState::default() };
    let status = ContainerStatus {
        name: container.to_owned(),
        state: Some(state),
        ..ContainerStatus::default()
    };
    pod.status.get_or_insert_default().container_statuses = Some(vec![status]);
}

/// A pod has a node since so many seconds, and nothing of it has begun there.
pub(crate) fn set_up_since(pod: &mut Pod, ago: i64, clock: &Clock) {
    set_phase(pod, "Pending", false);
    set_condition(pod, "PodScheduled", true);
    since(pod, "PodScheduled", ago, clock);
}

/// A condition of a pod is as it is since so many seconds.
pub(crate) fn since(pod: &mut Pod, name: &str, ago: i64, clock: &Clock) {
    let time = Timestamp::from_second(clock.second - ago).expect("a good second");
    let conditions = pod.status.get_or_insert_default().conditions.iter_mut().flatten();
    for it in conditions.filter(|it| it.type_ == name) {
        it.last_transition_time = Some(Time(time));
    }
}

/// An init container of a pod waits for this reason.
pub(crate) fn init_waits(pod: &mut Pod, reason: &str) {
    let (reason, message) = (Some(reason.to_owned()), Some("words of the kubelet".to_owned()));
    let waiting = Some(ContainerStateWaiting { reason, message });
    let state = Some(ContainerState { waiting, ..ContainerState::default() });
    let status = ContainerStatus { name: "prepare".into(), state, ..ContainerStatus::default() };
    pod.status.get_or_insert_default().init_container_statuses = Some(vec![status]);
}
