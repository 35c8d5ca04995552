//! A pool in a small cluster: what Kubernetes and users do to it, one look of the operator after the other.

use std::collections::BTreeMap;
use std::sync::Arc;

use cadre_crds::contract::{
    ANNOTATION_DRAIN, ANNOTATION_DRAIN_SINCE, FINALIZER, LABEL_SLOT, SERVER_CONTAINER,
};
use cadre_crds::validate::Refusal;
use cadre_crds::{AttentionPool, AttentionPoolSpec};
use cadre_desired::pool::{Node, Observed, Report, decide, scale::Memory, status};
use cadre_desired::{Action, Applied, Kind, Object};
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, PodTemplateSpec, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use proptest::prelude::*;

use super::world::{Clock, end, name, on_node, set_condition, set_phase, settings};

/// Nodes of the cluster; two on each leaf.
pub(crate) const NODES: usize = 6;

#[derive(Clone, Debug)]
pub(crate) struct World {
    pub(crate) clock: Clock,
    pub(crate) pool: AttentionPool,
    pub(crate) unreadable: Option<Refusal>,
    pub(crate) service: Option<Service>,
    pub(crate) budget: Option<PodDisruptionBudget>,
    pub(crate) pods: Vec<Pod>,
    pub(crate) nodes: BTreeMap<String, Node>,
    pub(crate) reports: BTreeMap<String, Report>,
    pub(crate) memory: Memory,
    pub(crate) gone: bool,
    /// Data version of the job that all servers of that version work for.
    pub(crate) job: Option<u32>,
}

impl World {
    pub(crate) fn new(replicas: u32) -> Self {
        let mut clock = Clock::new();
        let spec = AttentionPoolSpec { replicas, ..AttentionPoolSpec::default() };
        let metadata = ObjectMeta {
            name: Some("p".into()),
            namespace: Some("n".into()),
            ..ObjectMeta::default()
        };
        let mut pool = AttentionPool { metadata, spec, status: None };
        clock.born(&mut pool.metadata);
        let node = |at: usize| {
            let labels = [("leaf", at / 2), ("block", at / 4)];
            let labels = labels.map(|(key, place)| (key.to_owned(), place.to_string()));
            (format!("node-{at}"), Node { labels: labels.into(), cordoned: false })
        };
        Self {
            clock,
            pool,
            unreadable: None,
            service: None,
            budget: None,
            pods: Vec::new(),
            nodes: (0..NODES).map(node).collect(),
            reports: BTreeMap::new(),
            memory: Memory::default(),
            gone: false,
            job: None,
        }
    }

    pub(crate) fn observe(&self) -> Observed {
        let mut trainer = Pod::default();
        on_node(&mut trainer, "node-0");
        set_phase(&mut trainer, "Running", true);
        Observed {
            pool: self.pool.clone(),
            unreadable: self.unreadable.clone(),
            service: self.service.clone(),
            budget: self.budget.clone(),
            pods: self.pods.iter().cloned().map(Arc::new).collect(),
            trainers: vec![Arc::new(trainer)],
            nodes: self.nodes.clone(),
            reports: self.reports.clone(),
            reports_complete: true,
            memory: self.memory.clone(),
        }
    }

    /// One reconcile that dies after `most` actions. Out: whether it did nothing.
    pub(crate) fn reconcile(&mut self, most: usize) -> bool {
        if self.gone {
            return true;
        }
        let (decision, memory) = decide(&self.observe(), &settings(), self.clock.now());
        let idle = decision.actions.is_empty();
        let whole = decision.actions.len() <= most;
        for action in decision.actions.into_iter().take(most) {
            self.carry_out(action);
        }
        if whole && !self.gone {
            self.memory = memory;
            let applied = Applied::new(self.observe(), None);
            self.pool.status = Some(status(&applied, &settings(), self.clock.now()));
        }
        idle
    }

