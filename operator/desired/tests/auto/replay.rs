//! A pool of mode `Auto` whose servers share a load evenly, one look after the other.

use std::collections::BTreeMap;
use std::sync::Arc;

use cadre_crds::contract::{
    ANNOTATION_INCARNATION, LABEL_ATTEMPT, LABEL_JOB, LABEL_REVISION, LABEL_SLOT,
};
use cadre_crds::{AttentionPool, AttentionPoolSpec, Scaling, ScalingMode};
use cadre_desired::pool::scale::{Demand, Memory};
use cadre_desired::pool::{Observed, Report, decide, status};
use cadre_desired::{Action, Applied, Object, Settings};
use cadre_views::{JobKey, Unserved};
use k8s_openapi::api::core::v1::{Container, Pod, PodCondition, PodSpec, PodStatus};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use k8s_openapi::jiff::Timestamp;
use serde_json::json;

use super::replicas::{Way, scale, write};

/// Seconds between two looks.
pub(crate) const LOOK: i64 = 15;
/// Seconds that a new server needs before it serves.
pub(crate) const START: i64 = 40;

/// How far the trainers of the job are.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(crate) enum Trainers {
    /// They find no node.
    WithoutNodes,
    /// Their image cannot be pulled.
    Stuck,
    Running,
}

/// A pool whose servers share a load evenly.
pub(crate) struct Replay {
    pub(crate) pool: AttentionPool,
    pub(crate) budget: Option<PodDisruptionBudget>,
    /// When each server was asked for.
    pub(crate) servers: Vec<i64>,
    pub(crate) memory: Memory,
    pub(crate) second: i64,
    noise: u64,
    /// Servers that find a node.
    pub(crate) fits: usize,
    /// Whether the load is that of a job, which is there while there is load.
    pub(crate) has_jobs: bool,
    /// Among how many jobs servers are dealt out, in turn.
    pub(crate) jobs: usize,
    pub(crate) trainers: Trainers,
    /// What is known of the job's demand.
    pub(crate) demand: Demand,
    /// Whether servers work for the jobs that are there.
    pub(crate) serves: bool,
    /// Attempts that no server works for.
    pub(crate) unserved: BTreeMap<JobKey, Unserved>,
    /// A server that works and whose reports do not arrive.
    pub(crate) silent: Option<usize>,
    /// Whether all servers have had time to come back to this leader.
    pub(crate) is_complete: bool,
    /// What the chart says, among it the image of new servers without a template.
    pub(crate) settings: Settings,
    /// Digest of what its servers are made from.
    revision: String,
    /// Numbers that were written, and servers that were told to leave though nobody wrote that.
    pub(crate) written: Vec<u32>,
    pub(crate) drained: usize,
}

impl Replay {
    pub(crate) fn new(replicas: u32, max: u32, noise: u64) -> Self {
        let scaling = Scaling { mode: ScalingMode::Auto, max: Some(max), ..Scaling::default() };
        let spec = AttentionPoolSpec { replicas, scaling, ..AttentionPoolSpec::default() };
        let metadata =
            ObjectMeta { name: Some("p".into()), uid: Some("u".into()), ..ObjectMeta::default() };
        let pool = AttentionPool { metadata, spec, status: None };
        let servers = vec![0; replicas as usize];
        let mut replay = Self {
            pool,
            budget: None,
            servers,
            memory: Memory::default(),
            second: 1_000,
            noise,
            fits: usize::MAX,
            has_jobs: false,
            jobs: 1,
            trainers: Trainers::Running,
            demand: Demand::default(),
            serves: true,
            unserved: BTreeMap::new(),
            silent: None,
            is_complete: true,
            settings: Settings::default(),
            revision: String::new(),
            written: Vec::new(),
            drained: 0,
        };
        replay.revision = replay.revision();
        replay
    }

    /// Another operator leads, and knows what the object says. There is no status that it could know.
    pub(crate) fn take_over(&mut self) {
        self.memory = Memory::default();
    }

