//! A pool in a small cluster: what Kubernetes and users do to it, one look of the operator after the other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cadre_crds::contract::{ANNOTATION_DRAIN, ANNOTATION_DRAIN_SINCE, FINALIZER, LABEL_SLOT};
use cadre_crds::validate::Refusal;
use cadre_crds::{AttentionPool, AttentionPoolSpec, ScalingMode, UpdateType};
use cadre_desired::pool::{Node, Observed, Report, decide, scale::Memory, status};
use cadre_desired::{Action, Applied, Failure, Kind, Object};
use cadre_views::JobKey;
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::{NodeSelectorTerm, Pod, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use k8s_openapi::jiff::Timestamp;

use super::events::words;
use super::replicas::scale;
use super::world::{Clock, name, on_node, set_phase, settings};

/// Nodes of the cluster; two on each leaf.
pub(crate) const NODES: usize = 6;

#[derive(Clone, Debug)]
pub(crate) struct World {
    pub(crate) clock: Clock,
    pub(crate) pool: AttentionPool,
    pub(crate) unreadable: Option<Refusal>,
    pub(crate) service: Option<Service>,
    pub(crate) budget: Option<PodDisruptionBudget>,
    pub(crate) revisions: Vec<ControllerRevision>,
    /// Somebody has deleted some of them.
    pub(crate) has_lost_revisions: bool,
    pub(crate) pods: Vec<Pod>,
    pub(crate) nodes: BTreeMap<String, Node>,
    /// What the operator knows of servers, and whether it knows all of them.
    pub(crate) reports: BTreeMap<String, Report>,
    pub(crate) is_complete: bool,
    /// What servers do, whoever knows it.
    pub(crate) doing: BTreeMap<String, Report>,
    /// What the API server refuses, of [`REFUSALS`].
    pub(crate) refused: BTreeSet<&'static str>,
    /// Number of an image whose servers never become ready.
    pub(crate) broken: Option<u8>,
    pub(crate) memory: Memory,
    /// When servers lost their connection.
    pub(crate) lost: BTreeMap<String, Timestamp>,
    pub(crate) lent: BTreeMap<JobKey, u32>,
    /// Since when no pod is made.
    pub(crate) unmade_since: Option<Timestamp>,
    pub(crate) gone: bool,
    /// Data version of the job that all servers of that version work for.
    pub(crate) job: Option<u32>,
    /// How busy each server is, in millionths.
    pub(crate) busy_ppm: u32,
    /// What was done since something else happened: none of it is done again.
    pub(crate) done: Vec<Action>,
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
            revisions: Vec::new(),
            has_lost_revisions: false,
            pods: Vec::new(),
            nodes: (0..NODES).map(node).collect(),
            reports: BTreeMap::new(),
            is_complete: true,
            doing: BTreeMap::new(),
            refused: BTreeSet::new(),
            broken: None,
            memory: Memory::default(),
            lost: BTreeMap::new(),
            lent: BTreeMap::new(),
            unmade_since: None,
            gone: false,
            job: None,
            busy_ppm: 0,
            done: Vec::new(),
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
            revisions: self.revisions.iter().cloned().map(Arc::new).collect(),
            pods: self.pods.iter().cloned().map(Arc::new).collect(),
            trainers: vec![Arc::new(trainer)],
            nodes: self.nodes.clone(),
            reports: self.reports.clone(),
            holders: self.holders(),
            lent: self.lent.clone(),
            in_place: 0,
            has_control: true,
            lost: self.lost.clone(),
            unmade_since: self.unmade_since,
            demands: BTreeMap::new(),
            unserved: BTreeMap::new(),
            reports_complete: self.is_complete,
            memory: self.memory.clone(),
        }
    }

    /// Who works for the job, as the operator knows it.
    fn holders(&self) -> BTreeMap<String, JobKey> {
        let job = JobKey { namespace: "n".into(), name: "j".into(), attempt: 1 };
        let serve = self.reports.iter().filter(|it| it.1.serves);
        serve.map(|it| (it.0.clone(), job.clone())).collect()
    }

    /// One reconcile that dies after `most` actions. Out: whether it did nothing.
    pub(crate) fn reconcile(&mut self, most: usize) -> bool {
        if self.gone {
            return true;
        }
        let (decision, memory) = decide(&self.observe(), &settings(), self.clock.now());
        let idle = decision.actions.is_empty();
        let whole = decision.actions.len() <= most;
        let mut failure = None;
        let mut is_refused = false;
        for action in decision.actions.into_iter().take(most) {
            let name = words(&action);
            if self.refused.contains(name.as_str()) {
                // Servers are made all the same, and what they are made from may change before it is kept.
                self.has_lost_revisions |= name == "create Revision";
                is_refused |= name == "create Pod";
                failure.get_or_insert(Failure { reason: "Forbidden", message: name });
            } else {
                assert!(!self.done.contains(&action), "nothing has changed since: {action:?}");
                self.done.push(action.clone());
                self.carry_out(action);
            }
        }
        self.unmade_since = self.unmade_since.or(Some(self.clock.now())).filter(|_| is_refused);
        if whole && !self.gone {
            self.memory = memory;
            let applied = Applied::new(self.observe(), failure);
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
                let twin =
                    self.pods.iter().filter(|it| is_present(it)).find(|it| slot(it) == slot(&pod));
                assert!(twin.is_none(), "a slot has one server: {:?}", name(&pod.metadata));
                let values = name_requirements(&pod).into_iter().map(|it| it.1.len());
                assert!(
                    values.into_iter().all(|it| it == 1),
                    "422: must be only one value: {pod:?}"
                );
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
            Action::Create(Object::Revision(mut it)) => {
                if self.revisions.iter().all(|old| old.metadata.name != it.metadata.name) {
                    self.clock.born(&mut it.metadata);
                    self.revisions.push(*it);
                }
            }
            Action::Drain { pod, reason, since } => {
                let found =
                    self.pods.iter_mut().find(|it| it.metadata.uid == Some(pod.uid.clone()));
                let found = found.expect("only pods that are there are drained");
                annotate(&mut found.metadata, ANNOTATION_DRAIN, reason.to_owned());
                annotate(&mut found.metadata, ANNOTATION_DRAIN_SINCE, since.to_string());
                if reason == "TemplateChanged" {
                    self.no_more_are_missing_than_may_be();
                }
            }
            Action::Delete(which) if which.kind == Kind::Budget => self.budget = None,
            Action::Delete(which) if which.kind == Kind::Revision => {
                self.revisions.retain(|it| it.metadata.uid.as_ref() != Some(&which.uid));
            }
            Action::Delete(which) => {
                assert_eq!(which.kind, Kind::Pod);
                let found =
                    self.pods.iter_mut().find(|it| it.metadata.uid.as_ref() == Some(&which.uid));
                let Some(pod) = found else { return };
                let report = self.doing.get(&which.name);
                let since = pod.metadata.annotations.as_ref().and_then(|it| {
                    it.get(ANNOTATION_DRAIN_SINCE)?.parse::<k8s_openapi::jiff::Timestamp>().ok()
                });
                let timeout = i64::from(self.pool.spec.drain.timeout_seconds);
                let late = since.is_some_and(|it| it.as_second() + timeout <= self.clock.second);
                let served = report.is_some_and(|it| !it.drained);
                assert!(!served || late, "{} is deleted while it serves", which.name);
                pod.metadata.deletion_timestamp = Some(Time(self.clock.now()));
            }
            Action::Scale { replicas } => {
                assert_eq!(self.pool.spec.scaling.mode, ScalingMode::Auto, "whose number it is");
                scale(&mut self.pool, replicas);
            }
            Action::Guard => self.pool.metadata.finalizers = Some(vec![FINALIZER.into()]),
            Action::Release => {
                // Whoever leads: of a server that serves it has heard, or has to wait.
                let serves = |it: &Pod| self.doing.contains_key(&name(&it.metadata));
                let serving = self.pods.iter().find(|it| is_present(it) && serves(it));
                assert!(
                    serving.is_none(),
                    "it goes before {:?}",
                    serving.map(|it| name(&it.metadata))
                );
                self.pool.metadata.finalizers = None;
                self.gone = self.pool.metadata.deletion_timestamp.is_some();
            }
            Action::Create(Object::Job(_))
            | Action::Apply(Object::Job(_) | Object::Pod(_) | Object::Revision(_))
            | Action::Note { .. }
            | Action::DeleteSelf => panic!("not for a pool: {action:?}"),
        }
    }

    /// Of a rollout: those that go for it, and those that have come by it and are not ready, as far as the pool lacks servers.
    fn no_more_are_missing_than_may_be(&self) {
        let strategy = &self.pool.spec.update_strategy;
        assert_eq!(strategy.r#type, UpdateType::RollingUpdate, "nobody goes by itself");
        let most = strategy.rolling_update.as_ref().map_or(1, |it| it.max_unavailable as usize);
        let wanted = self.wanted_image();
        let goes = |it: &&Pod| {
            let notes = it.metadata.annotations.as_ref();
            notes.and_then(|it| it.get(ANNOTATION_DRAIN)).is_some_and(|it| it == "TemplateChanged")
        };
        let comes = |it: &&Pod| image_of(it) == wanted && !is_ready(it);
        let present = || self.pods.iter().filter(|it| is_present(it));
        let under_way = present().filter(|it| goes(it) || comes(it)).count();
        // Of a pool that shrinks meanwhile some of those that go have no successor: it does not miss them.
        let drains = |it: &&Pod| {
            it.metadata.annotations.as_ref().is_some_and(|it| it.contains_key(ANNOTATION_DRAIN))
        };
        let serve = present().filter(|it| is_ready(it) && !drains(it)).count();
        let missing = under_way.min((self.pool.spec.replicas as usize).saturating_sub(serve));
        assert!(missing <= most, "{missing} of at most {most} are missing");
    }

    /// Image that servers of the spec as it is have.
    pub(crate) fn wanted_image(&self) -> Option<String> {
        let template = self.pool.spec.template.as_ref();
        let own = template.and_then(|it| it.spec.as_ref()?.containers.first()?.image.clone());
        own.or_else(|| Some(settings().server_image))
    }

    /// How many servers may be evicted now, as the disruption controller counts: `maxUnavailable` from the scale
    /// subresource, `minAvailable` as it is written.
    pub(crate) fn evictions(&self) -> i64 {
        let spec = self.budget.as_ref().and_then(|it| it.spec.as_ref()).expect("a budget");
        let needed = match (&spec.max_unavailable, &spec.min_available) {
            (Some(IntOrString::Int(most)), None) => {
                (i64::from(self.pool.spec.replicas) - i64::from(*most)).max(0)
            }
            (None, Some(IntOrString::Int(least))) => i64::from(*least),
            (most, least) => panic!("the API server refuses {most:?} with {least:?}"),
        };
        let ready = self.pool.status.as_ref().map_or(0, |it| i64::from(it.ready));
        (ready - needed).max(0)
    }

    /// What scheduler, kubelet and servers do when nothing goes wrong.
    pub(crate) fn calm(&mut self) {
        self.done.clear();
        self.clock.second += 5;
        let broken = self.broken.map(|it| format!("server:{it}"));
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
            let is_broken = broken.is_some() && image_of(pod) == broken;
            set_phase(pod, "Running", !is_broken);
        }
        let draining = |it: &Pod| {
            it.metadata.annotations.as_ref().is_some_and(|it| it.contains_key(ANNOTATION_DRAIN))
        };
        let (serving, busy) = (self.pods.iter().filter(|it| is_ready(it)), self.busy_ppm);
        // Images with even numbers are of one build.
        let build = |pod: &Pod| {
            let number =
                image_of(pod).and_then(|it| it.strip_prefix("server:")?.parse::<u32>().ok());
            number.unwrap_or(0) % 2
        };
        let report = |pod: &Pod| {
            let (data_version, drained) = (build(pod), draining(pod));
            let serves = self.job == Some(data_version) && !drained;
            let busy_ppm = Some(busy);
            let report = Report { busy_ppm, drained, data_version, serves, ..Report::default() };
            (name(&pod.metadata), report)
        };
        self.reports = serving.map(report).collect();
        self.doing = self.reports.clone();
        self.is_complete = true;
    }
}

