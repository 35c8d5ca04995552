//! What happens to a pool's cluster: users, failures, the platform, other operators, an API server that refuses.

use cadre_crds::contract::SERVER_CONTAINER;
use cadre_crds::{RollingUpdate, UpdateStrategy, UpdateType};
use cadre_desired::Action;
use cadre_desired::pool::Report;
use cadre_desired::pool::scale::Memory;
use k8s_openapi::api::core::v1::{Container, PodSpec, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use proptest::prelude::*;

use super::cluster::{NODES, World};
use super::world::{end, name, set_condition};

impl World {
    /// Something that happens to a cluster.
    pub(crate) fn happen(&mut self, event: &Event) {
        if !matches!(event, Event::Reconcile(_) | Event::Wait(_)) {
            self.done.clear();
        }
        let at = |which: &usize, of: usize| which % of.max(1);
        let pods = self.pods.len();
        match event {
            Event::Replicas(wanted) => self.pool.spec.replicas = *wanted,
            Event::Fail { pod, ran } => {
                if let Some(pod) = self.pods.get_mut(at(pod, pods)) {
                    end(pod, SERVER_CONTAINER, 1, *ran, &self.clock);
                    self.reports.remove(&name(&pod.metadata));
                    self.doing.remove(&name(&pod.metadata));
                }
            }
            Event::Vanish(pod) => {
                if pods > 0 {
                    let pod = self.pods.remove(at(pod, pods));
                    self.reports.remove(&name(&pod.metadata));
                    self.doing.remove(&name(&pod.metadata));
                }
            }
            Event::Strategy(most) => {
                let rolling = |max_unavailable| RollingUpdate { max_unavailable };
                let r#type = most.map_or(UpdateType::OnDelete, |_| UpdateType::RollingUpdate);
                let rolling_update = most.map(rolling);
                self.pool.spec.update_strategy = UpdateStrategy { r#type, rolling_update };
            }
            Event::Takeover => {
                self.memory = Memory::default();
                self.reports.clear();
                self.is_complete = false;
            }
            Event::Lose(what) => match what % 3 {
                0 => self.service = None,
                1 => self.budget = None,
                _ => {
                    self.revisions.clear();
                    self.has_lost_revisions = true;
                }
            },
            Event::Refuse(which) => drop(self.refused.insert(REFUSALS[*which])),
            Event::Allow => self.refused.clear(),
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
                    *report =
                        Report { quarantined: true, slow_factor_percent: 300, ..report.clone() };
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

/// What the API server may refuse, as [`words`] call it.
pub(crate) const REFUSALS: [&str; 10] = [
    "create Pod",
    "delete Pod",
    "drain",
    "create Revision",
    "delete Revision",
    "create Service",
    "create Budget",
    "apply Budget",
    "guard",
    "release",
];

pub(crate) fn words(action: &Action) -> String {
    match action {
        Action::Create(it) => format!("create {:?}", it.kind()),
        Action::Apply(it) => format!("apply {:?}", it.kind()),
        Action::Delete(it) => format!("delete {:?}", it.kind),
        Action::Drain { .. } => "drain".into(),
        Action::Scale { .. } => "scale".into(),
        Action::Guard => "guard".into(),
        Action::Release => "release".into(),
        Action::Note { .. } | Action::DeleteSelf => "for no pool".into(),
    }
}

#[derive(Clone, Debug)]
pub(crate) enum Event {
    Replicas(u32),
    Fail {
        pod: usize,
        ran: i64,
    },
    Evict(usize),
    /// A server's pod is gone before anybody has seen it go.
    Vanish(usize),
    /// So many may be missing for a new template; none: whoever deletes them decides.
    Strategy(Option<u32>),
    /// Another operator leads, and no server has come back to it.
    Takeover,
    /// Somebody deletes what is made for the pool.
    Lose(usize),
    Refuse(usize),
    Allow,
    Cordon {
        node: usize,
        cordoned: bool,
    },
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
        1 => any::<usize>().prop_map(Event::Vanish),
        1 => prop::option::weighted(0.7, 1_u32..4).prop_map(Event::Strategy),
        1 => Just(Event::Takeover),
        1 => (0_usize..3).prop_map(Event::Lose),
        2 => (0..REFUSALS.len()).prop_map(Event::Refuse),
        1 => Just(Event::Allow),
        6 => (0_usize..5).prop_map(Event::Reconcile),
        4 => Just(Event::Reconcile(usize::MAX)),
        4 => Just(Event::Calm),
        1 => (0_i64..400).prop_map(Event::Wait),
    ];
    prop::collection::vec(event, 0..60)
}
