//! A server as its pod's labels, annotations and status tell it.
//!
//! In: the pods of a pool. Out: [`Server`]s in the order of slot and incarnation. Pods of somebody else,
//! and those without a slot, are none of ours.

use cadre_crds::AttentionPool;
use cadre_crds::contract::{
    ANNOTATION_AVOID, ANNOTATION_DRAIN, ANNOTATION_DRAIN_SINCE, ANNOTATION_FAILURES,
    ANNOTATION_INCARNATION, LABEL_REVISION, LABEL_SLOT, SERVER_CONTAINER,
};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;

use super::{FIRST_INCARNATION, Observed, Report};
use crate::names::{annotation, is_owned, label, name};
use crate::pod::{
    DISRUPTED, JOINS_SECONDS, NODE_PRESSURE, State, condition, disruption, end, joins_by, node,
    state,
};

/// Seconds that a server must have run for its end not to count as one more failure in a row.
const PROVEN_SECONDS: i64 = 60;
/// Nodes that a slot avoids at most.
const AVOIDED: usize = 8;
/// Reason of a drain that takes the slot away.
pub(crate) const SHRINK: &str = "ScaledDown";
/// Reason of a drain before the pool's own end.
pub(crate) const POOL_DELETED: &str = "PoolDeleted";
/// Reason of a drain for a server of another revision.
pub(crate) const TEMPLATE_CHANGED: &str = "TemplateChanged";
/// Reason of a drain for slowness or failures.
pub(crate) const QUARANTINED: &str = "Quarantined";
/// Reason of a drain for a node that is to be emptied.
pub(crate) const NODE_CORDONED: &str = "NodeCordoned";
/// All reasons of drains.
const DRAINS: [&str; 5] = [SHRINK, POOL_DELETED, TEMPLATE_CHANGED, QUARANTINED, NODE_CORDONED];

/// One start of a server.
#[derive(Clone, Debug)]
pub(crate) struct Server<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) slot: u32,
    pub(crate) incarnation: u32,
    pub(crate) state: State,
    pub(crate) drain: Option<Drain<'a>>,
    pub(crate) report: Option<&'a Report>,
}

/// Why and since when a server drains.
#[derive(Clone, Debug)]
pub(crate) struct Drain<'a> {
    pub(crate) reason: &'a str,
    pub(crate) since: Timestamp,
}

pub(crate) fn servers(observed: &Observed) -> Vec<Server<'_>> {
    let ours = observed.pods.iter().filter(|it| is_owned(&it.metadata, &observed.pool.metadata));
    let mut servers: Vec<_> = ours.filter_map(|pod| server(pod, observed)).collect();
    servers.sort_by_key(|it| (it.slot, it.incarnation, name(&it.pod.metadata).to_owned()));
    servers
}

fn server<'a>(pod: &'a Pod, observed: &'a Observed) -> Option<Server<'a>> {
    let meta = &pod.metadata;
    let since = annotation(meta, ANNOTATION_DRAIN_SINCE).and_then(|it| it.parse().ok());
    let drain = annotation(meta, ANNOTATION_DRAIN)
        .map(|reason| Drain { reason, since: since.unwrap_or(Timestamp::UNIX_EPOCH) });
    let number = |text: Option<&str>| text.and_then(|it| it.parse().ok());
    Some(Server {
        pod,
        slot: number(label(meta, LABEL_SLOT))?,
        incarnation: number(annotation(meta, ANNOTATION_INCARNATION)).unwrap_or(0),
        state: state(pod),
        drain,
        report: observed.reports.get(name(meta)),
    })
}

impl Drain<'_> {
    /// The reason, if an operator has written it at a time that is still to come: by another clock, which says nothing about when
    /// the drain is late.
    pub(crate) fn comes_from_another_clock(&self, now: Timestamp) -> Option<&'static str> {
        DRAINS.into_iter().find(|it| *it == self.reason && self.since > now)
    }
}