    /// The pool gets another template, and its servers are made from that.
    pub(crate) fn make(&mut self, image: &str) {
        let template = json!({"spec": {"containers": [{"name": "server", "image": image}]}});
        self.pool.spec.template = serde_json::from_value(template).expect("a template");
        self.revision = self.revision();
    }

    /// Somebody else writes a number, or a manifest without one.
    pub(crate) fn write(&mut self, manager: &str, way: Way, number: Option<u32>) -> bool {
        write(&mut self.pool, manager, way, number)
    }

    /// Reason and words of `ScalingActive`.
    pub(crate) fn told(&self) -> (String, String) {
        let told = self.status().conditions;
        let found = told.into_iter().find(|it| it.type_ == "ScalingActive").expect("it is told");
        (found.reason, found.message)
    }

    fn status(&self) -> cadre_crds::AttentionPoolStatus {
        let observed = self.observed(Vec::new(), BTreeMap::new(), Vec::new());
        let now = Timestamp::from_second(self.second).expect("a good second");
        status(&Applied::new(observed, None), &Settings::default(), now)
    }

    /// Servers that serve.
    pub(crate) fn serving(&self) -> usize {
        let placed = self.servers.iter().take(self.fits);
        placed.filter(|it| **it + START <= self.second).count()
    }

    /// A factor around one million, within five percent.
    fn noise(&mut self) -> u64 {
        // A linear congruence is enough noise for a replay.
        self.noise = self.noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        950_000 + (self.noise >> 33) % 100_001
    }

    fn observed(
        &self,
        pods: Vec<Pod>,
        reports: BTreeMap<String, Report>,
        trainers: Vec<Arc<Pod>>,
    ) -> Observed {
        let job = |at| JobKey { namespace: String::new(), name: job(at), attempt: 1 };
        let serve = reports.iter().filter(|it| it.1.serves).enumerate();
        let holders = serve.map(|(at, it)| (it.0.clone(), job(at % self.jobs))).collect();
        let demands = (0..self.jobs).map(|at| ((String::new(), job(at).name), self.demand));
        Observed {
            pool: self.pool.clone(),
            unreadable: None,
            service: None,
            budget: self.budget.clone(),
            revisions: Vec::new(),
            pods: pods.into_iter().map(Arc::new).collect(),
            trainers,
            nodes: BTreeMap::new(),
            reports,
            holders,
            lent: BTreeMap::new(),
            in_place: 0,
            reports_complete: self.is_complete,
            has_control: true,
            lost: BTreeMap::new(),
            unmade_since: None,
            demands: demands.collect(),
            unserved: self.unserved.clone(),
            memory: self.memory.clone(),
        }
    }

    /// Digest of what the pool's servers are made from.
    fn revision(&self) -> String {
        let observed = self.observed(Vec::new(), BTreeMap::new(), Vec::new());
        let (decision, _) = decide(&observed, &Settings::default(), Timestamp::UNIX_EPOCH);
        let kept = decision.actions.into_iter().find_map(|it| match it {
            Action::Create(Object::Revision(it)) => it.metadata.labels?.remove(LABEL_REVISION),
            Action::Create(_)
            | Action::Apply(_)
            | Action::Drain { .. }
            | Action::Note { .. }
            | Action::Scale { .. }
            | Action::Delete(_)
            | Action::DeleteSelf
            | Action::Guard
            | Action::Release => None,
        });
        kept.expect("it is kept")
    }