    pub(crate) fn carry_out(&mut self, action: Action) {
        match action {
            Action::Create(Object::Pod(mut pod)) => {
                if self.pods.iter().any(|it| it.metadata.name == pod.metadata.name) {
                    return;
                }
                let slot = |it: &Pod| it.metadata.labels.as_ref()?.get(LABEL_SLOT).cloned();
                let present = |it: &&Pod| {
                    let phase = it.status.as_ref().and_then(|it| it.phase.clone());
                    it.metadata.deletion_timestamp.is_none() && phase.as_deref() != Some("Failed")
                };
                let twin = self.pods.iter().filter(present).find(|it| slot(it) == slot(&pod));
                assert!(twin.is_none(), "a slot has one server: {:?}", name(&pod.metadata));
                self.clock.born(&mut pod.metadata);
                set_phase(&mut pod, "Pending", false);
                self.pods.push(*pod);
            }
            Action::Create(Object::Service(mut it)) | Action::Apply(Object::Service(mut it)) => {
                self.clock.born(&mut it.metadata);
                self.service = Some(*it);
            }
            Action::Create(Object::Budget(mut it)) | Action::Apply(Object::Budget(mut it)) => {
                self.clock.born(&mut it.metadata);
                self.budget = Some(*it);
            }
            Action::Drain { pod, reason, since } => {
                let found =
                    self.pods.iter_mut().find(|it| it.metadata.uid == Some(pod.uid.clone()));
                let found = found.expect("only pods that are there are drained");
                annotate(&mut found.metadata, ANNOTATION_DRAIN, reason.to_owned());
                annotate(&mut found.metadata, ANNOTATION_DRAIN_SINCE, since.to_string());
            }
            Action::Delete(which) if which.kind == Kind::Budget => self.budget = None,
            Action::Delete(which) => {
                assert_eq!(which.kind, Kind::Pod);
                let found =
                    self.pods.iter_mut().find(|it| it.metadata.uid.as_ref() == Some(&which.uid));
                let Some(pod) = found else { return };
                let report = self.reports.get(&which.name);
                let since = pod.metadata.annotations.as_ref().and_then(|it| {
                    it.get(ANNOTATION_DRAIN_SINCE)?.parse::<k8s_openapi::jiff::Timestamp>().ok()
                });
                let timeout = i64::from(self.pool.spec.drain.timeout_seconds);
                let late = since.is_some_and(|it| it.as_second() + timeout <= self.clock.second);
                let served = report.is_some_and(|it| !it.drained);
                assert!(!served || late, "{} is deleted while it serves", which.name);
                pod.metadata.deletion_timestamp = Some(Time(self.clock.now()));
            }
            Action::Guard => self.pool.metadata.finalizers = Some(vec![FINALIZER.into()]),
            Action::Release => {
                self.pool.metadata.finalizers = None;
                self.gone = self.pool.metadata.deletion_timestamp.is_some();
            }
            Action::Create(Object::Job(_))
            | Action::Apply(Object::Job(_) | Object::Pod(_))
            | Action::Note { .. }
            | Action::DeleteSelf => panic!("not for a pool: {action:?}"),
        }
    }

    /// How many servers may be evicted now, as the disruption controller counts: `maxUnavailable` from the scale
    /// subresource, `minAvailable` as it is written.
    pub(crate) fn evictions(&self) -> i64 {
        let spec = self.budget.as_ref().and_then(|it| it.spec.as_ref()).expect("a budget");
        let needed = match (&spec.max_unavailable, &spec.min_available) {
            (Some(IntOrString::Int(most)), None) => {
                i64::from(self.pool.spec.replicas) - i64::from(*most)
            }
            (None, Some(IntOrString::Int(least))) => i64::from(*least),
            (most, least) => panic!("the API server refuses {most:?} with {least:?}"),
        };
        let ready = self.pool.status.as_ref().map_or(0, |it| i64::from(it.ready));
        (ready - needed).max(0)
    }

    /// What scheduler, kubelet and servers do when nothing goes wrong.
    pub(crate) fn calm(&mut self) {
        self.clock.second += 5;
        let open: Vec<String> =
            self.nodes.iter().filter(|it| !it.1.cordoned).map(|it| it.0.clone()).collect();
        self.pods.retain(|it| it.metadata.deletion_timestamp.is_none());
        for (at, pod) in self.pods.iter_mut().enumerate() {
            let phase = pod.status.as_ref().and_then(|it| it.phase.clone()).unwrap_or_default();
            if phase == "Failed" {
                continue;
            }
            if pod.spec.as_ref().is_none_or(|it| it.node_name.is_none()) {
                on_node(pod, &open[at % open.len()]);
            }
            set_phase(pod, "Running", true);
        }
        let draining = |it: &Pod| {
            it.metadata.annotations.as_ref().is_some_and(|it| it.contains_key(ANNOTATION_DRAIN))
        };
        let serving = self.pods.iter().filter(|it| {
            it.status.as_ref().is_some_and(|it| it.phase.as_deref() == Some("Running"))
        });
        // Images with even numbers are of one build.
        let build = |pod: &Pod| {
            let image = pod.spec.as_ref().and_then(|it| it.containers.first()?.image.clone());
            let number = image.and_then(|it| it.strip_prefix("server:")?.parse::<u32>().ok());
            number.unwrap_or(0) % 2
        };
        let report = |pod: &Pod| {
            let (data_version, drained) = (build(pod), draining(pod));
            let serves = self.job == Some(data_version) && !drained;
            let busy_ppm = Some(0);
            let report = Report { busy_ppm, drained, data_version, serves, ..Report::default() };
            (name(&pod.metadata), report)
        };
        self.reports = serving.map(report).collect();
    }