impl Server<'_> {
    /// Whether it runs or may come to run.
    pub(crate) fn is_present(&self) -> bool {
        match self.state {
            State::Unscheduled | State::Starting | State::Ready => true,
            State::Leaving | State::Ended => false,
        }
    }

    /// Whether it is present and may be given work.
    pub(crate) fn stays(&self) -> bool {
        self.is_present() && self.drain.is_none()
    }

    /// Whether it leaves without a successor.
    pub(crate) fn shrinks(&self) -> bool {
        self.drain.as_ref().is_some_and(|it| it.reason == SHRINK || it.reason == POOL_DELETED)
    }

    /// Whether it is deleted and only its pod object is left.
    pub(crate) fn is_going(&self) -> bool {
        self.pod.metadata.deletion_timestamp.is_some()
    }

    pub(crate) fn node(&self) -> Option<&str> {
        node(self.pod)
    }

    /// Whether it may be connected, although it has not come back to this leader yet.
    pub(crate) fn is_awaited(&self, reports_complete: bool) -> bool {
        let runs = self.is_present() && self.state != State::Unscheduled;
        runs && self.report.is_none() && !reports_complete
    }

    /// Whether it has nothing to hand over.
    pub(crate) fn may_go(&self, reports_complete: bool) -> bool {
        self.report.map_or(!self.is_awaited(reports_complete), |it| it.drained)
    }

    /// The second from which on it is late to join the control service, if it is ready and has not.
    pub(crate) fn joins_by(&self, observed: &Observed) -> Option<i64> {
        let may_report = observed.has_control && observed.reports_complete;
        if self.state != State::Ready || self.report.is_some() || !may_report {
            return None;
        }
        let lost = observed.lost.get(name(&self.pod.metadata)).map(|it| it.as_second());
        joins_by(self.pod, JOINS_SECONDS).max(lost.map(|it| it + JOINS_SECONDS))
    }

    /// Image of its container.
    pub(crate) fn image(&self) -> Option<&str> {
        let mut containers = self.pod.spec.as_ref()?.containers.iter();
        containers.find(|it| it.name == SERVER_CONTAINER)?.image.as_deref()
    }

    /// Digest of what it was made from.
    pub(crate) fn revision(&self) -> Option<&str> {
        label(&self.pod.metadata, LABEL_REVISION)
    }

    /// Whether it leaves, or has left, for a server of another revision.
    pub(crate) fn is_updated(&self) -> bool {
        self.drain.as_ref().is_some_and(|it| it.reason == TEMPLATE_CHANGED)
    }

    /// Failures of the slot in a row, this server's included; 0 unless it has failed.
    pub(crate) fn failures(&self) -> u32 {
        let failed = self.pod.status.as_ref().and_then(|it| it.phase.as_deref()) == Some("Failed");
        let disrupted = condition(self.pod, DISRUPTED).is_some_and(|it| it.status == "True");
        // What its node lacks it may lack the next time, too.
        let disrupted = disrupted && !self.is_put_out();
        if !failed || disrupted || self.is_going() || self.drain.is_some() {
            return 0;
        }
        let before = annotation(&self.pod.metadata, ANNOTATION_FAILURES);
        let before: u32 = before.and_then(|it| it.parse().ok()).unwrap_or(0);
        let ran = end(self.pod, SERVER_CONTAINER).and_then(|it| {
            let (from, to) = (it.started_at.as_ref()?, it.finished_at.as_ref()?);
            Some(to.0.as_second() - from.0.as_second())
        });
        if ran.is_some_and(|it| it >= PROVEN_SECONDS) { 1 } else { before.saturating_add(1) }
    }

    /// Whether its node has ended it for lack of memory or disk.
    pub(crate) fn is_put_out(&self) -> bool {
        disruption(self.pod) == NODE_PRESSURE
    }

    /// When it ended, as its node's clock says it; but not before it was made, nor in the time to come. When it was made its
    /// incarnation says, by the clock of an operator; where that was ahead, the API server.
    pub(crate) fn ended(&self, now: Timestamp) -> Timestamp {
        let is_past = |it: &Timestamp| *it <= now;
        let second = FIRST_INCARNATION + i64::from(self.incarnation);
        let made = Timestamp::from_second(second).ok().filter(is_past);
        let created = self.pod.metadata.creation_timestamp.as_ref().map(|it| it.0);
        let made = made.or(created.filter(is_past));
        let ended = end(self.pod, SERVER_CONTAINER).and_then(|it| it.finished_at.as_ref());
        let ended = ended.map(|it| it.0).filter(is_past);
        ended.max(made).unwrap_or(Timestamp::UNIX_EPOCH)
    }

    /// Nodes that a successor avoids, the newest last. This server's node is among them if it failed
    /// there too often or was quarantined there.
    pub(crate) fn avoided(&self, pool: &AttentionPool) -> Vec<String> {
        let before = annotation(&self.pod.metadata, ANNOTATION_AVOID).unwrap_or_default();
        let mut nodes: Vec<String> =
            before.split(',').filter(|it| !it.is_empty()).map(str::to_owned).collect();
        let quarantined = self.drain.as_ref().is_some_and(|it| it.reason == QUARANTINED);
        if (quarantined || self.failures() >= pool.spec.health.quarantine_after)
            && let Some(node) = self.node()
        {
            nodes.retain(|it| it != node);
            nodes.push(node.to_owned());
        }
        let many = nodes.len().saturating_sub(AVOIDED);
        nodes.split_off(many)
    }
}