    /// One look at a load in thousandths of a server. Out: servers wanted after it.
    pub(crate) fn look(&mut self, load: u64) -> u32 {
        self.second += LOOK;
        let share = (load * 1_000).checked_div(self.serving() as u64).unwrap_or(0);
        let mut pods = Vec::new();
        let mut reports = BTreeMap::new();
        for (slot, since) in self.servers.clone().into_iter().enumerate() {
            let mut pod = pod(slot, &self.revision, &self.settings.server_image);
            if slot >= self.fits {
                pod.spec = None;
            } else if since + START <= self.second {
                let busy = (share * self.noise() / 1_000_000).min(1_000_000);
                let serves = self.has_jobs && load > 0 && self.serves;
                // Who works for no job reports nothing.
                let reports_load = serves || !self.has_jobs;
                let is_heard = reports_load && self.silent != Some(slot);
                let busy_ppm = u32::try_from(busy).ok().filter(|_| is_heard);
                let name = pod.metadata.name.clone().unwrap_or_default();
                reports.insert(name, Report { busy_ppm, serves, ..Report::default() });
            }
            pods.push(pod);
        }
        let jobs = if self.has_jobs && load > 0 { self.jobs } else { 0 };
        let trainers = (0..jobs).map(|at| Arc::new(trainer(at, self.trainers))).collect();
        let observed = self.observed(pods, reports, trainers);
        let now = Timestamp::from_second(self.second).expect("a good second");
        let (decision, memory) = decide(&observed, &self.settings, now);
        self.memory = memory;
        for action in decision.actions {
            if let Action::Drain { reason, .. } = &action {
                assert_eq!(*reason, "ScaledDown", "nobody is replaced");
                self.drained += 1;
            }
            match action {
                Action::Scale { replicas } => {
                    scale(&mut self.pool, replicas);
                    self.written.push(replicas);
                }
                Action::Create(Object::Budget(it)) | Action::Apply(Object::Budget(it)) => {
                    self.budget = Some(*it);
                }
                Action::Create(_)
                | Action::Apply(_)
                | Action::Drain { .. }
                | Action::Note { .. }
                | Action::Delete(_)
                | Action::DeleteSelf
                | Action::Guard
                | Action::Release => {}
            }
        }
        // Servers come and go at once.
        let wanted = self.status().desired;
        self.servers.resize(wanted as usize, self.second);
        wanted
    }

    /// Looks for so many seconds. Out: the wanted numbers where they changed, the first included.
    pub(crate) fn run(&mut self, load: u64, seconds: i64) -> Vec<u32> {
        let mut wanted: Vec<u32> = (0..seconds / LOOK).map(|_| self.look(load)).collect();
        wanted.dedup();
        wanted
    }
}

fn job(at: usize) -> String {
    format!("j{at}")
}

/// A trainer of a job.
fn trainer(at: usize, trainers: Trainers) -> Pod {
    let mut trainer = pod(0, "", "");
    let labels = [(LABEL_JOB, job(at)), (LABEL_ATTEMPT, "1".into())];
    let labels = labels.map(|(key, value)| (key.to_owned(), value));
    trainer.metadata.labels = Some(labels.into());
    if trainers == Trainers::WithoutNodes {
        (trainer.spec, trainer.status) = (None, None);
    }
    if trainers == Trainers::Stuck {
        let stuck = json!({
            "phase": "Pending",
            "containerStatuses": [{
                "name": "trainer", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
                "state": {"waiting": {"reason": "ImagePullBackOff"}},
            }],
        });
        trainer.status = serde_json::from_value(stuck).expect("a status");
    }
    trainer
}

fn pod(slot: usize, revision: &str, image: &str) -> Pod {
    let owner = OwnerReference { uid: "u".into(), controller: Some(true), ..Default::default() };
    let (name, image) = ("server".to_owned(), Some(image.to_owned()));
    let container = Container { name, image, ..Container::default() };
    let ready = PodCondition { type_: "Ready".into(), status: "True".into(), ..Default::default() };
    Pod {
        metadata: ObjectMeta {
            name: Some(format!("p-{slot}")),
            labels: Some(
                [
                    (LABEL_SLOT.to_owned(), slot.to_string()),
                    (LABEL_REVISION.to_owned(), revision.to_owned()),
                ]
                .into(),
            ),
            annotations: Some([(ANNOTATION_INCARNATION.to_owned(), "0".to_owned())].into()),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        spec: Some(PodSpec {
            node_name: Some("node".into()),
            containers: vec![container],
            ..PodSpec::default()
        }),
        status: Some(PodStatus {
            phase: Some("Running".into()),
            conditions: Some(vec![ready]),
            ..PodStatus::default()
        }),
    }
}