pub(crate) fn is_present(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|it| it.phase.as_deref());
    pod.metadata.deletion_timestamp.is_none() && phase != Some("Failed")
}

pub(crate) fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|it| it.conditions.as_ref());
    let ready =
        conditions.is_some_and(|it| it.iter().any(|it| it.type_ == "Ready" && it.status == "True"));
    is_present(pod) && ready
}

pub(crate) fn image_of(pod: &Pod) -> Option<String> {
    pod.spec.as_ref().and_then(|it| it.containers.first()?.image.clone())
}

/// What a pod's node affinity says of names of nodes: whether it must be so, and the values of each requirement. The API server
/// refuses one that has not exactly one value.
pub(crate) fn name_requirements(pod: &Pod) -> Vec<(bool, Vec<String>)> {
    let affinity = pod.spec.as_ref().and_then(|it| it.affinity.as_ref()?.node_affinity.as_ref());
    let required =
        affinity.and_then(|it| it.required_during_scheduling_ignored_during_execution.as_ref());
    let must = required.into_iter().flat_map(|it| &it.node_selector_terms).map(|it| (true, it));
    let preferred =
        affinity.and_then(|it| it.preferred_during_scheduling_ignored_during_execution.as_ref());
    let should = preferred.into_iter().flatten().map(|it| (false, &it.preference));
    let fields = |(must, term): (bool, &NodeSelectorTerm)| {
        let fields: Vec<_> = term.match_fields.iter().flatten().cloned().collect();
        fields.into_iter().map(move |it| (must, it.values.unwrap_or_default()))
    };
    must.chain(should).flat_map(fields).collect()
}

pub(crate) fn annotate(meta: &mut ObjectMeta, key: &str, value: String) {
    meta.annotations.get_or_insert_with(BTreeMap::new).insert(key.to_owned(), value);
}