    /// Something that happens to a cluster.
    pub(crate) fn happen(&mut self, event: &Event) {
        let at = |which: &usize, of: usize| which % of.max(1);
        let pods = self.pods.len();
        match event {
            Event::Replicas(wanted) => self.pool.spec.replicas = *wanted,
            Event::Fail { pod, ran } => {
                if let Some(pod) = self.pods.get_mut(at(pod, pods)) {
                    end(pod, SERVER_CONTAINER, 1, *ran, &self.clock);
                    self.reports.remove(&name(&pod.metadata));
                }
            }
            Event::Evict(pod) => {
                if let Some(pod) = self.pods.get_mut(at(pod, pods)) {
                    set_condition(pod, "DisruptionTarget", true);
                    pod.metadata.deletion_timestamp = Some(Time(self.clock.now()));
                }
            }
            Event::Cordon { node, cordoned } => {
                // One stays open, so that there is a place to come to rest.
                if let Some(node) = self.nodes.get_mut(&format!("node-{}", at(node, NODES - 1))) {
                    node.cordoned = *cordoned;
                }
            }
            Event::Slow(pod) => {
                if let Some(pod) = self.pods.get(at(pod, pods))
                    && let Some(report) = self.reports.get_mut(&name(&pod.metadata))
                {
                    *report = Report { quarantined: true, slow_factor_percent: 300, ..*report };
                }
            }
            Event::Template(image) => {
                let container = Container {
                    name: SERVER_CONTAINER.into(),
                    image: Some(format!("server:{image}")),
                    ..Container::default()
                };
                let spec = PodSpec { containers: vec![container], ..PodSpec::default() };
                let template = PodTemplateSpec { metadata: None, spec: Some(spec) };
                self.pool.spec.template = Some(template);
            }
            Event::Reconcile(most) => drop(self.reconcile(*most)),
            Event::Calm => self.calm(),
            Event::Wait(seconds) => self.clock.second += seconds,
            Event::Delete => {
                if self.pool.metadata.finalizers.is_some() {
                    self.pool.metadata.deletion_timestamp = Some(Time(self.clock.now()));
                }
            }
        }
    }
}

pub(crate) fn annotate(meta: &mut ObjectMeta, key: &str, value: String) {
    meta.annotations.get_or_insert_with(BTreeMap::new).insert(key.to_owned(), value);
}

#[derive(Clone, Debug)]
pub(crate) enum Event {
    Replicas(u32),
    Fail { pod: usize, ran: i64 },
    Evict(usize),
    Cordon { node: usize, cordoned: bool },
    Slow(usize),
    Template(u8),
    Reconcile(usize),
    Calm,
    Wait(i64),
    Delete,
}

pub(crate) fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        2 => (0_u32..9).prop_map(Event::Replicas),
        2 => (any::<usize>(), 0_i64..120).prop_map(|(pod, ran)| Event::Fail { pod, ran }),
        2 => any::<usize>().prop_map(Event::Evict),
        1 => (any::<usize>(), any::<bool>())
            .prop_map(|(node, cordoned)| Event::Cordon { node, cordoned }),
        1 => any::<usize>().prop_map(Event::Slow),
        1 => (0_u8..3).prop_map(Event::Template),
        6 => (0_usize..5).prop_map(Event::Reconcile),
        4 => Just(Event::Reconcile(usize::MAX)),
        4 => Just(Event::Calm),
        1 => (0_i64..400).prop_map(Event::Wait),
    ];
    prop::collection::vec(event, 0..60)
}
